"""Tests that suspects of a crash are soon run alone, and that everything else is batched as before."""

import math

import pytest
from trainhouse.workers.scheduler.quarantine import Suspects


def test_a_member_of_the_fatal_call_is_a_suspect_until_it_is_past_it() -> None:
    suspects = Suspects()
    assert not suspects and suspects.most_together(["a"]) == math.inf
    suspects.accuse({"a": 7, "b": 3})
    assert suspects and "a" in suspects and "c" not in suspects
    for position in (5, 6):
        suspects.record_progress("a", position)
        assert "a" in suspects
    suspects.record_progress("a", 7)
    suspects.record_progress("c", 100)
    assert "a" not in suspects and "b" in suspects
    suspects.clear("b")
    assert not suspects


def test_an_unknown_position_makes_a_suspect_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("trainhouse.workers.scheduler.quarantine.time.monotonic", lambda: now)
    suspects = Suspects()
    suspects.accuse({"a": None, "b": 7})
    suspects.record_progress("a", 100)
    suspects.record_progress("b", None)
    assert "a" in suspects and "b" in suspects
    now += 600
    suspects.record_progress("a", 100)
    suspects.record_progress("b", None)
    assert not suspects


def test_a_suspect_that_never_returns_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("trainhouse.workers.scheduler.quarantine.time.monotonic", lambda: now)
    suspects = Suspects()
    suspects.accuse({"a": 1})
    now += 1800
    suspects.accuse({"b": 1})
    assert "a" in suspects
    now += 3000
    suspects.accuse({"c": 1})
    assert "a" not in suspects and "b" in suspects and "c" in suspects


def test_groups_of_suspects_shrink_to_one_and_never_below() -> None:
    suspects = Suspects(shrinks=4)
    group_size = 64
    for expected in (16, 4, 1, 1):
        suspects.accuse({str(number): 0 for number in range(group_size)})
        group_size = int(suspects.most_together(["0", "innocent"]))
        assert group_size == expected
    assert suspects.most_together(["innocent"]) == math.inf
    assert suspects.most_together(["0", "40"]) == 1 and suspects.most_together(["40"]) == 16


def test_suspects_run_alone_by_default() -> None:
    suspects = Suspects()
    suspects.accuse({str(number): 0 for number in range(64)})
    assert suspects.most_together(["0"]) == 1
