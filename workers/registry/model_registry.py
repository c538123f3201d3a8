"""Holds the models of this rank's runs and samplers by id: adapters, full weights, and models of plugins' kinds."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from ...schemas.errors import OperationError
from ...schemas.models import FullConfig, LoraConfig, TrainingConfig
from ..full import FullWeights
from ..lora import Adapter, LoraLayers
from ..models.model import BaseModel
from ..programs.policy import POLICY
from ..protocol.calls import RunInfo
from ..protocol.worker_config import OptimizerStateDtype
from ..state.moments import MOMENTS, MomentFormat
from ..state.program import Program
from ..state.residency import Residency
from ..state.trainable import Trainable
from ..state.vectors import FORWARD_VECTORS, STEP_VECTORS

KINDS = (Adapter.kind, FullWeights.kind)


class ModelKind(Protocol):
    """Builds models of a kind that a plugin adds. name: in accounts of memory, as Trainable.kind."""

    name: str

    def build(
        self, training: TrainingConfig, program: Program, moments: MomentFormat, is_trained: bool = True
    ) -> Trainable: ...


class ModelRegistry:
    """Builds models, finds them by id, and keeps those that a pass needs on the device.

    lora: the layers that adapters target. residency: where the models are. kinds: of plugins, by training config.
    """

    def __init__(
        self,
        base: BaseModel,
        lora: LoraLayers,
        residency: Residency | None = None,
        max_full_models: int = 0,
        optimizer_states: OptimizerStateDtype = "float32",
        kinds: Mapping[type[TrainingConfig], ModelKind] | None = None,
    ) -> None:
        """Creates an empty registry.

        Args:
            residency: None = all models stay on the device.
            max_full_models: the number of models with full weights from which `make_room` refuses another copy. The
                server limits how many runs are created.
            optimizer_states: of all models but adapters, whose are float32.
        """
        self._base = base
        self.lora = lora
        self.residency = residency or Residency(base.device, dict.fromkeys(KINDS))
        self._max_full_models = max_full_models
        self._moments = MOMENTS[optimizer_states]
        self.kinds = kinds or {}
        self._models: dict[str, Trainable] = {}

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._models

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._models))

    def get(self, model_id: str) -> Trainable:
        """Returns the model wherever it is; its tensors are usable inside `resident`. Raises KeyError."""
        try:
            return self._models[model_id]
        except KeyError:
            raise KeyError(f"no model {model_id!r} on this rank") from None

    def is_exclusive(self, model_id: str) -> bool:
        """True if the model cannot share micro-batches with other models."""
        model = self._models.get(model_id)
        return model is not None and model.is_exclusive

    @property
    def has_full(self) -> bool:
        """True if any model has full weights."""
        return self.residency.has_any(FullWeights.kind)

    @contextmanager
    def resident(self, model_ids: Sequence[str], wanted: frozenset[str] = STEP_VECTORS) -> Iterator[list[Trainable]]:
        """Keeps the wanted vectors of these models, and the models that their trunks use, on the device while inside.

        At most as many models as there are slots. Adapters, which are small, are always loaded as a whole.

        Raises:
            KeyError: a model is unknown.
            OperationError: a model cannot be brought to the device.
        """
        models = [self.get(model_id) for model_id in model_ids]
        vectors = {target: FORWARD_VECTORS for model in models if (target := model.trunk_model) is not None}
        vectors |= {model: STEP_VECTORS if isinstance(model, Adapter) else wanted for model in models}
        with self.residency.holding(vectors):
            yield models

    def build(self, training: TrainingConfig, program: Program = POLICY) -> Trainable:
        """Returns a model with zero weights and no id yet.

        Raises:
            OperationError: the rank is too high, nothing is trainable, or the base model does not support it.
        """
        if isinstance(training, FullConfig):
            return FullWeights(training, self._base, program, self._moments)
        if isinstance(training, LoraConfig):
            return self.lora.build(training, program)
        return self.kinds[type(training)].build(training, program, self._moments)

    def build_initialized(self, training: TrainingConfig, program: Program = POLICY) -> Trainable:
        """Returns a freshly initialized model without an id yet. Raises as `build`."""
        model = self.build(training, program)
        model.initialize()
        return model

    def describe(self, model: Trainable) -> RunInfo:
        """Describes a new run's model."""
        num_trained = model.layout.num_weights if model.program.trains else 0
        if not isinstance(model, Adapter):
            return RunInfo(num_trained, (), model.training, model.feature_bytes)
        names, frozen = tuple(target.name for target in model.targets), self.lora.frozen_experts(model.lora)
        return RunInfo(num_trained, names, model.training, not_adapted=model.not_adapted, frozen_experts=frozen)

    def copy_weights(self, model_id: str) -> Trainable:
        """Returns a copy of the model's weights as a model without an id yet. Raises as `resident`."""
        with self.resident([model_id], FORWARD_VECTORS) as (source,):
            model = self.build(source.training)
            model.copy_weights_of(source)
        return model

    def make_room(self, model_id: str, model: Trainable, is_copy: bool) -> None:
        """Does everything of `put` that can fail in advance.

        Raises:
            OperationError: as `resident`; for a sampler's copy also if there are max_full_models already. A run is
                never refused for that reason, because copies can wait and runs cannot.
        """
        if is_copy and isinstance(model, FullWeights):
            self._check_full_models(model_id)
        if self.is_overwritten(model_id, model.training, model.program):
            with self.resident([model_id]):
                return
        self.residency.make_room(model.kind)

    def put(self, model_id: str, model: Trainable) -> Trainable:
        """Stores a model, and returns the one that has the id afterwards.

        If a model of equal shape has this id and no other, only its weights are overwritten, so that holders of that
        model see the new ones. Otherwise the new model replaces it.
        """
        if self.is_overwritten(model_id, model.training, model.program):
            with self.resident([model_id]) as (target,):
                target.copy_weights_of(model)
            return target
        self.drop(model_id)
        self._models[model_id] = model
        self.residency.add(model)
        return model

    def is_overwritten(self, model_id: str, training: TrainingConfig, program: Program = POLICY) -> bool:
        """True if storing such a model under this id overwrites the weights that the id has now."""
        model = self._models.get(model_id)
        if model is None or self.is_shared(model_id):
            return False
        return model.training == training and model.program is program

    def share(self, model_id: str, other_id: str) -> None:
        """Gives a model a second id. Raises KeyError."""
        model = self.get(model_id)
        if self._models.get(other_id) is not model:
            self.drop(other_id)
            self._models[other_id] = model

    def is_shared(self, model_id: str) -> bool:
        """True if the model has another id too."""
        model = self._models.get(model_id)
        return model is not None and sum(other is model for other in self._models.values()) > 1

    def drop(self, model_id: str) -> None:
        """Removes an id, and the model that its trunk uses. Ignores unknown ids; a model with another id stays."""
        model = self._models.pop(model_id, None)
        if model is None:
            return
        self.drop(trunk_id(model_id))
        if all(model is not other for other in self._models.values()):
            self.residency.remove(model)

    def with_weights_of(self, models: Sequence[Trainable], learns: bool = False) -> AbstractContextManager[None]:
        """While inside, gives the base model the weights of the fully trained model among these, which must run alone.

        Args:
            learns: whether backward passes add to its gradients.
        """
        of_trunk = [model.trunk_model for model in models]
        own = next((model for model in of_trunk if model is not None and model.replaces_base), None)
        if own is None:
            return nullcontext()
        assert all(model is own for model in of_trunk), "a model with weights of its own runs alone"
        learns = learns and own in models
        return self._base.weights.with_weights(
            own.vectors.weight_views(), own.gradients.of_lane().views if learns else None
        )

    def _check_full_models(self, model_id: str) -> None:
        """Raises OperationError if a copy with this id would exceed the limit on models with full weights."""
        others = {model for each, model in self._models.items() if each != model_id and isinstance(model, FullWeights)}
        if len(others) >= self._max_full_models:
            raise OperationError(
                f"there are {len(others)} models with full weights, trained ones and copies for samplers, and"
                " max_full_models allows no more: save with kind inflight, which updates one copy, end a session that"
                " has some, or start the server with a higher --max-full-models; models that are not in use are"
                " offloaded to disk"
            )


def trunk_id(model_id: str) -> str:
    """Returns the id of the other model that a model's trunk uses, if any."""
    return f"{model_id}:target"
