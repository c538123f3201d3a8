"""Tests min_p, min_tokens, penalties, biases and constraints against their definitions."""

import gc
import json
import re
import weakref
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from trainhouse.schemas.sampling import Constraint, SampledSequence, SamplingParams
from trainhouse.workers.protocol.calls import Failure
from trainhouse.workers.sampler.engine import SamplingEngine
from trainhouse.workers.sampler.requests import structured_output
from transformers import AutoTokenizer

from ...drawn import TIE, as_drawn
from ..adapted import Adapted, copy_adapter
from .test_sampler import (
    EOS,
    VOCAB,
    adapted,
    bpe_adapted,
    failure,
    finish,
    job,
    new_sampler,
    prompt,
    reference_logprobs,
    sample,
)

__all__ = ["adapted", "bpe_adapted"]

PARAMS = SamplingParams.model_fields.keys()
NUM_TOKENS = 40


def job_with(name: str, adapter_id: str | None = None, length: int = 8, **options: object) -> object:
    """Returns a job whose options may be any sampling parameters."""
    own = {key: options.pop(key) for key in set(options) & PARAMS - {"max_tokens", "seed", "temperature"}}
    made = job(name, prompt(length), adapter_id, **({"max_tokens": NUM_TOKENS} | options))
    params = SamplingParams.model_validate(made.params.model_dump(exclude_none=True) | own)
    return type(made)(**{**vars(made), "params": params})


def next_distributions(adapted: Adapted, tokens: np.ndarray, adapter_id: str | None, length: int = 8) -> Tensor:
    """Returns the plain model's log-softmax before each sampled token."""
    whole = np.concatenate([prompt(length), tokens])
    return reference_logprobs(adapted, whole, adapter_id)[length - 1 : -1]


def assert_raw_logprobs(adapted: Adapted, found: SampledSequence, adapter_id: str | None, length: int = 8) -> None:
    """Asserts that log-probabilities are the plain model's, without filters and biases."""
    exact = next_distributions(adapted, found.tokens, adapter_id, length)
    own = exact.gather(1, torch.from_numpy(found.tokens.astype(np.int64))[:, None])[:, 0].numpy()
    np.testing.assert_allclose(found.logprobs, own, atol=1e-4)


def test_min_p_excludes_unlikely_tokens(adapted: Adapted) -> None:
    found = sample(new_sampler(adapted), job_with("a", "one", min_p=0.3))
    ratios = _ratios(adapted, found)
    assert ratios.min() >= 0.3 - 1e-5
    assert _ratios(adapted, sample(new_sampler(adapted), job_with("a", "one"))).min() < 0.1
    assert_raw_logprobs(adapted, found, "one")


def _ratios(adapted: Adapted, found: SampledSequence) -> np.ndarray:
    """Returns the probability of each token relative to the likeliest one."""
    exact = next_distributions(adapted, found.tokens, "one").exp()
    own = exact.gather(1, torch.from_numpy(found.tokens.astype(np.int64))[:, None])[:, 0]
    return (own / exact.amax(-1)).numpy()


def test_nothing_stops_a_sample_before_min_tokens(adapted: Adapted) -> None:
    stops = tuple(range(0, VOCAB, 4))
    lengths = {}
    for least in (0, 15):
        found = finish(
            new_sampler(adapted),
            *(job_with(str(i), seed=i, min_tokens=least, stop_token_ids=stops) for i in range(20)),
        )
        sequences = [each.sequences[0] for each in found.values()]
        lengths[least] = min(len(sequence.tokens) for sequence in sequences)
        assert all(not set(sequence.tokens[: least or 0].tolist()) & set(stops) for sequence in sequences)
    assert lengths == {0: 1, 15: 16}


def test_penalties_follow_their_formulas(adapted: Adapted) -> None:
    """Compares greedy samples with a naive loop over plain forwards."""
    settings = [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.2, "logit_bias": {7: 1.5, 9: -3}},
    ]
    jobs = [job_with(str(i), "one", temperature=0, max_tokens=12, **each) for i, each in enumerate(settings)]
    found = finish(new_sampler(adapted), *jobs, job_with("plain", "one", temperature=0, max_tokens=12))
    plain = found["plain"].sequences[0].tokens.tolist()
    for i, each in enumerate(settings):
        tokens = found[str(i)].sequences[0].tokens.tolist()
        assert tokens == _greedy(adapted, **each)
        assert_raw_logprobs(adapted, found[str(i)].sequences[0], "one")
    assert plain == _greedy(adapted)
    assert sum(found[str(i)].sequences[0].tokens.tolist() != plain for i in range(4)) >= 2


def _greedy(
    adapted: Adapted,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: dict[int, float] | None = None,
) -> list[int]:
    """Applies the formulas to logits: the division, unlike the rest, would differ on log-probabilities."""
    tokens: list[int] = []
    for _ in range(12):
        whole = np.concatenate([prompt(8), np.array(tokens, dtype=np.int32)])
        with torch.no_grad():
            own = torch.from_numpy(whole.astype(np.int64))
            logits = adapted.logits([own], adapted.models.get("one"))[-1].numpy().copy()
        for token, bias in (logit_bias or {}).items():
            logits[token] += bias
        for token in set(whole.tolist()):
            logits[token] = (
                logits[token] / repetition_penalty if logits[token] > 0 else logits[token] * repetition_penalty
            )
        for token in set(tokens):
            logits[token] -= presence_penalty + frequency_penalty * tokens.count(token)
        second, first = np.sort(logits)[-2:]
        assert first - second > TIE
        tokens.append(int(logits.argmax()))
    return tokens


def test_logit_bias_forbids_and_forces_tokens(adapted: Adapted) -> None:
    forbidden = dict.fromkeys(range(1, VOCAB, 2), -10000.0)
    assert (sample(new_sampler(adapted), job_with("a", logit_bias=forbidden)).tokens % 2 == 0).all()
    assert (sample(new_sampler(adapted), job_with("a", logit_bias={33: 1e4})).tokens == 33).all()


def sampled_texts(adapted: Adapted, sampler: SamplingEngine, *constraints: Constraint, **options: object) -> list[str]:
    """Returns three samples of each constraint, drawn in one batch."""
    jobs = [
        job_with(str(i), constraint=each.model_dump(), num_samples=3, max_tokens=200, seed=i, **options)
        for i, each in enumerate(constraints)
    ]
    tokenizer = AutoTokenizer.from_pretrained(adapted.directory)
    found = finish(sampler, *jobs, job_with("free", max_tokens=30))
    sequences = [one for i in range(len(jobs)) for one in found[str(i)].sequences]
    assert all(sequence.stop_reason == "stop" for sequence in sequences)
    return [tokenizer.decode([token for token in sequence.tokens if token != EOS]) for sequence in sequences]


def test_samples_match_their_regular_expressions(bpe_adapted: Adapted) -> None:
    patterns = [r"[a-c]{3,8}", r"(yes|no|it is [0-9]{1,3})", r"[0-9]{4}-[0-9]{2}-[0-9]{2}"]
    found = sampled_texts(
        bpe_adapted,
        new_sampler(bpe_adapted),
        *(Constraint(regex=pattern) for pattern in patterns),
    )
    for number, text in enumerate(found):
        assert re.fullmatch(patterns[number // 3], text), text
    assert len(set(found[:3])) > 1


def test_samples_conform_to_a_json_schema_and_a_grammar(bpe_adapted: Adapted) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    grammar = 'start: sum\nsum: NUMBER "+" NUMBER ("+" NUMBER)?\nNUMBER: /[0-9]{1,2}/'
    found = sampled_texts(
        bpe_adapted,
        new_sampler(bpe_adapted, kv_cache_bytes=1 << 20),
        Constraint(json_schema=schema),
        Constraint(grammar=grammar),
    )
    for text in found[:3]:
        value = json.loads(text)
        assert value["name"] in ("ada", "bob") and 0 <= value["age"] <= 99 and len(value) == 2
    assert all(re.fullmatch(r"\d{1,2}(\+\d{1,2}){1,2}", text) for text in found[3:])


def test_a_model_that_likes_blanks_writes_compact_json_unless_its_schema_wants_them(bpe_adapted: Adapted) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bpe_adapted.directory)
    blanks = {token: 100.0 for token in range(VOCAB) if tokenizer.decode([token]).isspace()}
    schema = {
        "type": "object",
        "properties": {"list": {"type": "array", "items": {"enum": [1, "a"]}, "maxItems": 3}, "one": {"type": "null"}},
        "required": ["list", "one"],
        "additionalProperties": False,
    }
    sampler = new_sampler(bpe_adapted)
    for text in sampled_texts(bpe_adapted, sampler, Constraint(json_schema=schema), logit_bias=blanks):
        assert text == json.dumps(json.loads(text), separators=(",", ":"))
    flexible = schema | {"x-guidance": {"whitespace_flexible": True}}
    asked = job_with("a", constraint={"json_schema": flexible}, max_tokens=200, logit_bias=blanks)
    endless = finish(new_sampler(bpe_adapted), asked)["a"].sequences[0]
    assert endless.stop_reason == "length" and tokenizer.decode(endless.tokens[1:]).isspace()


def test_a_constraint_survives_slices_and_preemption(bpe_adapted: Adapted) -> None:
    one = Constraint(regex=r"([a-z]{5},){20}")
    wanted = sampled_texts(bpe_adapted, new_sampler(bpe_adapted), one)
    assert sampled_texts(bpe_adapted, new_sampler(bpe_adapted, kv_cache_bytes=400 * 1024), one) == wanted


def each_mask_takes(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the clock of processor time."""
    readings = count()
    clock = SimpleNamespace(thread_time=lambda: seconds * next(readings))
    monkeypatch.setattr(structured_output, "time", clock)


def test_a_constraint_whose_masks_are_slow_on_average_fails(
    bpe_adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = {"regex": "[a-z]{2000}"}
    # Beyond a tenth of a second in all, 1 ms too much for each mask.
    each_mask_takes(0.006, monkeypatch)
    found = finish(new_sampler(bpe_adapted), job_with("a", constraint=letters, max_tokens=99))["a"]
    assert len(found.sequences[0].tokens) == 99
    for num_samples, most in ((1, 150), (3, 50)):  # all samples of a constraint together
        slow = job_with("a", constraint=letters, max_tokens=most, num_samples=num_samples)
        message = failure(new_sampler(bpe_adapted), slow)
        assert message.startswith("the constraint takes 6 ms for each token, more than 5"), message
        assert structured_output.is_costly(message)
    each_mask_takes(0.005, monkeypatch)
    found = finish(new_sampler(bpe_adapted), job_with("a", constraint=letters, max_tokens=150))["a"]
    assert len(found.sequences[0].tokens) == 150


def test_masks_of_a_tenant_take_a_bounded_time_of_each_step(
    bpe_adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def constrained(name: str, tenant_id: str) -> object:
        return job_with(name, tenant_id=tenant_id, constraint={"regex": f"[a-z]{name}{{9}}"}, max_tokens=1)

    # Each has a constraint of its own, and 0.1 s for its first mask.
    each_mask_takes(0.1, monkeypatch)
    crowd = [constrained(letter, "crowd") for letter in "abcdef"]
    found = finish(new_sampler(bpe_adapted), *crowd, constrained("x", "other"), constrained("y", "other"))
    failed = {name: result.message for name, result in found.items() if isinstance(result, Failure)}
    assert sorted(failed) == ["d", "e", "f"], "three masks exceed a quarter of a second"
    assert all("in flight take more than 0.25 s for each token" in message for message in failed.values())
    each_mask_takes(0.04, monkeypatch)
    found = finish(new_sampler(bpe_adapted), *crowd)
    assert not any(isinstance(result, Failure) for result in found.values())


def test_invalid_constraints_are_refused(bpe_adapted: Adapted) -> None:
    for bad in ({"regex": "("}, {"grammar": "start: nothing"}, {"json_schema": {"type": "no such type"}}):
        message = failure(new_sampler(bpe_adapted), job_with("a", constraint=bad))
        assert "the constraint is invalid" in message, message


def test_a_constraint_needs_a_tokenizer_and_exactly_one_kind(adapted: Adapted, tmp_path: Path) -> None:
    assert "need the model's tokenizer" in failure(new_sampler(adapted), job_with("a", constraint={"regex": "a"}))
    with pytest.raises(ValueError, match="exactly one of json_schema, regex and grammar, got"):
        Constraint(regex="a", grammar="b")


def test_extreme_parameters_do_not_affect_other_jobs(adapted: Adapted) -> None:
    jobs = [
        job_with("hot", temperature=1e30),
        job_with("many", top_k=2**63 - 1),
        job_with("frequent", frequency_penalty=-1e6, presence_penalty=1e6),
        job_with("favoured", logit_bias={3: 1e6, 4: -1e6}, repetition_penalty=1e-3),
        job_with("long", min_tokens=2**63 - 1),
    ]
    found = finish(new_sampler(adapted), *jobs, job_with("other"))
    assert all(len(found[one.job_id].sequences[0].tokens) == NUM_TOKENS for one in jobs)
    other = sample(new_sampler(adapted), job_with("other"))
    assert as_drawn(found["other"].sequences[0]) == as_drawn(other)


def test_stop_tokens_outside_the_vocabulary_are_ignored(adapted: Adapted) -> None:
    odd = (2**63, 2**80, -1, -600, VOCAB, VOCAB + 5)
    jobs = [job_with("odd", stop_token_ids=odd), job_with("late", stop_token_ids=odd, min_tokens=3), job_with("other")]
    found = finish(new_sampler(adapted), *jobs)
    wanted = sample(new_sampler(adapted), job_with("other")).tokens.tolist()
    assert [found[one.job_id].sequences[0].tokens.tolist() for one in jobs] == [wanted] * 3


def test_many_stop_tokens_do_not_widen_the_shared_table(adapted: Adapted) -> None:
    stops = tuple(range(0, VOCAB, 3))
    few, many = job_with("few", stop_token_ids=stops[:20]), job_with("many", stop_token_ids=stops * 50)
    sampler = new_sampler(adapted)
    found = finish(sampler, few, many)
    assert sampler._scheduler.table.stops.shape[1] <= 32
    for one, own in ((few, stops[:20]), (many, stops)):
        free = sample(new_sampler(adapted), job_with("free", max_tokens=NUM_TOKENS)).tokens.tolist()
        first = next((number for number, token in enumerate(free) if token in own), NUM_TOKENS - 1)
        assert found[one.job_id].sequences[0].tokens.tolist() == free[: first + 1]


def test_a_finished_job_and_its_adapter_are_released(adapted: Adapted) -> None:
    copy_adapter(adapted.models, "one", "leaving")
    sampler = new_sampler(adapted)
    large, small = (
        job_with("a", "leaving", topk_sample_logprobs=VOCAB),
        job_with("b", "leaving", topk_sample_logprobs=1),
    )
    top = finish(sampler, large, small)["b"].sequences[0].topk_logprobs
    assert top.token_ids.shape == (NUM_TOKENS, 1) and top.token_ids.base is None
    held = [weakref.ref(adapted.models.get("leaving")), weakref.ref(large)]
    adapted.models.drop("leaving")
    del large
    gc.collect()
    assert [one() for one in held] == [None, None]
