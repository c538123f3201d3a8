"""Holds the models of this rank's runs and samplers by id: adapters, full weights, and draft models."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from ...schemas.models import DraftConfig, FullConfig, TrainingConfig
from ..drafts.algorithms.draft_programs import DraftProgram
from ..drafts.draft_model import DraftModel
from ..drafts.draft_models import DraftModels
from ..full import FullModels, FullWeights
from ..lora import Adapter, AdapterRegistry
from ..models.model import BaseModel
from ..programs.policy import POLICY
from ..state.program import Program
from ..state.resident_models import ResidentModels
from ..state.trainable import Trainable
from ..state.vectors import FORWARD_VECTORS, STEP_VECTORS


class ModelRegistry:
    def __init__(
        self,
        base: BaseModel,
        adapters: AdapterRegistry,
        full: FullModels | None = None,
        drafts: DraftModels | None = None,
    ) -> None:
        """Combines the holders; `full` or `drafts` None means that this rank holds none of that kind."""
        self._base = base
        self.adapters, self.full, self.drafts = adapters, full or FullModels(base, 0), drafts or DraftModels(base)
        self._holders: tuple[ResidentModels[Any], ...] = self.adapters, self.full, self.drafts

    def __contains__(self, model_id: str) -> bool:
        return any(model_id in holder for holder in self._holders)

    def __iter__(self) -> Iterator[str]:
        for holder in self._holders:
            yield from holder

    def get(self, model_id: str) -> Trainable:
        """Returns the model wherever it is; its tensors are usable inside `resident`. Raises KeyError."""
        return self._holder(model_id).get(model_id)

    @contextmanager
    def resident(self, model_ids: Sequence[str], wanted: frozenset[str] = STEP_VECTORS) -> Iterator[list[Trainable]]:
        """Keeps the wanted vectors of these models, and the targets of drafts among them, on the device while inside.

        At most as many models as there are slots. Adapters, which are small, are always loaded as a whole.

        Raises:
            KeyError: a model is unknown.
            OperationError: a model cannot be brought to the device.
        """
        targets = [target_id(model_id) for model_id in model_ids if target_id(model_id) in self]
        with ExitStack() as held:
            for holder, of_kind in ((self.adapters, STEP_VECTORS), (self.full, wanted), (self.drafts, wanted)):
                own = [model_id for model_id in model_ids if self._holder(model_id) is holder]
                held.enter_context(holder.resident(own, of_kind))
                held.enter_context(holder.resident([each for each in targets if each in holder], FORWARD_VECTORS))
            yield [self.get(model_id) for model_id in model_ids]

    def build(self, training: TrainingConfig, program: Program = POLICY) -> Trainable:
        """Returns a model with zero weights and no id yet. Raises OperationError if the rank is too high or nothing is
        trainable.
        """
        if isinstance(training, FullConfig):
            return self.full.build(training, program)
        if isinstance(training, DraftConfig):
            assert isinstance(program, DraftProgram)
            return self.drafts.build(training, program)
        return self.adapters.build(training, program)

    def build_initialized(self, training: TrainingConfig, program: Program = POLICY) -> Trainable:
        """Returns a freshly initialized model without an id yet. Raises as `build`."""
        model = self.build(training, program)
        model.initialize()
        return model

    def copy_weights(self, model_id: str) -> Trainable:
        """Returns a copy of the model's weights as a model without an id yet. Raises as `resident`."""
        with self.resident([model_id], FORWARD_VECTORS) as (source,):
            model = self.build(source.training)
            model.weights.copy_(source.weights)
        return model

    def make_room(self, model_id: str, model: Trainable, is_copy: bool) -> None:
        """Makes room, so that `put` cannot fail.

        Raises:
            OperationError: as `resident`; for a sampler's copy also if there are max_full_models already. A run is
                never refused for that reason, because copies can wait and runs cannot.
        """
        if is_copy and isinstance(model, FullWeights):
            self.full.check_room(model_id)
        self._holder_of(model).make_room(model_id, model)

    def put(self, model_id: str, model: Trainable) -> Trainable:
        """Stores the model under the id and returns it; see ResidentModels.put."""
        if model_id in self and self._holder(model_id) is not self._holder_of(model):
            self.drop(model_id)
        return self._holder_of(model).put(model_id, model)

    def drop(self, model_id: str) -> None:
        """Drops the model, and its target if it is a draft; ignores unknown ids."""
        for holder in self._holders:
            holder.drop(model_id)
            holder.drop(target_id(model_id))

    def set_target(self, draft_id: str, target: Trainable | None, version: str) -> None:
        """Sets the draft's target to this model, for which there is room; None means the bare base model.

        Args:
            version: the target's version.
        """
        draft = self.drafts.get(draft_id)
        if target is not None:
            target = self.put(target_id(draft_id), target)
        else:
            self.drop(target_id(draft_id))
        draft.target, draft.target_version = target, version

    def offload(self) -> None:
        """Offloads all models; see Residency."""
        for holder in self._holders:
            holder.leave_device()

    def moving_seconds(self) -> float:
        """Returns how long moving models has taken since the start."""
        return sum(holder.moving_seconds for holder in self._holders)

    def memory(self) -> dict[str, int]:
        """Returns bytes and numbers of models, by place."""
        return {name: number for holder in self._holders for name, number in holder.memory().items()}

    def with_weights_of(self, models: Sequence[Trainable], learns: bool = False) -> AbstractContextManager[None]:
        """Gives the base model the weights of the model among these that has full weights, while inside; it must run
        alone.

        Args:
            learns: whether backward passes add to its gradients.
        """
        of_trunk = [model.trunk_model for model in models]
        own = next((model for model in of_trunk if isinstance(model, FullWeights)), None)
        if own is None:
            return nullcontext()
        assert all(model is own for model in of_trunk), "a model with weights of its own runs alone"
        learns = learns and own in models
        return self._base.with_weights(own.vectors.weight_views(), own.gradients.of_lane().views if learns else None)

    @property
    def has_full(self) -> bool:
        """True if any model has full weights."""
        return any(True for _ in self.full)

    def is_exclusive(self, model_id: str) -> bool:
        """True if the model cannot share micro-batches with other models."""
        return model_id in self.full or model_id in self.drafts

    def _holder(self, model_id: str) -> ResidentModels[Any]:
        return next((holder for holder in self._holders if model_id in holder), self.adapters)

    def _holder_of(self, model: Trainable) -> ResidentModels[Any]:
        if isinstance(model, FullWeights):
            return self.full
        if isinstance(model, DraftModel):
            return self.drafts
        assert isinstance(model, Adapter)
        return self.adapters


def target_id(draft_id: str) -> str:
    """Returns the id under which a draft's target is held."""
    return f"{draft_id}:target"
