"""Workers on Ray that stay: servers are killed and replaced while the workers keep their loaded models."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from trainhouse.tests.live import live_server
from trainhouse.tests.workers.ray_nodes import RayNodes, ray_head

from .conftest import Undisturbed
from .crashing import OPTIONS, Crashing, assert_same, train, until
from .test_two_servers import LEASE_SECONDS
from .training_script import MODEL


def on(nodes: RayNodes) -> dict[str, Any]:
    return {"pool": "ray", "ray_address": nodes.address, "keep_workers_seconds": 600}


@contextmanager
def serving(nodes: RayNodes, model: Path, directory: Path, **options: object) -> Iterator[Crashing]:
    with Crashing(model, directory, OPTIONS | on(nodes) | options).running() as crashing:
        yield crashing


def kill_ranks(nodes: RayNodes) -> None:
    until(nodes.ranks)
    for pid in nodes.ranks():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("options", "num_ranks"),
    [
        ({}, 1),
        ({"parallel": "fsdp=2"}, 2),
        ({"sampler_workers": 1}, 2),
        ({"sampler_workers": 1, "sampler_parallel": "tp=2"}, 3),
    ],
    ids=["one rank", "fsdp=2", "a sampler", "a sampler of tp=2"],
)
def test_restarted_server_reuses_its_workers(
    options: dict[str, object],
    num_ranks: int,
    tiny_models: dict[str, Path],
    undisturbed: Undisturbed,
    tmp_path: Path,
) -> None:
    with ray_head(num_cpus=num_ranks) as nodes, serving(nodes, tiny_models["qwen3"], tmp_path, **options) as crashing:
        before = nodes.ranks()
        assert len(before) == num_ranks
        first = train(crashing, 15, {3: crashing.restart, 8: crashing.restart})
        assert nodes.ranks() == before
        faults = {
            3: lambda: os.kill(nodes.ranks()[0], signal.SIGKILL),
            6: lambda: crashing.restart(lambda: kill_ranks(nodes)),
            10: crashing.restart,
        }
        second = train(crashing, 15, faults)
        assert len(nodes.ranks()) == num_ranks and not set(nodes.ranks()) & set(before)
    for found in (first, second):
        assert_same(found, undisturbed(15))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_workers_stay_for_the_same_options_and_end_with_others(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    models, directory = {MODEL: tiny_models["qwen3"]}, tmp_path / "state"
    with ray_head(num_cpus=1) as nodes:
        options, seen = on(nodes), []
        same_workers: dict[str, Any] = {"snapshot_steps": 3}
        for changed in ({}, same_workers, {"adapter_slots": 3}):
            with live_server(models, directory, **options, **changed):
                seen.append(nodes.ranks())
            assert nodes.ranks() == seen[-1] != []
        first, same, other = seen
        assert first == same and not set(other) & set(first)
        options.pop("keep_workers_seconds")
        with live_server(models, directory, **options):
            assert not set(nodes.ranks()) & set(other)
        until(lambda: not nodes.actors())


@pytest.mark.full
@pytest.mark.timeout(600)
def test_takeover_includes_the_workers(
    tiny_models: dict[str, Path], undisturbed: Undisturbed, tmp_path: Path, postgres_url: str
) -> None:
    model = tiny_models["qwen3"]
    with ray_head(num_cpus=1) as nodes:
        options = OPTIONS | on(nodes) | {"database_url": postgres_url, "lease_seconds": LEASE_SECONDS}
        first, second = (
            Crashing(model, tmp_path / name, options, state_dir=tmp_path / "state") for name in ("first", "second")
        )
        with first.running(), second.running():
            before = nodes.ranks()
            sleep = {5: lambda: os.kill(first.pid, signal.SIGSTOP)}
            found = train(first, 15, sleep, url=second.url)
            assert "taking over, with epoch 2" in second.log
            os.kill(first.pid, signal.SIGCONT)
            until(lambda: "the lease of epoch 1" in first.log)
            again = train(second, 15, {5: lambda: os.kill(second.pid, signal.SIGKILL)}, url=first.url)
            assert "taking over, with epoch 3" in first.log
        assert nodes.ranks() == before and psutil.pid_exists(before[0])
    assert_same(found, undisturbed(15))
    assert_same(again, undisturbed(15))


ELSEWHERE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"']
"""Prefix of DIRECTORY COMMAND: hides the directory from the command, as on a machine that has not mounted it."""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_workers_without_the_shared_state_directory_are_refused(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    state_dir, shared = tmp_path / "state", tmp_path / "shared"
    state_dir.mkdir()
    if subprocess.run([*ELSEWHERE, str(state_dir), "true"], capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    models = {MODEL: tiny_models["qwen3"]}
    with ray_head(num_cpus=4, below=[*ELSEWHERE, str(state_dir)]) as nodes:
        options = on(nodes) | {"parallel": "replicas=2"}
        with pytest.raises(RuntimeError) as refused, live_server(models, state_dir, **options):
            pass
        assert f"error: {state_dir} is not shared with rank 0: on " in str(refused.value)
        assert "the file just written there was not found" in str(refused.value)
        assert "set --state-dir" in str(refused.value)
        with live_server(models, shared, **options):
            assert not list(shared.glob(".shared-*"))
