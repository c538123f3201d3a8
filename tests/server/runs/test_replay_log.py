"""The replay log: which operations must be replayed to rebuild a run, and when the journal may release them."""

import math

import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.server.files.segment_log import RecordPosition
from trainhouse.server.journal.strikes import STRIKE
from trainhouse.server.operations.operation import REFUSED, Outcome, ReplayEntry
from trainhouse.server.runs.replay_log import ReplayAction, ReplayLog

from ..api import needs_drafts

DONE, FAILED, BROKE, STRUCK = Outcome.DONE, Outcome.FAILED, Outcome.SERVER_FAILED, Outcome.POISONED
REPLAY, CLEAR = ReplayAction.REPLAY, ReplayAction.CLEAR


def history(*ended: tuple[str, Outcome | None]) -> tuple[ReplayLog, list[int]]:
    """Returns a history of operations 1, 2, 3, ... by kind and outcome, and the seq_ids that the journal may
    release."""
    released: list[int] = []
    made = ReplayLog(lambda place: released.append(place.offset))
    for seq_id, (kind, outcome) in enumerate(ended, 1):
        made.add(
            ReplayEntry(seq_id, kind, RecordPosition(0, seq_id), outcome=outcome, is_result_stored=outcome is not None)
        )
    return made, released


def replays(made: ReplayLog, after: int = 0, is_tainted: bool = False) -> list[tuple[int, ReplayAction]]:
    return [(past.seq_id, repeat) for past, repeat in made.replay_actions(after, is_tainted)]


FB, STEP, FORWARD = "forward_backward", "optim_step", "forward"


def test_operations_that_changed_the_state_are_repeated_in_order() -> None:
    made, released = history((FB, DONE), (FORWARD, DONE), (STEP, DONE), ("save_weights", DONE), (FB, DONE), (FB, None))
    assert replays(made) == [(1, REPLAY), (3, REPLAY), (5, REPLAY)]
    assert replays(made, after=3) == [(5, REPLAY)]
    assert released == [2, 4]


@pytest.mark.parametrize(("outcome", "step"), [(DONE, REPLAY), (FAILED, CLEAR), (BROKE, CLEAR)])
def test_a_step_over_an_incomplete_batch_clears_the_gradients(outcome: Outcome, step: ReplayAction) -> None:
    made, _ = history((FB, DONE), (FB, outcome), (STEP, DONE if step is REPLAY else FAILED), (FB, DONE), (STEP, DONE))
    wanted = [(1, REPLAY), *([(2, REPLAY)] if outcome is DONE else []), (3, step), (4, REPLAY), (5, REPLAY)]
    assert replays(made) == wanted


@pytest.mark.parametrize(("outcome", "replayed"), [(FAILED, [(2, REPLAY)]), (STRUCK, [(2, CLEAR)]), (BROKE, [])])
def test_a_failed_step_affects_the_gradients_as_it_did_before(
    outcome: Outcome, replayed: list[tuple[int, ReplayAction]]
) -> None:
    made, _ = history((FB, DONE), (STEP, outcome), (STEP, DONE))
    assert replays(made) == [(1, REPLAY), *replayed, (3, REPLAY)]


def test_a_refused_part_taints_the_step_and_a_load_clears_the_taint() -> None:
    made, _ = history((FB, DONE))
    made.add(ReplayEntry(2, REFUSED, RecordPosition(0, 2), outcome=FAILED, taints=True, is_result_stored=True))
    made.add(ReplayEntry(3, STEP, RecordPosition(0, 3), outcome=FAILED, is_result_stored=True))
    assert replays(made) == [(1, REPLAY), (3, CLEAR)]
    made.add(ReplayEntry(4, REFUSED, RecordPosition(0, 4), outcome=FAILED, taints=True, is_result_stored=True))
    made.add(ReplayEntry(5, "load_weights", RecordPosition(0, 5), outcome=DONE, is_result_stored=True))
    made.add(ReplayEntry(6, STEP, RecordPosition(0, 6), outcome=DONE, is_result_stored=True))
    assert replays(made, after=3) == [(5, REPLAY), (6, REPLAY)]


@needs_drafts
def test_targets_and_vocabularies_are_repeated_and_a_target_keeps_the_taint() -> None:
    made, _ = history(("build_vocab_map", DONE), (FB, DONE), ("set_target", DONE), ("set_target", FAILED), (STEP, DONE))
    assert replays(made) == [(1, REPLAY), (2, REPLAY), (3, REPLAY), (5, REPLAY)]
    assert replays(made, after=3) == [(5, REPLAY)]
    assert replays(made, after=2, is_tainted=True) == [(3, REPLAY), (5, CLEAR)]


@needs_drafts
def test_passes_refused_for_a_missing_vocabulary_do_not_taint_the_next_step() -> None:
    made, _ = history((FB, FAILED), ("build_vocab_map", DONE), (FB, DONE), (STEP, DONE))
    assert replays(made) == [(2, REPLAY), (3, REPLAY), (4, REPLAY)]
    made, _ = history((FB, FAILED), ("build_vocab_map", FAILED), (FB, DONE), (STEP, FAILED))
    assert replays(made) == [(3, REPLAY), (4, CLEAR)]


def test_an_operation_of_unknown_outcome_cannot_be_repeated() -> None:
    made, _ = history((FB, DONE))
    made.add(ReplayEntry(2, STEP, RecordPosition(0, 2), is_result_stored=True))
    assert replays(made, after=2) == []
    with pytest.raises(OperationError, match="the outcome of optim_step with seq_id 2 is not known"):
        replays(made)


def test_the_journal_releases_what_is_answered_and_covered() -> None:
    made, released = history((FB, DONE), (STEP, DONE), (STRIKE, FAILED), (FB, None), (STEP, DONE))
    made.cover(4)
    assert released == [1, 2, 3]
    (waiting,) = [entry for entry in made._entries if entry.seq_id == 4]
    made.mark_result_stored(waiting)
    made.mark_result_stored(waiting)
    assert released == [1, 2, 3, 4]
    assert replays(made) == [(5, REPLAY)]
    made.cover(math.inf)
    assert released == [1, 2, 3, 4, 5]


def test_a_snapshot_is_due_after_enough_steps_or_bytes() -> None:
    made, _ = history((STEP, DONE), (STEP, DONE))
    assert not made.is_due(3, 1000) and made.is_due(2, 1000) and not made.is_due(2, 1000)
    made.add(ReplayEntry(3, FB, RecordPosition(0, 3), num_bytes=1000))
    assert made.is_due(3, 1000) and not made.is_due(1, 1000)


def test_time_spent_in_the_queue_does_not_make_an_operation_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with a deep queue would otherwise take a snapshot at each look."""
    now = [1000.0]
    monkeypatch.setattr("trainhouse.server.runs.replay_log.time.monotonic", lambda: now[0])
    log = ReplayLog(lambda place: None)
    entry = ReplayEntry(1, FB, RecordPosition(0, 0))
    now[0] += 700
    log.add(entry)
    assert not log.is_older_than(600)
    now[0] += 601
    assert log.is_older_than(600)
