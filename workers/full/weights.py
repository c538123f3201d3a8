"""The weights of a fully fine-tuned model: its parameters, this rank's part of each, and views of its flat vectors."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...schemas.errors import OperationError
from ...schemas.models import FullConfig
from ..models.model import BaseModel
from ..parallel.split import Split
from ..protocol.parallel_spec import ShardedUnit
from ..shapes.layouts.flops import OwnFlops
from ..shapes.model_shape import ModelShape
from ..state.flat_params import FlatLayout
from ..state.moments import MomentFormat
from ..state.parameter import DimensionSplit, ExpertParameter, ModelParameter
from ..state.program import Program
from ..state.trainable import SEED_MASK, Trainable

# The linear layers that are stacked in each expert parameter of transformers.
_PACKED = {"gate_up_proj": slice(0, 2), "up_proj": slice(0, 1), "down_proj": slice(-1, None)}


class FullWeights(Trainable):
    """A fully fine-tuned model. Views are named as parameters in transformers, or as the program names its additional
    ones."""

    kind = "full_models"
    replaces_base = is_exclusive = True

    def __init__(self, full: FullConfig, base: BaseModel, program: Program, moments: MomentFormat) -> None:
        """Raises OperationError if the base model cannot be fully trained."""
        if base.weights.is_quantized:
            raise OperationError(
                "full fine-tuning needs an unquantized base model: train LoRA, or start the server without"
                " --base-quantization"
            )
        self.full = self.training = full
        layout = FlatLayout(parameters_of(base, program))
        super().__init__(layout, base.device, base.dtype, program, partial(_views, layout), moments)
        self.flops = OwnFlops(head=program.flops(base), trains_base=True, has_logits=program.head == "logprobs")
        self._base = base

    @property
    def config(self) -> PreTrainedConfig:
        """Returns the base model's config."""
        return self._base.config

    @property
    def source(self) -> str:
        """Returns the name or path that the base model was loaded from."""
        return self._base.source

    def buffers(self) -> dict[str, Tensor]:
        """Returns what is saved with the weights but not trained, such as corrections of routers, by names in files."""
        return buffers_of(self._base)

    def initialize(self) -> None:
        """Copies the base model's weights, and initializes those that the program adds."""
        views = _views(self.layout, self.weights)
        for name, value in self._base.weights.own_parameters().items():
            if name in views:
                views[name].copy_(value)
        generator = torch.Generator().manual_seed((self.full.seed or 0) & SEED_MASK)
        self.program.initialize(self, generator)


def _views(layout: FlatLayout, vector: Tensor) -> Mapping[str, Tensor]:
    return {str(matrix.key): layout.view(vector, matrix.key) for matrix in layout.matrices}


def parameters_of(base: BaseModel, program: Program) -> list[ModelParameter]:
    """Returns the parameters in the same order on all ranks. The output head is included only if the program reads
    it."""
    own = base.weights.own_parameters()
    if program.head != "logprobs":
        for name in base.weights.head_names - {base.embedding_name}:
            del own[name]
    return [
        *(_parameter(base, name, value) for name, value in own.items()),
        *(ModelParameter(str(matrix.key), str(matrix.key), matrix.shape) for matrix in program.matrices(base)),
    ]


def buffers_of(base: BaseModel) -> dict[str, Tensor]:
    """Returns the buffers that are saved with the model, whole on every rank, by their names in checkpoint files."""
    return {_checkpoint_name(base, name): base.model.get_buffer(name) for name in base.loaded.saved_buffers}


def _parameter(base: BaseModel, name: str, own: Tensor) -> ModelParameter:
    cuts, is_repeated = tuple(_cuts(base, name, own)), _is_repeated(base, name)
    path, _, kind = name.rpartition(".")
    if path in base.experts:
        assert isinstance(base.shape, ModelShape) and base.shape.experts is not None
        if not base.shape.experts.are_stacked:
            linears = base.experts[path].linears[_PACKED[kind]]
            return ExpertParameter(name, _checkpoint_name(base, path), tuple(own.shape), cuts, is_repeated, linears)
    return ModelParameter(name, _checkpoint_name(base, name), tuple(own.shape), cuts, is_repeated)


def _checkpoint_name(base: BaseModel, name: str) -> str:
    """Returns the parameter's name in checkpoint files, where the block with the experts may have another name."""
    block = next(
        (path.removesuffix("experts") for path in base.experts if name.startswith(path[: -len("experts")])), None
    )
    if block is None:
        return name
    assert isinstance(base.shape, ModelShape) and base.shape.experts is not None
    part = base.shape.experts
    if part.saved_block is None:
        return name
    layer, below = block.removesuffix(f"{part.name}."), name.removeprefix(block)
    if part.saved_router is not None and below.startswith(f"{part.router}."):
        below = part.saved_router + below.removeprefix(part.router)
    return f"{layer}{part.saved_block}.{below}"


def _cuts(base: BaseModel, name: str, own: Tensor) -> Iterator[DimensionSplit]:
    for dim, split in base.loaded.splits.get(name, {}).items():
        yield DimensionSplit(dim, split, {split.axis: split.size})
    if base.weights.is_fsdp_sharded(name):
        team = base.weights.shard_team
        sizes = {axis: size for axis, size in (("fsdp", base.spec.fsdp), ("sp", base.spec.sp)) if size > 1}
        yield DimensionSplit(0, Split("fsdp", team.size, team.index, (own.shape[0] * team.size,)), sizes)


def _is_repeated(base: BaseModel, name: str) -> bool:
    """True if all ranks along tp have the whole parameter and compute its whole gradient."""
    if base.spec.tp == 1:
        return False
    declared = base.loaded.declared_weight(name)
    placement = declared.placement if declared is not None else None
    if any(split.axis == "tp" for split in base.loaded.splits.get(name, {}).values()):
        return False
    unit = _unit(name.split(".")) if placement is None else placement.unit
    if unit is not None:
        return base.spec.tp_size_of(unit) == 1
    # Only the first rank adds to the gradient of the embedding, and each rank scores different tokens.
    return not (base.shards_activations or name in {base.embedding_name, *base.weights.head_names})


def _unit(path: Sequence[str]) -> ShardedUnit | None:
    if path[-2] == "shared_expert_gate" or path[3:4] == ["router"]:  # they read the residual stream
        return None
    if "linear_attn" in path:
        return "linear_attn"
    if "self_attn" in path:
        return "self_attn"
    if "experts" in path or path[-2] in ("gate", "router"):
        return "experts"
    return "mlp" if "mlp" in path else None
