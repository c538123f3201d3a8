"""Limits the heads and trailers of requests, and how slowly a request may arrive.

The head and the body of a request must each arrive within ARRIVAL_SECONDS plus one second for every BYTES_PER_SECOND
received, as in Apache's RequestReadTimeout; otherwise the request is answered 408 and the connection is closed. The
clock stops while received bytes wait to be read. A head that is incomplete after MAX_HEAD_BYTES is answered 431; the
same limit holds for trailers, and for bytes sent before the answer to a request has ended. A client that reads nothing
of an answer for STALLED_SECONDS is disconnected.
"""

import asyncio
import json
import socket
from http import HTTPStatus
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..http.bodies import STALLED_SECONDS

ARRIVAL_SECONDS = 30.0
BYTES_PER_SECOND = 500
CHECK_SECONDS = 1.0
"""Interval at which a connection checks whether a request arrives too slowly."""
MAX_HEAD_BYTES = 64 << 10
_MOST_JOINED_BYTES = 64 << 10


def disconnect_stalled_clients(listener: socket.socket) -> None:
    """Has the kernel close connections whose peer acknowledges nothing for STALLED_SECONDS. Linux only."""
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
        listener.setsockopt(socket.IPPROTO_TCP, option, round(1000 * STALLED_SECONDS))


class HttpConnection(HttpToolsProtocol):
    """A connection of uvicorn's with limits on what arrives. Passed to uvicorn as `http`.

    In uvicorn's words a `cycle` is a request and its answer; `cycle.body` is what the application has not read yet.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(cast(asyncio.Transport, _JoinedWrites(transport, self.loop)))
        # Bytes and seconds of the head or body that is arriving; bytes received since its last piece.
        self._num_bytes, self._seconds, self._num_bytes_besides = 0, 0.0, 0
        self._check: asyncio.TimerHandle | None = None
        # A new connection may idle as long as one between two requests.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        cycle, num_unread = self.cycle, len(self.cycle.body) if self.cycle else 0
        super().data_received(data)
        if self.cycle is not cycle:  # a head is complete
            self._num_bytes, self._seconds, self._num_bytes_besides = len(self.cycle.body), 0.0, 0
        else:
            is_body = cycle is not None and len(cycle.body) > num_unread
            self._num_bytes_besides = 0 if is_body else self._num_bytes_besides + len(data)
            self._num_bytes += len(data)
            if self._num_bytes_besides > MAX_HEAD_BYTES:
                self._limit_bytes()
        if self._check is None and (self._is_in_head or self.cycle.more_body):
            self._check = self.loop.call_later(CHECK_SECONDS, self._check_arrival)

    def on_response_complete(self) -> None:
        if self.cycle.response_complete and self.cycle.more_body:
            self.transport.close()  # the rest of the request was given up
        self._num_bytes, self._seconds, self._num_bytes_besides = 0, 0.0, 0
        super().on_response_complete()

    @property
    def _is_in_head(self) -> bool:
        """True between two requests, and while the head of the next is arriving."""
        return self.cycle is None or self.cycle.response_complete

    def _limit_bytes(self) -> None:
        if self._is_in_head:
            self._refuse(431, f"the head of the request has more than {MAX_HEAD_BYTES} bytes: send fewer headers")
        elif self.cycle.more_body and not self.pipeline:
            self.transport.close()  # these are trailers
        else:
            self.flow.pause_reading()  # until the answer has ended

    def _check_arrival(self) -> None:
        """Runs while a head or a body is arriving."""
        self._check = None
        is_arriving = self._num_bytes > 0 if self._is_in_head else self.cycle.more_body
        if not is_arriving or self.transport.is_closing():
            return
        # While an earlier request is answered, uvicorn reads nothing of this one.
        if self._is_in_head or not (self.pipeline or self.cycle.body or self.cycle.waiting_for_100_continue):
            self._seconds += CHECK_SECONDS
        if self._seconds > ARRIVAL_SECONDS + self._num_bytes / BYTES_PER_SECOND:
            self._refuse(
                408,
                f"the request did not arrive within {ARRIVAL_SECONDS:g} s, plus a second for every {BYTES_PER_SECOND} "
                "bytes received: send it faster, or send a smaller one",
            )
        else:
            self._check = self.loop.call_later(CHECK_SECONDS, self._check_arrival)

    def _refuse(self, status: int, detail: str) -> None:
        """Closes the connection, with an error response if none has begun."""
        if self._is_in_head or not self.cycle.response_started:
            body = json.dumps({"detail": detail})
            self.transport.write(
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()
            )
        self.transport.close()


class _JoinedWrites:
    """A transport that writes at once what is sent in one turn of the event loop, as the head and body of an answer.

    Separately they would take two system calls and two TCP segments, and wake the reader for half an answer.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.get_extra_info, self.is_closing = transport.get_extra_info, transport.is_closing
        self.pause_reading, self.resume_reading = transport.pause_reading, transport.resume_reading
        self._transport, self._loop = transport, loop
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > _MOST_JOINED_BYTES:
            self._flush()  # so that the sender waits for the reader

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._pieces and not self._transport.is_closing():
            self._transport.writelines(self._pieces)
        self._pieces, self._num_bytes = [], 0
