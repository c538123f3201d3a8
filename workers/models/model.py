"""A frozen base model: runs packed rows of tokens to hidden states."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..batch.micro_batch import MicroBatch
from ..ops.attention import AttendingPacking, Packing
from ..ops.kernels import load_kernels_for
from ..ops.linear import FrozenProduct, Merge, soft_capped
from ..parallel.expert_counts import ExpertCounts
from ..parallel.mesh import Mesh
from ..parallel.sequence import ShardedPacking
from ..parallel.token_shard import TokenShard
from ..protocol.worker_config import WorkerConfig
from ..resources.threads import ThreadCount
from ..shapes.layouts.checks import activations_refusal
from ..shapes.model_shape import ModelDescription, ModelShape, describe_model
from ..shapes.other_models import logit_cap_of, logit_scale_of
from .activation_checkpointing import ForwardContext, HostOffload, LayerInputs
from .fused_decoder import FusedTrunk, TransformersTrunk, Trunk, fused_trunk
from .layers import GroupedExperts, activation_of
from .loading import LoadedModel
from .packing_checks import check_modules, check_numbers
from .weights import ModelWeights


class BaseModel:
    """Runs packed rows to hidden states and the unembedding, by layers of our own or by transformers' modules."""

    def __init__(self, config: WorkerConfig, mesh: Mesh | None = None) -> None:
        """Loads and checks the model.

        Args:
            mesh: the ranks that share it; None for one. Its layout becomes the model's own.
        Raises:
            ValueError: the model is not supported, or not with this layout.
        """
        self._mesh = mesh = mesh or Mesh()
        self.loaded = loaded = LoadedModel(config, mesh)
        self.source, self.shape, self.spec = loaded.source, loaded.shape, loaded.spec
        self.model, self.config, self.trunk = loaded.model, loaded.config, loaded.trunk
        self.device, self.dtype = loaded.device, loaded.dtype
        self._layers = self._new_trunk(self.shape, mesh)
        self.runs_own_layers = isinstance(self._layers, FusedTrunk)
        self.weights = weights = ModelWeights(loaded, self._layers, config, mesh)
        self.embedding_name, self.head_name = weights.embedding_name, weights.head_name
        self.unembedding, self.head_bias = weights.unembedding, weights.head_bias
        self.vocab_size = weights.vocab_size
        self.threads = ThreadCount(self.device)
        self.product = FrozenProduct(self.device, self.dtype, self.threads)
        """Multiplies with the frozen weights."""
        if not self.runs_own_layers:
            check_modules(self.source, self.model)
        self.shards_activations = config.tp_activations == "sharded" and self.runs_own_layers
        """True if ranks along tp shard the activations between linear layers in training."""
        # Multiplied into the hidden states, so that it reaches all logits, those of adapters of the head included.
        self._logit_scale = logit_scale_of(self.config)
        self.logit_cap = logit_cap_of(self.config)
        self.activations = config.activations
        self._check_settings(config)
        # On the CPU compiled now, so that the first request does not wait for a compiler.
        load_kernels_for(self.dtype, self.device)
        prefix = self.model.base_model_prefix
        self.experts = {f"{prefix}.{name}": experts for name, experts in self._layers.experts.items()}
        """The experts of sparse layers that run by our own forward, by name."""
        self.is_sparse = any(parameter.dim() > 2 for parameter in self.trunk.parameters())
        """True if some layers have experts, run by us or by transformers."""
        linears = [module.weight.numel() for module in self.trunk.modules() if isinstance(module, nn.Linear)]
        self.weights_per_product = sum(linears) / max(1, len(linears))
        """Weights of a linear layer, on average."""
        if not mesh.has_forward_collectives:
            every = range(loaded.num_layers)
            attending = self.shape.attending_layers if isinstance(self.shape, ModelShape) else every
            check_numbers(self.source, self.model, self._logits, loaded.longest_context, attending)

    def _new_trunk(self, shape: ModelDescription, mesh: Mesh | None) -> Trunk:
        embedding, fused = self.model.get_input_embeddings(), fused_trunk(self.trunk, shape, mesh)
        return TransformersTrunk(self.trunk, embedding, self.loaded.num_layers) if fused is None else fused

    def _check_settings(self, config: WorkerConfig) -> None:
        """Raises ValueError if the layers, as they run, cannot run with these settings."""
        if not self.runs_own_layers and self._mesh.has_forward_collectives:
            raise ValueError(
                f"{self.source}: {self.config.model_type} models do not run with {self.spec}: use replicas"
            )
        if not self.runs_own_layers and config.activations != "keep":
            raise ValueError(activations_refusal(config.model.name, self.config.model_type, config.activations))

    def _logits(self, tokens: Tensor, positions: Tensor, packing: AttendingPacking) -> Tensor:
        """Returns logits by the layers as their modules are now; `check_numbers` changes their windows for a while."""
        trunk = self._new_trunk(describe_model(self.source, self.config.to_dict()), mesh=None)
        hidden = trunk.hidden_states(tokens, positions, packing)
        hidden = hidden if self._logit_scale == 1 else hidden * self._logit_scale
        logits = self.product(hidden, self.unembedding, self.head_bias)
        return soft_capped(logits, self.logit_cap)

    @property
    def is_concurrent(self) -> bool:
        """True if several threads may run rows at the same time.

        Modules of transformers may change state as they run, and ranks that exchange tensors must do so in one order.
        """
        return self.runs_own_layers and not self._mesh.has_forward_collectives

    def adaptable_experts(self) -> dict[str, GroupedExperts]:
        """Returns by name the experts that adapters can adapt, in our own layers or in those of transformers."""
        if self.runs_own_layers:
            return self.experts
        team, linears = self._mesh.expert_team("experts"), self.loaded.expert_linears()
        named = [(name, each) for name, each in self.model.named_modules() if activation_of(each) is not None]
        return {name: GroupedExperts(each, team, linears) for name, each in named} if linears else {}

    def finish_linears(self, merge: Merge, captured_context: Callable[[], ForwardContext]) -> None:
        """Prepares the layers for running, after all linear layers are replaced.

        Args:
            merge: makes one linear layer of several of the same input.
            captured_context: returns the context in which to run a layer again for its backward pass.
        """
        self.weights.check_packed()
        if not isinstance(self._layers, FusedTrunk):
            return
        if self.activations != "keep":
            host = HostOffload(self.device) if self.activations == "offload" else None
            self._layers.checkpoint_activations(lambda: LayerInputs(host, captured_context()))
        if self.weights.is_sharded:
            self.weights.shard(self._layers)
        else:
            self._layers.merge(merge)

    @torch.no_grad()
    def embedded(self, tokens: Tensor) -> Tensor:
        """Returns the input of the first layer [tokens, hidden] for int64 [tokens].

        All ranks call it together, each with its own tokens, because they may keep the embedding in parts.
        """
        return self._layers.embed(tokens)

    def shared_hidden_states(
        self,
        micro_batch: MicroBatch,
        share: TokenShard | None,
        expert_counts: ExpertCounts | None = None,
        captured: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Returns the hidden states of `share.hidden`, [tokens, hidden]; those of all tokens if `share` is None.

        For `expert_counts` and `captured` see FusedTrunk.hidden_states.
        """
        tokens, positions, packing, own = micro_batch.tokens, micro_batch.positions, micro_batch.packing, None
        if share is not None:
            # Also for tensor parallelism alone: the share pads the row, and the packing must cover the padding.
            packing = ShardedPacking.of(packing, share, self._mesh.along("sp"), self.loaded.sequence_split)
            tokens, positions, own = share.of_tokens(tokens), share.of_tokens(positions), share.own_of_tokens
        return self.hidden_states(tokens, positions, packing, own, False, captured, expert_counts)

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
        hidden = self._layers.hidden_states(tokens, positions, packing, own, are_alike, captured, expert_counts)
        return hidden if self._logit_scale == 1 else hidden * self._logit_scale
