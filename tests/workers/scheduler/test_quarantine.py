"""What a worker died of is soon alone, and everything else is batched as before."""

import math

import pytest
from trainhouse.workers.scheduler.quarantine import Suspects


def test_who_was_in_the_fatal_call_is_a_suspect_until_it_has_come_past_it() -> None:
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


def test_whose_position_nobody_knows_is_a_suspect_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_who_never_comes_back_is_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_suspects_shrink_to_one_and_never_below() -> None:
    suspects = Suspects(shrinks=4)
    company = 64
    for expected in (16, 4, 1, 1):
        suspects.accuse({str(number): 0 for number in range(company)})
        company = int(suspects.most_together(["0", "innocent"]))
        assert company == expected
    assert suspects.most_together(["innocent"]) == math.inf
    assert suspects.most_together(["0", "40"]) == 1 and suspects.most_together(["40"]) == 16


def test_one_alone_where_nothing_else_was_said() -> None:
    suspects = Suspects()
    suspects.accuse({str(number): 0 for number in range(64)})
    assert suspects.most_together(["0"]) == 1
