"""Limits how long clients may take, and sends a response's head and body together.

The head and the body of a request must each arrive within ARRIVAL_SECONDS plus one second for every BYTES_PER_SECOND
received, as in Apache's RequestReadTimeout; otherwise the request is answered 408 and the connection is closed. Only
time in which the application waits for the body counts. A head that is incomplete after MAX_HEAD_BYTES is answered
431; of what follows a request before its response has ended, about as much is read. A client that reads nothing of a
response for STALLED_SECONDS is disconnected.

If a request is answered before it has arrived, up to DRAIN_BYTES of the rest are read and dropped for at most
DRAIN_SECONDS: a client that is still sending receives the response, and one that never stops is disconnected. The end
of a response without Content-Length waits for that.

Writing head and body separately would take two system calls and two TCP segments, and wake the reader for half a
response.
"""

import asyncio
import json
import math
import socket
from http import HTTPStatus

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from ..http.bodies import STALLED_SECONDS, has_body

ARRIVAL_SECONDS = 30.0
BYTES_PER_SECOND = 500
MAX_HEAD_BYTES = 64 << 10
DRAIN_BYTES = 4 << 20
DRAIN_SECONDS = 5.0

_CONNECTION = "connection"
"""The key in a request's ASGI state under which its HttpConnection is."""


def disconnect_stalled_clients(listener: socket.socket) -> None:
    """Has the kernel close connections whose peer acknowledges nothing for STALLED_SECONDS. Linux only."""
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
        listener.setsockopt(socket.IPPROTO_TCP, option, round(1000 * STALLED_SECONDS))


class HttpConnection(asyncio.Protocol, asyncio.Transport):
    """Stands between a transport and uvicorn's protocol, and limits the heads of requests.

    Passed to uvicorn as `http`, for an application in a LimitedApp, which reports where requests and responses end.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__()
        self._protocol = HttpToolsProtocol(config, server_state, {**app_state, _CONNECTION: self}, _loop)
        self._loop = _loop or asyncio.get_running_loop()
        self._idle_seconds = config.timeout_keep_alive
        self._timer: asyncio.TimerHandle | None = None
        self._is_in_head, self._num_bytes = True, 0
        self._head_began_at: float | None = None
        self._most_bytes = math.inf
        self._num_bytes_ahead: int | None = None
        self._is_paused_by_protocol = self._is_paused_ahead = False
        self._has_answered = self._is_head_next = False
        self._answer_head: bytes | bytearray | memoryview | None = None

    # What the transport calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._transport = transport
        # A new connection may idle as long as one between two requests.
        self._timer = self._loop.call_later(self._idle_seconds, self.close)
        self._protocol.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_in_head = False
        self._stop_timer()
        self._protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        self._protocol.data_received(data)
        if self._num_bytes > self._most_bytes:
            self.close()
        elif self._num_bytes_ahead is not None:
            self._num_bytes_ahead += len(data)
            self._is_paused_ahead = self._num_bytes_ahead > MAX_HEAD_BYTES
            self._pause_or_resume()
        elif self._is_in_head:
            # If the head is complete, the application begins first.
            self._loop.call_soon(self._check_head)

    def eof_received(self) -> None:
        self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    # What uvicorn's protocol calls

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._is_paused_by_protocol = True
        self._pause_or_resume()

    def resume_reading(self) -> None:
        self._is_paused_by_protocol = False
        self._pause_or_resume()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._transport.is_closing():
            return
        if self._is_head_next:
            self._answer_head, self._is_head_next = data, False
        elif self._answer_head is not None:
            pieces, self._answer_head = (self._answer_head, data), None
            self._transport.writelines(pieces)
        else:
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    # What LimitedApp calls

    def request_begins(self) -> None:
        """The head is complete."""
        self._is_in_head, self._head_began_at = False, None
        self._stop_timer()

    def request_ends(self) -> None:
        """The application has the whole request: what arrives from now on belongs to the next one."""
        self._num_bytes_ahead = 0

    def drop_at_most(self, num_bytes: int) -> None:
        """Closes the connection if more than that arrives before the response ends."""
        self._most_bytes = self._num_bytes + num_bytes

    def response_begins(self) -> None:
        self._has_answered = self._is_head_next = True

    def response_ends(self) -> None:
        self._flush()
        self._is_in_head, self._has_answered, self._num_bytes = True, False, 0
        self._most_bytes, self._num_bytes_ahead, self._is_paused_ahead = math.inf, None, False
        self._pause_or_resume()

    def refuse(self, status: int, detail: str) -> None:
        """Closes the connection, with an error response if none has begun."""
        if not self._has_answered:
            body = json.dumps({"detail": detail})
            self.write(
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()
            )
        self.close()

    def refuse_as_slow(self) -> None:
        self.refuse(
            408,
            f"the request did not arrive within {ARRIVAL_SECONDS:g} s, plus a second for every {BYTES_PER_SECOND} "
            "bytes received: send it faster, or send a smaller one",
        )

    def _pause_or_resume(self) -> None:
        if self._is_paused_by_protocol or self._is_paused_ahead:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _check_head(self) -> None:
        if not self._is_in_head or self._num_bytes == 0:  # complete, and perhaps answered meanwhile
            return
        if self._num_bytes > MAX_HEAD_BYTES:
            self.refuse(431, f"the head of the request has more than {MAX_HEAD_BYTES} bytes: send fewer headers")
        elif self._head_began_at is None:
            self._stop_timer()
            self._head_began_at = self._loop.time()
            self._check_arrival()

    def _check_arrival(self) -> None:
        assert self._head_began_at is not None
        seconds_left = _seconds_left(self._num_bytes, self._loop.time() - self._head_began_at)
        if seconds_left > 0:
            self._timer = self._loop.call_later(seconds_left, self._check_arrival)
        else:
            self.refuse_as_slow()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _flush(self) -> None:
        """Sends a head without a body, as for a HEAD request."""
        if self._answer_head is not None:
            self.write(b"")


class LimitedApp:
    """An ASGI application that limits the bodies of requests to `app`. Needs HttpConnection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(scope, receive, send)
        await self._app(scope, exchange.receive, exchange.send)


class _Exchange:
    """A request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._is_arriving = has_body(scope)
        self._loop = asyncio.get_running_loop()
        self._num_bytes, self._seconds_waited = 0, 0.0
        self._connection: HttpConnection = scope["state"][_CONNECTION]
        self._connection.request_begins()
        if not self._is_arriving:
            self._connection.request_ends()

    async def receive(self) -> Message:
        if not self._is_arriving:
            return await self._receive()
        started_at, seconds = self._loop.time(), _seconds_left(self._num_bytes, self._seconds_waited)
        refusing = self._loop.call_later(seconds, self._connection.refuse_as_slow)
        try:
            message = await self._receive()
        finally:
            refusing.cancel()
        self._seconds_waited += self._loop.time() - started_at
        self._num_bytes += len(message.get("body", b""))
        self._is_arriving = message.get("more_body", False)
        if not self._is_arriving:
            self._connection.request_ends()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._connection.response_begins()
            await self._send(message)
            return
        is_last = not message.get("more_body")
        if is_last and self._is_arriving:
            await self._send({**message, "more_body": True})
            await self._drop_rest()
            message = {"type": "http.response.body"}
        await self._send(message)
        if is_last:
            self._connection.response_ends()

    async def _drop_rest(self) -> None:
        """Reads and drops the rest of the body; the connection is closed if that is too much."""
        self._connection.drop_at_most(DRAIN_BYTES)
        closing = self._loop.call_later(DRAIN_SECONDS, self._connection.close)
        try:
            while self._is_arriving:
                await self.receive()
        finally:
            closing.cancel()


def _seconds_left(num_bytes: int, seconds: float) -> float:
    """Returns how long the rest of a head or body may take, after so many bytes and seconds."""
    return ARRIVAL_SECONDS + num_bytes / BYTES_PER_SECOND - seconds
