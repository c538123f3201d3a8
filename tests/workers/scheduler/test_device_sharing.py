"""Groups that share devices: who has them, and for how long."""

import asyncio
import random
from collections.abc import Coroutine

import pytest
from trainhouse.workers.scheduler import device_sharing as device_turns
from trainhouse.workers.scheduler.device_sharing import DeviceLease, DeviceScheduler


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def turns_of(*devices: str) -> list[DeviceLease]:
    """Of groups on these devices, each a string of letters."""
    turns = DeviceScheduler()
    made = [turns.turn(f"group {number}", lambda: None) for number in range(len(devices))]
    for turn, own in zip(made, devices, strict=True):
        turn.devices = frozenset(own)
    return made


def test_one_group_has_a_device_and_who_asks_first_is_next() -> None:
    first, second, third = turns_of("a", "a", "a")
    for turn in (first, second, third):
        turn.request()
    assert [turn.is_held for turn in (first, second, third)] == [True, False, False]
    first.release()
    first.request()
    assert [turn.is_held for turn in (first, second, third)] == [False, True, False]
    second.release()
    third.release()
    assert first.is_held


def test_groups_on_other_devices_do_not_wait() -> None:
    left, right, both, other = turns_of("a", "b", "ab", "c")
    for turn in (left, right, other, both):
        turn.request()
    assert [turn.is_held for turn in (left, right, other, both)] == [True, True, True, False]


def test_who_wants_several_devices_is_not_passed_by_for_ever() -> None:
    left, both, later = turns_of("a", "ab", "b")
    left.request()
    both.request()
    later.request()
    assert not later.is_held  # though b is free: `both` has waited for longer
    left.release()
    assert both.is_held
    both.release()
    assert later.is_held


def test_a_turn_ends_when_another_one_waits_and_there_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_turns, "_FEWEST_SECONDS", 1000.0)
    first, second = turns_of("a", "a")
    first.request()
    assert not first.must_release(has_work=False)  # nobody wants it
    second.request()
    assert first.must_release(has_work=False)
    assert not first.must_release(has_work=True)
    assert second.blocked_by() == "group 0 has the device"
    first.release()
    assert second.blocked_by() is None


def test_a_turn_lasts_for_some_times_what_moving_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(device_turns.time, "monotonic", lambda: now[0])
    first, second = turns_of("a", "a")
    first.record_move(3.0)
    first.request()
    second.request()
    now[0] += 29.0
    assert not first.must_release(has_work=True)
    now[0] += 2.0
    assert first.must_release(has_work=True)
    first.record_move(0.5)
    second.release()
    first.release()
    first.request()
    second.request()
    now[0] += 4.0
    assert not first.must_release(has_work=True)
    now[0] += 2.0
    assert first.must_release(has_work=True)


def test_a_turn_without_work_has_so_many_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(device_turns.time, "monotonic", lambda: now[0])
    turn, other = (DeviceScheduler().turn("group", lambda: None, seconds) for seconds in (5.0, None))
    assert turn.seconds_left() is None
    turn.request(), other.request()
    now[0] += 3.0
    assert (turn.seconds_left(), other.seconds_left()) == (2.0, None)
    turn.record_use()
    now[0] += 1.0
    assert turn.seconds_left() == 4.0
    now[0] += 100.0
    assert turn.seconds_left() == 0.0
    turn.release()
    assert turn.seconds_left() is None


def test_the_holder_is_woken_when_somebody_waits() -> None:
    turns, woken = DeviceScheduler(), []
    first, second = (turns.turn(name, lambda name=name: woken.append(name)) for name in ("first", "second"))
    first.devices = second.devices = frozenset("a")
    first.request()
    assert woken == ["first"]  # it begins
    second.request()
    assert woken == ["first", "first"]
    first.release()
    assert woken[-1] == "second"


def test_who_gives_up_waiting_is_in_nobodys_way() -> None:
    async def test() -> None:
        first, second, third = turns_of("a", "a", "a")
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(0)
        third.request()
        waiting.cancel()
        await asyncio.wait({waiting})
        first.release()
        assert third.is_held and not second.is_held

    run(test())


def test_no_two_groups_ever_have_a_device_and_all_have_their_turns() -> None:
    async def test() -> None:
        draws = random.Random(0)
        turns = turns_of("a", "b", "c", "ab", "bc", "abc", "a", "c")
        held: list[str] = []
        num_taken = [0] * len(turns)

        async def work(number: int) -> None:
            for _ in range(50):
                await turns[number].acquire()
                own = sorted(turns[number].devices)
                assert not set(own) & set(held), "somebody has one of them"
                held.extend(own)
                for _ in range(draws.randrange(4)):
                    await asyncio.sleep(0)
                for device in own:
                    held.remove(device)
                turns[number].release()
                num_taken[number] += 1
                await asyncio.sleep(0)

        await asyncio.gather(*(work(number) for number in range(len(turns))))
        assert num_taken == [50] * len(turns)

    run(test())
