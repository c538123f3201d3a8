"""Runs the layers of the families in ../shapes/families without transformers' forward.

The weights and the numbers are the same, with fewer passes over memory and less Python. A model in which any module is
not recognised runs as transformers wrote it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.attention import AttendingPacking, Packing
from ..ops.fused import RotaryTable, query_scales
from ..ops.linear import Merge
from ..parallel.collectives import ResidualStream
from ..parallel.expert_counts import ExpertCounts
from ..parallel.mesh import Mesh
from ..parallel.sharded_embedding import ShardedEmbedding
from ..shapes.families import FIXED_ROTATIONS
from ..shapes.model_shape import ModelDescription, ModelShape
from ..shapes.parts import Attention
from .activation_checkpointing import LayerInputs
from .fsdp import ShardedLayers
from .layers import DecoderLayer, GroupedExperts, TokenInputs, is_recognised, norm_of
from .layers.shared_keys import SharingRow

# Stands for the input of the first layer among captured layers.
EMBEDDING = -1


class FusedTrunk:
    """Everything below the unembedding of a recognised model, on the modules that transformers created.

    Its linear layers are looked up at each call, because `lora` replaces them.
    """

    def __init__(self, trunk: Any, shape: ModelShape, mesh: Mesh) -> None:
        self._team, self._is_coupled = mesh.along("tp"), mesh.has_forward_collectives
        self.sharded: ShardedLayers | None = None
        self._layer_inputs: Callable[[], LayerInputs | None] = lambda: None
        self._embed: Callable[[Tensor], Tensor] = trunk.get_input_embeddings()
        self._embedding_scale = shape.embedding_scale
        self._layers = [
            DecoderLayer(module, layer, number, shape.family, mesh)
            for number, (module, layer) in enumerate(zip(trunk.layers, shape.layers, strict=True))
        ]
        size = shape.layers[0].token_input
        self._token_inputs = None if size is None else TokenInputs(trunk, size, mesh.along("tp"))
        self._sources = shape.sources
        self._shares = any(source is not None for source in shape.sources)
        self._norm = norm_of(getattr(trunk, shape.family.last_norm), shape.family)
        self._tables = {each.rotation: _rotary_table(trunk, each) for each in shape.attentions}

    def merge(self, merge: Merge) -> None:
        """Makes the linear layers of one input run as one where that is faster."""
        for layer in self._layers:
            layer.merge(merge)

    def shard(
        self, layers: ShardedLayers, embedding: ShardedEmbedding | None, of_layers: ShardedEmbedding | None
    ) -> None:
        """Makes passes gather the layers from now on.

        The embedding, and that of the layers' inputs for each token, are None if they are whole.
        """
        self.sharded = layers
        self._embed = embedding or self._embed
        if self._token_inputs is not None and of_layers is not None:
            self._token_inputs.embed = of_layers

    def parameters_changed(self, are_original: bool) -> None:
        """Updates what was derived from the modules' parameters, after they changed.

        Args:
            are_original: whether the parameters are the original ones, of which merged weights were made.
        """
        self._norm.refresh()
        if self._token_inputs is not None:
            self._token_inputs.refresh()
        for layer in self._layers:
            layer.refresh(are_original)

    def using_weights(self, gradients: Mapping[str, Tensor] | None) -> AbstractContextManager[None]:
        """Gathers layers from the parameters that the modules have on entry, while inside.

        For `gradients` see ShardedLayer.using_weights.
        """
        return nullcontext() if self.sharded is None else self.sharded.using_weights(gradients)

    def checkpoint_activations(self, layer_inputs: Callable[[], LayerInputs]) -> None:
        """Makes passes keep only the inputs of layers from now on.

        Args:
            layer_inputs: called at the start of each pass.
        """
        self._layer_inputs = layer_inputs

    @property
    def experts(self) -> dict[str, GroupedExperts]:
        """The experts of sparse layers, by their path below the trunk."""
        return {
            f"layers.{number}.{path}": experts
            for number, layer in enumerate(self._layers)
            for path, experts in layer.experts.items()
        }

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

        Args:
            own: this rank's tokens, if tensor-parallel ranks shard the activations between linear layers; only their
                hidden states are returned.
            are_alike: whether expert-parallel ranks all run the same tokens.
            captured: filled with the outputs of the layers whose numbers are its keys; EMBEDDING stands for the
                embedding's.
            expert_counts: see ResidualStream.
        """
        stream = ResidualStream(self._team, own is not None, are_alike, expert_counts)
        # If tensor-parallel ranks all have all tokens, only the first one has the embedding's gradient.
        has_gradient = torch.is_grad_enabled() and (own is not None or self._team.index == 0)
        with torch.set_grad_enabled(has_gradient):
            hidden, update = self.embed(tokens if own is None else tokens[own]), None
        made = self._token_inputs
        of_layers = None if made is None else made.of_layers(tokens, own, hidden, stream)
        packing = SharingRow(packing, self._sources) if self._shares else packing
        captured = captured if captured is not None else {}
        if EMBEDDING in captured:
            captured[EMBEDDING] = hidden
        inputs = self._layer_inputs() if torch.is_grad_enabled() else None
        if torch.is_grad_enabled() and (self._is_coupled or inputs is not None):
            # A rank whose tokens have no adapter must still take part in the backward pass of the others.
            hidden.requires_grad_()
        rotations = {kind: table.at(positions, packing.longest) for kind, table in self._tables.items()}
        for number, layer in enumerate(self._layers):
            if self.sharded is not None:
                hidden, update = self.sharded.before_layer(number, hidden, update)
            forward = partial(layer.forward, rotations=rotations, packing=packing, stream=stream)
            given = hidden, update, None if of_layers is None else of_layers[number]
            after = forward(*given) if inputs is None else self._checkpointed(inputs, number, forward, packing, *given)
            hidden, update = after if self.sharded is None else self.sharded.after_layer(number, *after)
            if number in captured:
                captured[number] = hidden if update is None else hidden + update
        return self._norm.add(hidden, update)[1]

    def _checkpointed(
        self,
        inputs: LayerInputs,
        number: int,
        forward: Callable[..., tuple[Tensor, Tensor]],
        packing: Packing | AttendingPacking,
        hidden: Tensor,
        update: Tensor | None,
        token_input: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Runs a layer and keeps only its inputs, among them what it takes from an earlier layer."""
        if not isinstance(packing, SharingRow):
            hidden, update = inputs.run(number, forward, hidden, update, token_input)
            return hidden, update
        source = self._sources[number]

        def run(
            hidden: Tensor, update: Tensor | None, token_input: Tensor | None, *taken: Tensor
        ) -> tuple[Tensor, ...]:
            row = packing.of_layer(source, taken)
            return *forward(hidden, update, token_input, packing=row), *row.kept(number)

        hidden, update, *made = inputs.run(number, run, hidden, update, token_input, *packing.kept(source))
        packing.keep(number, made)
        return hidden, update

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the input of the first layer [tokens, hidden] for int64 [tokens]."""
        embedded = self._embed(tokens)
        return embedded if self._embedding_scale == 1 else embedded * self._embedding_scale


class TransformersTrunk:
    """Everything below the unembedding by transformers' own modules, for a model that is not recognised.

    It has the methods that callers of both trunks need; their arguments are those of FusedTrunk.
    """

    experts: Mapping[str, GroupedExperts] = {}
    sharded = None

    def __init__(self, trunk: Any, embedding: Any, num_layers: int) -> None:
        self._trunk, self._embedding, self._num_layers = trunk, embedding, num_layers

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embedding(tokens)

    def parameters_changed(self, are_original: bool) -> None:
        """Does nothing: the modules derive nothing from their parameters."""

    def using_weights(self, gradients: Mapping[str, Tensor] | None) -> AbstractContextManager[None]:
        return nullcontext()

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
        with self._capture_outputs(captured or {}):
            output = self._trunk(
                input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, packing=packing
            )
        return output.last_hidden_state.squeeze(0)

    @contextmanager
    def _capture_outputs(self, captured: dict[int, Tensor]) -> Iterator[None]:
        """Makes layers store their outputs in `captured` while inside.

        transformers' own hidden states would not do: the last layer's have the norm applied.
        """

        def kept(layer: int, state: Any) -> None:
            captured[layer] = (state if isinstance(state, Tensor) else state[0]).squeeze(0)

        with ExitStack() as held:
            for layer in captured:
                if layer == EMBEDDING:
                    hook = self._layers[0].register_forward_pre_hook(lambda _, inputs: kept(EMBEDDING, inputs))
                else:
                    hook = self._layers[layer].register_forward_hook(
                        lambda _, inputs, output, layer=layer: kept(layer, output)
                    )
                held.callback(hook.remove)
            yield

    @cached_property
    def _layers(self) -> nn.ModuleList:
        """The layers, whose name in transformers differs between families."""
        lists = (each for each in self._trunk.modules() if isinstance(each, nn.ModuleList))
        return next(each for each in lists if len(each) == self._num_layers)


Trunk = FusedTrunk | TransformersTrunk


def fused_trunk(trunk: nn.Module, shape: ModelDescription, mesh: Mesh | None = None) -> FusedTrunk | None:
    """Returns the fused trunk, or None for a model that is not recognised in every module.

    Args:
        shape: of the trunk's config.
        mesh: the ranks that share the model; None for one.
    """
    if not isinstance(shape, ModelShape) or not shape.runs_own_layers or not _is_recognised(trunk, shape):
        return None
    return FusedTrunk(trunk, shape, mesh or Mesh())


def _is_recognised(trunk: Any, shape: ModelShape) -> bool:
    family = shape.family
    if not family.defines(trunk, family.trunk) or any(_has_hooks(module) for module in trunk.modules()):
        return False
    embedding = trunk.get_input_embeddings()
    is_plain = type(embedding) is nn.Embedding
    return (
        (is_plain if family.embedding is None else family.defines(embedding, family.embedding))
        and family.is_norm(getattr(trunk, family.last_norm, None))
        and _has_fixed_rotations(trunk, shape)
        and all(is_recognised(*pair, family) for pair in zip(trunk.layers, shape.layers, strict=True))
    )


def _has_fixed_rotations(trunk: Any, shape: ModelShape) -> bool:
    """True if rotations do not depend on the input and cover as many features as the layers declare."""
    kinds = {each.rotation: each.rotary_dim for each in shape.attentions if each.rotation is not None}
    if not kinds:
        return True
    rotary = trunk.rotary_emb
    types = [rotary.rope_type] if isinstance(rotary.rope_type, str) else rotary.rope_type.values()
    return (
        shape.family.defines(rotary, shape.family.rotary)
        and FIXED_ROTATIONS.issuperset(types)
        and all(2 * len(_frequencies(trunk, *each)[0]) == each[1] for each in kinds.items())
    )


def _has_hooks(module: nn.Module) -> bool:
    """True if a library (for sharding or offloading) has hooked into the module's forward."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def _rotary_table(trunk: Any, part: Attention) -> RotaryTable:
    (frequencies, scale), growth = _frequencies(trunk, part.rotation, part.rotary_dim), part.growth
    if part.rotary_scale is not None:
        scale = part.rotary_scale
    scales = None if growth is None else partial(query_scales, **asdict(growth))
    return RotaryTable(frequencies, scale, scales)


def _frequencies(trunk: Any, kind: str | None, size: int) -> tuple[Tensor, float]:
    """Returns inverse frequencies, and the scale of cosines and sines.

    Args:
        kind: of the rotations; "" is the only one of a model, None rotates nothing.
        size: rotated features of a head.
    """
    if kind is None:
        return torch.zeros(size // 2, device=trunk.get_input_embeddings().weight.device), 1.0
    rotary, prefix = trunk.rotary_emb, f"{kind}_" if kind else ""
    return getattr(rotary, f"{prefix}inv_freq"), getattr(rotary, f"{prefix}attention_scaling")
