"""Finding out without torch which devices a worker would have."""

import asyncio
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from trainhouse.workers.models.loading import resolve_device
from trainhouse.workers.protocol.worker_config import (
    DispatchConfig,
    SamplingConfig,
    ServedModel,
    VllmConfig,
    WorkerConfig,
)
from trainhouse.workers.resources import machine
from trainhouse.workers.resources.devices import check_cuda, no_cuda
from trainhouse.workers.scheduler.supervision.pool_factory import PoolFactory

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.mark.parametrize("version", ["2.9.0+cu128", "2.9.0", "2.9.0+rocm6.4", "2.9.0+cpu"])
@pytest.mark.parametrize("driver", ["nvidia0", "dxg", "kfd", None])
def test_cuda_needs_a_driver_and_a_build_for_it(
    driver: str | None, version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(metadata, "version", {"torch": version}.__getitem__)
    (tmp_path / (driver or "null")).touch()
    check_cuda("cpu", tmp_path)
    check_cuda("auto", tmp_path)
    if driver is not None and not version.endswith("+cpu"):
        check_cuda("cuda:1", tmp_path)
        return
    with pytest.raises(ValueError, match=r"device cuda:1: this machine, or this build of torch \(2.9.0.*, has no CUDA"):
        check_cuda("cuda:1", tmp_path)


@pytest.mark.parametrize(
    ("file", "visible", "on_cpu"), [(None, None, True), ("nvidia3", None, False), ("nvidia3", "", True)]
)
def test_auto_is_the_cpu_without_a_device_that_the_process_may_use(
    file: str | None, visible: str | None, on_cpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "_DEVICES", tmp_path)
    (tmp_path / (file or "null")).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.runs_on_cpu(WorkerConfig(ServedModel("tiny", "tiny"))) == on_cpu


@without_cuda
def test_worker_reports_the_same_message() -> None:
    with pytest.raises(ValueError) as refused:
        resolve_device(WorkerConfig(ServedModel("m", "m"), device="cuda"))
    assert str(refused.value) == str(no_cuda("cuda", torch.__version__))


@without_cuda
def test_missing_cuda_is_refused_before_start_unless_ranks_may_be_remote() -> None:
    on_cuda = WorkerConfig(ServedModel("m", "m"), device="cuda")
    on_cpu = WorkerConfig(ServedModel("m", "m"), device="cpu")
    for refused in (
        DispatchConfig((on_cuda,)),
        DispatchConfig((on_cuda,), pool="ray"),
        DispatchConfig((on_cpu,), sampling=SamplingConfig(1, devices=("cuda:1",))),
    ):
        with pytest.raises(ValueError, match="has no CUDA"):
            asyncio.run(PoolFactory(refused).open())
    for taken in (
        DispatchConfig((on_cuda,), pool="ray", ray_address="127.0.0.1:1"),
        DispatchConfig((on_cpu,), sampling=SamplingConfig(vllm=VllmConfig(python=sys.executable), devices=("cuda:0",))),
    ):
        asyncio.run(PoolFactory(taken).open())
