"""Samples that drafts guess, on ranks that decode them together."""

from pathlib import Path

import pytest
from trainhouse.schemas.models import Algorithm, DraftConfig
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.workers.parallel.spec import SINGLE, ParallelSpec
from trainhouse.workers.verbs import RunSpec

from ..jobs import job
from .training import Layout, layout
from .watched_worker import WATCHED

KIND, EP = "qwen3_moe", ParallelSpec.parse("ep=2")
DRAFTS: dict[str, Algorithm] = {"chain": "eagle3", "block": "dflash"}


def load_drafts(where: Layout, directory: Path) -> None:
    for draft_id, algorithm in DRAFTS.items():
        if not (directory / draft_id).exists():
            where.call("create_run", RunSpec("draft", DraftConfig(algorithm=algorithm, seed=3), "draft"))
            (directory / draft_id).mkdir()
            where.call("save_run", "draft", str(directory / draft_id), False)
            where.call("drop_run", "draft")
        where.call("load_draft", draft_id, str(directory / draft_id))


def drawn(where: Layout, temperature: float) -> dict[str, SampleResponse]:
    """By each draft, and by none."""
    options = {"temperature": temperature, "max_tokens": 20}
    jobs = [
        job(f"{draft_id} {seed}", [5, 6, 7, 8 + seed], seed=seed, draft_id=draft_id, **options)
        for draft_id in (*DRAFTS, None)
        for seed in range(2)
    ]
    answers = where.sample(*jobs)
    found = {job_id: each for job_id, each in answers.items() if isinstance(each, SampleResponse)}
    assert found.keys() == answers.keys(), answers
    return found


def tokens_of(found: dict[str, SampleResponse]) -> dict[str, list[int]]:
    return {job_id: each.sequences[0].tokens.tolist() for job_id, each in found.items()}


def guessed(found: dict[str, SampleResponse]) -> set[str]:
    """By which drafts."""
    return {job_id.split()[0] for job_id, each in found.items() if each.guesses is not None}


@pytest.mark.full
def test_ranks_decide_together_what_guesses(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """One that cannot have a draft on its device has all of them go on without; what they draw is what one draws."""
    with layout(tiny_models[KIND], SINGLE, tmp_path) as alone:
        load_drafts(alone, tmp_path)
        wanted = {temperature: drawn(alone, temperature) for temperature in (0.0, 0.9)}
    with layout(tiny_models[KIND], EP, tmp_path, WATCHED, full_slots=2) as where:
        load_drafts(where, tmp_path)
        for temperature, of_one in wanted.items():
            found = drawn(where, temperature)
            assert tokens_of(found) == tokens_of(of_one) and guessed(found) == {"chain", "block"}
        for rank, lacked, rest in ((1, ["chain"], {"block"}), (0, ["block"], {"chain"}), (1, [*DRAFTS], set())):
            where.call("lack", rank, *lacked)
            found = drawn(where, 0.0)
            assert tokens_of(found) == tokens_of(wanted[0.0]) and guessed(found) == rest
        where.call("lack", 0)
        assert guessed(drawn(where, 0.0)) == {"chain", "block"}
