"""Sampling with drafts under every layout equals one rank, and agrees on all ranks that decode together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import Algorithm, DraftConfig, LoraConfig
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.workers.pools.base import WorkerDied
from trainhouse.workers.protocol.calls import OptimizerStep, RunSpec, SampleJob
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec

from ...drawn import Drawn, all_drawn
from ..jobs import job
from .case import Case
from .drafting import Drafting
from .faults import call_unreadable, lack
from .training import ADAM, Layout, layout, supervised

pytestmark = pytest.mark.slow

DRAFTS: dict[str, Algorithm] = {"chain": "eagle3", "block": "dflash"}
ADAPTER = "adapter"
TP = ParallelSpec(tp=2)

CASES = [
    Case("tp=2"),
    Case("sp=2"),
    *(
        pytest.param(case, marks=pytest.mark.full)
        for case in (
            *map(Case, ("replicas=2,tp=2", "fsdp=2,tp=2", "sp=2,tp=2", "fsdp=2,sp=2")),
            Case("tp=2", replicated=("self_attn",)),
            Case("tp=2", "gemma3"),
            *(Case(spec, "qwen3_moe") for spec in ("ep=2", "ep=2,tp=2")),
        )
    ),
]


@dataclass(frozen=True)
class Alone:
    """One rank, the directory of its saved drafts and adapter, and its samples by temperature."""

    where: Layout
    directory: Path
    samples: Mapping[float, Mapping[str, SampleResponse]]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def alone(case: Case, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    directory = tmp_path_factory.mktemp("alone")
    with layout(tiny_models[case.kind], SINGLE, directory) as where:
        save_all(where, directory)
        load_all(where, directory)
        yield Alone(where, directory, {temperature: drawn(where, temperature) for temperature in (0.0, 0.9)})


@pytest.fixture(scope="module")
def many(case: Case, alone: Alone, tiny_models: dict[str, Path]) -> Iterator[Layout]:
    with layout(tiny_models[case.kind], case.parallel, alone.directory, full_slots=2) as where:
        load_all(where, alone.directory)
        yield where


def save_all(where: Layout, directory: Path) -> None:
    """Saves new drafts, and a trained adapter."""
    for draft_id, algorithm in DRAFTS.items():
        where.call("create_run", RunSpec("draft", DraftConfig(algorithm=algorithm, seed=3), "draft"))
        save(where, "draft", directory / draft_id)
    where.call("create_run", RunSpec("policy", LoraConfig(rank=4, seed=5)))
    for number in range(3):
        where.run_pass(supervised("policy", number, 9, 30))
        where.call("apply_steps", (OptimizerStep("policy", ADAM),))
    save(where, "policy", directory / ADAPTER)


def save(where: Layout, run_id: str, directory: Path) -> None:
    directory.mkdir()
    where.call("save_run", run_id, str(directory), False)
    where.call("drop_run", run_id)


def load_all(where: Layout, directory: Path) -> None:
    where.call("load_adapter", ADAPTER, str(directory / ADAPTER))
    for draft_id in DRAFTS:
        where.call("load_draft", draft_id, str(directory / draft_id))


def jobs_at(temperature: float) -> list[SampleJob]:
    """Jobs of the base and the adapter with each draft and none; they outgrow their slots, and some draw 2 samples."""
    random = np.random.default_rng(0)
    return [
        replace(
            job(f"{draft_id} {number}", random.integers(3, 500, 4 + 23 * number), temperature=temperature, seed=number,
                max_tokens=20 + 9 * number, num_samples=1 + number % 2, draft_id=draft_id, num_draft_tokens=3),
            adapter_id=ADAPTER if number == 2 else None,
        )
        for number in range(3)
        for draft_id in (*DRAFTS, None)
    ]  # fmt: skip


def drawn(where: Layout, temperature: float) -> dict[str, SampleResponse]:
    return sampled(where, *jobs_at(temperature))


def sampled(where: Layout, *jobs: SampleJob) -> dict[str, SampleResponse]:
    answers = where.sample(*jobs)
    found = {job_id: each for job_id, each in answers.items() if isinstance(each, SampleResponse)}
    assert found.keys() == answers.keys(), answers
    return found


def tokens_of(found: Mapping[str, SampleResponse]) -> dict[str, list[Drawn]]:
    return {job_id: all_drawn(answer) for job_id, answer in found.items()}


def drafted(found: Mapping[str, SampleResponse]) -> set[str]:
    """Returns the drafts that proposed tokens."""
    return {job_id.split()[0] for job_id, each in found.items() if each.guesses is not None}


def teams_of(where: Layout) -> list[list[int]]:
    """Ranks that decode together."""
    return [list(ranks) for ranks in where.spec.rank_groups(("ep", "tp"))]


def forget(where: Layout) -> None:
    """Clears the ranks' records."""
    where.probe(Drafting.sampled)
    where.probe(Drafting.num_overruled)


def sampled_on_teams(where: Layout) -> list[list[dict[str, list[list[int]]]]]:
    on_ranks = where.probe(Drafting.sampled)
    return [[on_ranks[rank] for rank in team] for team in teams_of(where)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafted_samples_equal_one_rank_and_agree_within_teams(alone: Alone, many: Layout, temperature: float) -> None:
    """The drafts see the same features, so as many draft tokens are accepted."""
    wanted = alone.samples[temperature]
    forget(many)
    found = drawn(many, temperature)
    assert tokens_of(found) == tokens_of(wanted)
    assert {job_id: each.guesses for job_id, each in found.items()} == {
        job_id: each.guesses for job_id, each in wanted.items()
    }
    assert drafted(found) == {*DRAFTS}
    whole: dict[str, list[list[int]]] = {}
    for team in sampled_on_teams(many):
        assert all(rank_samples == team[0] for rank_samples in team)
        assert team[0], "every team has samples"
        whole |= team[0]
    assert whole == tokens_of(found)
    assert many.probe(Drafting.num_overruled) == [0] * many.spec.num_ranks, "all ranks agree to the last bit"


def test_greedy_tokens_equal_those_without_a_draft(many: Layout) -> None:
    jobs = jobs_at(0.0)
    plain = sampled(many, *(replace(each, draft_id=None) for each in jobs))
    assert tokens_of(plain) == tokens_of(drawn(many, 0.0))
    assert not drafted(plain)


@pytest.mark.parametrize("draft_id", DRAFTS)
def test_repeated_prompts_hit_the_cache_on_every_rank(alone: Alone, many: Layout, draft_id: str) -> None:
    prompt = np.random.default_rng(9).integers(3, 500, 70)
    one = job("one", prompt, temperature=0.9, max_tokens=20, draft_id=draft_id, num_draft_tokens=3)
    forget(many)
    found = [sampled(where, one)["one"] for where in (alone.where, many) for _ in range(2)]
    assert [each.prompt_cache_hit_tokens for each in found] == [0, 64, 0, 64]
    assert len({str(tokens_of({"one": each})) for each in found}) == 1
    assert found[0].guesses is not None and all(each.guesses == found[0].guesses for each in found)
    assert many.probe(Drafting.num_overruled) == [0] * many.spec.num_ranks


def test_perfect_draft_has_all_tokens_accepted_plus_one(alone: Alone, many: Layout) -> None:
    num, prompt = 3, [5, 6, 7, 8]
    wanted = job("text", prompt, temperature=0.0, max_tokens=4 * (num + 1) + 1)
    text = tokens_of(sampled(alone.where, wanted))["text"][0]
    jobs = [replace(wanted, job_id=f"{i}", draft_id=each, num_draft_tokens=num) for i, each in enumerate(DRAFTS)]
    many.probe(Drafting.know, {each.job_id: [*prompt, *text] for each in jobs})
    found = sampled(many, *jobs)
    many.probe(Drafting.know, {})
    for answer in found.values():
        assert answer.sequences[0].tokens.tolist() == text
        assert answer.guesses is not None
        assert (answer.guesses.passes, answer.guesses.acceptance_length) == (4, num + 1)


def test_team_decodes_without_a_draft_that_one_rank_lacks(alone: Alone, many: Layout) -> None:
    wanted = tokens_of(alone.samples[0.0])
    last = many.spec.num_ranks - 1
    for rank, lacked, rest in ((last, ["chain"], {"block"}), (0, ["block"], {"chain"}), (last, [*DRAFTS], set())):
        many.probe(lack, rank, *lacked)
        forget(many)
        found = drawn(many, 0.0)
        assert tokens_of(found) == wanted
        (its_team,) = (team for team in teams_of(many) if rank in team)
        on_ranks = many.probe(Drafting.sampled)
        assert drafted({job_id: found[job_id] for job_id in on_ranks[rank]}) == rest
        others = [job_id for other in range(last + 1) if other not in its_team for job_id in on_ranks[other]]
        assert drafted({job_id: found[job_id] for job_id in others}) == ({*DRAFTS} if others else set())
    many.probe(lack, 0)
    assert drafted(drawn(many, 0.0)) == {*DRAFTS}


def test_draft_that_one_rank_cannot_read_is_loaded_on_none(alone: Alone, many: Layout) -> None:
    for rank in (0, many.spec.num_ranks - 1):
        with pytest.raises(OperationError):
            many.probe(call_unreadable, rank, "load_draft", "other", str(alone.directory / "chain"))
    jobs = [replace(each, draft_id="other") for each in jobs_at(0.0)[:2]]
    assert not drafted(sampled(many, *jobs))


def test_leader_rank_decides_if_draft_weights_differ(alone: Alone, many: Layout) -> None:
    """On ranks that decode independently, sampled tokens depend on their own draft."""
    last = many.spec.num_ranks - 1
    decodes_alone = teams_of(many)[-1] == [last]
    for draft_id in DRAFTS:
        many.probe(Drafting.disturb, last, draft_id)
    forget(many)
    found = drawn(many, 0.9)
    assert (tokens_of(found) != tokens_of(alone.samples[0.9])) == decodes_alone
    assert all(rank_samples == team[0] for team in sampled_on_teams(many) for rank_samples in team)
    assert (many.probe(Drafting.num_overruled)[last] > 10) != decodes_alone
    load_all(many, alone.directory)


@pytest.mark.full
def test_ranks_that_decide_independently_diverge_or_hang(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """Different draft tokens give different samples; different accepted lengths leave one rank waiting forever."""
    jobs = [each for each in jobs_at(0.9) if each.draft_id == "chain"]
    with layout(tiny_models["qwen3"], TP, tmp_path, hang_seconds=10) as where:
        save_all(where, tmp_path)
        load_all(where, tmp_path)
        where.probe(Drafting.disturb, 1, "chain")
        where.probe(Drafting.decide_alone, "from_leader")
        sampled(where, *jobs)
        one, other = where.probe(Drafting.sampled)
        assert one.keys() == other.keys() and one != other
        where.probe(Drafting.decide_alone, "agree_on_verified")
        with pytest.raises(WorkerDied):
            sampled(where, *jobs)


@pytest.mark.full
def test_error_while_drafting_on_one_rank_ends_all_ranks(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """The others are in the middle of a pass: all ranks end, and the dispatch restarts them."""
    with layout(tiny_models["qwen3"], TP, tmp_path) as where:
        save_all(where, tmp_path)
        load_all(where, tmp_path)
        where.probe(Drafting.break_drafting, 1, "out of memory")
        with pytest.raises(WorkerDied, match=r"rank 1|no memory"):
            sampled(where, *jobs_at(0.0))
