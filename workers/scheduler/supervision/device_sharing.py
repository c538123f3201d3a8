"""Lets groups that share devices use them in turns."""

import asyncio
import time
from collections.abc import Callable

# A group keeps its device for this many times the time that moving on and off took, which bounds the cost of moving.
_STAYS = 10.0
_FEWEST_SECONDS = 0.2


class DeviceScheduler:
    """Grants devices to groups in the order of their requests.

    A group that waits for several devices is never starved: later requests for any of them wait behind it.
    """

    def __init__(self) -> None:
        self._holding: list[DeviceLease] = []
        self._waiting: list[DeviceLease] = []

    def turn(self, name: str, wake: Callable[[], None], idle_seconds: float | None = None) -> "DeviceLease":
        """Returns a group's turn.

        Args:
            name: the group's name, for messages.
            wake: called when the turn begins, and when another group waits for its devices.
            idle_seconds: see DeviceLease.seconds_left.
        """
        return DeviceLease(self, name, wake, idle_seconds)

    def enter(self, turn: "DeviceLease") -> None:
        self._waiting.append(turn)
        self._grant()

    def leave(self, turn: "DeviceLease") -> None:
        self._waiting = [each for each in self._waiting if each is not turn]
        self._holding = [each for each in self._holding if each is not turn]
        self._grant()

    def holders(self, turn: "DeviceLease") -> list["DeviceLease"]:
        """Returns the turns that hold a device this turn wants."""
        return [each for each in self._holding if each is not turn and not each.devices.isdisjoint(turn.devices)]

    def is_wanted(self, turn: "DeviceLease") -> bool:
        """True if another turn waits for one of this turn's devices."""
        return any(not each.devices.isdisjoint(turn.devices) for each in self._waiting)

    def _grant(self) -> None:
        taken = {device for turn in self._holding for device in turn.devices}
        for turn in list(self._waiting):
            if turn.devices.isdisjoint(taken):
                self._waiting.remove(turn)
                self._holding.append(turn)
                turn.begin()
            taken |= turn.devices
        for turn in self._holding:
            if self.is_wanted(turn):
                turn.wake()


class DeviceLease:
    """A group's claim on the devices that it shares.

    devices: those of its ranks, by names that all groups agree on. Empty until the ranks have reported them; the turn
        then waits for no one.
    """

    def __init__(
        self, turns: DeviceScheduler, name: str, wake: Callable[[], None], idle_seconds: float | None = None
    ) -> None:
        self.name, self.wake = name, wake
        self.devices: frozenset[str] = frozenset()
        self._turns = turns
        self._begun = asyncio.Event()
        self._has_asked = False
        self._idle_seconds = idle_seconds
        self._since = self._used_at = 0.0
        self._moving_seconds = 0.0

    @property
    def is_held(self) -> bool:
        """True while the group owns all its devices, until `release`."""
        return self._begun.is_set()

    def request(self) -> None:
        """Requests the devices; `wake` is called when they are held."""
        if not self._has_asked:
            self._has_asked = True
            self._turns.enter(self)

    async def acquire(self) -> None:
        """Requests the devices and waits until they are held."""
        self.request()
        try:
            await self._begun.wait()
        except asyncio.CancelledError:
            self.release()
            raise

    def begin(self) -> None:
        self._since = self._used_at = time.monotonic()
        self._begun.set()
        self.wake()

    def release(self) -> None:
        """Releases the devices or withdraws the request; does nothing if there is neither."""
        self._begun.clear()
        self._has_asked = False
        self._turns.leave(self)

    def record_use(self) -> None:
        """Records that the devices were in use until now."""
        self._used_at = time.monotonic()

    def seconds_left(self) -> float | None:
        """Returns the seconds until the devices count as idle for too long; None if they never do."""
        if self._idle_seconds is None or not self.is_held:
            return None
        return max(0.0, self._idle_seconds - (time.monotonic() - self._used_at))

    def record_move(self, seconds: float) -> None:
        """Records how long it took to move on and off the devices."""
        self._moving_seconds = seconds

    def must_release(self, has_work: bool) -> bool:
        """True if the group must release its devices to another one now.

        Args:
            has_work: whether this group has work waiting.
        """
        if not (self.is_held and self._turns.is_wanted(self)):
            return False
        least = max(_FEWEST_SECONDS, _STAYS * self._moving_seconds)
        return not has_work or time.monotonic() - self._since >= least

    def blocked_by(self) -> str | None:
        """Describes which groups hold the requested devices, or returns None."""
        names = [turn.name for turn in self._turns.holders(self)]
        return f"{' and '.join(names)} has the device" if names and self._has_asked and not self.is_held else None
