"""Encodes messages between a pool and its ranks: a pickle followed by the raw bytes of large arrays.

A frame is a head, the sizes of its buffers, the pickle, and the buffers at aligned offsets. It is received into one
block of memory and the arrays are views of it: they keep it alive and are writable if the sender's arrays were.
"""

import pickle
import socket
import struct

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
    pieces: list[Buffer] = []
    for view in buffers:
        padding = -position % _ALIGNMENT
        pieces += (bytes(padding), view)
        position += padding + view.nbytes
    head = _HEAD.pack(position, len(pickled), len(sizes))
    return [head + struct.pack(f"<{len(sizes)}Q", *sizes) + pickled, *pieces]


def decode(frame: memoryview) -> object:
    """Decodes a whole frame; arrays in the value are views of the frame's memory."""
    _, num_pickled, num_buffers = _HEAD.unpack_from(frame)
    sizes = struct.unpack_from(f"<{num_buffers}Q", frame, _HEAD.size)
    start = _HEAD.size + num_buffers * _SIZE_BYTES
    position = start + num_pickled
    buffers: list[memoryview] = []
    for size in sizes:
        position += -position % _ALIGNMENT
        buffers.append(frame[position : position + size])
        position += size
    return pickle.loads(frame[start : start + num_pickled], buffers=buffers)


def send_pieces(unsent: list[Buffer], pipe: socket.socket) -> bool:
    """Sends as much as the pipe takes, removes it from `unsent`, and returns True if nothing is left.

    Raises:
        OSError: the pipe is broken.
    """
    while unsent:
        try:
            num_sent = pipe.sendmsg(unsent[:_MAX_PIECES])
        except BlockingIOError:
            return False
        num_whole = 0
        while num_whole < len(unsent) and num_sent >= len(unsent[num_whole]):
            num_sent -= len(unsent[num_whole])
            num_whole += 1
        del unsent[:num_whole]
        if num_sent:
            unsent[0] = memoryview(unsent[0])[num_sent:]
    return True


class FrameReader:
    """Reads frames from a pipe."""

    def __init__(self) -> None:
        self._frame = self._missing = memoryview(bytearray(_HEAD.size))

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
                head = self._frame
                self._frame = np.empty(_HEAD.unpack_from(head)[0], np.uint8).data
                self._frame[: _HEAD.size] = head
                self._missing = self._frame[_HEAD.size :]
        frame = self._frame
        self._frame = self._missing = memoryview(bytearray(_HEAD.size))
        return frame
