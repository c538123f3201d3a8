"""The layers of Llama-shaped models run without transformers' forward: the same weights, the same numbers, fewer passes
over memory and less Python. What is not recognised to the last module runs as transformers wrote it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from .attention import AttentionKind, CachedPacking, Packing, attend
from .experts import RoutedExperts
from .fused import RmsNorm, RotaryTable, Rotation, add_rms_norm, rms_norm, rotate_heads, swiglu
from .parallel.collectives import Stream
from .parallel.fsdp import ShardedLayers
from .parallel.mesh import Mesh

# The name that a family's classes begin with -> the module of transformers that holds them.
_FAMILIES = {"Llama": "llama", "Mistral": "mistral", "Qwen2": "qwen2", "Qwen3": "qwen3", "Qwen3Moe": "qwen3_moe"}

# Rotations that do not depend on the lengths in a batch.
_FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn"}

# With more tokens than this the CPU gains nothing from a merged product, and loses by its parts lying apart in memory.
_MOST_MERGED_TOKENS = 256

# Makes one linear layer of several of the same input; `out_features` of the result says how to split its output.
Merge = Callable[[Sequence[Any]], Any]


class FusedTrunk:
    """Everything below the unembedding of a recognised model, over the modules that transformers made.

    Its linear layers are looked up at each call: `lora` replaces them.
    """

    def __init__(self, trunk: Any, family: str, mesh: Mesh) -> None:
        self._team, self._is_coupled = mesh.along("tp"), mesh.is_coupled
        self._sharded = ShardedLayers([])
        self._embedding = trunk.embed_tokens
        self._layers = [_Layer(layer, family, mesh) for layer in trunk.layers]
        self._norm = _rms_norm(trunk.norm)
        rotary = trunk.rotary_emb
        self._rotary = RotaryTable(rotary.inv_freq, rotary.attention_scaling)

    def merge(self, merge: Merge) -> None:
        """Has the linear layers of one input run as one where that is faster."""
        for layer in self._layers:
            layer.merge(merge)

    def shard(self, layers: ShardedLayers) -> None:
        """From now on layers are gathered for use."""
        self._sharded = layers

    @property
    def num_gathered_bytes(self) -> int:
        """What all layers take when they are whole."""
        return self._sharded.num_whole_bytes

    def gathered(self) -> AbstractContextManager[None]:
        """Inside, all layers are whole. Of all ranks at once."""
        return self._sharded.held()

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        packing: Packing | CachedPacking,
        own: slice | None = None,
        are_alike: bool = True,
    ) -> Tensor:
        """tokens and positions int64 [tokens]; returns the last hidden states [tokens, hidden].

        own: this rank's tokens, where the tensor-parallel ones share out what lies between the layers' linear parts;
        returns the hidden states of these alone. are_alike: whether expert-parallel ranks all run the same tokens.
        """
        stream = Stream(self._team, own is not None, are_alike)
        hidden, update = self._embedding(tokens if own is None else tokens[own]), None
        if self._is_coupled and torch.is_grad_enabled():
            # A rank whose tokens no adapter adapts takes part in the others' backward pass all the same.
            hidden.requires_grad_()
        rotation = self._rotary.at(positions, packing.longest)
        for number, layer in enumerate(self._layers):
            hidden, update = self._sharded.enter(number, hidden, update)
            hidden, update = self._sharded.leave(number, *layer.forward(hidden, update, rotation, packing, stream))
        return _add_norm(hidden, update, self._norm)[1]


class _Layer:
    def __init__(self, layer: Any, family: str, mesh: Mesh) -> None:
        attention = layer.self_attn
        self._attention, self._mlp = attention, layer.mlp
        self._head_dim = attention.head_dim
        self._kind = AttentionKind(attention.layer_idx, attention.scaling, _window(attention))
        self._input_norm = _rms_norm(layer.input_layernorm)
        self._mlp_norm = _rms_norm(layer.post_attention_layernorm)
        self._query_norm = _rms_norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self._key_norm = _rms_norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self._is_dense = _is(layer.mlp, family, "MLP")
        self._experts = None if self._is_dense else RoutedExperts(layer.mlp, mesh.along("ep"))
        self._merged_qkv: Any = None
        self._merged_gate_up: Any = None
        self._merged_norm: RmsNorm | None = None

    def merge(self, merge: Merge) -> None:
        attention, mlp = self._attention, self._mlp
        self._merged_qkv = merge([attention.q_proj, attention.k_proj, attention.v_proj])
        if self._query_norm is not None and self._key_norm is not None:
            heads = [size // self._head_dim for size in self._merged_qkv.out_features]
            weights = [self._query_norm.weight.expand(heads[0], -1), self._key_norm.weight.expand(heads[1], -1)]
            self._merged_norm = RmsNorm(torch.cat(weights), self._query_norm.eps)
        if self._is_dense:
            self._merged_gate_up = merge([mlp.gate_proj, mlp.up_proj])

    def forward(
        self,
        hidden: Tensor,
        update: Tensor | None,
        rotation: Rotation,
        packing: Packing | CachedPacking,
        stream: Stream,
    ) -> tuple[Tensor, Tensor]:
        """hidden, to which the update of the layer before is still to be added -> the same behind this layer."""
        hidden, x = _add_norm(hidden, update, self._input_norm)
        update = stream.leave(self._attend(stream.enter(x), rotation, packing))
        hidden, x = add_rms_norm(hidden, update, self._mlp_norm)
        return hidden, stream.leave(self._feed_forward(stream.enter(x), stream))

    def _attend(self, x: Tensor, rotation: Rotation, packing: Packing | CachedPacking) -> Tensor:
        rotated = self._merged_heads if self._merges(self._merged_qkv, x) else self._heads
        query, key, value = rotated(x, rotation)
        return self._attention.o_proj(attend(query, key, value, packing, self._kind).flatten(-2))

    def _heads(self, x: Tensor, rotation: Rotation) -> Sequence[Tensor]:
        """Query, key and value [tokens, heads, head_dim], normed and rotated."""
        attention = self._attention
        linears = attention.q_proj, attention.k_proj, attention.v_proj
        query, key, value = (linear(x).unflatten(-1, (-1, self._head_dim)) for linear in linears)
        query = rotate_heads(query, rotation, self._query_norm)
        return query, rotate_heads(key, rotation, self._key_norm), value

    def _merged_heads(self, x: Tensor, rotation: Rotation) -> Sequence[Tensor]:
        heads = self._merged_qkv(x).view(x.shape[0], -1, self._head_dim)
        queries, keys, values = (size // self._head_dim for size in self._merged_qkv.out_features)
        rotated = rotate_heads(heads[:, : queries + keys], rotation, self._merged_norm)
        return *rotated.split((queries, keys), dim=1), heads[:, -values:]

    def _feed_forward(self, x: Tensor, stream: Stream) -> Tensor:
        mlp = self._mlp
        if self._experts is not None:
            return self._experts.forward(x, stream.are_alike)
        if self._merges(self._merged_gate_up, x):
            gate, up = self._merged_gate_up(x).split(self._merged_gate_up.out_features, dim=-1)
        else:
            gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        return mlp.down_proj(swiglu(gate, up))

    def _merges(self, merged: Any, x: Tensor) -> bool:
        """Whether one product of a merged weight is better for x than several of its parts."""
        if merged is None or torch.is_grad_enabled():
            return False
        return not x.is_cpu or x.shape[0] <= _MOST_MERGED_TOKENS


def fused_trunk(trunk: nn.Module, mesh: Mesh | None = None) -> FusedTrunk | None:
    """None for a model that this file does not know through and through. mesh: of the ranks that have it together, None
    = there is one."""
    family = type(trunk).__name__.removesuffix("Model")
    if family not in _FAMILIES or not _recognised(trunk, family):
        return None
    return FusedTrunk(trunk, family, mesh or Mesh())


def _recognised(trunk: Any, family: str) -> bool:
    if any(_is_altered(module) for module in trunk.modules()):
        return False
    return (
        _is(trunk, family, "Model")
        and type(trunk.embed_tokens) is nn.Embedding
        and _is(trunk.norm, family, "RMSNorm")
        and _is(trunk.rotary_emb, family, "RotaryEmbedding")
        and trunk.rotary_emb.rope_type in _FIXED_ROTATIONS
        and all(_is_layer(layer, family, trunk.rotary_emb) for layer in trunk.layers)
    )


def _is_layer(layer: Any, family: str, rotary: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return (
        _is(layer, family, "DecoderLayer")
        and _is(attention, family, "Attention")
        and 2 * len(rotary.inv_freq) == attention.head_dim
        and all(_is(norm, family, "RMSNorm") for norm in norms)
        and (_is(mlp, family, "SparseMoeBlock") or (_is(mlp, family, "MLP") and mlp.config.hidden_act == "silu"))
    )


def _is(module: nn.Module, family: str, role: str) -> bool:
    kind, directory = type(module), _FAMILIES[family]
    home = f"transformers.models.{directory}.modeling_{directory}"
    return kind.__name__ == family + role and kind.__module__ == home


def _is_altered(module: nn.Module) -> bool:
    """Whether somebody (a library that shards or offloads) has hooked into the module's forward."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def _window(attention: Any) -> int | None:
    """Mistral alone keeps it in the config; Llama has none."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return attention.config.sliding_window if _is(attention, "Mistral", "Attention") else None


def _rms_norm(module: Any) -> RmsNorm:
    return RmsNorm(module.weight, torch.tensor(module.variance_epsilon, device=module.weight.device))


def _add_norm(hidden: Tensor, update: Tensor | None, norm: RmsNorm) -> tuple[Tensor, Tensor]:
    if update is None:
        return hidden, rms_norm(hidden, norm)
    return add_rms_norm(hidden, update, norm)
