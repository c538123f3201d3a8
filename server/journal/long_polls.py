"""Requests that wait for an event for a limited time."""

import asyncio


class LongPolls:
    """The waits in progress, which a server that stops ends early."""

    def __init__(self) -> None:
        self._deadlines: set[asyncio.Timeout] = set()

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """True if the event was set within `seconds`."""
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                self._deadlines.add(deadline)
                await event.wait()
        except TimeoutError:
            return False
        finally:
            self._deadlines.discard(deadline)
        return True

    def stop(self) -> None:
        """Ends all waits as if they had timed out."""
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(now)
