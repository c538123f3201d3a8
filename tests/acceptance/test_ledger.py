"""Many clients with many faults: every operation runs once and is answered once, and nothing leaks."""

import asyncio
import contextlib
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from ..benchmarks.ledger import Entry, LedgerClient, Planned, Sentence, check, connected, final_moment, work
from ..faults.proxy import Weather, proxy
from ..live import DEPLOYMENTS
from .crashing import Crashing, worker_pids
from .training_script import MODEL

WEATHER = Weather(cut=0.01, repeated=0.02)
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Usage:
    """fds: of the server, without its connections."""

    server_mib: float
    worker_mib: float
    fds: float
    threads: float
    files: float
    file_mib: float


@dataclass(frozen=True)
class Plan:
    """num_operations: of each client. faults: number of each kind, between these seconds."""

    num_clients: int
    num_operations: int
    seconds: float
    between: tuple[float, float]
    faults: dict[str, int]


SHORT = Plan(20, 15, 6.0, (1.0, 5.0), {"worker": 1, "both": 1})
SHORT_OF_RANKS = replace(SHORT, faults={"rank": 1, "both": 1})
LONG = Plan(200, 50, 600.0, (60.0, 300.0), {"worker": 5, "server": 3, "both": 2})


@pytest.fixture
def deployment() -> str:
    return "local"


@pytest.fixture
def crashing(deployment: str, tiny_models: dict[str, Path], tmp_path: Path) -> Iterator[Crashing]:
    options = {"snapshot_steps": 5, "max_lora_rank": 4} | DEPLOYMENTS[deployment]
    with Crashing(tiny_models["qwen3"], tmp_path, options).running() as crashing:
        yield crashing


@pytest.mark.full
@pytest.mark.parametrize("deployment", ["local", "fsdp=2"])
def test_every_operation_runs_once_despite_faults(deployment: str, crashing: Crashing) -> None:
    carry_out(crashing, SHORT_OF_RANKS if deployment == "fsdp=2" else SHORT)
    once = [Planned("forward_backward", 3), Planned("optim_step", 3, 1)]
    check_carried_out(crashing, once)
    for wrong in ([once[0], *once], [*once[:1], Planned("optim_step", 6, 2)], [once[1], once[0]]):
        with pytest.raises(AssertionError):
            check_carried_out(crashing, wrong)


def check_carried_out(crashing: Crashing, plan: list[Planned]) -> None:
    """Runs the plan with an undisturbed client."""
    sentence = asyncio.run(weigh(crashing.url))
    check(asyncio.run(carried_out(crashing.url, plan)), sentence)


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_ten_thousand_operations_leak_nothing(crashing: Crashing) -> None:
    samples = carry_out(crashing, LONG)
    for minute in range(int(samples[-1].at - samples[0].at) // 60):
        print(f"minute {minute}: {typical(samples, 60 * minute, 60 * minute + 60)}")
    first, rested, last = typical(samples, 0, 60), typical(samples, -240, -180), typical(samples, -60, 0)
    # The same processes; the results of these operations stay in memory, 1 KiB each.
    assert last.server_mib < rested.server_mib + 16
    assert last.worker_mib < rested.worker_mib + 16
    # Other processes, which have rebuilt all runs at once: 100 MiB more for the allocator of a worker.
    assert last.server_mib < first.server_mib + 64
    assert last.worker_mib < first.worker_mib + 200
    # Some segments, files being written, and threads of executors.
    assert last.fds < first.fds + 16
    assert last.threads < first.threads + 16
    # Per run two snapshots of five files and one being written; per process a few segments and logs.
    assert last.files < LONG.num_clients * 3 * 6 + 20 * len(crashing.pids)
    # Results are kept for a day: some 2 KiB each. A snapshot of a run has 0.1 MiB.
    assert last.file_mib < first.file_mib + 20 + LONG.num_clients * 3 * 0.1


def carry_out(crashing: Crashing, plan: Plan) -> list["Sample"]:
    """Prints what was done. Raises AssertionError if the ledger is wrong."""
    sentence = asyncio.run(weigh(crashing.url))
    with proxy(crashing.url, WEATHER) as (url, made), sampled(crashing) as samples, struck(crashing, plan) as struck_at:
        began = time.monotonic()
        clients = asyncio.run(work(url, MODEL, plan.num_clients, plan.num_operations, plan.seconds))
        took = time.monotonic() - began
    asyncio.run(save(crashing.url, clients))
    for client in clients:
        check(client.entries, sentence)
        np.testing.assert_allclose(moment_norm(crashing, client), expected_moment(client, sentence), rtol=TOLERANCE)
    assert asyncio.run(answers_again(crashing.url, clients)) == [
        [entry.answer for entry in client.entries] for client in clients
    ]
    print(summary(clients, took, made, struck_at))
    assert orphans(crashing) == []
    assert len(struck_at) == sum(plan.faults.values())
    return samples


async def carried_out(url: str, plan: list[Planned]) -> list[Entry]:
    async with connected(url) as http:
        client = LedgerClient(http, 10**6, MODEL, plan)
        await client.work(0)
        return client.entries


async def weigh(url: str) -> Sentence:
    entries = await carried_out(url, [Planned("forward_backward", 1), Planned("optim_step", 1, 1)])
    passed, step = (entry.answer["metrics"] for entry in entries)
    return Sentence(passed["loss:sum"], step["unclipped_grad_l2:mean"])


def expected_moment(client: LedgerClient, sentence: Sentence) -> float:
    return final_moment(client.entries) * sentence.grad_norm


def moment_norm(crashing: Crashing, client: LedgerClient) -> float:
    run = crashing.state_dir / "checkpoints" / client.run_id.replace(":", "_")
    (saved,) = (run / "weights").glob("end.*")
    state = load_file(saved / "optimizer.safetensors")
    moments = [moment.ravel() for name, moment in state.items() if name.startswith("exp_avg.")]
    return float(np.linalg.norm(np.concatenate(moments)))


async def save(url: str, clients: Sequence[LedgerClient]) -> None:
    async with connected(url) as http:
        await asyncio.gather(*(client.save(http) for client in clients))


async def answers_again(url: str, clients: Sequence[LedgerClient]) -> list[list[dict]]:
    async with connected(url) as http:
        return [await client.answers_again(http) for client in clients]


def summary(clients: Sequence[LedgerClient], took: float, made: Counter[str], struck_at: list[str]) -> str:
    entries = [entry for client in clients for entry in client.entries]
    kinds = Counter(entry.planned.kind for entry in entries)
    tries = sum((client.tries for client in clients), Counter())
    waited = sorted(entry.seconds for entry in entries)
    return "\n".join(
        (
            f"{len(entries)} operations of {len(clients)} clients in {took:.0f} s, each once: {dict(kinds)}",
            f"faults: {', '.join(struck_at)}; network: {dict(made)}",
            f"requests by status: {dict(tries)}",
            f"answers after {statistics.median(waited):.2f} s (median), {waited[int(0.99 * len(waited))]:.1f} s (99 %)"
            f", {waited[-1]:.1f} s (longest)",
        )
    )


def orphans(crashing: Crashing) -> list[int]:
    """Returns processes whose server has ended."""
    gone = set(crashing.pids[:-1])
    return [pid for pid in psutil.pids() if session_of(pid) in gone]


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


# --- faults and measurements during the work ---


@contextmanager
def in_thread(function) -> Iterator[None]:
    """Runs the function in a thread, with an event that ends it."""
    over = threading.Event()
    thread = threading.Thread(target=function, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def struck(crashing: Crashing, plan: Plan) -> Iterator[list[str]]:
    """Yields the list of kills so far, with their times."""
    drawn = random.Random(0)
    kinds = [kind for kind, times in plan.faults.items() for _ in range(times)]
    drawn.shuffle(kinds)
    times = sorted(drawn.uniform(*plan.between) for _ in kinds)
    struck_at: list[str] = []
    began = time.monotonic()

    def strike(over: threading.Event) -> None:
        for kind, at in zip(kinds, times, strict=True):
            if not over.wait(max(0.0, began + at - time.monotonic())):
                crashing.strike(kind)
                struck_at.append(f"{kind} at {at:.1f} s")

    with in_thread(strike):
        yield struck_at


@dataclass(frozen=True)
class Sample:
    at: float
    usage: Usage


@contextmanager
def sampled(crashing: Crashing) -> Iterator[list[Sample]]:
    """Samples every second, except while a process is dying."""
    samples: list[Sample] = []

    def sample(over: threading.Event) -> None:
        while not over.wait(1.0):
            with contextlib.suppress(OSError, psutil.Error):
                samples.append(Sample(time.monotonic(), usage(crashing)))

    with in_thread(sample):
        yield samples


def usage(crashing: Crashing) -> Usage:
    server = psutil.Process(crashing.pid)
    files = [path.stat().st_size for path in crashing.state_dir.rglob("*") if path.is_file()]
    opened = [os.readlink(f"/proc/{crashing.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{crashing.pid}/fd")]
    workers = [psutil.Process(pid).memory_info().rss for pid in worker_pids(crashing.pid)]
    return Usage(
        server.memory_info().rss / 2**20,
        sum(workers) / 2**20,
        sum(not name.startswith("socket:") for name in opened),
        server.num_threads(),
        len(files),
        sum(files) / 2**20,
    )


def typical(samples: Sequence[Sample], begin: float, end: float) -> Usage:
    """Returns medians. Seconds count from the first sample, or, if negative, back from the last."""
    origin = samples[-1 if begin < 0 else 0].at
    chosen = [sample.usage for sample in samples if begin <= sample.at - origin <= end]
    return Usage(*(statistics.median(getattr(each, entry.name) for each in chosen) for entry in fields(Usage)))
