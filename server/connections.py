"""Connections: uvicorn's, but the head of an answer leaves together with the beginning of its body.

Written one after the other they are two system calls, two segments, and a reader who wakes up for half an answer.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Connection(HttpToolsProtocol):
    """To be given to uvicorn as its `http`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.transport = self._answers = _HeadWithBody(transport)

    def on_response_complete(self) -> None:
        self._answers.answer_ends()
        super().on_response_complete()


class _HeadWithBody(asyncio.Transport):
    """As much of a transport as uvicorn uses for writing."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
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
        self._transport.close()

    def _flush(self) -> None:
        """A head that no body came for, as when HEAD was asked."""
        if self._head is not None:
            self.write(b"")

    def is_closing(self) -> bool:
        return self._transport.is_closing()
