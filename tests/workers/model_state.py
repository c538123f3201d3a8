"""Reads and changes the models of a worker by its verbs alone."""

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainhouse.workers.checkpoint.description import CheckpointDescription
from trainhouse.workers.state.gradients import GradientWindow
from trainhouse.workers.worker.worker import Worker

SECONDS = 60.0


def weights_of(worker: Worker, run_id: str) -> Tensor:
    """Returns a copy of a policy's or sampler's weights, in one vector."""
    exported = worker.export_adapter(run_id)
    assert exported is not None
    return torch.tensor(exported.weights)


def pending_gradients(worker: Worker, run_id: str) -> Tensor:
    """Returns the gradients since the last step, in one vector, matrices in the order of their names."""
    with TemporaryDirectory() as directory:
        snapshot(worker, run_id, directory)
        window = tensors_in(directory, "window")
    assert window, "no gradients are pending"
    return torch.cat([window[name].flatten() for name in sorted(window)])


def pending_window(worker: Worker, run_id: str) -> GradientWindow:
    with TemporaryDirectory() as directory:
        snapshot(worker, run_id, directory)
        return CheckpointDescription.read(Path(directory)).window


def saved_state(worker: Worker, run_id: str) -> dict[str, Tensor]:
    """Returns weights and optimizer states, by name in their files."""
    with TemporaryDirectory() as directory:
        worker.save_run(run_id, directory, True)
        return tensors_in(directory, "")


def snapshot(worker: Worker, run_id: str, directory: str) -> None:
    worker.begin_snapshot(-1, run_id, directory)
    deadline = time.monotonic() + SECONDS
    while not (ended := worker.ended_snapshots()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert ended == {-1: None}, ended


def tensors_in(directory: str, stem: str) -> dict[str, Tensor]:
    paths = Path(directory).glob(f"{stem}*.safetensors")
    return {f"{path.stem}: {name}": each for path in paths for name, each in load_file(path).items()}


def change_weights(worker: Worker, run_id: str, change: Callable[[Tensor], Tensor]) -> None:
    """Loads the run with its weights changed; pending gradients are dropped."""
    with TemporaryDirectory() as directory:
        worker.save_run(run_id, directory, True)
        for stem in ("model", "adapter_model"):
            for path in Path(directory).glob(f"{stem}*.safetensors"):
                stored = load_file(path).items()
                save_file({name: change(each) if each.is_floating_point() else each for name, each in stored}, path)
        worker.load_run(run_id, directory, True)


def add_noise(worker: Worker, run_id: str, scale: float, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    change_weights(worker, run_id, lambda each: each + scale * torch.randn(each.shape, generator=generator))
