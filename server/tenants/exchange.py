"""Exchange: one request and its answer.

If a request is answered before it has arrived, up to DRAIN_BYTES of the rest are read and dropped for at most
DRAIN_SECONDS: a client that is still sending receives the answer, and one that never stops is disconnected. The end of
an answer without Content-Length waits for that.
"""

import asyncio
import contextlib
from collections.abc import Callable

from fastapi import Request, Response
from starlette.types import Message, Receive, Scope, Send

from ..http.bodies import Body, BodyTooLarge
from ..http.errors import HANDLED_ERRORS, handle_error
from .auth import Auth

DRAIN_BYTES = 4 << 20
DRAIN_SECONDS = 5.0

_NOTE = b"x-deprecation-note"
"""A header that SDKs log."""


class Exchange:
    """One request and its answer, as the application receives and sends them.

    The key of an admitted request is confirmed when its body has arrived, before its answer, and before each piece of
    a stream: if it was revoked meanwhile, the answer is 401, and a stream ends.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        self.request = Request(scope)
        self.body = Body()
        self.headers: list[tuple[bytes, bytes]] = []
        """Added to those of the answer."""
        self.status: int | None = None
        """Status of the answer; None until it begins."""
        self.auth: Auth | None = None
        """Confirms the key from when the request is admitted."""
        self._receive, self._send = receive, send
        self._is_arriving = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
        self._num_bytes = 0

    def send_through(self, wrap: Callable[[Send], Send]) -> None:
        """Wraps the function that sends the answer, so that `wrap` can change the messages."""
        self._send = wrap(self._send)

    async def receive(self) -> Message:
        """Receives the next message.

        Raises:
            RequestError: 401 if it is the end of the body of a revoked key.
            BodyTooLarge: the body exceeds its limit. Its rest has been read and dropped, up to three times the limit,
                because a client that is still sending would not read the answer.
        """
        message, limit = await self._receive(), self.body.limits.received_bytes
        if not self._is_arriving:
            return message
        self._num_bytes += len(message.get("body", b""))
        self._is_arriving = message.get("more_body", False)
        if is_too_large := self._num_bytes > limit:
            await self._drop(3 * limit)
        if self.auth and (is_too_large or not self._is_arriving) and message["type"] == "http.request":
            await self.auth.confirm(self.request)
        if is_too_large:
            raise BodyTooLarge(limit, message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        """Sends a message. Raises AnswerWithheld, after the refusal, if the key was revoked."""
        begins = message["type"] == "http.response.start"
        is_last = not begins and not message.get("more_body")
        if self.auth and not is_last and message.get("status") != 204:
            try:
                await self.auth.confirm(self.request)
            except HANDLED_ERRORS as error:
                self.auth = None
                if begins:
                    refusal = await handle_error(self.request, error)
                    await refusal(self.request.scope, self.receive, self.send)
                raise AnswerWithheld from None
        if begins:
            self.status = message["status"]
            notes = ((_NOTE, b"ignored: " + words.encode("unicode_escape")) for words in self.body.ignored)
            message["headers"] = [*message.get("headers", ()), *self.headers, *notes]
        elif is_last and self._is_arriving:
            await self._send({**message, "more_body": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    await self._drop(DRAIN_BYTES)
            message = {"type": "http.response.body"}
        await self._send(message)

    async def refuse(self, refusal: Response) -> None:
        """Answers without waiting for the body."""
        if self._is_arriving:
            refusal.headers["Connection"] = "close"
        await refusal(self.request.scope, self.receive, self.send)

    async def _drop(self, most_bytes: int) -> None:
        """Reads and drops the rest of the body, up to a limit."""
        num_bytes = 0
        while self._is_arriving and num_bytes < most_bytes:
            message = await self._receive()
            num_bytes += len(message.get("body", b""))
            self._is_arriving = message.get("more_body", False)


class AnswerWithheld(Exception):
    """The key of a request was revoked before its answer was complete. The connection of one that has begun closes."""
