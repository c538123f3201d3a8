"""Encodes messages between a pool and its ranks: a pickle followed by the raw bytes of large arrays.

A frame is a head, the sizes of its buffers, the pickle, and the buffers at aligned offsets. It is received into one
block of memory and the arrays are views of it: they keep it alive and are writable if the sender's arrays were.
"""

import pickle
import socket
import struct
from collections.abc import Sequence

import numpy as np

Buffer = bytes | memoryview

_HEAD = struct.Struct("<QQI")
"""Bytes of the frame, bytes of its pickle, number of buffers."""

_SIZE_BYTES = 8
_ALIGNMENT = 64
_SMALL_BYTES = 1024
"""Smaller arrays are copied into the pickle, which costs less than a separate buffer."""

_MAX_PIECES = 512  # in one system call; the kernel's limit is 1024


def encode(value: object) -> list[Buffer]:
    """Returns the frame as pieces to be sent in order; large arrays in `value` are not copied."""
    buffers: list[memoryview] = []

    def stays_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes >= _SMALL_BYTES:
            buffers.append(view)
        return view.nbytes < _SMALL_BYTES

    pickled = pickle.dumps(value, protocol=5, buffer_callback=stays_in_pickle)
    sizes = [view.nbytes for view in buffers]
    position = _HEAD.size + len(sizes) * _SIZE_BYTES + len(pickled)
    stops = _stops(position, sizes)
    head = _HEAD.pack(stops[-1] if stops else position, len(pickled), len(sizes))
    pieces: list[Buffer] = [head + struct.pack(f"<{len(sizes)}Q", *sizes) + pickled]
    for view, stop in zip(buffers, stops, strict=True):
        pieces += (bytes(stop - view.nbytes - position), view)
        position = stop
    return pieces


def decode(frame: memoryview) -> object:
    """Decodes a whole frame; arrays in the value are views of the frame's memory."""
    _, num_pickled, num_buffers = _HEAD.unpack_from(frame)
    sizes = struct.unpack_from(f"<{num_buffers}Q", frame, _HEAD.size)
    start = _HEAD.size + num_buffers * _SIZE_BYTES
    stops = _stops(start + num_pickled, sizes)
    buffers = [frame[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
    return pickle.loads(frame[start : start + num_pickled], buffers=buffers)


def _stops(position: int, sizes: Sequence[int]) -> list[int]:
    """Returns the end offset of each aligned buffer, if the first may begin at `position`."""
    stops: list[int] = []
    for size in sizes:
        position += -position % _ALIGNMENT + size
        stops.append(position)
    return stops


class FrameWriter:
    """A frame that is being written to a pipe in as many calls as it takes."""

    def __init__(self, pieces: Sequence[Buffer]) -> None:
        self._unsent = [memoryview(piece) for piece in pieces]

    def send(self, pipe: socket.socket) -> bool:
        """Sends as much as the pipe takes and returns True if the whole frame is sent.

        Raises:
            OSError: the pipe is broken.
        """
        while self._unsent:
            try:
                num_sent = pipe.sendmsg(self._unsent[:_MAX_PIECES])
            except BlockingIOError:
                return False
            self._drop(num_sent)
        return True

    def _drop(self, num_bytes: int) -> None:
        num_whole = 0
        while num_whole < len(self._unsent) and num_bytes >= self._unsent[num_whole].nbytes:
            num_bytes -= self._unsent[num_whole].nbytes
            num_whole += 1
        del self._unsent[:num_whole]
        if num_bytes:
            self._unsent[0] = self._unsent[0][num_bytes:]


class FrameReader:
    """Reads frames from a pipe."""

    def __init__(self) -> None:
        self._begin()

    def receive(self, pipe: socket.socket) -> memoryview | None:
        """Returns the next frame, or None if a non-blocking pipe has no more data for now.

        Raises:
            EOFError: the other side closed the pipe.
            OSError: the pipe is broken.
        """
        while self._missing:
            try:
                num_read = pipe.recv_into(self._missing)
            except BlockingIOError:
                return None
            if num_read == 0:
                raise EOFError("the other side closed the pipe")
            self._missing = self._missing[num_read:]
            if not self._missing and len(self._frame) == _HEAD.size:
                self._make_room()
        frame = self._frame
        self._begin()
        return frame

    def _begin(self) -> None:
        self._frame = self._missing = memoryview(bytearray(_HEAD.size))

    def _make_room(self) -> None:
        head = self._frame
        num_bytes, _, _ = _HEAD.unpack_from(head)
        self._frame = np.empty(num_bytes, np.uint8).data
        self._frame[: _HEAD.size] = head
        self._missing = self._frame[_HEAD.size :]
