"""Large bodies are decoded in separate processes, with limits on memory and time.

The decoder is `eval`, so that a body says what the process does.
"""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zstandard
from trainhouse.schemas.bounds import MAX_JSON_BYTES
from trainhouse.schemas.chats.openai import CompletionRequest, OpenAiError, decoder
from trainhouse.schemas.codec import JSON, PROTOBUF, decode_model, encode_forward_backward_request
from trainhouse.schemas.drafts import BuildVocabMapRequest
from trainhouse.schemas.errors import RequestError
from trainhouse.schemas.sampling import SampleRequest
from trainhouse.schemas.training import Datum, ForwardBackwardRequest
from trainhouse.schemas.verbs import FORWARD, FORWARD_BACKWARD
from trainhouse.server.http.bodies import (
    PROCESS_JSON_BYTES,
    PROCESS_PROTOBUF_BYTES,
    UNLIMITED,
    Body,
    Decoder,
    decode_body,
    decoder_of,
)
from trainhouse.server.http.decoding import decode_in_process
from trainhouse.server.journal.journal import Header, JournalEntry
from trainhouse.server.journal.request_decoding import decode_entry

AUTOGROUP = Path("/proc/self/autogroup")
OF_TESTS = AUTOGROUP.read_text() if AUTOGROUP.exists() else None

pytestmark = pytest.mark.anyio

PROCESS_ID = b"__import__('os').getpid()"


def padded(body: bytes, num_bytes: int) -> bytes:
    return body + b" " * (num_bytes - len(body))


async def test_a_large_body_is_decoded_in_another_process() -> None:
    assert await decode_body(Body(padded(PROCESS_ID, PROCESS_JSON_BYTES - 1), UNLIMITED), Decoder(eval)) == os.getpid()
    assert await decode_body(Body(padded(PROCESS_ID, PROCESS_JSON_BYTES), UNLIMITED), Decoder(eval)) != os.getpid()
    compressed = Body(zstandard.compress(padded(PROCESS_ID, PROCESS_JSON_BYTES)), UNLIMITED, content_encoding="zstd")
    assert await decode_body(compressed, Decoder(eval)) != os.getpid()
    for most, is_here in ((PROCESS_JSON_BYTES + 1, True), (PROCESS_JSON_BYTES, False)):
        where = await decode_body(Body(padded(PROCESS_ID, PROCESS_JSON_BYTES), UNLIMITED), Decoder(eval, most))
        assert (where == os.getpid()) == is_here
    assert decoder_of(FORWARD_BACKWARD, JSON).process_bytes == PROCESS_JSON_BYTES
    assert decoder_of(FORWARD_BACKWARD, PROTOBUF).process_bytes == PROCESS_PROTOBUF_BYTES


async def test_another_process_decodes_to_the_same_result() -> None:
    inputs = {"target_tokens": np.arange(3), "weights": np.ones(3, np.float32)}
    data = tuple(Datum(np.arange(3, dtype=np.int32), inputs) for _ in range(20))
    body = encode_forward_backward_request(ForwardBackwardRequest("m", 1, data, "cross_entropy"))
    decode = decoder_of(FORWARD, PROTOBUF).decode
    here, apart = decode(body), await decode_in_process(decode, body, None, 1 << 20)
    assert isinstance(apart, ForwardBackwardRequest) and apart.forward_only and len(apart.data) == 20
    for one, other in zip(here.data, apart.data, strict=True):
        assert np.array_equal(one.tokens, other.tokens) and other.tokens.flags.writeable
        for name, values in one.loss_fn_inputs.items():
            assert np.array_equal(values, other.loss_fn_inputs[name])
    sample = json.dumps(
        {"base_model": "b", "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}}
    ).encode()
    decode_sample = partial(decode_model, SampleRequest)
    assert await decode_in_process(decode_sample, sample, None, 1 << 20) == decode_sample(sample)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"bytearray(1 << 40)", 413, "too much memory"),
        (b"__import__('os')._exit(9)", 413, "too much memory"),
        (b"__import__('os').kill(__import__('os').getpid(), 24)", 413, "too much memory or time"),
    ],
)
async def test_bodies_that_need_too_much_memory_or_time_are_refused(body: bytes, status: int, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        await decode_in_process(eval, body, None, 1 << 20)
    assert refused.value.status == status
    assert await decode_in_process(eval, b"1 + 1", None, 1 << 20) == 2


async def test_refusals_and_internal_errors_reach_the_caller() -> None:
    with pytest.raises(RequestError, match="base_model is 3"):
        await decode_in_process(partial(decode_model, SampleRequest), b'{"base_model": 3}', None, 1 << 20)
    with pytest.raises(OpenAiError) as refused:
        await decode_in_process(decoder(CompletionRequest), b'{"model": "m"}', None, 1 << 20)
    assert (refused.value.status, refused.value.param, refused.value.code) == (
        400,
        "prompt",
        "missing_required_parameter",
    )
    with pytest.raises(RequestError, match="limit"):
        await decode_in_process(eval, zstandard.compress(bytes(2 << 20)), "zstd", 1 << 20)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        await decode_in_process(eval, b"1 / 0", None, 1 << 20)


async def test_a_killed_decoder_process_is_answered_503() -> None:
    with pytest.raises(RequestError, match=r"killed.*send it again") as refused:
        await decode_in_process(eval, b"__import__('os').kill(__import__('os').getpid(), 9)", None, 1 << 20)
    assert refused.value.status == 503 and refused.value.retry_after_seconds


async def test_a_decoder_process_that_cannot_start_is_answered_503(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", no_memory)
    with pytest.raises(RequestError, match=r"Cannot allocate memory.*send it again") as refused:
        await decode_in_process(eval, b"1", None, 1 << 20)
    assert refused.value.status == 503


async def test_decoder_processes_are_the_first_choice_of_the_oom_killer() -> None:
    assert await decode_in_process(eval, b"open('/proc/self/oom_score_adj').read()", None, 1 << 20) == "1000\n"


@pytest.mark.skipif(OF_TESTS is None, reason="the kernel does not group processes by session")
async def test_decoder_processes_yield_to_those_of_other_sessions() -> None:
    """A process has its own session, so that its niceness alone would not count against the server's."""
    group = await decode_in_process(eval, b"open('/proc/self/autogroup').read()", None, 1 << 20)
    assert group.endswith("nice 5\n") and group != OF_TESTS


def test_a_decoder_process_ends_when_its_server_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "process_id"
    body = f"[open({str(mark)!r}, 'w').write(str(__import__('os').getpid())), __import__('time').sleep(600)]"
    run = f"asyncio.run(decode_in_process(eval, {body.encode()!r}, None, 1 << 20))"
    server = subprocess.Popen(
        [sys.executable, "-c", f"import asyncio; from trainhouse.server.http.decoding import decode_in_process; {run}"]
    )
    try:
        wait_until(lambda: mark.exists() and mark.read_text() != "")
        process = int(mark.read_text())
        assert is_alive(process)
    finally:
        server.kill()
        server.wait()
    wait_until(lambda: not is_alive(process))


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    """Returns False for zombies as well."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [PROCESS_JSON_BYTES, MAX_JSON_BYTES + 1])
@pytest.mark.parametrize("python", [sys.executable, "/bin/false", "/dev/null/python"])
async def test_journal_entries_of_any_size_decode_without_a_decoder_process(
    python: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an upgrade or a start with little memory would lose a run, because one refused operation ends it."""
    monkeypatch.setattr(sys, "executable", python)
    header = Header("build_vocab_map", "alice", "s:train:0", 3, "r:3")
    entry = JournalEntry(header, padded(b'{"model_id": "s:train:0", "seq_id": 3, "tokens": [[5, 6]]}', num_bytes), 0)
    decoded = await decode_entry(entry)
    assert isinstance(decoded, BuildVocabMapRequest) and decoded.tokens == [[5, 6]]
    with pytest.raises(RequestError, match="model_id is missing"):
        await decode_entry(replace(entry, body=padded(b"{}", PROCESS_JSON_BYTES)))
