"""Runs a decoder layer: its mixer and its feed-forward part between the norms of the residual stream."""

from typing import Any, Protocol

from torch import Tensor

from ...ops.attention import AttendingPacking, Packing
from ...ops.fused import Rotations, rms_norm
from ...parallel.collectives import ResidualStream
from ...parallel.mesh import Mesh
from ...shapes.families import Family
from ...shapes.parts import Dense, GatedDelta, LatentAttention, Layer, Part, SoftmaxAttention
from ...shapes.parts import Mixer as MixerPart
from ...shapes.parts import RoutedExperts as RoutedExpertsPart
from .dense import DenseFeedForward
from .experts import RoutedExperts
from .gated_delta import GatedDeltaMixer
from .latent_attention import LatentMixer
from .merge import Merge
from .norms import add_norm, norm_of
from .softmax_attention import SoftmaxMixer
from .sparse import SparseFeedForward


class Mixer(Protocol):
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
    def experts(self) -> RoutedExperts | None: ...

    def forward(self, x: Tensor, stream: ResidualStream) -> Tensor:
        """Returns the update of the residual stream for x, both as `stream` lays it out."""
        ...

    def merge(self, merge: Merge) -> None: ...

    def refresh(self, are_original: bool) -> None: ...


class DecoderLayer:
    """A decoder layer on transformers' modules, whose linear layers are looked up at each call: `lora` replaces
    them."""

    def __init__(self, module: Any, layer: Layer, number: int, family: Family, mesh: Mesh) -> None:
        self._names = layer.norms
        self._norms = {name: norm_of(getattr(module, name), family.norm_weight_plus_one) for name in layer.norms.names}
        self._mixer = _mixer(layer.mixer, module, number, family, mesh)
        self._feed_forward = _feed_forward(layer.feed_forward, module, mesh)

    @property
    def experts(self) -> RoutedExperts | None:
        return self._feed_forward.experts

    def refresh(self, are_original: bool) -> None:
        """Updates what was derived from parameters, see Mixer.refresh."""
        for norm in self._norms.values():
            norm.refresh()
        self._mixer.refresh(are_original)
        self._feed_forward.refresh(are_original)

    def merge(self, merge: Merge) -> None:
        self._mixer.merge(merge)
        self._feed_forward.merge(merge)

    def forward(
        self,
        hidden: Tensor,
        update: Tensor | None,
        rotations: Rotations,
        packing: Packing | AttendingPacking,
        stream: ResidualStream,
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer on hidden states and the previous layer's update, which is not yet added to them.

        Returns:
            the same pair after this layer.
        """
        mixer, names = self._mixer, self._names
        hidden, x = self._add_norm(hidden, update, names.before_mixer)
        mixed = mixer.forward(stream.enter(x, mixer.is_replicated), rotations, packing)
        update = self._normed(stream.leave(mixed, mixer.is_replicated), names.after_mixer)
        hidden, x = self._add_norm(hidden, update, names.before_mlp)
        return hidden, self._normed(self._feed_forward.forward(x, stream), names.after_mlp)

    def _add_norm(self, hidden: Tensor, update: Tensor | None, name: str | None) -> tuple[Tensor, Tensor]:
        return add_norm(hidden, update, None if name is None else self._norms[name])

    def _normed(self, update: Tensor, name: str | None) -> Tensor:
        return update if name is None else rms_norm(update, self._norms[name])


def is_recognised(module: Any, layer: Layer, family: Family) -> bool:
    """True if transformers' module has exactly the parts of the layer."""
    norms = [getattr(module, name, None) for name in layer.norms.names]
    return (
        family.defines(module, "DecoderLayer")
        and all(family.defines(norm, "RMSNorm") for norm in norms)
        and all(_is_part(part, getattr(module, part.name, None), family) for part in layer.parts)
    )


def _is_part(part: Part, module: Any, family: Family) -> bool:
    is_known = family.defines(module, part.module)
    return is_known and (not isinstance(part, SoftmaxAttention) or SoftmaxMixer.is_recognised(part, module, family))


def _mixer(part: MixerPart, module: Any, number: int, family: Family, mesh: Mesh) -> Mixer:
    if isinstance(part, SoftmaxAttention):
        return SoftmaxMixer(part, module.self_attn, number, family, mesh)
    if isinstance(part, LatentAttention):
        return LatentMixer(part, module.self_attn, number, mesh)
    assert isinstance(part, GatedDelta)
    return GatedDeltaMixer(part, module.linear_attn, number, mesh)


def _feed_forward(part: Dense | RoutedExpertsPart, module: Any, mesh: Mesh) -> FeedForward:
    if isinstance(part, Dense):
        return DenseFeedForward(part, module.mlp, mesh)
    return SparseFeedForward(part, module.mlp, mesh)
