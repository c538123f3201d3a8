"""Tests groups that share devices: which one holds them, and for how long."""

import asyncio
import math
import random
from collections.abc import Coroutine

import pytest
from trainhouse.workers.scheduler.supervision import device_sharing
from trainhouse.workers.scheduler.supervision.device_sharing import DeviceLease, DeviceScheduler


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def leases_on(*devices: str) -> list[DeviceLease]:
    """Returns a lease for each group; its devices are the letters of a string."""
    scheduler = DeviceScheduler()
    leases = [DeviceLease(scheduler, f"group {number}", lambda: None) for number in range(len(devices))]
    for lease, own in zip(leases, devices, strict=True):
        lease.devices = frozenset(own)
    return leases


def test_one_group_holds_a_device_and_the_first_to_request_is_next() -> None:
    first, second, third = leases_on("a", "a", "a")
    for lease in (first, second, third):
        lease.request()
    assert [lease.is_held for lease in (first, second, third)] == [True, False, False]
    first.release()
    first.request()
    assert [lease.is_held for lease in (first, second, third)] == [False, True, False]
    second.release()
    third.release()
    assert first.is_held


def test_groups_on_other_devices_do_not_wait() -> None:
    left, right, both, other = leases_on("a", "b", "ab", "c")
    for lease in (left, right, other, both):
        lease.request()
    assert [lease.is_held for lease in (left, right, other, both)] == [True, True, True, False]


def test_a_request_for_several_devices_does_not_starve() -> None:
    left, both, later = leases_on("a", "ab", "b")
    left.request()
    both.request()
    later.request()
    assert not later.is_held  # though b is free: `both` has waited for longer
    left.release()
    assert both.is_held
    both.release()
    assert later.is_held


def test_a_lease_ends_when_another_group_waits_and_there_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sharing, "_MIN_STAY_SECONDS", 1000.0)
    first, second = leases_on("a", "a")
    first.request()
    assert not first.must_release(has_work=False)  # no other group waits
    second.request()
    assert first.must_release(has_work=False)
    assert not first.must_release(has_work=True)
    assert second.blocked_by() == "group 0 has the device"
    first.release()
    assert second.blocked_by() is None


def test_a_lease_lasts_a_multiple_of_the_time_that_moving_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(device_sharing.time, "monotonic", lambda: now[0])
    first, second = leases_on("a", "a")
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


def test_an_idle_lease_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(device_sharing.time, "monotonic", lambda: now[0])
    lease, other = (DeviceLease(DeviceScheduler(), "group", lambda: None, seconds) for seconds in (5.0, None))
    assert lease.idle_at == math.inf
    lease.request(), other.request()
    now[0] += 3.0
    assert (lease.idle_at, other.idle_at) == (now[0] + 2.0, math.inf)
    lease.idle_at = now[0] + lease.idle_seconds
    now[0] += 1.0
    assert lease.idle_at == now[0] + 4.0
    now[0] += 100.0
    assert lease.idle_at < now[0]
    lease.release()
    assert lease.idle_at == math.inf


def test_the_holder_is_woken_when_another_group_waits() -> None:
    scheduler, woken = DeviceScheduler(), []
    first, second = (DeviceLease(scheduler, name, lambda name=name: woken.append(name)) for name in ("first", "second"))
    first.devices = second.devices = frozenset("a")
    first.request()
    assert woken == ["first"]  # it may start
    second.request()
    assert woken == ["first", "first"]
    first.release()
    assert woken[-1] == "second"


def test_a_cancelled_wait_does_not_block_others() -> None:
    async def test() -> None:
        first, second, third = leases_on("a", "a", "a")
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(0)
        third.request()
        waiting.cancel()
        await asyncio.wait({waiting})
        first.release()
        assert third.is_held and not second.is_held

    run(test())


def test_no_two_groups_hold_a_device_and_all_get_their_turns() -> None:
    async def test() -> None:
        draws = random.Random(0)
        leases = leases_on("a", "b", "c", "ab", "bc", "abc", "a", "c")
        held: list[str] = []
        num_held = [0] * len(leases)

        async def work(number: int) -> None:
            for _ in range(50):
                await leases[number].acquire()
                own = sorted(leases[number].devices)
                assert not set(own) & set(held), "another group holds one of them"
                held.extend(own)
                for _ in range(draws.randrange(4)):
                    await asyncio.sleep(0)
                for device in own:
                    held.remove(device)
                leases[number].release()
                num_held[number] += 1
                await asyncio.sleep(0)

        await asyncio.gather(*(work(number) for number in range(len(leases))))
        assert num_held == [50] * len(leases)

    run(test())
