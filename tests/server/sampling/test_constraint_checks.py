"""Constraints are tried in a process apart, so that none of them crashes or holds up a rank."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from psutil import Process
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.sampling import Constraint
from trainhouse.server.sampling.constraint_checks import ConstraintChecks
from trainhouse.server.text.tokenizer import Tokenizers
from trainhouse.workers.protocol.worker_config import ServedModel

from ...letters import VOCAB, letter_tokenizer
from ..api import Clock

pytestmark = pytest.mark.anyio

PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
GOOD = {
    "object": Constraint(json_schema=PERSON | {"required": ["name"], "additionalProperties": False}),
    "any object": Constraint(json_schema={"type": "object"}),
    "date": Constraint(regex="[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "word": Constraint(regex=r"[^\s]{3,200}"),
    "300 properties": Constraint(
        json_schema={"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(300)}}
    ),
    "1000 alternatives": Constraint(json_schema={"enum": [f"the value {i * 7919 % 1009}" for i in range(1000)]}),
    "sum": Constraint(grammar='start: sum\nsum: NUMBER | sum "+" NUMBER\nNUMBER: /[0-9]{1,2}/'),
    "300 rules": Constraint(grammar="start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(300)) + 'r300: "b"'),
}


def chained(num_rules: int, rule: str) -> Constraint:
    rules = "".join(f'{rule}{i}: "a" {rule}{i + 1}\n' for i in range(num_rules))
    return Constraint(grammar=f'start: {rule}0\n{rules}{rule}{num_rules}: "b"\n')


def patterns(count: int) -> Constraint:
    each = [{"type": "string", "pattern": f"(a|b|{chr(97 + i)})*{chr(97 + i)}.{{{i + 1}}}"} for i in range(count)]
    return Constraint(json_schema={"type": "string", "allOf": each})


def nested(depth: int) -> Constraint:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return Constraint(json_schema=schema)


COSTLY = {
    "rules": chained(5000, "r"),
    "terminals": chained(5000, "T"),
    "patterns": patterns(20),
    "properties": Constraint(
        json_schema={
            "type": "object",
            "properties": {f"property_{i}": {"type": "string"} for i in range(5000)},
            "additionalProperties": False,
        }
    ),
    "multiples": Constraint(
        json_schema={"allOf": [{"type": "integer", "multipleOf": each} for each in (7, 11, 13, 17, 19, 23)]}
    ),
    "one multiple": Constraint(json_schema={"type": "integer", "multipleOf": 999_983}),
    "repetitions": Constraint(regex="(a{1000}){1000}"),
    "optional rules": Constraint(
        grammar="start: " + " ".join(f"x{i}?" for i in range(2000)) + "".join(f'\nx{i}: "{i}"' for i in range(2000))
    ),
    "groups": Constraint(regex="(" * 20_000 + "a" + ")" * 20_000),
    "parentheses": Constraint(grammar="start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "arrays": nested(400),
}


@asynccontextmanager
async def running_checks(directory: Path, clock: Clock | None = None) -> AsyncIterator[ConstraintChecks]:
    letter_tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text("{}")
    model: Any = SimpleNamespace(vocab_size=VOCAB, eos_token_ids=(2,))
    checks = ConstraintChecks(Tokenizers([ServedModel("tiny", str(directory))]), {"tiny": model}, clock or Clock())
    try:
        yield checks
    finally:
        checks.close()


async def refusal(checks: ConstraintChecks, constraint: Constraint, tenant_id: str = "t") -> str | None:
    try:
        await checks.check("tiny", tenant_id, constraint)
    except OperationError as error:
        assert error.category == "user", error
        return error.message
    return None


def trial_processes() -> list[Process]:
    return [each for each in Process().children() if "constraint_process" in " ".join(each.cmdline())]


async def test_only_costly_and_invalid_constraints_are_refused(tmp_path: Path) -> None:
    async with running_checks(tmp_path) as checks:
        for name, constraint in GOOD.items():
            assert await refusal(checks, constraint) is None, name
        (process,) = trial_processes()
        for number, (name, constraint) in enumerate(COSTLY.items()):
            message = await refusal(checks, constraint, f"tenant {number}")
            assert message is not None and message.startswith("the constraint "), name
            assert len(message) < 1500, name
        assert "invalid" in (await refusal(checks, Constraint(regex="(")) or "")
        assert trial_processes() == [process], "no constraint ends the process that tries them"
        assert all(each.num_threads() == 1 for each in [process]), "threads do not survive a fork"


async def test_a_constraint_is_tried_once(tmp_path: Path) -> None:
    async with running_checks(tmp_path) as checks:
        found = await asyncio.gather(*(refusal(checks, chained(5000, "r"), f"tenant {i}") for i in range(20)))
        assert len(set(found)) == 1 and found[0]
        (process,) = trial_processes()
        process.suspend()  # what is known needs no trial
        assert await refusal(checks, chained(5000, "r")) == found[0]
        process.resume()


async def test_after_costly_constraints_new_ones_of_the_tenant_wait(tmp_path: Path) -> None:
    clock = Clock()
    async with running_checks(tmp_path, clock) as checks:
        assert await refusal(checks, GOOD["date"], "a") is None
        assert await refusal(checks, chained(5000, "r"), "a")
        waiting = asyncio.create_task(refusal(checks, GOOD["word"], "a"))
        assert await refusal(checks, GOOD["object"], "b") is None, "others do not wait"
        assert await refusal(checks, GOOD["date"], "a") is None, "nor do constraints that are known"
        assert not waiting.done()
        waiting.cancel()
        clock.now += 5
        assert await refusal(checks, GOOD["word"], "a") is None


async def test_a_constraint_that_a_rank_could_not_apply_is_refused_from_then_on(tmp_path: Path) -> None:
    async with running_checks(tmp_path) as checks:
        assert await refusal(checks, GOOD["word"]) is None
        checks.failed("tiny", "t", GOOD["word"], "the constraint takes 9 ms for each token")
        assert await refusal(checks, GOOD["word"], "u") == "the constraint takes 9 ms for each token"


async def test_the_process_is_started_again_after_it_has_ended(tmp_path: Path) -> None:
    async with running_checks(tmp_path) as checks:
        assert await refusal(checks, GOOD["word"]) is None
        (process,) = trial_processes()
        process.kill()
        assert await refusal(checks, GOOD["date"]) is None
        assert process not in trial_processes()


async def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    model: Any = SimpleNamespace(vocab_size=VOCAB, eos_token_ids=(2,))
    checks = ConstraintChecks(Tokenizers([ServedModel("tiny", str(tmp_path))]), {"tiny": model})
    assert "needs the model's tokenizer" in (await refusal(checks, GOOD["date"]) or "")
    checks.close()


def test_the_examples_are_small_enough_for_a_request() -> None:
    """Otherwise they would be refused for their size."""
    assert all(len(json.dumps(each.model_dump())) < 1 << 18 for each in (*GOOD.values(), *COSTLY.values()))
