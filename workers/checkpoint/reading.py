"""Reads a saved model, into an existing model or as a new one."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...schemas.errors import OperationError
from ..programs.policy import POLICY
from ..registry.model_registry import ModelRegistry
from ..state.gradients import GradientWindow
from ..state.program import Program
from ..state.trainable import Trainable
from ..state.vectors import MOMENT_VECTORS
from .description import CheckpointDescription
from .formats import format_of
from .tensor_files import SavedTensors, has_tensors


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A checkpoint: unsharded tensors in host memory by their names in files, moments also by their kind.

    Tensors of an adapter have been read; those of a fully trained model are read one by one as they are put into it.

    weights: also the constants of its form. num_steps: None if it has no optimizer state.
    missing_tensors: names of the model's tensors that the checkpoint does not have; they are initialized as in a new
    model.
    """

    description: CheckpointDescription
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Mapping[str, Tensor]]
    num_steps: int | None
    gradients: Mapping[str, Tensor]
    window: GradientWindow
    missing_tensors: Collection[str] = ()

    def load_into(self, model: Trainable) -> None:
        """Replaces the model's weights, optimizer state (fresh if the checkpoint has none) and accumulated
        gradients."""
        layout = model.layout
        format_of(model).load_constants(self.weights, self.description)
        model.gradients.clear_window()
        model.clear_optimizer()
        if self.num_steps:
            _ = model.exp_avg, model.exp_avg_sq  # allocates them, before the weights are changed
        if self.missing_tensors:
            model.initialize()
        model.fill("weights", partial(layout.copy_parts, saved=self.weights, lacking=self.missing_tensors))
        if self.num_steps:
            for name in MOMENT_VECTORS:
                model.fill(name, partial(layout.copy_parts, saved=self.moments[name], lacking=self.missing_tensors))
            model.num_steps = self.num_steps
        if self.gradients:
            model.fill("accumulator", partial(layout.copy_parts, saved=self.gradients, lacking=self.missing_tensors))
        model.gradients.window = self.window


def read_saved(model: Trainable, directory: Path, *, optimizer: bool) -> SavedModel:
    """Reads a checkpoint for this model, with gradients if it is a snapshot that has any.

    Raises OperationError if it does not fit the model or is incomplete.
    """
    description = CheckpointDescription.read(directory)
    description.check(model)
    form = format_of(model)
    form.check(description)
    whole = model.layout.unsharded
    lacking = form.missing_tensors(description)
    every = whole.named_views(torch.empty(whole.size, device="meta"))
    shapes = {name: shape for name, shape in every.items() if name not in lacking}

    def read(stem: str, wanted: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        tensors = SavedTensors(directory, stem, wanted, form.legacy_name, form.joined_tensors())
        return tensors.read() if form.is_read_at_once else tensors

    window = description.window
    weights = read(form.stem, {**shapes, **form.constants()})
    moments: Mapping[str, Mapping[str, Tensor]] = {}
    if optimizer:
        if not has_tensors(directory, "optimizer"):
            raise OperationError(
                "the checkpoint was saved without optimizer state: load it without the optimizer (load_state), or train"
                " from a checkpoint written by save_state"
            )
        found = read(
            "optimizer", {f"{kind}.{name}": shape for kind in MOMENT_VECTORS for name, shape in shapes.items()}
        )
        moments = {kind: _OfKind(found, kind) for kind in MOMENT_VECTORS}
    gradients = read("window", shapes) if window.num_operations else {}
    num_steps = description.num_steps if optimizer else None
    return SavedModel(description, weights, moments, num_steps, gradients, window, lacking)


def is_snapshot(directory: Path) -> bool:
    """True if the checkpoint has the whole state of a run. Raises OperationError if its description cannot be read."""
    return CheckpointDescription.read(directory).is_snapshot


def read_new_model(models: ModelRegistry, directory: Path, program: Program = POLICY) -> Trainable:
    """Returns a new model, not registered yet, with the checkpoint's weights. Raises like read_saved."""
    return filled(models.build(CheckpointDescription.read(directory).training, program), directory)


def filled(model: Trainable, directory: Path) -> Trainable:
    """Returns the model, with the checkpoint's weights. Raises like read_saved."""
    read_saved(model, directory, optimizer=False).load_into(model)
    return model


class _OfKind(Mapping[str, Tensor]):
    """Maps the names of weights to their moments of one kind."""

    def __init__(self, found: Mapping[str, Tensor], kind: str) -> None:
        self._found, self._kind = found, kind

    def __getitem__(self, name: str) -> Tensor:
        return self._found[f"{self._kind}.{name}"]

    def __iter__(self) -> Iterator[str]:
        return (name.partition(".")[2] for name in self._found if name.startswith(f"{self._kind}."))

    def __len__(self) -> int:
        return len(self._found) // len(MOMENT_VECTORS)
