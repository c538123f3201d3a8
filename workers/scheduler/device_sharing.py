"""DeviceTurns: which groups have the devices that they share, one after the other."""

import asyncio
import time
from collections.abc import Callable

# To have a device for so many times as long as it took to come there and to leave bounds what moving costs.
_STAYS = 10.0
_FEWEST_SECONDS = 0.2


class DeviceTurns:
    """Who asks first is first, and nobody who wants several devices waits for ever for one of them: whoever comes later
    and wants it waits, too."""

    def __init__(self) -> None:
        self._holding: list[Turn] = []
        self._waiting: list[Turn] = []

    def turn(self, name: str, wake: Callable[[], None], idle_seconds: float | None = None) -> "Turn":
        """A group's. name: the group's, for messages. wake: is called when it begins, and when another one waits for
        it. idle_seconds: see Turn.seconds_left."""
        return Turn(self, name, wake, idle_seconds)

    def enter(self, turn: "Turn") -> None:
        self._waiting.append(turn)
        self._go_on()

    def leave(self, turn: "Turn") -> None:
        """Wherever it is."""
        self._waiting = [each for each in self._waiting if each is not turn]
        self._holding = [each for each in self._holding if each is not turn]
        self._go_on()

    def holders(self, turn: "Turn") -> list["Turn"]:
        """Of a device that it wants."""
        return [each for each in self._holding if each is not turn and not each.devices.isdisjoint(turn.devices)]

    def is_wanted(self, turn: "Turn") -> bool:
        """Whether another one waits for a device of its own."""
        return any(not each.devices.isdisjoint(turn.devices) for each in self._waiting)

    def _go_on(self) -> None:
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


class Turn:
    """A group's part in it. devices: that its ranks have, by names that are the same for all groups; none, before they
    have said so: then it waits for nobody."""

    def __init__(
        self, turns: DeviceTurns, name: str, wake: Callable[[], None], idle_seconds: float | None = None
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
        """Whether all its devices are its own, which they stay until `give`."""
        return self._begun.is_set()

    def ask(self) -> None:
        """For it; `wake` is called when it is held."""
        if not self._has_asked:
            self._has_asked = True
            self._turns.enter(self)

    async def take(self) -> None:
        """Returns when it is held."""
        self.ask()
        try:
            await self._begun.wait()
        except asyncio.CancelledError:
            self.give()
            raise

    def begin(self) -> None:
        self._since = self._used_at = time.monotonic()
        self._begun.set()
        self.wake()

    def give(self) -> None:
        """To who waits. Where it is not held: no-op."""
        self._begun.clear()
        self._has_asked = False
        self._turns.leave(self)

    def used(self) -> None:
        """The devices, until now."""
        self._used_at = time.monotonic()

    def seconds_left(self) -> float | None:
        """Until they have not been used for too long; None: for ever."""
        if self._idle_seconds is None or not self.is_held:
            return None
        return max(0.0, self._idle_seconds - (time.monotonic() - self._used_at))

    def moved(self, seconds: float) -> None:
        """So long it took to come to the devices and to leave them."""
        self._moving_seconds = seconds

    def is_over(self, has_work: bool) -> bool:
        """Whether another one is to have its devices now. has_work: whether there is any for this one."""
        if not (self.is_held and self._turns.is_wanted(self)):
            return False
        least = max(_FEWEST_SECONDS, _STAYS * self._moving_seconds)
        return not has_work or time.monotonic() - self._since >= least

    def obstacle(self) -> str | None:
        """Who has what it asked for, in words."""
        names = [turn.name for turn in self._turns.holders(self)]
        return f"{' and '.join(names)} has the device" if names and self._has_asked and not self.is_held else None
