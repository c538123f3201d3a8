"""Runs the layers of Llama-shaped models without transformers' forward.

The weights and the numbers are the same, with fewer passes over memory and less Python. A model in which any module is
not recognised runs as transformers wrote it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.attention import AttendingPacking, AttentionKind, Packing, attend
from ..ops.fused import GATES, RmsNorm, RotaryTable, Rotation, add_rms_norm, rms_norm, rotate_heads
from ..parallel.collectives import ResidualStream
from ..parallel.mesh import Mesh, Team
from ..parallel.norms import ShardedHeadNorms
from ..parallel.sharded_embedding import ShardedEmbedding
from ..shapes.families import FAMILIES, FIXED_ROTATIONS, Family
from .activation_checkpointing import LayerInputs
from .experts import RoutedExperts
from .fsdp import ShardedLayers

# With more tokens than this a merged product is no faster on the CPU, and its parts, strided views, are slower to read.
_MAX_MERGED_TOKENS = 256

# Stands for the input of the first layer among captured layers.
EMBEDDING = -1

# Makes one linear layer of several of the same input; `out_features` of the result says how to split its output.
Merge = Callable[[Sequence[Any]], Any]


class FusedTrunk:
    """Everything below the unembedding of a recognised model, on the modules that transformers created.

    Its linear layers are looked up at each call, because `lora` replaces them.
    """

    def __init__(self, trunk: Any, family: Family, mesh: Mesh) -> None:
        self._team, self._is_coupled = mesh.along("tp"), mesh.has_forward_collectives
        self._sharded = ShardedLayers([])
        self._layer_inputs: Callable[[], LayerInputs | None] = lambda: None
        self._embed: Callable[[Tensor], Tensor] = trunk.embed_tokens
        self._layers = [_Layer(layer, family, mesh) for layer in trunk.layers]
        self._norm = _rms_norm(trunk.norm, family)
        self._tables = _rotary_tables(trunk.rotary_emb, family)

    def merge(self, merge: Merge) -> None:
        """Makes the linear layers of one input run as one where that is faster."""
        for layer in self._layers:
            layer.merge(merge)

    def shard(self, layers: ShardedLayers, embedding: ShardedEmbedding | None) -> None:
        """Makes passes gather the layers from now on. `embedding` is None if it is whole."""
        self._sharded = layers
        self._embed = embedding or self._embed

    def parameters_changed(self, are_original: bool) -> None:
        """Updates what was derived from the modules' parameters, after they changed.

        Args:
            are_original: whether the parameters are the original ones, of which merged weights were made.
        """
        self._norm.refresh()
        for layer in self._layers:
            layer.refresh(are_original)

    def using_weights(self, gradients: Mapping[str, Tensor] | None) -> AbstractContextManager[None]:
        """Gathers layers from the parameters that the modules have on entry, while inside.

        For `gradients` see ShardedLayer.using_weights.
        """
        return self._sharded.using_weights(gradients)

    def checkpoint_activations(self, layer_inputs: Callable[[], LayerInputs]) -> None:
        """Makes passes keep only the inputs of layers from now on.

        Args:
            layer_inputs: called at the start of each pass.
        """
        self._layer_inputs = layer_inputs

    @property
    def experts(self) -> dict[str, RoutedExperts]:
        """The experts of sparse layers, by their path below the trunk."""
        by_layer = enumerate(layer.experts for layer in self._layers)
        return {f"layers.{number}.mlp.experts": experts for number, experts in by_layer if experts is not None}

    @property
    def num_gathered_bytes(self) -> int:
        """Bytes of all layers when they are gathered."""
        return self._sharded.num_whole_bytes

    def gathered(self) -> AbstractContextManager[None]:
        """Keeps all layers, the embedding and the output head whole while inside. All ranks enter together."""
        return self._sharded.gathered()

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        packing: Packing | AttendingPacking,
        own: slice | None = None,
        are_alike: bool = True,
        captured: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Returns the last hidden states [tokens, hidden] of tokens at positions, both int64 [tokens].

        Args:
            own: this rank's tokens, if tensor-parallel ranks shard the activations between linear layers; only their
                hidden states are returned.
            are_alike: whether expert-parallel ranks all run the same tokens.
            captured: filled with the outputs of the layers whose numbers are its keys; EMBEDDING stands for the
                embedding's.
        """
        stream = ResidualStream(self._team, own is not None, are_alike)
        hidden, update = self._embedded(tokens, own), None
        captured = captured if captured is not None else {}
        if EMBEDDING in captured:
            captured[EMBEDDING] = hidden
        inputs = self._layer_inputs() if torch.is_grad_enabled() else None
        if torch.is_grad_enabled() and (self._is_coupled or inputs is not None):
            # A rank whose tokens have no adapter must still take part in the backward pass of the others.
            hidden.requires_grad_()
        rotations = {kind: table.at(positions, packing.longest) for kind, table in self._tables.items()}
        for number, layer in enumerate(self._layers):
            rotation = rotations[layer.rotation_kind]
            hidden, update = self._sharded.before_layer(number, hidden, update)
            forward = partial(layer.forward, rotation=rotation, packing=packing, stream=stream)
            after = inputs.run(number, forward, hidden, update) if inputs is not None else forward(hidden, update)
            hidden, update = self._sharded.after_layer(number, *after)
            if number in captured:
                captured[number] = hidden if update is None else hidden + update
        return _add_norm(hidden, update, self._norm)[1]

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the input of the first layer [tokens, hidden] for int64 [tokens]."""
        return self._embed(tokens)

    def _embedded(self, tokens: Tensor, own: slice | None) -> Tensor:
        """Embeds this rank's tokens.

        If tensor-parallel ranks all have all tokens, only the first one has the gradient.
        """
        if own is None and self._team.index > 0:
            with torch.no_grad():
                return self._embed(tokens)
        return self._embed(tokens if own is None else tokens[own])


class _Layer:
    """A decoder layer, which rotates its heads with the rotary table `rotation_kind`."""

    def __init__(self, layer: Any, family: Family, mesh: Mesh) -> None:
        attention = layer.self_attn
        self._attention, self._mlp, self._family = attention, layer.mlp, family
        self._head_dim = attention.head_dim
        self._kind = AttentionKind(attention.layer_idx, attention.scaling, _window(attention, family))
        self.rotation_kind = attention.layer_type if family.has_local_rope else ""
        self._norms = {name: _rms_norm(getattr(layer, name), family) for name in family.norms.names}
        self._query_norm: RmsNorm | None = None
        self._key_norm: RmsNorm | None = None
        self._joint_norms: ShardedHeadNorms | None = None
        self._set_head_norms(mesh.tensor_team("self_attn"))
        self._is_dense = _is(layer.mlp, family, "MLP")
        replicated = mesh.spec.replicated
        self._replicates_attention = "self_attn" in replicated
        self._replicates_features = ("mlp" if self._is_dense else "experts") in replicated
        self.experts: RoutedExperts | None = None
        if not self._is_dense:
            self.experts = RoutedExperts(
                layer.mlp.experts, mesh.expert_team("experts"), family.expert_linears, layer.mlp.gate
            )
        self._activated = GATES[family.activation]
        config, tp = attention.config, mesh.spec.tp_size_of("self_attn")
        heads = config.num_attention_heads // tp, config.num_key_value_heads // tp
        self._qkv_features = [number * self._head_dim for number in (heads[0], heads[1], heads[1])]
        self._may_merge = True
        self._merged_qkv: Any = None
        self._merged_gate_up: Any = None
        self._merged_norm: RmsNorm | None = None

    def _set_head_norms(self, team: Team) -> None:
        attention, family = self._attention, self._family
        if family.norms_heads is None:
            return
        query, key = _rms_norm(attention.q_norm, family), _rms_norm(attention.k_norm, family)
        if family.norms_heads == "together":
            self._joint_norms = ShardedHeadNorms(query, key, team)
        else:
            self._query_norm, self._key_norm = query, key

    def refresh(self, are_original: bool) -> None:
        """Updates the norms. `are_original`: whether merged weights are still those of the parameters."""
        self._may_merge = are_original
        for norm in (*self._norms.values(), self._query_norm, self._key_norm):
            if norm is not None:
                norm.refresh()
        for norm in self._joint_norms.parts if self._joint_norms is not None else ():
            norm.refresh()

    def merge(self, merge: Merge) -> None:
        attention, mlp = self._attention, self._mlp
        if self._family.has_fused_projections:
            return
        if self._joint_norms is None:
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
        packing: Packing | AttendingPacking,
        stream: ResidualStream,
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer on hidden states and the previous layer's update, which is not yet added to them.

        Returns:
            the same pair after this layer.
        """
        norms = self._family.norms
        hidden, x = self._add_norm(hidden, update, norms.before_attention)
        is_replicated = self._replicates_attention
        update = stream.leave(self._attend(stream.enter(x, is_replicated), rotation, packing), is_replicated)
        hidden, x = self._add_norm(hidden, self._normed(update, norms.after_attention), norms.before_mlp)
        is_replicated = self._replicates_features
        update = stream.leave(self._feed_forward(stream.enter(x, is_replicated), stream), is_replicated)
        return hidden, self._normed(update, norms.after_mlp)

    def _add_norm(self, hidden: Tensor, update: Tensor | None, name: str | None) -> tuple[Tensor, Tensor]:
        return _add_norm(hidden, update, None if name is None else self._norms[name])

    def _normed(self, update: Tensor, name: str | None) -> Tensor:
        return update if name is None else rms_norm(update, self._norms[name])

    def _attend(self, x: Tensor, rotation: Rotation, packing: Packing | AttendingPacking) -> Tensor:
        rotated = self._merged_heads if self._merges(self._merged_qkv, x) else self._heads
        query, key, value = rotated(x, rotation)
        return self._attention.o_proj(attend(query, key, value, packing, self._kind).flatten(-2))

    def _heads(self, x: Tensor, rotation: Rotation) -> Sequence[Tensor]:
        """Returns query, key and value [tokens, heads, head_dim], normed and rotated."""
        query, key, value = self._projected(x)
        if self._joint_norms is not None:
            query, key = self._joint_norms.normed(query, key)
        query, key, value = (each.unflatten(-1, (-1, self._head_dim)) for each in (query, key, value))
        query = rotate_heads(query, rotation, self._query_norm)
        return query, rotate_heads(key, rotation, self._key_norm), value

    def _projected(self, x: Tensor) -> Sequence[Tensor]:
        attention = self._attention
        if not self._family.has_fused_projections:
            return [linear(x) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
        query, key, value = attention.qkv_proj(x).split(self._qkv_features, dim=-1)
        # Cloned, since the view of the values that backward keeps would hold the queries and keys too.
        return query, key, value.clone() if torch.is_grad_enabled() else value

    def _merged_heads(self, x: Tensor, rotation: Rotation) -> Sequence[Tensor]:
        heads = self._merged_qkv(x).view(x.shape[0], -1, self._head_dim)
        queries, keys, values = (size // self._head_dim for size in self._merged_qkv.out_features)
        rotated = rotate_heads(heads[:, : queries + keys], rotation, self._merged_norm)
        return *rotated.split((queries, keys), dim=1), heads[:, -values:]

    def _feed_forward(self, x: Tensor, stream: ResidualStream) -> Tensor:
        if self.experts is not None:
            return self.experts.forward(x, stream.ep_ranks_share_tokens)
        return self._mlp.down_proj(self._activated(*self._gate_and_up(x)))

    def _gate_and_up(self, x: Tensor) -> Sequence[Tensor]:
        mlp = self._mlp
        if self._family.has_fused_projections:
            return mlp.gate_up_proj(x).chunk(2, dim=-1)
        if self._merges(self._merged_gate_up, x):
            return self._merged_gate_up(x).split(self._merged_gate_up.out_features, dim=-1)
        return mlp.gate_proj(x), mlp.up_proj(x)

    def _merges(self, merged: Any, x: Tensor) -> bool:
        if merged is None or not self._may_merge or torch.is_grad_enabled():
            return False
        return not x.is_cpu or x.shape[0] <= _MAX_MERGED_TOKENS


def fused_trunk(trunk: nn.Module, mesh: Mesh | None = None) -> FusedTrunk | None:
    """Returns the fused trunk, or None for a model that is not recognised in every module.

    Args:
        mesh: the ranks that share the model; None for one.
    """
    config: Any = getattr(trunk, "config", None)
    family = FAMILIES.get(getattr(config, "model_type", ""))
    if family is None or not _is_recognised(trunk, family):
        return None
    return FusedTrunk(trunk, family, mesh or Mesh())


def _is_recognised(trunk: Any, family: Family) -> bool:
    if any(_has_hooks(module) for module in trunk.modules()):
        return False
    embedding, config = trunk.embed_tokens, trunk.config
    return (
        _is(trunk, family, family.trunk)
        and (type(embedding) is nn.Embedding if family.embedding is None else _is(embedding, family, family.embedding))
        and _is(trunk.norm, family, "RMSNorm")
        and getattr(config, family.activation_key) == family.activation
        and _has_fixed_rotations(trunk, family)
        and all(_is_layer(layer, family) for layer in trunk.layers)
    )


def _has_fixed_rotations(trunk: Any, family: Family) -> bool:
    """True if rotations do not depend on the input and cover whole heads."""
    rotary = trunk.rotary_emb
    kinds = rotary.rope_type.values() if family.has_local_rope else [rotary.rope_type]
    return (
        _is(rotary, family, "RotaryEmbedding")
        and FIXED_ROTATIONS.issuperset(kinds)
        and {2 * len(each) for each, _ in _frequencies(rotary, family).values()}
        == {layer.self_attn.head_dim for layer in trunk.layers}
    )


def _is_layer(layer: Any, family: Family) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(layer, name, None) for name in family.norms.names]
    norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return (
        _is(layer, family, "DecoderLayer")
        and _is(attention, family, "Attention")
        and hasattr(attention, "q_norm") == (family.norms_heads is not None)
        and hasattr(attention, "qkv_proj") == family.has_fused_projections
        and all(_is(norm, family, "RMSNorm") for norm in norms)
        and (_is(mlp, family, "SparseMoeBlock") or _is(mlp, family, "MLP"))
    )


def _is(module: Any, family: Family, role: str) -> bool:
    kind = type(module)
    home = f"transformers.models.{family.module}.modeling_{family.module}"
    return kind.__name__ == family.name + role and kind.__module__ == home


def _has_hooks(module: nn.Module) -> bool:
    """True if a library (for sharding or offloading) has hooked into the module's forward."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def _window(attention: Any, family: Family) -> int | None:
    """Returns the layer's window, which some families keep only in the config."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return attention.config.sliding_window if family.windows == "every" else None


def _frequencies(rotary: Any, family: Family) -> Mapping[str, tuple[Tensor, float]]:
    """Returns inverse frequencies and the scale of cosines and sines by kind of layer, or under "" if shared."""
    if not family.has_local_rope:
        return {"": (rotary.inv_freq, rotary.attention_scaling)}
    return {
        kind: (getattr(rotary, f"{kind}_inv_freq"), getattr(rotary, f"{kind}_attention_scaling"))
        for kind in rotary.rope_type
    }


def _rotary_tables(rotary: Any, family: Family) -> dict[str, RotaryTable]:
    return {kind: RotaryTable(*of_kind) for kind, of_kind in _frequencies(rotary, family).items()}


def _rms_norm(module: Any, family: Family) -> RmsNorm:
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return RmsNorm(module.weight, torch.tensor(eps, device=module.weight.device), family.norm_weight_plus_one)


def _add_norm(hidden: Tensor, update: Tensor | None, norm: RmsNorm | None) -> tuple[Tensor, Tensor]:
    if norm is None:
        total = hidden if update is None else hidden + update
        return total, total
    if update is None:
        return hidden, rms_norm(hidden, norm)
    return add_rms_norm(hidden, update, norm)
