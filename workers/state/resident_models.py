"""Holds the models of one kind that runs and samplers have on this rank, by id."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from .residency import Residency
from .trainable import Trainable
from .vectors import STEP_VECTORS

Model = TypeVar("Model", bound=Trainable)


class ResidentModels(Generic[Model]):
    """Keeps models by id, and moves them by a residency. kind_name: the models' name in memory accounts."""

    kind_name: str

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._models: dict[str, Model] = {}

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._models

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._models))

    def get(self, model_id: str) -> Model:
        """Returns the model, which may be anywhere: its tensors are available inside `resident`. Raises KeyError."""
        try:
            return self._models[model_id]
        except KeyError:
            raise KeyError(f"no model {model_id!r} on this rank") from None

    @contextmanager
    def resident(self, model_ids: Sequence[str], wanted: frozenset[str] = STEP_VECTORS) -> Iterator[list[Model]]:
        """Keeps the wanted vectors of these models on the device while inside.

        Raises:
            KeyError: an id is unknown.
            OperationError: a model cannot be moved there.
        """
        models = [self.get(model_id) for model_id in model_ids]
        with self._residency.resident(models, wanted):
            yield models

    def make_room(self, model_id: str, model: Model) -> None:
        """Does everything of `put` that can fail in advance. Raises OperationError like `resident`."""
        if self._is_overwritten(model_id, model):
            with self.resident([model_id]):
                return
        self._residency.make_room()

    def put(self, model_id: str, model: Model) -> Model:
        """Stores a model, and returns the one that has the id afterwards.

        If a model of equal shape has this id and no other, only its weights are overwritten, so that holders of that
        model see the new ones. Otherwise the new model replaces it.
        """
        if self._is_overwritten(model_id, model):
            with self.resident([model_id]) as (target,):
                target.weights.copy_(model.weights)
            return target
        self.drop(model_id)
        self._models[model_id] = model
        self._residency.add(model)
        return model

    def share(self, model_id: str, other_id: str) -> None:
        """Gives a model a second id. Raises KeyError."""
        model = self.get(model_id)
        if self._models.get(other_id) is not model:
            self.drop(other_id)
            self._models[other_id] = model

    def drop(self, model_id: str) -> None:
        """Removes an id. Unknown ids are ignored; a model with another id stays."""
        model = self._models.pop(model_id, None)
        if model is not None and all(model is not other for other in self._models.values()):
            self._residency.remove(model)

    def leave_device(self) -> None:
        self._residency.leave_device()

    @property
    def moving_seconds(self) -> float:
        """Seconds spent moving models since the start."""
        return self._residency.moving_seconds

    def memory(self) -> dict[str, int]:
        """Returns bytes in memory and on disk, and counts of models, by place."""
        return self._residency.memory(self.kind_name)

    def is_shared(self, model_id: str) -> bool:
        model = self._models.get(model_id)
        return sum(other is model for other in self._models.values()) > 1 if model is not None else False

    def _is_overwritten(self, model_id: str, model: Model) -> bool:
        is_its_own = model_id in self._models and not self.is_shared(model_id)
        return is_its_own and self._models[model_id].can_copy_weights_from(model)
