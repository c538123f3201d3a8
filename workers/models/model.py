"""Loading a Hugging Face causal LM and running packed rows through it: every private hook of transformers is here."""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.utils import logging as transformers_logging

from ...schemas.errors import OperationError
from ..batch.micro_batch import MicroBatch
from ..ops.attention import ATTENTION, CachedPacking, Packing
from ..ops.kernels import kernels_for
from ..ops.linear import FrozenProduct, laid_out
from ..ops.memory import available_bytes
from ..ops.quantized import QuantizedWeight, check_installed, replace_parameter
from ..ops.threads import Threads
from ..parallel.lookup import SharedEmbedding
from ..parallel.mesh import Mesh, Team
from ..parallel.rows import TokenShare
from ..parallel.sequence import SharedPacking
from ..planner.checks import keeps_all
from ..planner.footprint import gigabytes
from ..protocol.config import WorkerConfig, ZeroStage
from ..protocol.parallel_spec import ParallelSpec
from ..shapes.families import TEXT_PARTS, logit_scale_of
from ..shapes.model_shape import longest_context, refusal_of, refuse_missing_weights, rope_of
from ..shapes.sequence_split import SequenceSplit
from ..shapes.styles import placement_of
from .devices import no_cuda
from .experts import RoutedExperts, runs_as_ours
from .fsdp import Buffers, ShardedLayer, ShardedLayers
from .fused_decoder import EMBEDDING, FusedTrunk, Merge, fused_trunk
from .layer_inputs import Again, HostMemory, LayerInputs
from .packing_checks import check_modules, check_numbers
from .tensor import Placed


def resolve_device(config: WorkerConfig) -> torch.device:
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise no_cuda(config.device, torch.__version__)
    if config.device == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda" if config.device == "auto" else config.device)
    # Process groups want to know which one: of what a rank on Ray sees, it is the first.
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def unique_name(device: torch.device) -> str:
    """That no other device has, on any machine."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_properties(device).uuid}"
    machine = Path("/proc/sys/kernel/random/boot_id")
    return f"{device.type} of {machine.read_text().strip() if machine.exists() else platform.node()}"


def resolve_dtype(config: WorkerConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return torch.float32 if config.dtype == "float32" else torch.bfloat16
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class BaseModel:
    """The frozen base weights and the two things done with them: packed hidden states, and the unembedding.

    trunk: everything below the unembedding; its linear layers are what `lora` wraps. product: with its weights.
    weights_per_product: of a linear layer, on average. experts: of sparse layers that run by our own forward, by name.
    is_sparse: whether some layers have experts, whoever runs them.
    num_parameters: of all ranks together. precision: that it runs in. source: where it was loaded from. spec: the
    ranks that have it together. sequence_split: of those along sp.
    shards_activations: whether those along tp share out what lies between linear layers, in training. activations: as
    WorkerConfig has them.
    unembedding: [vocab, hidden], possibly tied to the embedding; this rank's rows, but for `whole_unembedding` and
    `gathered`, where ranks keep it in parts. head_name, embedding_name: of these parameters.
    """

    def __init__(self, config: WorkerConfig, mesh: Mesh | None = None) -> None:
        """mesh: the ranks that have it together, None = one."""
        mesh = self._mesh = mesh or Mesh()
        self.spec, self.source = mesh.spec, config.model.source
        check_installed("base_quantization", config.base_quantization, "none")
        check_installed("optimizer_states", config.optimizer_states, "float32")
        self._quantization = config.base_quantization
        self._quantized: list[QuantizedWeight] = []
        placed = Placed(mesh)
        self.device = resolve_device(config)
        self.dtype = resolve_dtype(config, self.device)
        self.precision = f"{self.dtype} {config.base_quantization}"
        self.threads = Threads(self.device)
        self.product = FrozenProduct(self.device, self.dtype, self.threads)
        self.model, self._is_text_part = _load(config.model.source, self.dtype, self.device, placed)
        self.splits = placed.splits
        self._sharded, self._left = placed.sharded, placed.left
        self.config: PreTrainedConfig = self.model.config
        own = self.own_parameters()
        self.num_parameters = sum(self._num_parts(name) * each.numel() for name, each in own.items())
        self.sequence_split = _sequence_split(self.config, mesh.spec)
        self.trunk: nn.Module = self.model.base_model
        self._fused = fused_trunk(self.trunk, mesh)
        if self._fused is None:
            check_modules(self.source, self.model)
        self.shards_activations = config.tp_activations == "sharded" and self._fused is not None
        # Hidden states carry it, and so do the logits, those of adapters of the head among them.
        self._logit_scale = logit_scale_of(self.config)
        if self._fused is None and mesh.is_coupled:
            raise ValueError(
                f"{config.model.source}: {self.config.model_type} models do not run with {mesh.spec}: use replicas"
            )
        self.activations = config.activations
        self._zero_stage: ZeroStage = config.zero_stage
        if self._fused is None and config.activations != "keep":
            raise ValueError(keeps_all(config.model.name, self.config.model_type, config.activations))
        # Now, lest the first request waits for a compiler.
        kernels_for(torch.empty(0, dtype=self.dtype, device=self.device))
        self.experts = self._named_experts()
        self.is_sparse = any(parameter.dim() > 2 for parameter in self.trunk.parameters())
        linears = [module.weight.numel() for module in self.trunk.modules() if isinstance(module, nn.Linear)]
        self.weights_per_product = sum(linears) / max(1, len(linears))
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ValueError(f"{config.model.source}: the output head must be a linear layer without bias, got {head}")
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.head_name = names[id(head.weight)]
        self.embedding_name = names[id(self.model.get_input_embeddings().weight)]
        if self.head_name not in (self.embedding_name, *self._sharded):
            # The rows of one that is tied are read one by one, too.
            head.weight.data = laid_out(head.weight.data)
        self.unembedding: Tensor = head.weight
        self.vocab_size = self._num_parts(self.head_name) * len(head.weight)
        self._sharded_head: ShardedLayer | None = None
        if not mesh.is_coupled:
            check_numbers(self.source, self.model, self._logits, config.max_context_length or self.num_positions)

    def _logits(self, tokens: Tensor, positions: Tensor, packing: CachedPacking) -> Tensor:
        """By layers as their modules are now, which may have other windows than later."""
        fused = fused_trunk(self.trunk)
        run = self._by_transformers if fused is None else fused.hidden_states
        return self.product(run(tokens, positions, packing), self.unembedding)

    def saved_name(self, name: str) -> str:
        """Returns what the parameter or module of this name is called in transformers' whole model."""
        prefix = f"{self.model.base_model_prefix}."
        if self._is_text_part and name.startswith(prefix):
            return f"{prefix}{_TEXT_PART}.{name.removeprefix(prefix)}"
        return name

    def is_repeated(self, name: str) -> bool:
        """Whether several ranks put the same tokens through the weights of this name, which all of them have whole."""
        placement = placement_of(name.removeprefix(f"{self.model.base_model_prefix}."))
        return placement is not None and self.spec.tp > self.spec.tp_of(placement.unit)

    def _num_parts(self, name: str) -> int:
        """Of which all ranks together make the whole parameter of this name."""
        num_kept = self.keeping_team.size if name in self._sharded else 1
        return num_kept * prod(split.size for split in self.splits.get(name, {}).values())

    def _named_experts(self) -> dict[str, RoutedExperts]:
        prefix = self.model.base_model_prefix
        return {f"{prefix}.{name}": experts for name, experts in (self._fused.experts if self._fused else {}).items()}

    def adaptable_experts(self) -> dict[str, RoutedExperts]:
        """Returns by name the experts that adapters can adapt: in layers of our own, and in those of transformers."""
        if self._fused is not None:
            return self.experts
        team, linears = self._mesh.expert_team("experts"), self._expert_linears()
        named = [(name, each) for name, each in self.model.named_modules() if runs_as_ours(each)]
        return {name: RoutedExperts(each, team, linears) for name, each in named} if linears else {}

    @cached_property
    def _conversions(self) -> Sequence[Any]:
        """From the tensors of files to parameters, by transformers and peft."""
        return get_model_conversion_mapping(self.model)

    def _expert_linears(self) -> tuple[str, str, str] | None:
        """Returns what gate, up and down of an expert are called in files; None where files have experts together."""
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
        """Returns the name of a linear layer from which transformers' renaming of files, and with it peft's, leads to
        that layer: its own, but where that would be renamed."""
        renamings = [each for each in self._conversions if type(each) is WeightRenaming]
        if _renamed(name, renamings) == name:
            return name
        original = _renamed(name, [each.reverse_transform() for each in reversed(renamings)])
        return original if _renamed(original, renamings) == name else name

    @property
    def num_positions(self) -> int | None:
        """The longest context, None where the model's config does not say."""
        config = self.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None)
        return longest_context(longest, rope_of(config.to_dict()))

    @property
    def num_layers(self) -> int:
        return int(self.config.get_text_config().num_hidden_layers)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Those of generation_config.json, and where it has none those of config.json."""
        generation = self.model.generation_config
        ids = generation.eos_token_id if generation is not None else None
        if ids is None:
            ids = getattr(self.config, "eos_token_id", None)
        if ids is None:
            return ()
        return tuple(ids) if isinstance(ids, list) else (ids,)

    @property
    def is_fused(self) -> bool:
        """Whether its layers run by our own forward."""
        return self._fused is not None

    @property
    def is_concurrent(self) -> bool:
        """Whether several threads may run rows at once. Modules of transformers may change as they run, and ranks
        that exchange tensors do it in one order."""
        return self._fused is not None and not self._mesh.is_coupled

    @property
    def is_sharded(self) -> bool:
        """Whether layers are gathered for use."""
        return bool(self._sharded)

    @property
    def saved_buffers(self) -> list[str]:
        """Names of what is saved of the model beside its parameters."""
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
        """Of all weights on this rank."""
        parameters = {id(parameter): parameter.nbytes for parameter in self.model.parameters()}
        return sum(parameters.values()) + sum(weight.nbytes for weight in self._quantized)

    def movable_tensors(self) -> list[Tensor]:
        """All weights on this rank, none of them in a mapped file any more."""
        parameters = list(self.model.parameters())
        for parameter in parameters:
            if not parameter.data.untyped_storage().resizable():
                parameter.data = parameter.data.clone()
        return [each.data for each in parameters] + [part for weight in self._quantized for part in weight.tensors]

    def quantize(self, module: nn.Module, *names: str) -> None:
        """These parameters of the module, where the base is quantised."""
        if self.is_quantized:
            self._quantized += [replace_parameter(module, name) for name in names]

    @property
    def keeping_team(self) -> Team:
        """Those that share out what `is_kept_in_parts`."""
        return self._mesh.keeping_team

    def is_kept_in_parts(self, name: str) -> bool:
        """Whether of this parameter each rank keeps some rows, and gathers the others for use, or asks for them."""
        return name in self._sharded

    def own_parameters(self) -> dict[str, Tensor]:
        """This rank's parts of all parameters, by name and in the order of names, the same on all ranks: biases that
        another rank adds are among them."""
        own = {name: parameter.data for name, parameter in self.model.named_parameters()} | self._left
        return dict(sorted(own.items()))

    @contextmanager
    def with_weights(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor] | None = None
    ) -> Iterator[None]:
        """Inside, parameters of these names are these tensors, of this rank's parts. gradients: float32, to which those
        of backward passes are added."""
        parameters = {name: each for name, each in self.model.named_parameters() if name in weights}
        with ExitStack() as held:
            if self._fused is not None:
                held.callback(self._fused.refresh, is_made_of_these=True)
            held.callback(_give_back, [(each, each.data) for each in parameters.values()])
            for name, parameter in parameters.items():
                parameter.data = weights[name]
                if gradients is not None:
                    # Rows of an embedding stay where they are.
                    is_gathered = name in self._sharded and name != self.embedding_name
                    _take_gradient(parameter, None if is_gathered else gradients[name])
            if self._fused is not None:
                self._fused.refresh(is_made_of_these=False)
                held.enter_context(self._fused.gathering_others(gradients))
            with self._sparse_embedding(gradients is not None):
                yield

    @contextmanager
    def _sparse_embedding(self, is_wanted: bool) -> Iterator[None]:
        """Inside, what autograd makes of its gradient is not of the size of the vocabulary."""
        embedding: Any = self.model.get_input_embeddings()
        embedding.sparse = is_wanted
        try:
            yield
        finally:
            embedding.sparse = False

    def settle_linears(self, merge: Merge, again: Callable[[], Again]) -> None:
        """With the layers as they are from now on. merge: a way to run several linear layers of one input as one.
        again: what a layer that runs once more on the way back needs to have around it."""
        if self._fused is None:
            return
        if self.activations != "keep":
            host = HostMemory(self.device) if self.activations == "offload" else None
            self._fused.checkpoint(lambda: LayerInputs(host, again()))
        if self.is_sharded:
            self._shard(self._fused)
        elif not self.is_quantized:
            self._fused.merge(merge)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, nothing has to be gathered. Of all ranks at once.

        Raises OperationError where one of them has no memory for the whole model.
        """
        if self._fused is None or not self.is_sharded:
            yield
            return
        self._check_room(self._fused.num_gathered_bytes)
        with self._fused.gathered():
            yield

    def _check_room(self, num_bytes: int) -> None:
        free = [each for each in self._mesh.exchange(available_bytes(self.device)) if each is not None]
        if free and min(free) < num_bytes:
            raise OperationError(
                f"to sample, each rank gathers the whole model, which takes {gigabytes(num_bytes)}, and has"
                f" {gigabytes(min(free))}: serve the model with tp, or sample in workers of their own"
                " (--sampler-workers)",
                "server",
            )

    def whole_unembedding(self) -> AbstractContextManager[None]:
        """Inside, the unembedding is whole, and so is its gradient, if it has one. Of all ranks at once."""
        return nullcontext() if self._sharded_head is None else self._sharded_head.in_use()

    def _shard(self, trunk: FusedTrunk) -> None:
        buffers, numbers = Buffers(), range(len(self.trunk.layers))  # pyright: ignore[reportArgumentType]
        prefixes = [f"{self.model.base_model_prefix}.layers.{number}." for number in numbers]
        by_layer = [[name for name in self._sharded if name.startswith(prefix)] for prefix in prefixes]
        layers = [self._sharded_layer(names, buffers) for names in by_layer if names]
        # One, where they are tied.
        of_ends = sorted({self.embedding_name, self.head_name}.intersection(self._sharded))
        # Each into memory of its own, which nothing else wants.
        ends = {name: self._sharded_layer([name], Buffers()) for name in of_ends}
        self._sharded_head = ends.get(self.head_name)
        embedding: Any = self.model.get_input_embeddings()
        trunk.shard(
            ShardedLayers(layers, self._zero_stage, list(ends.values())),
            SharedEmbedding(embedding, self.keeping_team) if self.embedding_name in ends else None,
        )

    def _sharded_layer(self, names: Sequence[str], buffers: Buffers) -> ShardedLayer:
        return ShardedLayer({name: self.model.get_parameter(name) for name in names}, self.keeping_team, buffers)

    @torch.no_grad()
    def embedded(self, tokens: Tensor) -> Tensor:
        """tokens int64 [tokens]: what goes into the first layer, [tokens, hidden]. Of all ranks at once, each with its
        own: they may keep the embedding in parts."""
        if self._fused is not None:
            return self._fused.embedded(tokens)
        embedding: Any = self.model.get_input_embeddings()
        return embedding(tokens)

    def shared_hidden_states(
        self, micro_batch: MicroBatch, share: TokenShare, captured: dict[int, Tensor] | None = None
    ) -> Tensor:
        """Of `share.hidden`: [tokens, hidden]. captured: see FusedTrunk.hidden_states."""
        team, packing = self._mesh.along("sp"), micro_batch.packing
        # Once it is filled up, on tensor-parallel ranks too.
        shared = packing if share.is_all else SharedPacking.of(packing, share, team, self.sequence_split)
        tokens, positions = share.of_tokens(micro_batch.tokens), share.of_tokens(micro_batch.positions)
        own = share.own_of_tokens
        return self.hidden_states(tokens, positions, shared, own, are_alike=False, captured=captured)

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        packing: Packing | CachedPacking,
        own: slice | None = None,
        are_alike: bool = True,
        captured: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """tokens and positions int64 [tokens]; returns the last hidden states [tokens, hidden].

        own, are_alike, captured: see FusedTrunk.hidden_states.
        """
        if self._fused is not None:
            return self._fused.hidden_states(tokens, positions, packing, own, are_alike, captured)
        return self._by_transformers(tokens, positions, packing, captured)

    def _by_transformers(
        self,
        tokens: Tensor,
        positions: Tensor,
        packing: Packing | CachedPacking,
        captured: dict[int, Tensor] | None = None,
    ) -> Tensor:
        with self._capturing(captured or {}):
            output = self.trunk(
                input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, packing=packing
            )
        hidden = output.last_hidden_state.squeeze(0)
        return hidden if self._logit_scale == 1 else hidden * self._logit_scale

    @contextmanager
    def _capturing(self, captured: dict[int, Tensor]) -> Iterator[None]:
        """Inside, layers leave there what they return: of the last one, transformers' hidden states have the norm."""
        trunk: Any = self.trunk

        def kept(layer: int, state: Any) -> None:
            captured[layer] = (state if isinstance(state, Tensor) else state[0]).squeeze(0)

        with ExitStack() as held:
            for layer in captured:
                if layer == EMBEDDING:
                    hook = trunk.layers[0].register_forward_pre_hook(lambda _, inputs: kept(EMBEDDING, inputs))
                else:
                    hook = trunk.layers[layer].register_forward_hook(
                        lambda _, inputs, output, layer=layer: kept(layer, output)
                    )
                held.callback(hook.remove)
            yield


def _renamed(name: str, renamings: Sequence[Any]) -> str:
    """name: of a linear layer, whose weight is what is renamed."""
    key = f"{name}.weight"
    for each in renamings:
        key, _ = each.rename_source_key(key)
    return key.removesuffix(".weight")


def _give_back(parameters: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """What they were, frozen."""
    for parameter, value in parameters:
        parameter.data, parameter.grad, parameter.requires_grad = value, None, False


def _take_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """gradient: None of a parameter that is gathered later, with its gradient."""
    parameter.requires_grad = True
    parameter.grad_dtype = torch.float32
    parameter.grad = gradient


def _sequence_split(config: PreTrainedConfig, spec: ParallelSpec) -> SequenceSplit:
    if spec.sp == 1:
        return SequenceSplit()
    tp = spec.tp_of("self_attn")
    return SequenceSplit.of(spec.sp, config.num_attention_heads // tp, config.num_key_value_heads // tp)


# Where models that take images, too, have their part for text, and what its weights are called in files of today and
# of earlier versions of transformers, and here.
_TEXT_PART = "language_model"
_TEXT_NAMES = {rf"^{_TEXT_PART}\.lm_head": "lm_head", rf"^(?:model\.)?{_TEXT_PART}\.(?:model\.)?": "model."}


def _load(source: str, dtype: torch.dtype, device: torch.device, placed: Placed) -> tuple[PreTrainedModel, bool]:
    """And whether it is the part for text of a model of images, too."""
    transformers_logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(source)
    if (refusal := refusal_of(config.to_dict())) is not None:
        raise ValueError(f"{source}: {refusal}")
    refuse_missing_weights(source)
    is_text_part = config.model_type in TEXT_PARTS
    of_part = {"config": config.get_text_config(), "key_mapping": _TEXT_NAMES} if is_text_part else {}
    with placed.loading() as options:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation=ATTENTION, output_loading_info=True, **of_part, **options
        )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{source}: {len(missing)} weights are not in its files, such as {missing[0]}: download the model again"
        )
    placed.settle(model)
    model.requires_grad_(False)
    nn.Module.to(model, device)
    return model.eval(), is_text_part
