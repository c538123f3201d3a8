"""Extends uvicorn's HTTP protocol with time limits for slow clients, and sends a response's head and body together.

A request must arrive within ARRIVAL_SECONDS plus one second for every BYTES_PER_SECOND received, as in Apache's
RequestReadTimeout; otherwise it is answered 408 and the connection is closed. The clock stops while the server does not
read. A head that is incomplete after MOST_HEAD_BYTES is answered 431. A client that reads nothing of a response for
STALLED_SECONDS is disconnected.

Writing head and body separately would take two system calls and two TCP segments, and wake the reader for half a
response.

If a request is answered before it has arrived, up to DRAIN_BYTES of the rest are read and dropped for at most
DRAIN_SECONDS: a client that is still sending receives the response, and one that never stops is disconnected.
"""

import asyncio
import json
import socket
from collections.abc import Callable
from http import HTTPStatus

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

ARRIVAL_SECONDS = 30.0
BYTES_PER_SECOND = 500
MOST_HEAD_BYTES = 64 << 10
STALLED_SECONDS = 120.0
DRAIN_BYTES = 4 << 20
DRAIN_SECONDS = 5.0


class HttpConnection(HttpToolsProtocol):
    """The HTTP protocol class, passed to uvicorn as `http`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.transport = self._answers = _ResponseTransport(transport, self._has_more_to_drop)
        self.flow = self._timed_flow = _TimedFlowControl(transport, self.loop.time)
        self._is_arriving = self._is_in_head = False
        self._num_bytes = 0
        self._began_at = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._draining: asyncio.TimerHandle | None = None
        self._dropped_until = 0
        _set_user_timeout(transport)
        # A new connection may idle as long as one between two requests.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        self._stop_watching()
        self._stop_draining()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_arriving:
            self._stop_watching()
            return
        self._num_bytes += len(data)
        if self._draining is not None:
            if self._num_bytes > self._dropped_until:
                self.transport.close()
        elif self._is_in_head and self._num_bytes > MOST_HEAD_BYTES:
            self._refuse(431, f"the head of the request has more than {MOST_HEAD_BYTES} bytes: send fewer headers")
        elif self._watch is None:
            self._began_at = self._timed_flow.seconds_open()
            self._watch = self.loop.call_later(ARRIVAL_SECONDS, self._check_arrival)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_arriving = self._is_in_head = True
        self._num_bytes = 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_arriving = False
        super().on_message_complete()
        if self._draining is not None:
            self._stop_draining()
            if self.transport.is_closing():
                self.transport.close()

    def on_response_complete(self) -> None:
        self._answers.answer_ends()
        super().on_response_complete()
        if self._has_more_to_drop():
            self.flow.resume_reading()
            self._dropped_until = self._num_bytes + DRAIN_BYTES
            self._draining = self.loop.call_later(DRAIN_SECONDS, self.transport.close)

    def _check_arrival(self) -> None:
        left = ARRIVAL_SECONDS + self._num_bytes / BYTES_PER_SECOND - (self._timed_flow.seconds_open() - self._began_at)
        if self.flow.read_paused or left > 0:
            # While reading is paused, `left` does not decrease; the minimum avoids a busy loop when it is tiny.
            self._watch = self.loop.call_later(max(left, 0.01 * ARRIVAL_SECONDS), self._check_arrival)
        else:
            self._refuse(
                408,
                f"the request did not arrive within {ARRIVAL_SECONDS:g} s, plus a second for every {BYTES_PER_SECOND} "
                "bytes received: send it faster, or send a smaller one",
            )

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _has_more_to_drop(self) -> bool:
        """True if the response has ended, but the body of its request is still arriving."""
        is_body = self._is_arriving and not self._is_in_head and self._draining is None
        return is_body and self.cycle.response_complete

    def _stop_draining(self) -> None:
        if self._draining is not None:
            self._draining.cancel()
            self._draining = None

    def _refuse(self, status: int, detail: str) -> None:
        """Closes the connection, with an error response if none has begun."""
        self._stop_watching()
        if self._is_in_head or not self.cycle.response_started:
            body = json.dumps({"detail": detail})
            self.transport.write(
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()
            )
        self.transport.close()


def _set_user_timeout(transport: asyncio.Transport) -> None:
    """Has the kernel close a connection whose peer acknowledges nothing for STALLED_SECONDS. Linux only."""
    connection, option = transport.get_extra_info("socket"), getattr(socket, "TCP_USER_TIMEOUT", None)
    if connection is not None and option is not None:
        connection.setsockopt(socket.IPPROTO_TCP, option, round(1000 * STALLED_SECONDS))


class _TimedFlowControl(FlowControl):
    """Flow control that counts the seconds in which the server reads, so that a client can send."""

    def __init__(self, transport: asyncio.Transport, clock: Callable[[], float]) -> None:
        super().__init__(transport)
        self._clock = clock
        self._seconds_paused = 0.0
        self._paused_at = 0.0

    def seconds_open(self) -> float:
        """Returns the time of a clock that stops while reading is paused."""
        return (self._paused_at if self.read_paused else self._clock()) - self._seconds_paused

    def pause_reading(self) -> None:
        if not self.read_paused:
            self._paused_at = self._clock()
        super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self._seconds_paused += self._clock() - self._paused_at
        super().resume_reading()


class _ResponseTransport(asyncio.Transport):
    """A transport that sends a response's head together with the first piece of its body.

    Has only the methods that uvicorn uses for writing. `close` takes effect at once, except while `stays_open()`.
    """

    def __init__(self, transport: asyncio.Transport, stays_open: Callable[[], bool]) -> None:
        super().__init__()
        self._transport = transport
        self._stays_open = stays_open
        self._is_to_close = False
        self._is_next_head = True
        self._head: bytes | bytearray | memoryview | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._head is not None:
            pieces, self._head = (self._head, data), None
            self._transport.writelines(pieces)
        elif self._is_next_head and bytes(data[:13]) != b"HTTP/1.1 100 ":
            self._head, self._is_next_head = data, False
        else:
            self._transport.write(data)

    def answer_ends(self) -> None:
        self._flush()
        self._is_next_head = True

    def close(self) -> None:
        self._flush()
        self._is_to_close = True
        if not self._stays_open():
            self._transport.close()

    def _flush(self) -> None:
        """Sends a head without a body, as for a HEAD request."""
        if self._head is not None:
            self.write(b"")

    def is_closing(self) -> bool:
        return self._is_to_close or self._transport.is_closing()
