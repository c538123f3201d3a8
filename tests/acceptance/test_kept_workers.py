"""`trainhouse workers`: servers are killed and replaced while the workers keep their loaded models."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from ..kept import SECRET, Workers, kept_workers
from ..live import live_server
from .conftest import Undisturbed
from .crashing import OPTIONS, Crashing, assert_same, free_port, train, until, worker_pids
from .test_two_servers import LEASE_SECONDS
from .training_script import MODEL


@contextmanager
def attached(workers: Workers, model: Path, directory: Path, **options: object) -> Iterator[Crashing]:
    with Crashing(model, directory, OPTIONS | workers.options | options).running() as crashing:
        yield crashing


FEW_FILES = ["sh", "-c", 'ulimit -Sn 256 && exec "$@"', "sh"]


def ranks(workers: Workers) -> list[int]:
    return sorted(worker_pids(workers.process.pid))


def kill_ranks(workers: Workers) -> None:
    until(lambda: ranks(workers))
    for pid in ranks(workers):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.full
def test_restarted_server_reuses_its_workers(
    tiny_models: dict[str, Path], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    with (
        kept_workers({MODEL: tiny_models["qwen3"]}, tmp_path, below=FEW_FILES) as workers,
        attached(workers, tiny_models["qwen3"], tmp_path) as crashing,
    ):
        assert psutil.Process(workers.process.pid).rlimit(psutil.RLIMIT_NOFILE)[0] > 256
        before = ranks(workers)
        assert len(before) == 1 and worker_pids(crashing.pid) == []
        seen = []
        faults = {
            3: crashing.restart,
            7: lambda: (seen.append(ranks(workers)), kill_ranks(workers)),
            10: crashing.restart,
        }
        found = train(crashing, 15, faults)
        assert seen == [before] and len(ranks(workers)) == 1 and ranks(workers) != before
        assert SECRET not in crashing.log + workers.log.read_text()
        after = ranks(workers)
    assert not any(psutil.pid_exists(pid) for pid in before + after)
    assert_same(found, undisturbed(15))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("made", "num_ranks"),
    [
        ({"parallel": "fsdp=2"}, 2),
        ({"sampler_workers": 1}, 2),
        ({"sampler_workers": 1, "sampler_parallel": "tp=2"}, 3),
        ({"pool": "ray"}, 1),
    ],
    ids=["fsdp=2", "a sampler", "a sampler of tp=2", "ray"],
)
def test_several_ranks_survive_crashes_of_servers_and_workers(
    made: dict[str, object], num_ranks: int, tiny_models: dict[str, Path], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    with (
        kept_workers({MODEL: tiny_models["qwen3"]}, tmp_path, **made) as workers,  # pyright: ignore[reportArgumentType]
        attached(workers, tiny_models["qwen3"], tmp_path) as crashing,
    ):
        before = ranks(workers)
        assert len(before) == num_ranks
        first = train(crashing, 15, {3: crashing.restart, 8: crashing.restart})
        assert ranks(workers) == before
        second = train(
            crashing,
            15,
            {
                3: lambda: os.kill(ranks(workers)[0], signal.SIGKILL),
                6: lambda: crashing.restart(lambda: kill_ranks(workers)),
                10: crashing.restart,
            },
        )
        assert not set(ranks(workers)) & set(before)
    for found in (first, second):
        assert_same(found, undisturbed(15))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_server_continues_after_its_workers_are_restarted(
    tiny_models: dict[str, Path], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    models = {MODEL: tiny_models["qwen3"]}
    with kept_workers(models, tmp_path, listen) as first, attached(first, tiny_models["qwen3"], tmp_path) as crashing:
        started = []

        def replace(ending: signal.Signals) -> None:
            last = started[-1].process if started else first.process
            last_ranks = worker_pids(last.pid)
            last.send_signal(ending)
            assert last.wait(30) == (0 if ending == signal.SIGTERM else -ending)
            until(lambda: not any(psutil.pid_exists(pid) for pid in last_ranks), 15)
            until(lambda: f"no workers are running at {listen}" in crashing.log)
            manager = kept_workers(models, tmp_path / str(len(started)), listen)
            started.append(manager.__enter__())
            managers.append(manager)

        managers = []
        try:
            found = train(crashing, 15, {4: lambda: replace(signal.SIGKILL), 9: lambda: replace(signal.SIGTERM)})
        finally:
            for manager in managers:
                manager.__exit__(None, None, None)
    assert_same(found, undisturbed(15))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_workers_restarted_with_another_layout_are_not_used(
    tiny_models: dict[str, Path], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The other workers have as many ranks, and would answer with wrong numbers."""
    listen, models = f"127.0.0.1:{free_port()}", {MODEL: tiny_models["qwen3"]}
    with (
        kept_workers(models, tmp_path, listen, parallel="fsdp=2") as first,
        attached(first, tiny_models["qwen3"], tmp_path) as crashing,
        ExitStack() as later,
    ):

        def restart_with_other_layout() -> None:
            first.process.kill()
            first.process.wait(30)
            with kept_workers(models, tmp_path / "otherwise", listen, parallel="tp=2") as other:
                changed = "they were restarted with parallel tp=2 instead of fsdp=2"
                until(lambda: f"cannot be placed: the workers at {listen} cannot be used: {changed}" in crashing.log)
                assert changed in other.log.read_text() and len(ranks(other)) == 2
            later.enter_context(kept_workers(models, tmp_path / "again", listen, parallel="fsdp=2"))

        found = train(crashing, 15, {4: restart_with_other_layout})
    assert_same(found, undisturbed(15))


@pytest.mark.full
def test_rank_that_hangs_during_attach_is_replaced(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    models = {MODEL: tiny_models["qwen3"]}
    with kept_workers(models, tmp_path) as workers:
        before, options = ranks(workers), {"hang_seconds": 0.5} | workers.options
        os.kill(before[0], signal.SIGSTOP)
        hung = pytest.raises(RuntimeError, match="it hung: reset had no answer after 5 s, so it was killed")
        with hung, live_server(models, tmp_path / "state", **options):
            pass
        with live_server(models, tmp_path / "state", **workers.options):
            assert ranks(workers) and ranks(workers) != before


@pytest.mark.full
@pytest.mark.timeout(600)
def test_takeover_includes_the_workers(
    tiny_models: dict[str, Path], undisturbed: Undisturbed, tmp_path: Path, postgres_url: str
) -> None:
    state = {"database_url": postgres_url, "lease_seconds": LEASE_SECONDS}
    model = tiny_models["qwen3"]
    with kept_workers({MODEL: model}, tmp_path) as workers:
        before = ranks(workers)
        options = OPTIONS | state | workers.options
        first, second = (
            Crashing(model, tmp_path / name, options, state_dir=tmp_path / "state") for name in ("first", "second")
        )
        with first.running(), second.running():
            sleep = {5: lambda: os.kill(first.pid, signal.SIGSTOP)}
            found = train(first, 15, sleep, url=second.url)
            assert "taking over, with epoch 2" in second.log
            os.kill(first.pid, signal.SIGCONT)
            until(lambda: "the lease of epoch 1" in first.log)
            again = train(second, 15, {5: lambda: os.kill(second.pid, signal.SIGKILL)}, url=first.url)
            assert "taking over, with epoch 3" in first.log
        assert ranks(workers) == before
        assert "epoch 2 has taken over the workers" in workers.log.read_text()
    assert_same(found, undisturbed(15))
    assert_same(again, undisturbed(15))


ELSEWHERE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"']
"""Prefix of DIRECTORY COMMAND: hides the directory from the command, as on a machine that has not mounted it."""


@pytest.mark.full
def test_workers_without_the_shared_state_directory_are_refused(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    if subprocess.run([*ELSEWHERE, str(state_dir), "true"], capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    models, below = {MODEL: tiny_models["qwen3"]}, [*ELSEWHERE, str(state_dir)]
    with kept_workers(models, tmp_path / "workers", below=below, parallel="replicas=2") as workers:
        with pytest.raises(RuntimeError) as refused, live_server(models, state_dir, **workers.options):
            pass
        assert f"error: {state_dir} is not shared with rank 0: on " in str(refused.value)
        assert "the file just written there was not found" in str(refused.value)
        assert "set --state-dir" in str(refused.value)
        shared = tmp_path / "shared"
        with live_server(models, shared, **workers.options):
            assert not list(shared.glob(".shared-*"))
