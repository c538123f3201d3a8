"""A response that is a stream of server-sent events."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from .bodies import STALLED_SECONDS

logger = logging.getLogger(__name__)


class EventStream(StreamingResponse):
    """Streams server-sent events.

    close: called at the end, also if the client disconnects or reads nothing for STALLED_SECONDS.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALLED_SECONDS):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            logger.info("closed a stream: its client has read nothing for %g s", STALLED_SECONDS)
        finally:
            self._close()
