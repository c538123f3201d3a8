"""Models: what runs and samplers have on this rank, by id: adapters of the base model, weights of their own, drafts."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from ...schemas.models import DraftConfig, FullConfig, TrainingConfig
from ..drafts.algorithms.programs import DraftProgram
from ..drafts.model import DraftModel
from ..drafts.models import Drafts
from ..full import FullModels, FullWeights
from ..lora import Adapter, Adapters
from ..models.model import BaseModel
from ..programs.policy import POLICY
from ..state.holder import Holder
from ..state.program import Program
from ..state.trainable import FORWARD, STEP, Learner


class Models:
    def __init__(
        self, base: BaseModel, adapters: Adapters, full: FullModels | None = None, drafts: Drafts | None = None
    ) -> None:
        """full, drafts: None = there are to be none."""
        self._base = base
        self.adapters, self.full, self.drafts = adapters, full or FullModels(base, 0), drafts or Drafts(base)
        self._holders: tuple[Holder[Any], ...] = self.adapters, self.full, self.drafts

    def __contains__(self, model_id: str) -> bool:
        return any(model_id in holder for holder in self._holders)

    def __iter__(self) -> Iterator[str]:
        for holder in self._holders:
            yield from holder

    def get(self, model_id: str) -> Learner:
        """Wherever it is: its tensors are to be had inside `resident`. Raises KeyError."""
        return self._holder(model_id).get(model_id)

    @contextmanager
    def resident(self, model_ids: Sequence[str], wanted: frozenset[str] = STEP) -> Iterator[list[Learner]]:
        """Inside, the wanted vectors of these are on the device, of at most as many as there are slots, and what drafts
        among them guess. Adapters, which are small, come as a whole.

        Raises KeyError, and OperationError when one cannot be brought there.
        """
        targets = [target_id(model_id) for model_id in model_ids if target_id(model_id) in self]
        with ExitStack() as held:
            for holder, of_kind in ((self.adapters, STEP), (self.full, wanted), (self.drafts, wanted)):
                own = [model_id for model_id in model_ids if self._holder(model_id) is holder]
                held.enter_context(holder.resident(own, of_kind))
                held.enter_context(holder.resident([each for each in targets if each in holder], FORWARD))
            yield [self.get(model_id) for model_id in model_ids]

    def build(self, training: TrainingConfig, program: Program = POLICY) -> Learner:
        """One with zero weights and no id yet. Raises OperationError on a rank too high or nothing to train."""
        if isinstance(training, FullConfig):
            return self.full.build(training, program)
        if isinstance(training, DraftConfig):
            assert isinstance(program, DraftProgram)
            return self.drafts.build(training, program)
        return self.adapters.build(training, program)

    def initialized(self, training: TrainingConfig, program: Program = POLICY) -> Learner:
        """A fresh one without an id yet. Raises as `build`."""
        model = self.build(training, program)
        model.initialize()
        return model

    def copied(self, model_id: str) -> Learner:
        """Its weights alone, as one that has no id yet. Raises as `resident`."""
        with self.resident([model_id], FORWARD) as (source,):
            model = self.build(source.training)
            model.weights.copy_(source.weights)
        return model

    def make_room(self, model_id: str, model: Learner, is_copy: bool) -> None:
        """So that `put` has nothing to do that may fail. Raises OperationError as `resident`, and for a copy where
        there are as many as there may be: a run is not kept from its place by what could wait."""
        if is_copy and isinstance(model, FullWeights):
            self.full.check_room(model_id)
        self._holder_of(model).make_room(model_id, model)

    def put(self, model_id: str, model: Learner) -> Learner:
        """See Holder.put."""
        if model_id in self and self._holder(model_id) is not self._holder_of(model):
            self.drop(model_id)
        return self._holder_of(model).put(model_id, model)

    def drop(self, model_id: str) -> None:
        """With what it guesses, if it is a draft; unknown ids are ignored."""
        for holder in self._holders:
            holder.drop(model_id)
            holder.drop(target_id(model_id))

    def aim(self, draft_id: str, target: Learner | None, version: str) -> None:
        """From now on the draft guesses what this one says, for which there is room, None = the bare base model.
        version: the target's."""
        draft = self.drafts.get(draft_id)
        if target is not None:
            target = self.put(target_id(draft_id), target)
        else:
            self.drop(target_id(draft_id))
        draft.target, draft.target_version = target, version

    def leave_device(self) -> None:
        """See Residency."""
        for holder in self._holders:
            holder.leave_device()

    def moving_seconds(self) -> float:
        """How long moving them has taken since the start."""
        return sum(holder.moving_seconds for holder in self._holders)

    def memory(self) -> dict[str, int]:
        """Bytes in memory and on disk, and how many there are, by place."""
        return {name: number for holder in self._holders for name, number in holder.memory().items()}

    def in_force(self, models: Sequence[Learner], learns: bool = False) -> AbstractContextManager[None]:
        """Inside, the base model has the weights of the one among these that has its own: it is alone then. learns:
        whether backward passes add to its gradients."""
        of_trunk = [model.of_trunk for model in models]
        own = next((model for model in of_trunk if isinstance(model, FullWeights)), None)
        if own is None:
            return nullcontext()
        assert all(model is own for model in of_trunk), "a model with weights of its own runs alone"
        learns = learns and own in models
        return self._base.with_weights(own.weight_views(), own.gradient_views() if learns else None)

    @property
    def has_full(self) -> bool:
        """Whether there are models with weights of their own."""
        return any(True for _ in self.full)

    def runs_alone(self, model_id: str) -> bool:
        """Whether nothing of others can run in the same micro-batches."""
        return model_id in self.full or model_id in self.drafts

    def _holder(self, model_id: str) -> Holder[Any]:
        return next((holder for holder in self._holders if model_id in holder), self.adapters)

    def _holder_of(self, model: Learner) -> Holder[Any]:
        if isinstance(model, FullWeights):
            return self.full
        if isinstance(model, DraftModel):
            return self.drafts
        assert isinstance(model, Adapter)
        return self.adapters


def target_id(draft_id: str) -> str:
    """Of what a draft guesses."""
    return f"{draft_id}:target"
