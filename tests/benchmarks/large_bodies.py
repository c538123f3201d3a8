"""Large bodies, of strangers and of tenants: how long others wait for an answer meanwhile, and the memory they take."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
from trainhouse.schemas.codec import JSON, PROTOBUF, encode_forward_backward_request
from trainhouse.schemas.training import Datum, ForwardBackwardRequest

from ..live import LiveServer, live_server
from .child import child
from .report import Line, Row, Section
from .workload import MODEL

KEY = "tml-large-bodies"
MOST_WAIT_MS = 250
_MEBIBYTE = 1 << 20
_TOKENS = 1000
_SETTLE_SECONDS = 3.0


@dataclass(frozen=True)
class Case:
    """make: the body of that many bytes, for a model."""

    what: str
    path: str
    has_key: bool
    num_bytes: int
    make: Callable[[str, int], bytes]
    content_type: str = JSON


def large_bodies(model: Path, scratch: Path, pool: str, rounds: int) -> Section:
    table = []
    for index, case in enumerate(CASES):
        # A server for each: what one has left of its memory would hide what the next takes.
        with live_server({MODEL: model}, scratch / f"large-bodies-{index}", pool=pool) as server:
            table.append(_measured(server, case))
    longest = max(row["longest wait ms"] for row in table)
    assert isinstance(longest, float)
    notes = [
        "A health probe every 30 ms beside one request. Memory: of the server's process and those that it decodes in.",
    ]
    return Section("Large bodies", table, [Line("longest wait, ms", longest, "at most", MOST_WAIT_MS)], notes)


def _measured(server: LiveServer, case: Case) -> Row:
    model_id = _new_model(server.url)
    body = case.make(model_id, case.num_bytes)
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    with child("health_probe", server.url) as probe, child("tree_memory", str(server.process.pid)) as memory:
        time.sleep(0.5)
        probe.ask(0)
        memory.ask(0)
        began_at = time.monotonic()
        status = _send(server.url, case, body)
        seconds = time.monotonic() - began_at
        time.sleep(_SETTLE_SECONDS)
        wait, peak = probe.ask(0), memory.ask(0)
    return {
        "body": f"{case.what}, {case.num_bytes // _MEBIBYTE} MiB",
        "key": "yes" if case.has_key else "no",
        "answer": str(status),
        "answered after s": seconds,
        "longest wait ms": wait,
        "server MiB before": before / _MEBIBYTE,
        "at most": peak / _MEBIBYTE,
    }


def _send(url: str, case: Case, body: bytes) -> int:
    """The status; of an operation that is accepted, once its result is there. 0: the connection was closed."""
    headers = {"Content-Type": case.content_type} | ({"X-API-Key": KEY} if case.has_key else {})
    with httpx.Client(base_url=f"{url}/api/v1/", timeout=300, headers=headers) as client:
        try:
            answer = client.post(case.path, content=body)
        except httpx.TransportError:
            return 0
        if answer.status_code == 200 and "request_id" in answer.json():
            poll = {"request_id": answer.json()["request_id"]}
            while client.post("retrieve_future", json=poll, headers={"Content-Type": JSON}).status_code == 408:
                pass
        return answer.status_code


def _new_model(url: str) -> str:
    with httpx.Client(base_url=f"{url}/api/v1/", timeout=60, headers={"X-API-Key": KEY, "Prefer": "wait=40"}) as client:
        session_id = client.post("create_session", json={"sdk_version": "bench"}).json()["session_id"]
        new = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
        return client.post("create_model", json=new).json()["model_id"]


def _many_strings(model_id: str, num_bytes: int) -> bytes:
    body = b'{"sdk_version": "x", "tags": ["a"' + b',"a"' * (num_bytes // 4) + b"]}"
    return body[: num_bytes - 2] + b"]}" if len(body) < num_bytes else body


def _prompt(model_id: str, num_bytes: int) -> bytes:
    tokens = b"7" + b",77" * (num_bytes // 3)
    return b'{"base_model": "%s", "prompt": {"chunks": [{"type": "encoded_text", "tokens": [%s]}]}}' % (
        MODEL.encode(),
        tokens,
    )


def _inputs(random: np.random.Generator) -> dict[str, np.ndarray]:
    numbers = {name: random.standard_normal(_TOKENS).astype(np.float32) for name in ("logprobs", "advantages")}
    return {"target_tokens": random.integers(3, 250, _TOKENS)} | numbers


def _training_json(model_id: str, num_bytes: int) -> bytes:
    random = np.random.default_rng(0)
    inputs = _inputs(random)
    datum = {
        "model_input": inputs["target_tokens"].tolist(),
        "loss_fn_inputs": {k: v.tolist() for k, v in inputs.items()},
    }
    text = json.dumps(datum)
    data = ",".join([text] * (num_bytes // len(text)))
    return f'{{"model_id": "{model_id}", "seq_id": 1, "loss_fn": "ppo", "data": [{data}]}}'.encode()


def _training_protobuf(model_id: str, num_bytes: int) -> bytes:
    random = np.random.default_rng(0)
    tokens = random.integers(3, 250, _TOKENS).astype(np.int32)
    datum = Datum(tokens, _inputs(random))
    one = len(encode_forward_backward_request(ForwardBackwardRequest(model_id, 1, (datum,), "ppo")))
    return encode_forward_backward_request(ForwardBackwardRequest(model_id, 1, (datum,) * (num_bytes // one), "ppo"))


def _small_messages(model_id: str, num_bytes: int) -> bytes:
    """Data of no tokens at all: what a parser takes most memory and time for."""
    head = encode_forward_backward_request(ForwardBackwardRequest(model_id, 1, (), "ppo"))
    return head + b"\x1a\x00" * (num_bytes // 2)


def _empty_objects(model_id: str, num_bytes: int) -> bytes:
    return (
        f'{{"model_id": "{model_id}", "seq_id": 1, "loss_fn": "ppo", "data": [{{}}'.encode()
        + b",{}" * (num_bytes // 3)
        + b"]}"
    )


CASES = [
    *(Case("create_session, strings", "create_session", False, size * _MEBIBYTE, _many_strings) for size in (50, 100)),
    Case("forward_backward, JSON", "forward_backward", False, 50 * _MEBIBYTE, _training_json),
    *(Case("create_session, strings", "create_session", True, size * _MEBIBYTE, _many_strings) for size in (50, 100)),
    *(Case("forward_backward, JSON", "forward_backward", True, size * _MEBIBYTE, _training_json) for size in (50, 100)),
    Case("forward_backward, JSON, empty objects", "forward_backward", True, 50 * _MEBIBYTE, _empty_objects),
    *(
        Case("forward_backward, protobuf", "forward_backward", True, size * _MEBIBYTE, _training_protobuf, PROTOBUF)
        for size in (50, 100)
    ),
    *(
        Case(
            "forward_backward, protobuf, empty data",
            "forward_backward",
            True,
            size * _MEBIBYTE,
            _small_messages,
            PROTOBUF,
        )
        for size in (15, 100)
    ),
    Case("asample, JSON", "asample", True, 50 * _MEBIBYTE, _prompt),
]
"""In order."""


if __name__ == "__main__":
    import sys
    import tempfile

    from ..tiny import tiny_model

    with tempfile.TemporaryDirectory() as scratch:
        if sys.argv[1:]:
            CASES[:] = [CASES[int(index)] for index in sys.argv[1:]]
        print(large_bodies(tiny_model("qwen3", Path(scratch) / "model"), Path(scratch), "local", 1))
