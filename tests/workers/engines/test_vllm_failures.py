"""A vLLM that is missing, dies, hangs or changes its answers, and what happens to its requests."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from trainhouse.schemas.adapters.vllm_form import VllmForm
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.sampling import SampledSequence, SampleResponse, SamplingParams
from trainhouse.tests.workers.engines import vllm_stand_in
from trainhouse.tests.workers.engines.vllm_stand_in import FATAL
from trainhouse.tests.workers.recording_worker import RECORDING
from trainhouse.tests.workers.slow_loader import LOADING_SECONDS, SLOW_LOADER
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.engines.in_flight import StreamDeduplicator
from trainhouse.workers.engines.vllm import watchdog
from trainhouse.workers.engines.vllm.api import VllmApi
from trainhouse.workers.engines.vllm.requests import VllmRequest
from trainhouse.workers.engines.vllm.server import VllmProcess, VllmServer
from trainhouse.workers.protocol.calls import RunSpec, SampledPart, SampleJob
from trainhouse.workers.protocol.timeouts import GRACE_SECONDS
from trainhouse.workers.protocol.worker_config import SamplingConfig, ServedModel, VllmConfig, WorkerConfig
from trainhouse.workers.scheduler.supervision.backoff import RestartBackoff
from trainhouse.workers.scheduler.work import OnProgress

from .test_sampler_groups import running

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


@contextmanager
def watchdog_of(*command: str) -> Iterator["tuple[subprocess.Popen[bytes], int]"]:
    """Yields the watchdog, and the process id of its command."""
    arguments = [sys.executable, watchdog.__file__, str(GRACE_SECONDS), *command]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def is_group_running(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_command_and_its_children_end_when_the_pipe_closes() -> None:
    shell = "sleep 1000 & sleep 1000"
    with watchdog_of("sh", "-c", shell) as (process, pid):
        assert process.stdin is not None and is_group_running(pid)
        # Ctrl-C and SIGTERM are for the server.
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        time.sleep(0.3)
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(20) != 0
        deadline = time.monotonic() + 30
        while is_group_running(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_group_running(pid)


def test_watchdog_exits_with_the_status_of_its_command() -> None:
    with watchdog_of("sh", "-c", "exit 7") as (process, _):
        assert process.wait(20) == 7


def config(vllm: VllmConfig, directory: Path | None = None, worker: Any = RECORDING) -> DispatchConfig:
    model = WorkerConfig(ServedModel("tiny", "tiny"), device="cpu")
    sampling = SamplingConfig(vllm=vllm, devices=("cuda:0",), directory=directory and str(directory))
    return DispatchConfig((model,), worker=worker, sampling=sampling)


def at_url(url: str) -> DispatchConfig:
    return config(VllmConfig(urls=(url,)))


def job(job_id: str, max_tokens: int = 5, first: int = 1, adapter_id: str | None = None, **options: Any) -> SampleJob:
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    return SampleJob(job_id, adapter_id, np.array([first], np.int32), params, (), (), **options)


async def test_start_without_vllm_fails_with_the_reason(tmp_path: Path) -> None:
    dispatch = WorkerDispatch(config(VllmConfig(python=sys.executable), tmp_path))
    with pytest.raises(ValueError, match=r"vLLM of tiny does not start: .*No module named 'vllm'.*vllm\.log"):
        await dispatch.start(lambda _: None)


async def test_requests_wait_for_an_unreachable_vllm_until_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with running(at_url(url)) as dispatch:
            waiting = asyncio.create_task(dispatch.sample("tiny", job("job")))
            await asyncio.sleep(0.5)
            assert dispatch.status("tiny") == f"1 sampling request waits or runs on the vLLM at {url}"
            dispatch.cancel("job")
            with pytest.raises(OperationError, match="job was cancelled"):
                await waiting
            monkeypatch.setattr(VllmServer, "retry_seconds", 1.0)
            with pytest.raises(OperationError, match=rf"{url} has not responded for .* --sampler native") as failed:
                await dispatch.sample("tiny", job("job"))
            assert failed.value.category == "server"
            waiting = asyncio.create_task(dispatch.sample("tiny", job("job")))
            await asyncio.sleep(0.1)
        with pytest.raises(OperationError, match="shutting down"):
            await waiting


def part(sample: int, tokens: Sequence[int]) -> SampledPart:
    return SampledPart(sample, np.array(tokens, np.int32), np.array(tokens, np.float32))


def response(*samples: Sequence[int]) -> SampleResponse:
    parts = [part(0, tokens) for tokens in samples]
    return SampleResponse(tuple(SampledSequence("length", each.tokens, each.logprobs) for each in parts))


Run = tuple[Sequence[SampledPart], SampleResponse]


async def streamed_parts(*runs: Run) -> list[tuple[int, list[int]]]:
    """Runs a request repeatedly, and returns what its caller gets of the streams."""
    received: list[tuple[int, list[int]]] = []
    deduplicated = StreamDeduplicator(
        lambda parts: received.extend((each.sample, each.tokens.tolist()) for each in parts)
    )

    async def attempt(run: Run, on_progress: OnProgress | None) -> SampleResponse:
        assert on_progress is not None
        for each in run[0]:
            on_progress((each,))
        return run[1]

    for each in runs:
        await deduplicated.run(partial(attempt, each))
    return received


async def test_tokens_of_a_rerun_are_not_streamed_again() -> None:
    first = [part(0, [1, 2]), part(1, [7]), part(0, [3])], response([1, 2, 3], [7])
    again = [part(0, [1]), part(0, [2, 3, 4]), part(1, [7, 8]), part(1, [9])], response([1, 2, 3, 4], [7, 8, 9])
    assert await streamed_parts(first, again) == [(0, [1, 2]), (1, [7]), (0, [3]), (0, [4]), (1, [8]), (1, [9])]


@pytest.mark.parametrize(
    "again",
    [
        ([part(0, [9, 9, 9, 9])], response([9, 9, 9, 9])),
        ([part(0, [1, 2]), part(0, [9, 9])], response([1, 2, 9, 9])),
        ([], response([1, 2, 9, 9])),
        ([part(0, [1, 2])], response([1, 2])),
    ],
)
async def test_stream_that_would_continue_differently_fails(again: Run) -> None:
    with pytest.raises(OperationError, match="tokens that differ from those already streamed") as failed:
        await streamed_parts(([part(0, [1, 2, 3])], response([1, 2, 3])), again)
    assert failed.value.category == "server"


# --- with a stand-in for vLLM ---


def stand_in(directory: Path) -> str:
    """Returns a program that starts the stand-in like a Python with vLLM."""
    program = directory / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {vllm_stand_in.__file__} {directory} "$@"\n')
    program.chmod(0o700)
    return str(program)


@asynccontextmanager
async def dispatch_with_stand_in(directory: Path) -> AsyncIterator[tuple[WorkerDispatch, VllmProcess]]:
    """Yields a dispatch that samples with its own stand-in, which restarts quickly."""
    async with running(config(VllmConfig(python=stand_in(directory)), directory)) as dispatch:
        engine: Any = dispatch._own["tiny"].engine
        engine._server.backoff.first = 0.05
        yield dispatch, engine._server


@asynccontextmanager
async def started(directory: Path, first: float = 0.05, device: str = "cuda:0") -> AsyncIterator[VllmProcess]:
    """Yields a stand-in. first: its first delay before a restart."""
    model = WorkerConfig(ServedModel("tiny", "tiny"), device=device)
    server = VllmProcess(model, VllmConfig(python=stand_in(directory)), VllmForm(), directory / "logs")
    server.backoff = RestartBackoff(first, steady_after=0.2)
    await server.start(lambda _: None)
    try:
        yield server
    finally:
        await server.close()


def kill(server: VllmProcess) -> None:
    os.kill(server.pids[0], signal.SIGKILL)


def num_starts(directory: Path) -> int:
    return len((directory / "starts").read_text().splitlines())


async def wait_for_starts(directory: Path, number: int) -> None:
    while num_starts(directory) < number:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


@contextmanager
def stand_in_at_url(directory: Path) -> Iterator[tuple[str, int]]:
    """Yields the URL and process id of a stand-in."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--served-model-name", "tiny"]
    with subprocess.Popen([sys.executable, vllm_stand_in.__file__, str(directory), *options]) as server:
        try:
            yield f"http://127.0.0.1:{port}", server.pid
        finally:
            server.kill()


async def test_request_that_kills_vllm_fails_and_others_continue(tmp_path: Path) -> None:
    """The culprit kills vLLM once to be found, and three times more. Innocent requests get no strikes."""
    async with dispatch_with_stand_in(tmp_path) as (dispatch, server):
        innocent = [asyncio.create_task(dispatch.sample("tiny", job(f"job-{i}", 100))) for i in range(6)]
        with pytest.raises(OperationError, match="sampling request fatal failed 3 times: vLLM of tiny") as failed:
            await dispatch.sample("tiny", job("fatal", first=FATAL))
        assert failed.value.category == "server"
        for each in innocent:
            assert len((await each).sequences[0].tokens) == 100
        await wait_for_starts(tmp_path, 1 + 1 + 3)
        await asyncio.sleep(0.5)
        assert server.is_ready and num_starts(tmp_path) == 1 + 1 + 3


async def test_stream_that_differs_after_a_restart_fails(tmp_path: Path) -> None:
    async with dispatch_with_stand_in(tmp_path) as (dispatch, server):
        streamed: list[int] = []
        long = job("long", 200, streams=True)
        sampling = asyncio.create_task(
            dispatch.sample("tiny", long, lambda parts: streamed.extend(parts[0].tokens.tolist()))
        )
        while len(streamed) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (tmp_path / "changed").touch()
        kill(server)
        with pytest.raises(OperationError, match="tokens that differ from those already streamed: send"):
            await sampling
        assert streamed == list(range(len(streamed)))


async def test_requests_to_a_hung_vllm_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a request that takes longer than the timeout succeeds while the server is alive."""
    monkeypatch.setattr(VllmServer, "retry_seconds", 2.0)
    with stand_in_at_url(tmp_path) as (url, pid):
        async with running(at_url(url)) as dispatch:
            long = await dispatch.sample("tiny", job("long", 600))
            assert len(long.sequences[0].tokens) == 600
            os.kill(pid, signal.SIGSTOP)
            reason = rf"{url} has not responded for 2 seconds .*does not respond"
            with pytest.raises(OperationError, match=reason) as failed:
                await dispatch.sample("tiny", job("hangs"))
            assert failed.value.category == "server"


async def test_restart_delay_grows_when_slow_starts_fail(tmp_path: Path) -> None:
    """A run of 0.2 s counts as steady here, and a start that fails takes 0.5 s. The first restart is immediate."""
    async with started(tmp_path, first=0.3) as server:
        (tmp_path / "refuses").touch()
        kill(server)
        await wait_for_starts(tmp_path, 5)
        assert server.backoff.next_delay() == 0.3 * 2**3


async def test_log_keeps_the_output_of_earlier_vllms(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The reported reason is from the newest one's output."""
    async with started(tmp_path) as server:
        (tmp_path / "refuses").touch()
        kill(server)
        await wait_for_starts(tmp_path, 3)
        (tmp_path / "refuses").unlink()
        await server.ready()
        kill(server)
        await wait_for_starts(tmp_path, 5)
        await server.ready()
    log = (tmp_path / "logs" / "vllm.log").read_text()
    assert log.count("ready to serve") == 3 and log.count("no room for the keys") == 2
    ends = [each for each in caplog.messages if "ended with status" in each]
    assert ["ready to serve" in end for end in ends] == [True, True]
    assert sum("does not start: ValueError: no room for the keys" in each for each in caplog.messages) == 2


async def test_start_that_fails_because_of_files_is_retried(tmp_path: Path) -> None:
    """The log cannot be created here, and is missing, too, when the reason of the end is looked up."""
    async with started(tmp_path) as server:
        server.backoff.limit = 0.1
        shutil.rmtree(tmp_path / "logs")
        (tmp_path / "logs").write_text("not a directory")
        kill(server)
        await asyncio.sleep(0.5)
        assert not server.is_ready
        (tmp_path / "logs").unlink()
        await asyncio.wait_for(server.ready(), 30)
        assert num_starts(tmp_path) == 2


async def test_crashed_supervisor_fails_waiting_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with dispatch_with_stand_in(tmp_path) as (dispatch, server):
        monkeypatch.setattr(server, "backoff", "a mistake of ours")
        sampling = asyncio.create_task(dispatch.sample("tiny", job("waits", 200)))
        await asyncio.sleep(0.2)
        kill(server)
        with pytest.raises(OperationError, match=r"out of service after an internal error: .*next_delay"):
            await sampling


@pytest.mark.parametrize(
    ("visible", "device", "given"),
    [
        (None, "cuda:1", "1"),
        ("4,5", "cuda:1", "5"),
        ("GPU-a, GPU-b", "cuda:1,cuda:0", "GPU-b,GPU-a"),
        ("4,5", "cuda", "4,5"),
    ],
)
async def test_vllm_gets_the_configured_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str, given: str
) -> None:
    """cuda:1 is the second of the visible devices."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    async with started(tmp_path, device=device):
        assert (tmp_path / "visible").read_text() == given


async def test_invisible_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ValueError, match="vLLM cannot use cuda:2, CUDA_VISIBLE_DEVICES=4,5 has 2 devices: name one"):
        async with started(tmp_path, device="cuda:2"):
            pass


@asynccontextmanager
async def with_adapter(url: str, directory: Path) -> AsyncIterator[WorkerDispatch]:
    """Yields a dispatch that samples at this vLLM, with one adapter. directory: of its copies of adapters."""
    async with running(config(VllmConfig(urls=(url,)), directory, SLOW_LOADER)) as dispatch:
        await dispatch.create_run("tiny", RunSpec("run", LoraConfig(rank=4, seed=0)), "tenant")
        await dispatch.copy_adapter("run", "adapter")
        yield dispatch


async def test_scoring_a_prompt_does_not_delay_samples_of_its_adapter(tmp_path: Path) -> None:
    with stand_in_at_url(tmp_path) as (url, _):
        async with with_adapter(url, tmp_path / "samplers") as dispatch:
            scored = job("scored", adapter_id="adapter", prompt_logprobs=True)
            scoring = asyncio.create_task(dispatch.sample("tiny", scored))
            await asyncio.sleep(0.2)
            began_at = time.monotonic()
            await dispatch.sample("tiny", job("plain", adapter_id="adapter"))
            assert time.monotonic() - began_at < 0.75 * LOADING_SECONDS and not scoring.done()
            await scoring


async def test_servers_at_one_vllm_do_not_share_adapters(tmp_path: Path) -> None:
    """Both have an "adapter" in its first version, and each unloads its own when it ends."""

    async def names(url: str) -> list[str]:
        async with httpx.AsyncClient() as client:
            return [card["id"] for card in (await client.get(f"{url}/v1/models")).json()["data"][1:]]

    found: list[str] = []
    with stand_in_at_url(tmp_path) as (url, _):
        for server in ("first", "second"):
            async with with_adapter(url, tmp_path / server) as dispatch:
                await dispatch.sample("tiny", job("plain", adapter_id="adapter"))
                found += await names(url)
        assert await names(url) == []
    assert len(set(found)) == len(found) == 2 and all(name.startswith("adapter-v1-") for name in found)


async def test_adapter_invisible_to_vllm_is_refused_without_naming_paths(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sees no files").touch()
    with stand_in_at_url(tmp_path) as (url, _):
        async with with_adapter(url, tmp_path / "samplers") as dispatch:
            with pytest.raises(OperationError, match=r"vLLM cannot load adapter .*it must see the server's") as refused:
                await dispatch.sample("tiny", job("plain", adapter_id="adapter"))
            assert str(tmp_path) not in refused.value.message
            assert f"No adapter found for {tmp_path}/samplers" in caplog.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1025 tokens, vLLM takes 1024: leave some"),
        ({"min_tokens": 1, "stops": 121}, "121 stop tokens with min_tokens exceed vLLM's limit of 120: leave out"),
        ({"top": 500, "max_tokens": 1000}, "topk_sample_logprobs 500 of 64 samples of 1000 tokens makes more than"),
    ],
)
async def test_requests_that_would_kill_vllm_are_refused(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    options = {"seed": 0, "max_tokens": 5} | options
    stops, top = tuple(range(options.pop("stops", 0))), options.pop("top", 0)
    params = SamplingParams(**options)
    asked = replace(job("refused"), params=params, stop_token_ids=stops, topk_sample_logprobs=top, num_samples=64)
    async with dispatch_with_stand_in(tmp_path) as (dispatch, _):
        with pytest.raises(OperationError, match=reason) as refused:
            await dispatch.sample("tiny", asked)
        assert refused.value.category == "user"


async def test_large_answer_does_not_block_the_event_loop(tmp_path: Path) -> None:
    """The loop never stalls for as long as parsing the JSON takes, which is only a part of the work."""
    longest = to_read = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            began_at = time.monotonic()
            await asyncio.sleep(0.001)
            longest = max(longest, time.monotonic() - began_at)

    text = json.dumps(vllm_stand_in.answer({"logprobs": 0, "n": 64}, range(16_000)))
    async with started(tmp_path) as server:
        api = VllmApi(server)
        for _ in range(5):  # retries, because other processes may delay it, too
            longest = 0.0
            watching = asyncio.create_task(watch())
            answer = await api.complete(VllmRequest(job("large", num_samples=64), range(64), "tiny", 16_000))
            watching.cancel()
            assert [len(each.tokens) for each in answer.parts] == [16_000] * 64
            began_at = time.monotonic()
            json.loads(text)
            to_read = time.monotonic() - began_at
            if longest < to_read:
                break
        assert longest < to_read
        await api.close()
