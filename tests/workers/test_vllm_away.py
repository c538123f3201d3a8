"""A vLLM that is not there: processes that end with us, a start that fails, and requests that wait for nobody."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.sampling import SamplingParams
from trainhouse.tests.workers.recording_worker import RECORDING
from trainhouse.workers.config import SamplingConfig, ServedModel, VllmConfig, WorkerConfig
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.engines import lifeline, vllm
from trainhouse.workers.engines.underway import Told
from trainhouse.workers.verbs import SampledPart, SampleJob

JOB = SampleJob("job", None, np.array([1, 5], np.int32), SamplingParams(max_tokens=1, seed=0), (), ())


@contextmanager
def lifeline_of(*command: str) -> Iterator["tuple[subprocess.Popen[bytes], int]"]:
    """It, and the process id of its command."""
    arguments = [sys.executable, lifeline.__file__, *command]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_command_ends_when_we_hang_up_and_its_children_too() -> None:
    shell = "sleep 1000 & sleep 1000"
    with lifeline_of("sh", "-c", shell) as (process, pid):
        assert process.stdin is not None and is_running(pid)
        # Ctrl-C and SIGTERM are for the server.
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        time.sleep(0.3)
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(20) != 0
        deadline = time.monotonic() + 5
        while group_lives(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not group_lives(pid)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_status_of_a_command_is_passed_on() -> None:
    with lifeline_of("sh", "-c", "exit 7") as (process, _):
        assert process.wait(20) == 7


def config(sampling: SamplingConfig) -> DispatchConfig:
    return DispatchConfig(
        (WorkerConfig(ServedModel("tiny", "tiny"), device="cpu"),), worker=RECORDING, sampling=sampling
    )


def test_a_python_without_vllm_stops_the_start_with_the_reason(tmp_path: Path) -> None:
    async def check() -> None:
        sampling = SamplingConfig(vllm=VllmConfig(python=sys.executable), directory=str(tmp_path))
        with pytest.raises(ValueError, match=r"vLLM of tiny does not start: .*No module named 'vllm'.*vllm\.log"):
            await WorkerDispatch(config(sampling)).start(lambda _: None)

    asyncio.run(asyncio.wait_for(check(), 60))


def test_requests_wait_a_while_for_a_vllm_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
            dispatch = WorkerDispatch(config(SamplingConfig(vllm=VllmConfig(urls=(url,)))))
            await dispatch.start(lambda _: None)
            try:
                waiting = asyncio.create_task(dispatch.sample("tiny", JOB))
                await asyncio.sleep(0.5)
                assert dispatch.status("tiny") == f"1 sampling request waits or runs on the vLLM at {url}"
                dispatch.cancel("job")
                with pytest.raises(OperationError, match="job was cancelled"):
                    await waiting
                monkeypatch.setattr(vllm, "_PATIENCE_SECONDS", 1.0)
                with pytest.raises(OperationError, match=rf"{url} does not answer since .* --sampler native") as failed:
                    await dispatch.sample("tiny", JOB)
                assert failed.value.category == "server"
                waiting = asyncio.create_task(dispatch.sample("tiny", JOB))
                await asyncio.sleep(0.1)
            finally:
                await dispatch.close()
            with pytest.raises(OperationError, match="shutting down"):
                await waiting

    asyncio.run(asyncio.wait_for(check(), 60))


def test_what_is_told_again_is_left_out() -> None:
    heard: list[tuple[int, list[int]]] = []
    told = Told(lambda parts: heard.extend((part.sample, part.tokens.tolist()) for part in parts))

    def run(*parts: tuple[int, list[int]]) -> None:
        tell = told.from_the_start()
        assert tell is not None
        for sample, tokens in parts:
            tell((SampledPart(sample, np.array(tokens, np.int32), np.array(tokens, np.float32)),))

    run((0, [1, 2]), (1, [7]), (0, [3]))
    run((0, [1]), (0, [2, 3, 4]), (1, [7, 8]), (1, [9]))
    assert heard == [(0, [1, 2]), (1, [7]), (0, [3]), (0, [4]), (1, [8]), (1, [9])]
    assert Told(None).from_the_start() is None
