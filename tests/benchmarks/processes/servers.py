"""Servers to compare ours with. Neither loads the official SDK, which would slow down what they are measured by.

servers.py null: has ready-made answers, for the time that the SDK itself takes. Prints its port; ends with its input.
servers.py serve ...: our server, except that nothing that it accepts or answers reaches the disk.
"""

import asyncio
import json
import sys
from collections.abc import Mapping

import numpy as np
import uvloop
from trainhouse.schemas.codec import JSON, PROTOBUF, encode_forward_backward_output
from trainhouse.schemas.training import ForwardBackwardOutput

from ..harness import MODEL, reply

_OUTPUT = ForwardBackwardOutput(({"logprobs": np.zeros(8, np.float32)},), {"loss:sum": 0.0})
_RESULT = "result"


def _response(body: bytes, content_type: str = JSON) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


_ANSWERS = {
    path: _response(json.dumps(answer).encode())
    for path, answer in {
        "client/config": {},
        "client/dynamic_config": {},
        "create_session": {"session_id": "s"},
        "session_heartbeat": {},
        "sessions/s/finish": {},
        "get_server_capabilities": {"supported_models": [{"model_name": MODEL}]},
        "create_model": {"request_id": "model"},
        "get_info": {"model_id": "s:train:0", "model_data": {"model_name": MODEL}},
        "forward_backward": {"request_id": _RESULT},
        "retrieve_future": {"model_id": "s:train:0", "type": "create_model"},
    }.items()
}
_FORWARD_RESULT = _response(encode_forward_backward_output(_OUTPUT), PROTOBUF)


class _Connection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        num_body = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if end and len(rest) >= num_body:
            self._received = rest[num_body:]
            self._transport.write(_answer(head.split(b" ")[1].decode(), rest[:num_body]))


def _answer(path: str, body: bytes) -> bytes:
    if path.endswith("retrieve_future") and f'"{_RESULT}"'.encode() in body:
        return _FORWARD_RESULT
    return _ANSWERS[path.removeprefix("/api/v1/")]


async def serve_nothing() -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", 0)
    reply(server.sockets[0].getsockname()[1])
    await asyncio.to_thread(sys.stdin.read)


def serve_volatile() -> None:
    # Here, because the other server stays light.
    from trainhouse.server.__main__ import main
    from trainhouse.server.files.segment_log import RecordPosition, SegmentLog
    from trainhouse.server.runs.snapshots import RunSnapshots

    def append(self: SegmentLog, header: Mapping[str, object], body: bytes = b"") -> "asyncio.Future[RecordPosition]":
        done: asyncio.Future[RecordPosition] = asyncio.get_running_loop().create_future()
        done.set_result(RecordPosition(0, 0))
        return done

    SegmentLog.append = append
    SegmentLog.delete = lambda self, segment: None
    RunSnapshots.take_if_due = lambda *_, **__: None
    main()


if __name__ == "__main__":
    if sys.argv[1] == "null":
        uvloop.run(serve_nothing())
    else:
        serve_volatile()
