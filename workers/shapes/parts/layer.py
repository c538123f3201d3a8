"""A layer: its sequence mixer, its feed-forward part, and the norms around them."""

from collections.abc import Iterator
from dataclasses import dataclass

from ...protocol.parallel_spec import SINGLE, ParallelSpec
from .dense import Dense
from .gated_delta import GatedDelta
from .latent_attention import LatentAttention
from .mamba import Mamba
from .mixer import Mixer
from .part import Divisible, Flops, Part, Weight, product_flops
from .routed_experts import RoutedExperts
from .softmax_attention import SoftmaxAttention

FeedForward = Dense | RoutedExperts

PARTS: tuple[type[Part], ...] = (SoftmaxAttention, LatentAttention, GatedDelta, Mamba, Dense, RoutedExperts)


@dataclass(frozen=True)
class Norms:
    """Names of a layer's norms by position, before and after the mixer and the feed-forward part. None = no norm.

    has_bias: whether all norms of the model have biases, the one after all layers included.
    """

    before_mixer: str | None = "input_layernorm"
    after_mixer: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    has_bias: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters of each norm."""
        return ("weight", "bias") if self.has_bias else ("weight",)

    @property
    def names(self) -> tuple[str, ...]:
        every = (self.before_mixer, self.after_mixer, self.before_mlp, self.after_mlp)
        return tuple(name for name in every if name is not None)


@dataclass(frozen=True)
class Layer:
    """A decoder layer. hidden: features of the residual stream.

    mixer, feed_forward: one of them may be missing. second_mixer: another one of the same input, whose output is added.
    scales: by which the outputs of `parts`, normed, are multiplied; empty for 1. is_parallel: whether the feed-forward
    part has the mixer's input, and both outputs are added; there is no norm but the first one.
    token_input: the features of a further input that the layer has for each token; None if there is none.
    is_scaled: whether the residual stream is scaled by a number of the layer at its end.
    """

    hidden: int
    mixer: Mixer | None
    feed_forward: FeedForward | None
    norms: Norms = Norms()
    second_mixer: Mixer | None = None
    scales: tuple[float, ...] = ()
    is_parallel: bool = False
    token_input: int | None = None
    is_scaled: bool = False

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return tuple(each for each in (self.mixer, self.second_mixer) if each is not None)

    @property
    def kv_source(self) -> int | None:
        """The number of the layer whose keys and values it uses; None for its own."""
        return None if self.mixer is None else self.mixer.kv_source

    @property
    def experts(self) -> RoutedExperts | None:
        """The feed-forward part if that is one of experts, else None."""
        return self.feed_forward if isinstance(self.feed_forward, RoutedExperts) else None

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.mixers if self.feed_forward is None else (*self.mixers, self.feed_forward)

    def weights(self) -> Iterator[Weight]:
        """Yields all parameters of the layer, with names below it."""
        for part in self.parts:
            yield from part.weights()
        yield from self._input_weights()
        for norm in self.norms.names:
            yield from (Weight(f"{norm}.{name}", (self.hidden,)) for name in self.norms.parameters)

    def _input_weights(self) -> Iterator[Weight]:
        if self.token_input is not None:
            yield Weight("per_layer_input_gate.weight", (self.token_input, self.hidden))
            yield Weight("per_layer_projection.weight", (self.hidden, self.token_input))
            yield Weight("post_per_layer_input_norm.weight", (self.hidden,))

    def divisible(self) -> Iterator[Divisible]:
        for part in self.parts:
            yield from part.divisible()

    def flops(self, spec: ParallelSpec = SINGLE) -> Iterator[Flops]:
        """Yields the operations of its parts, and of what it does with its further input, on one rank along tp."""
        yield from (part.flops(spec) for part in self.parts)
        yield Flops(product_flops(self._input_weights()) / spec.tp)
