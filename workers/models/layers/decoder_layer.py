"""Runs a decoder layer: its mixer and its feed-forward part between the norms of the residual stream."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ...ops.attention import AttendingPacking, Packing
from ...ops.fused import RmsNorm, Rotations
from ...ops.linear import Merge
from ...parallel.collectives import ResidualStream
from ...parallel.mesh import Mesh
from ...shapes.families import Family
from ...shapes.parts import (
    Dense,
    GatedDelta,
    LatentAttention,
    Layer,
    Mamba,
    Mixer,
    Part,
    RoutedExperts,
    SoftmaxAttention,
)
from .experts import GroupedExperts
from .feed_forward import DenseFeedForward, NormedSparseFeedForward, SparseFeedForward
from .gated_delta import GatedDeltaMixer
from .latent_attention import LatentMixer
from .mamba import MambaMixer
from .norms import NoNorm, norm_of
from .softmax_attention import SoftmaxMixer
from .token_inputs import LayerEnd


class SequenceMixer(Protocol):
    """Mixes the tokens of each sequence.

    is_replicated: whether all ranks along tp have all its weights.
    """

    is_replicated: bool

    def forward(self, x: Tensor, rotations: Rotations, packing: Packing | AttendingPacking) -> Tensor:
        """Returns the update of the residual stream [tokens, hidden] for x [tokens, hidden]."""
        ...

    def merge(self, merge: Merge) -> None:
        """Makes linear layers of one input run as one where that is faster."""
        ...

    def refresh(self, are_original: bool) -> None:
        """Updates what was derived from parameters, after they changed.

        Args:
            are_original: whether merged weights are still those of the parameters.
        """
        ...


class FeedForward(Protocol):
    """Treats each token by itself. experts: None if it is dense."""

    @property
    def experts(self) -> GroupedExperts | None: ...

    def forward(self, x: Tensor, stream: ResidualStream) -> Tensor:
        """Returns the update of the residual stream for x, both as `stream` lays it out."""
        ...

    def merge(self, merge: Merge) -> None: ...

    def refresh(self, are_original: bool) -> None: ...


class DecoderLayer:
    """A decoder layer on transformers' modules, whose linear layers are looked up at each call: `lora` replaces
    them."""

    def __init__(self, module: Any, layer: Layer, number: int, family: Family, mesh: Mesh) -> None:
        names = layer.norms
        self._norms = {name: norm_of(getattr(module, name), family) for name in names.names}
        self._before_mixer, self._before_mlp = (
            NoNorm() if name is None else self._norms[name] for name in (names.before_mixer, names.before_mlp)
        )
        self._after_mixer, self._after_mlp = (
            None if name is None else self._norms[name] for name in (names.after_mixer, names.after_mlp)
        )
        self._mixers = [_mixer(part, module, number, family, mesh) for part in layer.mixers]
        feed_forward = layer.feed_forward
        self._feed_forward = None if feed_forward is None else _feed_forward(feed_forward, module, family, mesh)
        self._experts_name = feed_forward.below("experts") if isinstance(feed_forward, RoutedExperts) else ""
        self._is_parallel = layer.is_parallel
        self._end = LayerEnd(module, layer.token_input is not None) if layer.is_scaled else None
        self._scales = layer.scales or (1.0,) * len(layer.parts)

    @property
    def experts(self) -> dict[str, GroupedExperts]:
        """The routed experts by their path below the layer: at most one entry."""
        experts = None if self._feed_forward is None else self._feed_forward.experts
        return {} if experts is None else {self._experts_name: experts}

    @property
    def _parts(self) -> Sequence[SequenceMixer | FeedForward]:
        return self._mixers if self._feed_forward is None else [*self._mixers, self._feed_forward]

    def refresh(self, are_original: bool) -> None:
        """Updates what was derived from parameters, see SequenceMixer.refresh."""
        for norm in self._norms.values():
            norm.refresh()
        if self._end is not None:
            self._end.refresh()
        for part in self._parts:
            part.refresh(are_original)

    def merge(self, merge: Merge) -> None:
        for part in self._parts:
            part.merge(merge)

    def forward(
        self,
        hidden: Tensor,
        update: Tensor | None,
        token_input: Tensor | None,
        rotations: Rotations,
        packing: Packing | AttendingPacking,
        stream: ResidualStream,
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer on hidden states and the previous layer's update, which is not yet added to them.

        Args:
            token_input: of the layer, [tokens, size] as `stream` lays it out; None if it has none.
        Returns:
            the same pair after this layer.
        """
        if self._is_parallel:
            hidden, x = self._before_mixer.add(hidden, update)
            assert self._feed_forward is not None
            return hidden, self._mixed(x, rotations, packing, stream) + self._feed_forward.forward(x, stream)
        if self._mixers:
            hidden, x = self._before_mixer.add(hidden, update)
            update = self._mixed(x, rotations, packing, stream)
        if self._feed_forward is not None:
            hidden, x = self._before_mlp.add(hidden, update)
            update = _finished(self._feed_forward.forward(x, stream), self._after_mlp, self._scales[-1])
        assert update is not None
        return (hidden, update) if self._end is None else self._end.forward(hidden, update, token_input)

    def _mixed(
        self, x: Tensor, rotations: Rotations, packing: Packing | AttendingPacking, stream: ResidualStream
    ) -> Tensor:
        """Returns the sum of what the mixers make of x, normed and scaled, both as `stream` lays it out."""
        found = []
        for mixer, scale in zip(self._mixers, self._scales, strict=False):
            mixed = mixer.forward(stream.enter(x, mixer.is_replicated), rotations, packing)
            found.append(_finished(stream.leave(mixed, mixer.is_replicated), self._after_mixer, scale))
        return found[0] if len(found) == 1 else found[0] + found[1]


def _finished(update: Tensor, norm: RmsNorm | None, scale: float) -> Tensor:
    """Returns a part's output normed, if there is a norm, and scaled."""
    normed = update if norm is None else norm(update)
    return normed if scale == 1 else normed * scale


def is_recognised(module: Any, layer: Layer, family: Family) -> bool:
    """True if transformers' module has exactly the parts of the layer."""
    norms = [getattr(module, name, None) for name in layer.norms.names]
    return (
        family.defines(module, family.layer)
        and hasattr(module, "per_layer_input_gate") == (layer.token_input is not None)
        and hasattr(module, "layer_scalar") == layer.is_scaled
        and hasattr(module, "experts") == (layer.feed_forward is not None and not layer.feed_forward.name)
        and all(family.is_norm(norm) for norm in norms)
        and all(_is_part(part, _below(module, part.name), family) for part in layer.parts)
    )


def _below(module: Any, name: str) -> Any:
    """Returns the module of this name below a layer, None if there is none; the layer itself for no name."""
    return getattr(module, name, None) if name else module


def _is_part(part: Part, module: Any, family: Family) -> bool:
    is_known = family.defines(module, part.module)
    if isinstance(part, SoftmaxAttention):
        return is_known and SoftmaxMixer.is_recognised(part, module, family)
    if isinstance(part, RoutedExperts) and part.norms is not None:
        norms = [getattr(module, name, None) for name in part.norms.names]
        return is_known and all(family.is_norm(norm) for norm in norms)
    if isinstance(part, Mamba):
        return is_known and MambaMixer.is_recognised(part, module, family)
    return is_known


def _mixer(part: Mixer, module: Any, number: int, family: Family, mesh: Mesh) -> SequenceMixer:
    own = getattr(module, part.name)
    if isinstance(part, SoftmaxAttention):
        return SoftmaxMixer(part, own, number, family, mesh)
    if isinstance(part, LatentAttention):
        return LatentMixer(part, own, number, mesh)
    if isinstance(part, Mamba):
        return MambaMixer(part, own, number, mesh)
    assert isinstance(part, GatedDelta)
    return GatedDeltaMixer(part, own, number, mesh)


def _feed_forward(part: Dense | RoutedExperts, module: Any, family: Family, mesh: Mesh) -> FeedForward:
    if isinstance(part, Dense):
        return DenseFeedForward(part, getattr(module, part.name), mesh)
    if part.norms is not None:
        return NormedSparseFeedForward(part, module, family, mesh)
    return SparseFeedForward(part, module, mesh)
