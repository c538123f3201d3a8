"""Loads a Hugging Face causal LM and runs packed rows through it."""

import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.utils import logging as transformers_logging

from ...schemas.errors import OperationError
from ..batch.micro_batch import MicroBatch
from ..ops.attention import ATTENTION, AttendingPacking, Packing
from ..ops.frozen.packing import pack
from ..ops.frozen.quantized import QuantizedWeight, check_installed, replace_parameter
from ..ops.frozen.released import ReleasedWeight
from ..ops.kernels import load_kernels_for
from ..ops.linear import FrozenProduct, soft_capped, to_product_layout
from ..parallel.expert_counts import ExpertCounts
from ..parallel.mesh import Mesh, Team
from ..parallel.sequence import ShardedPacking
from ..parallel.sharded_embedding import ShardedEmbedding
from ..parallel.token_shard import TokenShard
from ..protocol.worker_config import WorkerConfig, ZeroStage
from ..resources.machine import gigabytes
from ..resources.memory import available_bytes
from ..resources.threads import ThreadCount
from ..shapes.layouts.checks import activations_refusal, check_quantization
from ..shapes.model_shape import (
    ModelShape,
    check_weight_files,
    describe_model,
    longest_context,
    read_architecture,
    refusal_of,
)
from ..shapes.other_models import SAME_TYPES, left_out_of, logit_cap_of, logit_scale_of, text_settings
from ..shapes.parts import RoutedExperts, Weight
from ..shapes.quantization import quantization_of
from ..shapes.sequence_split import SequenceSplit
from .activation_checkpointing import ForwardContext, HostOffload, LayerInputs
from .devices import no_cuda
from .fsdp import GatherBuffers, ShardedLayer, ShardedLayers
from .fused_decoder import EMBEDDING, FusedTrunk, fused_trunk
from .layers import GroupedExperts, Merge, activation_of
from .long_rotations import rotate_alike
from .packed_tensors import dequantizing
from .packing_checks import check_modules, check_numbers
from .tensor_parallel import ParameterSharding
from .text_parts import TextModel, text_config_of, transposing_experts

_log = logging.getLogger(__name__)


def resolve_device(config: WorkerConfig) -> torch.device:
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise no_cuda(config.device, torch.__version__)
    if config.device == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda" if config.device == "auto" else config.device)
    # Process groups need an index. Among the devices that a rank on Ray sees, its own is the first.
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def unique_name(device: torch.device) -> str:
    """Returns a name that no other device on any machine has."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_properties(device).uuid}"
    machine = Path("/proc/sys/kernel/random/boot_id")
    return f"{device.type} of {machine.read_text().strip() if machine.exists() else platform.node()}"


def resolve_dtype(config: WorkerConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return torch.float32 if config.dtype == "float32" else torch.bfloat16
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class BaseModel:
    """Holds the frozen base weights, and runs packed rows to hidden states and the unembedding.

    The class is long because it is the same to its callers whether layers run by our own forward or by transformers'
    modules, and whether they are whole, sharded or quantized.

    trunk: everything below the unembedding; `lora` wraps its linear layers. product: multiplies with the frozen
    weights. shape: what its config describes. architecture: the class that config.json names, None if none.
    weights_per_product: weights of a linear layer, on average. experts: by name, those of sparse layers that run by our
    own forward. is_sparse: whether some layers have experts, run by us or by transformers. num_parameters: of all ranks
    together. precision: dtype and quantization. source: where it was loaded from. spec: layout of the ranks that share
    it. sequence_split: how ranks along sp split sequences. shards_activations: whether ranks along tp shard the
    activations between linear layers in training. activations: as in WorkerConfig. unembedding: [vocab, hidden],
    possibly tied to the embedding; this rank's rows if ranks keep it in parts, except inside `whole_unembedding` and
    `gathered`. head_name, embedding_name: names of these parameters. head_bias: added to the logits, [vocab], whole on
    every rank; None if there is none. head_names: of the unembedding and of this bias. num_moves: how often the weights
    that layers use have got other places in memory.
    """

    def __init__(self, config: WorkerConfig, mesh: Mesh | None = None) -> None:
        """Loads and checks the model.

        Args:
            mesh: the ranks that share it; None for one. Its layout becomes the model's own.
        Raises:
            ValueError: the model is not supported, or not with this layout.
        """
        mesh = self._mesh = mesh or Mesh()
        self.source = config.model.source
        check_installed("base_quantization", config.base_quantization, "none", "released")
        check_installed("optimizer_states", config.optimizer_states, "float32")
        self._quantization = config.base_quantization
        self._quantized: list[QuantizedWeight | ReleasedWeight] = []
        self._num_unpacked = 0
        self.device = resolve_device(config)
        self.dtype = resolve_dtype(config, self.device)
        self.precision = f"{self.dtype} {config.base_quantization}"
        self.threads, self.num_moves = ThreadCount(self.device), 0
        self.product = FrozenProduct(self.device, self.dtype, self.threads)
        loaded_config, self._text_part = _config_of(config.model.source)
        self.shape = describe_model(config.model.name, loaded_config.to_dict())
        self.architecture = read_architecture(config.model)
        self.sequence_split = SequenceSplit()
        if isinstance(self.shape, ModelShape):
            mesh.spec = self.shape.own_layout(mesh.spec)
            self.sequence_split = self.shape.sequence_split(mesh.spec)
        self.spec = mesh.spec
        check_quantization(config.base_quantization, mesh.spec, self.shape)
        self._weights = self.shape.placed_weights() if isinstance(self.shape, ModelShape) else {}
        placed = ParameterSharding(mesh, self._weights)
        self.model = _load(config.model.source, loaded_config, self._text_part, self.dtype, self.device, placed)
        self.splits = placed.splits
        self._sharded, self._biases_of_others = placed.sharded, placed.biases_of_others
        self.config: PreTrainedConfig = self.model.config
        own = self.own_parameters()
        self.num_parameters = sum(self._num_parts(name) * each.numel() for name, each in own.items())
        self.trunk: nn.Module = self.model.base_model
        rotate_alike(self.trunk, config.max_context_length or self.num_positions)
        self._fused = fused_trunk(self.trunk, self.shape, mesh)
        if self._fused is None:
            check_modules(self.source, self.model)
        self.shards_activations = config.tp_activations == "sharded" and self._fused is not None
        # Multiplied into the hidden states, so that it reaches all logits, those of adapters of the head included.
        self._logit_scale = logit_scale_of(self.config)
        self.logit_cap = logit_cap_of(self.config)
        self.activations = config.activations
        self._zero_stage: ZeroStage = config.zero_stage
        self._check_settings(config)
        # On the CPU compiled now, so that the first request does not wait for a compiler.
        load_kernels_for(self.dtype, self.device)
        self.experts = self._named_experts()
        self.is_sparse = any(parameter.dim() > 2 for parameter in self.trunk.parameters())
        linears = [module.weight.numel() for module in self.trunk.modules() if isinstance(module, nn.Linear)]
        self.weights_per_product = sum(linears) / max(1, len(linears))
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ValueError(f"{config.model.source}: the output head must be a linear layer, got {head}")
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.head_name = names[id(head.weight)]
        self.embedding_name = names[id(self.model.get_input_embeddings().weight)]
        if self.head_name not in (self.embedding_name, *self._sharded):
            # A tied head keeps its memory layout, because the embedding reads its rows one by one.
            head.weight.data = to_product_layout(head.weight.data)
        self.unembedding: Tensor = head.weight
        self.head_bias: Tensor | None = head.bias
        self.head_names = frozenset(names[id(each)] for each in (head.weight, head.bias) if each is not None)
        self.vocab_size = self._num_parts(self.head_name) * len(head.weight)
        self._sharded_head: ShardedLayer | None = None
        if not mesh.has_forward_collectives:
            longest = config.max_context_length or self.num_positions
            check_numbers(self.source, self.model, self._logits, longest, self._attending_layers())

    def _check_settings(self, config: WorkerConfig) -> None:
        """Raises ValueError if the layers, as they run, cannot run with these settings."""
        if self._fused is None and self._mesh.has_forward_collectives:
            raise ValueError(
                f"{self.source}: {self.config.model_type} models do not run with {self.spec}: use replicas"
            )
        if self._fused is None and config.activations != "keep":
            raise ValueError(activations_refusal(config.model.name, self.config.model_type, config.activations))

    def _attending_layers(self) -> Sequence[int]:
        """Returns the number of the layer to whose keys and values each layer with softmax attention attends."""
        if not isinstance(self.shape, ModelShape):
            return range(self.num_layers)
        return self.shape.attending_layers

    def _logits(self, tokens: Tensor, positions: Tensor, packing: AttendingPacking) -> Tensor:
        """Returns logits by the layers as their modules are now; `check_numbers` changes their windows for a while."""
        fused = fused_trunk(self.trunk, describe_model(self.source, self.config.to_dict()))
        run = self._by_transformers if fused is None else fused.hidden_states
        hidden = self._logit_scaled(run(tokens, positions, packing))
        logits = self.product(hidden, self.unembedding, self.head_bias)
        return soft_capped(logits, self.logit_cap)

    @property
    def text_part_name(self) -> str | None:
        """The name of this part for text in transformers' whole model, None if it is all of it."""
        return None if self._text_part is None else self._text_part.name

    def saved_name(self, name: str) -> str:
        """Returns the name of this parameter or module in transformers' whole model."""
        part = self._text_part
        return name if part is None else part.name_in_whole(name, f"{self.model.base_model_prefix}.")

    def adaptable_weight(self, name: str) -> Weight | None:
        """Returns the declared weight of the linear layer of this name, None if its family declares none."""
        return self.declared_weight(f"{name}.weight")

    def declared_weight(self, name: str) -> Weight | None:
        """Returns the declaration of the parameter of this name, None if its family declares none."""
        return self._weights.get(name.removeprefix(f"{self.model.base_model_prefix}."))

    def is_replicated_over_tp(self, name: str) -> bool:
        """True if several ranks have the weights of this name whole, and run the same tokens through them."""
        weight = self.declared_weight(name)
        if weight is None or weight.placement is None:
            return False
        return self.spec.tp > self.spec.tp_size_of(weight.placement.unit)

    def _num_parts(self, name: str) -> int:
        """Returns the number of ranks' parts that make up the whole parameter of this name."""
        num_kept = self.shard_team.size if name in self._sharded else 1
        return num_kept * prod(split.size for split in self.splits.get(name, {}).values())

    def _named_experts(self) -> dict[str, GroupedExperts]:
        prefix = self.model.base_model_prefix
        return {f"{prefix}.{name}": experts for name, experts in (self._fused.experts if self._fused else {}).items()}

    def adaptable_experts(self) -> dict[str, GroupedExperts]:
        """Returns by name the experts that adapters can adapt, in our own layers or in those of transformers."""
        if self._fused is not None:
            return self.experts
        team, linears = self._mesh.expert_team("experts"), self._expert_linears()
        named = [(name, each) for name, each in self.model.named_modules() if activation_of(each) is not None]
        return {name: GroupedExperts(each, team, linears) for name, each in named} if linears else {}

    @cached_property
    def _conversions(self) -> Sequence[Any]:
        """The rules of transformers and peft that map the tensors of files to parameters."""
        return get_model_conversion_mapping(self.model)

    def _expert_linears(self) -> tuple[str, str, str] | None:
        """Returns the names of an expert's gate, up and down in files, or None if one tensor there has all experts."""
        sources = {
            entry.target_patterns[0].rpartition(".")[2]: entry.source_patterns
            for entry in self._conversions
            if isinstance(entry, WeightConverter)
        }
        patterns = [*sources.get("gate_up_proj", ()), *sources.get("down_proj", ())]
        if len(patterns) != 3:
            return None
        gate, up, down = (pattern.removesuffix(".weight").rpartition(".")[2] for pattern in patterns)
        return gate, up, down

    def name_in_files(self, name: str) -> str:
        """Returns the name that transformers' renaming of files, and so peft's, maps to this linear layer.

        It is the layer's own name unless that would be renamed.
        """
        renamings = [each for each in self._conversions if type(each) is WeightRenaming]
        if _renamed(name, renamings) == name:
            return name
        original = _renamed(name, [each.reverse_transform() for each in reversed(renamings)])
        return original if _renamed(original, renamings) == name else name

    @property
    def declared_experts(self) -> RoutedExperts | None:
        """The experts as their family declares them; None if there are none, or the type has no family."""
        return self.shape.experts if isinstance(self.shape, ModelShape) else None

    @cached_property
    def stacked_experts(self) -> RoutedExperts | None:
        """The experts whose matrices are in one tensor in files, and so for peft; None if each has its own."""
        experts = self.declared_experts
        if experts is not None and self._text_part is not None and self._text_part.has_transposed_experts:
            return replace(experts, is_transposed=True)
        return experts if experts is not None and self._expert_linears() is None else None

    @property
    def num_positions(self) -> int | None:
        """The longest context, or None if the model's config does not say."""
        if isinstance(self.shape, ModelShape):
            return self.shape.max_positions
        config = self.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None)
        return longest_context(longest, self.shape.rope)

    @property
    def num_layers(self) -> int:
        return int(self.config.get_text_config().num_hidden_layers)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids in generation_config.json, or if it has none, in config.json."""
        generation = self.model.generation_config
        ids = generation.eos_token_id if generation is not None else None
        return _ids(getattr(self.config, "eos_token_id", None) if ids is None else ids)

    @property
    def config_eos_token_ids(self) -> tuple[int, ...]:
        """The ids in config.json, or if it has none, in its part about text."""
        configs = (self.config, self.config.get_text_config())
        return next(filter(None, (_ids(getattr(config, "eos_token_id", None)) for config in configs)), ())

    @property
    def runs_own_layers(self) -> bool:
        """True if the layers run by our own forward."""
        return self._fused is not None

    @property
    def is_concurrent(self) -> bool:
        """True if several threads may run rows at the same time.

        Modules of transformers may change state as they run, and ranks that exchange tensors must do so in one order.
        """
        return self._fused is not None and not self._mesh.has_forward_collectives

    @property
    def is_sharded(self) -> bool:
        """True if layers are gathered for use."""
        return bool(self._sharded)

    @property
    def saved_buffers(self) -> list[str]:
        """Names of the buffers that are saved with the model, in addition to its parameters."""
        return [
            f"{path}.{name}"
            for path, module in self.model.named_modules()
            for name in module._buffers.keys() - module._non_persistent_buffers_set
        ]

    @property
    def is_quantized(self) -> bool:
        return self._quantization != "none"

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights on this rank."""
        parameters = {id(parameter): parameter.nbytes for parameter in self.model.parameters()}
        return sum(parameters.values()) + sum(weight.nbytes for weight in self._quantized)

    def movable_tensors(self) -> list[Tensor]:
        """Returns all weights on this rank, after copying those in a mapped file to memory."""
        parameters = list(self.model.parameters())
        for parameter in parameters:
            if not parameter.data.untyped_storage().resizable():
                parameter.data = parameter.data.clone()
        return [each.data for each in parameters] + [part for weight in self._quantized for part in weight.tensors]

    def quantize(self, module: nn.Module, *names: str) -> None:
        """Quantizes these parameters of the module, if the base is quantized.

        As released, those that the release does not hold packed stay as they are.
        """
        for name in names if self.is_quantized else ():
            parameter = module.get_parameter(name)
            quantized = self._quantized_weight(parameter)
            if quantized is None:
                self._num_unpacked += 1
                continue
            self._quantized.append(quantized)
            replace_parameter(module, name, quantized)

    def _quantized_weight(self, parameter: nn.Parameter) -> QuantizedWeight | ReleasedWeight | None:
        if self._quantization == "nf4":
            return QuantizedWeight(parameter.data)
        if parameter.dim() == 2:
            # The memory layout in which it would be multiplied if it were not packed.
            parameter.data = to_product_layout(parameter.data)
        return pack(parameter.data, self.shape.released.formats)

    def _check_packed(self) -> None:
        """Raises ValueError if no weight under adapters is held as released."""
        if self._quantization != "released":
            return
        if not self._quantized:
            raise ValueError(
                f"{self.source}: none of its {self._num_unpacked} weights under adapters can be held as released: leave"
                " out --base-quantization released"
            )
        _log.info(
            "%s: %d weights are held as released, %d others as numbers of %s",
            *(self.source, len(self._quantized), self._num_unpacked, self.dtype),
        )

    @property
    def shard_team(self) -> Team:
        """The ranks that each keep a part of the parameters for which `is_fsdp_sharded` is true."""
        return self._mesh.shard_team

    def is_fsdp_sharded(self, name: str) -> bool:
        """True if each rank keeps some rows of this parameter, and gathers or requests the others for use."""
        return name in self._sharded

    def own_parameters(self) -> dict[str, Tensor]:
        """Returns this rank's parts of all parameters by name, sorted by name, with the same names on all ranks.

        Biases that another rank adds are included.
        """
        own = {name: parameter.data for name, parameter in self.model.named_parameters()} | self._biases_of_others
        return dict(sorted(own.items()))

    @contextmanager
    def with_weights(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor] | None = None
    ) -> Iterator[None]:
        """Replaces the parameters of these names by these tensors, this rank's parts, while inside.

        Args:
            gradients: float32, by name; backward passes add the weights' gradients to them.
        """
        parameters = {name: each for name, each in self.model.named_parameters() if name in weights}
        self.num_moves += 1
        with ExitStack() as held:
            if self._fused is not None:
                held.callback(self._fused.parameters_changed, are_original=True)
            held.callback(_restore_parameters, [(each, each.data) for each in parameters.values()])
            for name, parameter in parameters.items():
                parameter.data = weights[name]
                if gradients is not None:
                    # Embeddings are never gathered, so that their gradients are this rank's part.
                    is_gathered = name in self._sharded and name not in self._embeddings
                    _collect_gradient(parameter, None if is_gathered else gradients[name])
            if self._fused is not None:
                self._fused.parameters_changed(are_original=False)
                held.enter_context(self._fused.using_weights(gradients))
            with self._sparse_gradients(gradients is not None):
                yield

    @contextmanager
    def _sparse_gradients(self, is_wanted: bool) -> Iterator[None]:
        """Makes autograd's gradients of embeddings sparse while inside, not of the size of the vocabulary."""
        for embedding in self._embeddings.values():
            embedding.sparse = is_wanted
        try:
            yield
        finally:
            for embedding in self._embeddings.values():
                embedding.sparse = False

    @cached_property
    def _embeddings(self) -> Mapping[str, nn.Embedding]:
        """The embeddings by the names of their weights."""
        named = self.model.named_modules()
        return {f"{path}.weight": module for path, module in named if isinstance(module, nn.Embedding)}

    def finish_linears(self, merge: Merge, captured_context: Callable[[], ForwardContext]) -> None:
        """Prepares the layers for running, after all linear layers are replaced.

        Args:
            merge: makes one linear layer of several of the same input.
            captured_context: returns the context in which to run a layer again for its backward pass.
        """
        self._check_packed()
        if self._fused is None:
            return
        if self.activations != "keep":
            host = HostOffload(self.device) if self.activations == "offload" else None
            self._fused.checkpoint_activations(lambda: LayerInputs(host, captured_context()))
        if self.is_sharded:
            self._shard(self._fused)
        else:
            self._fused.merge(merge)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keeps all layers whole while inside. All ranks enter together.

        Raises:
            OperationError: a rank has no memory for the whole model.
        """
        if self._fused is None or not self.is_sharded:
            yield
            return
        self._check_room(self._fused.num_gathered_bytes)
        self.num_moves += 1
        with self._fused.gathered():
            yield

    def _check_room(self, num_bytes: int) -> None:
        free = [each for each in self._mesh.all_gather_object(available_bytes(self.device)) if each is not None]
        if free and min(free) < num_bytes:
            raise OperationError(
                f"to sample, each rank gathers the whole model, which takes {gigabytes(num_bytes)}, but one has only"
                f" {gigabytes(min(free))} free: serve the model with tp, or sample in separate workers"
                " (--sampler-workers)",
                "server",
            )

    def whole_unembedding(self) -> AbstractContextManager[None]:
        """Keeps the unembedding whole while inside, and its gradient if it has one. All ranks enter together."""
        return nullcontext() if self._sharded_head is None else self._sharded_head.in_use()

    def _shard(self, trunk: FusedTrunk) -> None:
        buffers, numbers = GatherBuffers(), range(len(self.trunk.layers))  # pyright: ignore[reportArgumentType]
        prefixes = [f"{self.model.base_model_prefix}.layers.{number}." for number in numbers]
        by_layer = [[name for name in self._sharded if name.startswith(prefix)] for prefix in prefixes]
        layers = [self._sharded_layer(names, buffers) for names in by_layer if names]
        # A single name if they are tied.
        of_ends = sorted({*self._embeddings, self.head_name}.intersection(self._sharded))
        # Separate buffers, because no layer needs one of their size.
        ends = {name: self._sharded_layer([name], GatherBuffers()) for name in of_ends}
        self._sharded_head = ends.get(self.head_name)
        shared_out = {
            name: ShardedEmbedding(each, self.shard_team) for name, each in self._embeddings.items() if name in ends
        }
        embedding = shared_out.pop(self.embedding_name, None)
        of_layers = next(iter(shared_out.values()), None)
        trunk.shard(ShardedLayers(layers, self._zero_stage, list(ends.values())), embedding, of_layers)

    def _sharded_layer(self, names: Sequence[str], buffers: GatherBuffers) -> ShardedLayer:
        return ShardedLayer({name: self.model.get_parameter(name) for name in names}, self.shard_team, buffers)

    @torch.no_grad()
    def embedded(self, tokens: Tensor) -> Tensor:
        """Returns the input of the first layer [tokens, hidden] for int64 [tokens].

        All ranks call it together, each with its own tokens, because they may keep the embedding in parts.
        """
        if self._fused is not None:
            return self._fused.embed(tokens)
        embedding: Any = self.model.get_input_embeddings()
        return embedding(tokens)

    def shared_hidden_states(
        self,
        micro_batch: MicroBatch,
        share: TokenShard,
        expert_counts: ExpertCounts | None = None,
        captured: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Returns the hidden states of `share.hidden`, [tokens, hidden].

        For `expert_counts` and `captured` see FusedTrunk.hidden_states.
        """
        team, packing = self._mesh.along("sp"), micro_batch.packing
        # Also for tensor parallelism alone: the share pads the row, and the packing must cover the padding.
        shared = packing if share.is_all else ShardedPacking.of(packing, share, team, self.sequence_split)
        tokens, positions = share.of_tokens(micro_batch.tokens), share.of_tokens(micro_batch.positions)
        own = share.own_of_tokens
        return self.hidden_states(tokens, positions, shared, own, False, captured, expert_counts)

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        packing: Packing | AttendingPacking,
        own: slice | None = None,
        are_alike: bool = True,
        captured: dict[int, Tensor] | None = None,
        expert_counts: ExpertCounts | None = None,
    ) -> Tensor:
        """Returns the last hidden states [tokens, hidden] of tokens at positions, both int64 [tokens].

        For the other arguments see FusedTrunk.hidden_states.
        """
        if self._fused is not None:
            hidden = self._fused.hidden_states(tokens, positions, packing, own, are_alike, captured, expert_counts)
        else:
            hidden = self._by_transformers(tokens, positions, packing, captured)
        return self._logit_scaled(hidden)

    def _logit_scaled(self, hidden: Tensor) -> Tensor:
        return hidden if self._logit_scale == 1 else hidden * self._logit_scale

    def _by_transformers(
        self,
        tokens: Tensor,
        positions: Tensor,
        packing: Packing | AttendingPacking,
        captured: dict[int, Tensor] | None = None,
    ) -> Tensor:
        with self._capture_outputs(captured or {}):
            output = self.trunk(
                input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, packing=packing
            )
        return output.last_hidden_state.squeeze(0)

    @cached_property
    def _layer_modules(self) -> nn.ModuleList:
        """The layers, whose name in transformers differs between families."""
        lists = (each for each in self.trunk.modules() if isinstance(each, nn.ModuleList))
        return next(each for each in lists if len(each) == self.num_layers)

    @contextmanager
    def _capture_outputs(self, captured: dict[int, Tensor]) -> Iterator[None]:
        """Makes layers store their outputs in `captured` while inside.

        transformers' own hidden states would not do: the last layer's have the norm applied.
        """
        layers = self._layer_modules

        def kept(layer: int, state: Any) -> None:
            captured[layer] = (state if isinstance(state, Tensor) else state[0]).squeeze(0)

        with ExitStack() as held:
            for layer in captured:
                if layer == EMBEDDING:
                    hook = layers[0].register_forward_pre_hook(lambda _, inputs: kept(EMBEDDING, inputs))
                else:
                    hook = layers[layer].register_forward_hook(
                        lambda _, inputs, output, layer=layer: kept(layer, output)
                    )
                held.callback(hook.remove)
            yield


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _renamed(name: str, renamings: Sequence[Any]) -> str:
    key = f"{name}.weight"
    for each in renamings:
        key, _ = each.rename_source_key(key)
    return key.removesuffix(".weight")


def _restore_parameters(parameters: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, value in parameters:
        parameter.data, parameter.grad, parameter.requires_grad = value, None, False


def _collect_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Makes the parameter collect its gradient, which is None if the layer is gathered later with its gradient."""
    parameter.requires_grad = True
    parameter.grad_dtype = torch.float32
    parameter.grad = gradient


def _config_of(source: str) -> tuple[PreTrainedConfig, TextModel | None]:
    """Returns the config of the model to load, and the part that it is, if the model also takes images or sound.

    Raises:
        ValueError: the model is not supported.
    """
    stored, _ = PreTrainedConfig.get_config_dict(source)
    if (same_type := SAME_TYPES.get(str(stored.get("model_type")))) is None:
        config = AutoConfig.from_pretrained(source)
    else:
        config = CONFIG_MAPPING[same_type].from_dict(stored | {"model_type": same_type})
    if (refusal := refusal_of(config.to_dict())) is not None:
        raise ValueError(f"{source}: {refusal}")
    if (left_out := left_out_of(str(config.model_type))) is None:
        return config, None
    _log.info("%s: %s", source, left_out)
    text: Any = text_config_of(config)
    # transformers unties a head that has weights of its own in the files.
    text.tie_word_embeddings = text_settings(config.to_dict()).get("tie_word_embeddings", text.tie_word_embeddings)
    text.quantization_config = dict(quantization_of(config.to_dict()))
    return text, TextModel(str(config.model_type))


def class_of(config: PreTrainedConfig) -> Any:
    """Returns transformers' class that makes the causal model of a config.

    Mistral Small 4 is listed among models of images only, though its class is a causal model.
    """
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def _load(
    source: str,
    config: PreTrainedConfig,
    part: TextModel | None,
    dtype: torch.dtype,
    device: torch.device,
    placed: ParameterSharding,
) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()
    check_weight_files(source, config.model_type)
    with placed.loading() as options, transposing_experts(part, config), dequantizing(config, dtype):
        loaded: Any = class_of(config).from_pretrained(
            source,
            config=config,
            key_mapping=None if part is None else part.renamings,
            dtype=dtype,
            attn_implementation=ATTENTION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            **options,
        )
    model, report = loaded
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        raise ValueError(
            f"{source}: {len(mismatched)} weights do not fit its config.json, such as {name} of {[*stored]}, which must"
            f" be {[*expected]}: download the model again"
        )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{source}: {len(missing)} weights are not in its files, such as {missing[0]}: download the model again"
        )
    placed.finish_loading(model)
    model.requires_grad_(False)
    nn.Module.to(model, device)
    return model.eval()
