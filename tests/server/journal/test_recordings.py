"""Recordings: what samplers drew, kept for the losses that train on it."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.sampling import SampledSequence, SampleResponse
from trainhouse.schemas.training import Datum, ForwardBackwardRequest, ProvenanceSpan
from trainhouse.server.journal.recordings import Recordings

pytestmark = pytest.mark.anyio

PROMPT = np.array([5, 6, 7], np.int32)


def drawn(*lengths: int) -> SampleResponse:
    """Returns a response whose sequence i has tokens 100 i, 100 i + 1, ... with log-probabilities -i, -i - 0.5, ..."""
    return SampleResponse(
        tuple(
            SampledSequence(
                "length",
                np.arange(100 * number, 100 * number + length, dtype=np.int32),
                (-number - 0.5 * np.arange(length)).astype(np.float32),
            )
            for number, length in enumerate(lengths)
        )
    )


def request(targets: list[int], *spans: ProvenanceSpan, **inputs: np.ndarray) -> ForwardBackwardRequest:
    tokens = np.zeros(len(targets), np.int32)
    datum = Datum(tokens, {"target_tokens": np.array(targets), **inputs}, loss_fn_input_spans=spans)
    return ForwardBackwardRequest("s:train:0", 1, (datum,), "stable_reinforce")


@pytest.fixture
async def recordings(tmp_path: Path) -> AsyncIterator[Recordings]:
    recordings = Recordings(tmp_path)
    await recordings.keep("s:sample:0:4", "alice", PROMPT, drawn(3, 0, 2))
    yield recordings
    await recordings.close()


GOOD = request(
    [6, 7, 0, 1, 2, 201],
    ProvenanceSpan("prompt", "s:sample:0:4:0", 1, 2),
    ProvenanceSpan("sampled", "s:sample:0:4:0", 0, 3),
    ProvenanceSpan("sampled", "s:sample:0:4:2", 1, 1),
)


def check_filled_in(filled: ForwardBackwardRequest) -> None:
    inputs = filled.data[0].loss_fn_inputs
    assert inputs["logprobs"].tolist() == [0, 0, 0, -0.5, -1, -2.5]
    assert inputs["sampled_mask"].tolist() == [0, 0, 1, 1, 1, 1]
    assert {array.dtype for name, array in inputs.items() if name != "target_tokens"} == {np.dtype(np.float32)}


async def test_spans_become_logprobs_and_a_mask(recordings: Recordings) -> None:
    check_filled_in(await recordings.fill_in("alice", GOOD))


async def test_recordings_survive_a_restart(recordings: Recordings, tmp_path: Path) -> None:
    later = Recordings(tmp_path)
    check_filled_in(await later.fill_in("alice", GOOD))
    await later.keep("s:sample:0:5", "alice", PROMPT, drawn(1))
    check_filled_in(await later.fill_in("alice", GOOD))
    await later.close()


async def test_expired_recordings_are_missing_also_after_a_restart(tmp_path: Path) -> None:
    first = Recordings(tmp_path)
    await first.keep("s:sample:0:4", "alice", PROMPT, drawn(3, 0, 2))
    await first.close()
    later, indexed = Recordings(tmp_path), Recordings(tmp_path)
    check_filled_in(await indexed.fill_in("alice", GOOD))
    indexed._in_memory.clear()
    (segment,) = os.listdir(tmp_path)
    os.utime(tmp_path / segment, (0, 0))
    await later.expire()
    assert not os.listdir(tmp_path)
    for recordings in (later, indexed):
        with pytest.raises(OperationError, match="no recording"):
            await recordings.fill_in("alice", GOOD)
        await recordings.close()


def age(directory: Path, hours: float) -> None:
    """Makes all segments older."""
    for path in directory.iterdir():
        before = path.stat().st_mtime - 3600 * hours
        os.utime(path, (before, before))


async def test_each_training_request_that_uses_a_recording_restarts_its_day(tmp_path: Path) -> None:
    for number in (4, 5):  # each in a segment of its own
        first = Recordings(tmp_path)
        await first.keep(f"s:sample:0:{number}", "alice", PROMPT, drawn(3, 0, 2))
        await first.close()
    for _ in range(3):
        age(tmp_path, 20)
        restarted = Recordings(tmp_path)
        await restarted.expire()
        check_filled_in(await restarted.fill_in("alice", GOOD))
        await restarted.close()
    unused = request([0, 1, 2], ProvenanceSpan("sampled", "s:sample:0:5:0", 0, 3))
    wrong = request([0, 9, 2], SAMPLED)
    later = Recordings(tmp_path)
    with pytest.raises(OperationError, match="no recording of sequence s:sample:0:5:0"):
        await later.fill_in("alice", unused)
    age(tmp_path, 20)
    with pytest.raises(OperationError, match="target_tokens has 9"):  # trains nothing
        await later.fill_in("alice", wrong)
    with pytest.raises(OperationError, match="no recording"):
        await later.fill_in("bob", GOOD)
    own = {"logprobs": np.zeros(3, np.float32), "sampled_mask": np.ones(3, np.float32)}
    await later.fill_in("bob", request([0, 1, 2], SAMPLED, **own))  # does not read it
    age(tmp_path, 20)
    await later.expire()
    with pytest.raises(OperationError, match=r"no recording of sequence s:sample:0:4:0: .*restarts them"):
        await later.fill_in("alice", GOOD)
    await later.close()


async def test_prompts_may_be_left_out_of_the_targets(recordings: Recordings) -> None:
    """tinker-cookbook's rl_loop has zeros there: nothing is trained at these positions."""
    check_filled_in(await recordings.fill_in("alice", request([0, 0, 0, 1, 2, 201], *GOOD.data[0].loss_fn_input_spans)))


SAMPLED = ProvenanceSpan("sampled", "s:sample:0:4:0", 0, 3)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (request([0, 1, 2]), "loss_fn_input_spans"),
        (request([0, 1, 2, 3], SAMPLED), "cover 3 positions, target_tokens has 4"),
        (request([0, 9, 2], SAMPLED), "token 1 at 1, but target_tokens has 9"),
        (request([0, 0, 2], SAMPLED), "token 1 at 1, but target_tokens has 0"),
        (request([5, 7], ProvenanceSpan("prompt", "s:sample:0:4:0", 0, 2)), "token 6 at 1, but target_tokens has 7"),
        (request([1, 2, 3], ProvenanceSpan("sampled", "s:sample:0:4:0", 1, 3)), "beyond its 3 sampled tokens"),
        (request([0], ProvenanceSpan("sampled", "s:sample:0:9:0", 0, 1)), "no recording of sequence s:sample:0:9:0"),
        (request([0], ProvenanceSpan("sampled", "s:sample:0:4:3", 0, 1)), "no recording of sequence s:sample:0:4:3"),
        (request([0], ProvenanceSpan("sampled", "nonsense", 0, 1)), "no recording of sequence nonsense"),
    ],
)
async def test_spans_that_do_not_match_are_user_errors(
    recordings: Recordings, wrong: ForwardBackwardRequest, reason: str
) -> None:
    with pytest.raises(OperationError, match=reason) as failure:
        await recordings.fill_in("alice", wrong)
    assert failure.value.category == "user"
    assert failure.value.message.startswith("data[0]: ")


async def test_recordings_of_other_tenants_are_missing(recordings: Recordings) -> None:
    with pytest.raises(OperationError, match="no recording"):
        await recordings.fill_in("bob", GOOD)


async def test_inputs_in_the_request_are_left_unchanged(recordings: Recordings) -> None:
    ones = np.ones(2, np.float32)
    given = request([3, 4], logprobs=-ones, sampled_mask=ones)
    assert (await recordings.fill_in("alice", given)).data[0].loss_fn_inputs["logprobs"].tolist() == [-1, -1]
