"""The declaration of a part of a layer: what every part says about itself."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal, Self

from ...protocol.parallel_spec import SINGLE, ParallelSpec, ShardedUnit

FLOAT32 = 4
INT32 = 4
INT64 = 8

Style = Literal["colwise", "rowwise", "grouped", "replicate"]


@dataclass(frozen=True)
class Placement:
    """The division of a parameter along `dim` by tp; None if ranks along tp all have it whole.

    Parameters of experts have one row for each expert in addition, and these rows are divided along ep.

    is_gathered: whether fsdp divides it too, and gathers it for use; small ones stay whole.
    is_common: whether the experts of a layer have it in common, so that ep does not divide it.
    """

    unit: ShardedUnit
    dim: int | None
    is_gathered: bool = True
    is_common: bool = False

    @property
    def style(self) -> Style:
        if self.dim is None:
            return "replicate"
        if self.unit == "experts":
            return "grouped"
        return "colwise" if self.dim == 0 else "rowwise"


@dataclass(frozen=True)
class Weight:
    """A parameter of a part.

    name: below the layer, such as self_attn.q_proj.weight. placement: None if every rank has it whole.
    sections: sizes of the parts of the placement's dimension that are divided separately; one by default.
    adapters: names of the pairs of matrices by which adapters adapt this linear layer. Several names share out the
    first sections of its outputs.
    """

    name: str
    shape: tuple[int, ...]
    placement: Placement | None = None
    sections: tuple[int, ...] = ()
    adapters: tuple[str, ...] = ()

    @property
    def split_sections(self) -> tuple[int, ...]:
        assert self.placement is not None and self.placement.dim is not None
        return self.sections or (self.shape[self.placement.dim],)

    def own_shape(self, spec: ParallelSpec) -> tuple[int, ...]:
        """Returns the shape of a rank's part."""
        if self.placement is None:
            return self.shape
        parts = [1] * len(self.shape)
        if self.placement.dim is not None:
            parts[self.placement.dim] *= spec.tp_size_of(self.placement.unit)
        if not self.placement.is_common:
            parts[0] *= spec.ep_size_of(self.placement.unit)
        return tuple(size // num for size, num in zip(self.shape, parts, strict=True))

    def adapter_pairs(self, spec: ParallelSpec) -> Iterator[tuple[int, int]]:
        """Yields a rank's numbers of inputs and outputs for each pair of matrices."""
        if not self.adapters:
            return
        num_outputs, num_inputs = self.own_shape(spec)
        if len(self.adapters) == 1:
            yield num_inputs, num_outputs
            return
        sizes = self.sections[: len(self.adapters)]
        yield from ((num_inputs, num_outputs * size // sum(self.sections)) for size in sizes)


@dataclass(frozen=True)
class Divisible:
    """A number of things that ranks along tp divide evenly.

    by_sp: how ranks along sp share out a rank's part of them: evenly ("divided"), or, if there are more ranks than
    things, with copies ("copied"); None if they do not. or_whole: whether each rank has the unit whole if tp does not
    divide the number.
    """

    unit: ShardedUnit
    number: int
    what: str
    by_sp: Literal["divided", "copied"] | None = None
    or_whole: bool = False

    def suits_sp(self, spec: ParallelSpec) -> bool:
        """True if ranks along sp can share out what a rank along tp has."""
        own = self.number // spec.tp_size_of(self.unit)
        return self.by_sp is None or own % spec.sp == 0 or (self.by_sp == "copied" and spec.sp % own == 0)


@dataclass(frozen=True)
class CacheEntries:
    """Counts what the sampler keeps of a sequence for one layer, on one rank.

    numbers_per_token: keys and values, in the base model's dtype. state_numbers: of the states of a fixed size in the
    base model's dtype; float32_state_numbers: of those in float32.
    """

    numbers_per_token: int = 0
    state_numbers: int = 0
    float32_state_numbers: int = 0


@dataclass(frozen=True)
class View:
    """The tokens that a token attends to: itself and all before it, or the last `window` of these, or those in its part
    of `part_size` tokens.
    """

    window: int | None = None
    part_size: int | None = None


@dataclass(frozen=True)
class IndexFlops:
    """The operations that choose the tokens of attention, in sequences of more than `most` tokens. They have no
    gradient.

    tokens: for each token. pairs: for each token and each one that it may choose.
    """

    tokens: float
    pairs: float
    most: int


@dataclass(frozen=True)
class Flops:
    """The operations of a part's forward pass, two for each multiplication with its addition. Only products count.

    weights: with weights, for each token. states: with states of a recurrence, for each token. scores: for each token
    and each one that it attends to, of which `view` says how many.
    index: of a choice of tokens, None if the part makes none.
    """

    weights: float = 0.0
    states: float = 0.0
    scores: float = 0.0
    view: View = View()
    index: IndexFlops | None = None


def product_flops(weights: Iterable[Weight], spec: ParallelSpec = SINGLE) -> float:
    """Returns the operations for each token of products with a rank's parts of those weights that are matrices."""
    return 2.0 * sum(prod(each.own_shape(spec)) for each in weights if len(each.shape) > 1)


@dataclass(frozen=True)
class Share:
    """A rank's share of a pass, as far as parts need it to count bytes for each of its tokens.

    ulysses: ranks that share out heads in attention; the others along sp form a ring. number_bytes: of a number in the
    base model's dtype. lora_rank: 0 if no adapters are trained. gathers_stream: whether ranks along tp shard the
    residual stream. longest: tokens of the longest sequence. tokens: of a micro-batch, which may have those of several
    adapters if mixes_adapters.
    """

    spec: ParallelSpec
    number_bytes: int
    lora_rank: int
    is_full: bool
    gathers_stream: bool
    longest: int
    tokens: int
    ulysses: int = 1
    mixes_adapters: bool = False

    @property
    def ring(self) -> int:
        return self.spec.sp // self.ulysses

    def stream(self, hidden: int) -> float:
        """Returns the bytes of a state of the residual stream, and of the inverse of its norm."""
        return (self.number_bytes * hidden + FLOAT32) / (self.spec.tp if self.gathers_stream else 1)

    def inputs(self, hidden: int, num_linears: int) -> float:
        """Returns the bytes of the input of trained linear layers, and of its products with adapters' A matrices."""
        return self.number_bytes * (hidden + num_linears * self.lora_rank)


class Part(ABC):
    """A sequence mixer or a feed-forward part.

    placements: by name of a parameter below the layer, how ranks divide it; ranks have all other parameters whole.
    module: the ending of the name of its class in transformers. name: where it is below the layer.
    """

    placements: ClassVar[Mapping[str, Placement]]
    name: str
    module: str

    @abstractmethod
    def weights(self) -> Iterator[Weight]:
        """Yields all parameters, in the order of the module."""

    def adapter_pairs(self, spec: ParallelSpec) -> Iterator[tuple[int, int]]:
        """Yields a rank's numbers of inputs and outputs for each pair of matrices that adapters may have; the numbers
        of its experts are summed."""
        for weight in self.weights():
            yield from weight.adapter_pairs(spec)

    @property
    def of_token(self) -> Self:
        """The part with only those weights that each token uses."""
        return self

    @abstractmethod
    def divisible(self) -> Iterator[Divisible]: ...

    @abstractmethod
    def kept_bytes(self, share: Share) -> float:
        """Returns the bytes for each token that a pass keeps for the backward pass."""

    def working_bytes(self, share: Share) -> float:
        """Returns the bytes for each token that are needed in addition while the part runs backward."""
        return 0.0

    @abstractmethod
    def flops(self, spec: ParallelSpec = SINGLE) -> Flops:
        """Returns the operations of one rank along tp, for all tokens that these ranks have in common."""
