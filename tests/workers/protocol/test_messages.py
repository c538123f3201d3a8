"""Messages between the pool and its ranks: whole, aligned, writable, and without copies of large arrays."""

import pickle
import socket
import time
from collections.abc import Callable

import numpy as np
import pytest
from trainhouse.schemas.training import Datum, ForwardBackwardRequest
from trainhouse.workers.protocol.messages import Buffer, FrameReader, decode, encode, send_pieces


def frame_of(pieces: list[Buffer]) -> memoryview:
    return memoryview(bytearray(b"".join(pieces)))


def batch(num_data: int, length: int) -> ForwardBackwardRequest:
    def datum() -> Datum:
        inputs = {"target_tokens": np.arange(length), "weights": np.ones(length, np.float32)}
        return Datum(np.arange(length, dtype=np.int32), inputs)

    return ForwardBackwardRequest("run", 1, tuple(datum() for _ in range(num_data)), "cross_entropy")


@pytest.mark.parametrize("sizes", [[], [1], [0, 5000, 3, 100_000], [2000] * 1500])
def test_arrays_of_any_size_arrive_equal_writable_and_aligned(sizes: list[int]) -> None:
    arrays = [np.random.default_rng(size).normal(size=size).astype(np.float32) for size in sizes]
    decoded = decode(frame_of(encode({"arrays": arrays, "text": "with them"})))
    assert isinstance(decoded, dict)
    assert decoded["text"] == "with them"
    for array, original in zip(decoded["arrays"], arrays, strict=True):
        np.testing.assert_array_equal(array, original)
        assert array.flags.writeable and array.flags.aligned


def test_a_large_array_is_a_view_on_both_sides() -> None:
    array = np.arange(1 << 16)
    pieces = encode(array)
    assert any(np.shares_memory(array, np.frombuffer(piece, np.uint8)) for piece in pieces)
    frame = frame_of(pieces)
    decoded = decode(frame)
    assert isinstance(decoded, np.ndarray)
    assert np.shares_memory(decoded, np.frombuffer(frame, np.uint8))


def test_frames_pass_through_a_nonblocking_socket_in_pieces() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        incoming = FrameReader()

        def passed_through(value: object) -> object:
            unsent = encode(value)
            for _ in range(10_000):
                send_pieces(unsent, near)
                if (frame := incoming.receive(far)) is not None:
                    return decode(frame)
            raise AssertionError("the frame did not arrive")

        values = [np.arange(1 << 18), "small", [np.ones(3000)] * 700]
        for value in values:
            np.testing.assert_array_equal(passed_through(value), value)
        near.close()
        with pytest.raises(EOFError):
            incoming.receive(far)


def test_encoding_a_large_batch_takes_less_than_half_of_pickling() -> None:
    request = batch(1000, 64)

    def seconds(move: Callable[[], object]) -> float:
        def once() -> float:
            started = time.thread_time()
            move()
            return time.thread_time() - started

        return min(once() for _ in range(7))

    columns = seconds(lambda: decode(frame_of(encode(request))))
    assert columns < 0.5 * seconds(lambda: pickle.loads(pickle.dumps(request.data, protocol=5)))
