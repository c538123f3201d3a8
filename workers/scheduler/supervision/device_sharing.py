"""Leases devices to groups that share them, one group at a time."""

import asyncio
import math
import time
from collections.abc import Callable

# A group keeps its devices for this many times the time that moving on and off took, which bounds the cost of moving.
_MOVES_PER_STAY = 10.0
_MIN_STAY_SECONDS = 0.2


class DeviceScheduler:
    """Grants devices to groups in the order of their requests.

    A group that waits for several devices is never starved: later requests for any of them wait behind it.
    """

    def __init__(self) -> None:
        self._holding: list[DeviceLease] = []
        self._waiting: list[DeviceLease] = []

    def request(self, lease: "DeviceLease") -> None:
        self._waiting.append(lease)
        self._grant_free()

    def release(self, lease: "DeviceLease") -> None:
        self._waiting = [each for each in self._waiting if each is not lease]
        self._holding = [each for each in self._holding if each is not lease]
        self._grant_free()

    def holders(self, lease: "DeviceLease") -> list["DeviceLease"]:
        """Returns the other leases that hold one of this lease's devices."""
        return [each for each in self._holding if each is not lease and not each.devices.isdisjoint(lease.devices)]

    def _grant_free(self) -> None:
        taken = {device for lease in self._holding for device in lease.devices}
        for lease in list(self._waiting):
            if lease.devices.isdisjoint(taken):
                self._waiting.remove(lease)
                self._holding.append(lease)
                lease.grant()
            taken |= lease.devices
        for lease in self._holding:
            lease.is_contested = any(not waiting.devices.isdisjoint(lease.devices) for waiting in self._waiting)
            if lease.is_contested:
                lease.wake()


class DeviceLease:
    """A group's claim on the devices that it shares."""

    def __init__(
        self, scheduler: DeviceScheduler, name: str, wake: Callable[[], None], idle_seconds: float | None = None
    ) -> None:
        """Makes the lease; it is not requested yet.

        Args:
            name: the group's name, for messages.
            wake: called when the lease is granted, and when another group waits for its devices.
            idle_seconds: idle time after which the devices should be released; None means never.
        """
        self.name, self.wake = name, wake
        self.devices: frozenset[str] = frozenset()
        """Those of its ranks, by names that all groups agree on. Empty until the ranks have reported them; the lease
        then waits for no one."""
        self.is_held = False
        """True while the group owns all its devices, until `release`."""
        self.is_contested = False
        """True while another lease waits for a device that this one holds."""
        self.idle_seconds = math.inf if idle_seconds is None else idle_seconds
        self.idle_at = math.inf
        """The monotonic time at which the devices will have been idle for too long; infinite if they are not held."""
        self._scheduler = scheduler
        self._granted = asyncio.Event()
        self._is_requested = False
        self._since = 0.0
        self._moving_seconds = 0.0

    def request(self) -> None:
        """Requests the devices; `wake` is called when they are held."""
        if not self._is_requested:
            self._is_requested = True
            self._scheduler.request(self)

    async def acquire(self) -> None:
        """Requests the devices and waits until they are held."""
        self.request()
        try:
            await self._granted.wait()
        except asyncio.CancelledError:
            self.release()
            raise

    def grant(self) -> None:
        self._since = time.monotonic()
        self.idle_at = self._since + self.idle_seconds
        self.is_held = True
        self._granted.set()
        self.wake()

    def release(self) -> None:
        """Releases the devices or withdraws the request; does nothing if there is neither."""
        self._granted.clear()
        self.is_held = self.is_contested = self._is_requested = False
        self.idle_at = math.inf
        self._scheduler.release(self)

    def record_move(self, seconds: float) -> None:
        """Records how long it took to move on and off the devices."""
        self._moving_seconds = seconds

    def must_release(self, has_work: bool) -> bool:
        """True if the group must release its devices to another one now.

        Args:
            has_work: whether this group has work waiting.
        """
        if not self.is_contested:
            return False
        least = max(_MIN_STAY_SECONDS, _MOVES_PER_STAY * self._moving_seconds)
        return not has_work or time.monotonic() - self._since >= least

    def blocked_by(self) -> str | None:
        """Describes which groups hold the requested devices, or returns None."""
        names = [lease.name for lease in self._scheduler.holders(self)]
        return f"{' and '.join(names)} has the device" if names and self._is_requested and not self.is_held else None
