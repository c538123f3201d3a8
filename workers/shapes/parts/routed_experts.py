"""Feed-forward experts, of which a router chooses some for each token, and the experts that all tokens share."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...protocol.parallel_spec import ParallelSpec
from .dense import Dense
from .part import FLOAT32, INT64, Divisible, Placement, Share, Weight

_NAME = "mlp"


@dataclass(frozen=True, kw_only=True)
class RoutedExperts:
    """Experts, of which each token uses `per_token`.

    features: of each expert. saved_block, linears: names in checkpoint files of the whole part, and of an expert's
    gate, up and down. are_stacked: whether files have the matrices of all experts in one tensor, as modules do.
    router, router_weight: where the router is below the part, and its weight below it. router_biases: its other
    parameters.
    corrects_in_block: whether the part holds the buffer with the biases by which the router chooses.
    has_bias: whether the experts have biases. is_transposed: whether matrices are stored [in, out]. alternates: whether
    gates and ups take turns.
    shared: a dense part that all tokens run through in addition. gates_shared: whether a number for each token scales
    its output.
    """

    hidden: int
    num: int
    per_token: int
    features: int
    saved_block: str = _NAME
    linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    are_stacked: bool = False
    router: str = "gate"
    router_weight: str = "weight"
    router_biases: tuple[Weight, ...] = ()
    corrects_in_block: bool = False
    has_bias: bool = False
    is_transposed: bool = False
    alternates: bool = False
    shared: Dense | None = None
    gates_shared: bool = False
    name: str = _NAME
    module: str = "SparseMoeBlock"

    placements: ClassVar[Mapping[str, Placement]] = {
        f"{_NAME}.experts.gate_up_proj": Placement("experts", 1),
        f"{_NAME}.experts.down_proj": Placement("experts", 2),
    }

    def weights(self) -> Iterator[Weight]:
        yield Weight(f"{_NAME}.{self.router}.{self.router_weight}", (self.num, self.hidden))
        yield from self.router_biases
        yield from self._expert_weights()
        if self.shared is not None:
            yield from self.shared.weights()
        if self.gates_shared:
            yield Weight(f"{_NAME}.shared_expert_gate.weight", (1, self.hidden))

    def _expert_weights(self) -> Iterator[Weight]:
        gate_up, down = self.placements
        # Where gates and ups take turns, each rank has whole pairs of one section.
        sections = (2 * self.features,) if self.alternates else (self.features, self.features)
        shapes = [self.num, 2 * self.features, self.hidden], [self.num, self.hidden, self.features]
        dims = (1, 2)
        if self.is_transposed:
            shapes, dims = tuple([num, columns, rows] for num, rows, columns in shapes), (2, 1)
        for name, shape, dim, parts in zip((gate_up, down), shapes, dims, (sections, ()), strict=True):
            yield Weight(name, tuple(shape), Placement("experts", dim), parts)
        if self.has_bias:
            of_features = Placement("experts", 1, is_gathered=False)
            yield Weight(f"{gate_up}_bias", (self.num, 2 * self.features), of_features, sections)
            yield Weight(f"{down}_bias", (self.num, self.hidden), Placement("experts", None, is_gathered=False))

    def adapter_pairs(self, spec: ParallelSpec) -> Iterator[tuple[int, int]]:
        """Yields those of adapters whose experts share the matrices at the side of the hidden states, see
        schemas/models.py, ExpertFactors."""
        features = self.num // spec.ep_size_of("experts") * self.own_features(spec)
        yield from ((self.hidden, features), (self.hidden, features), (features, self.hidden))
        if self.shared is not None:
            yield from self.shared.adapter_pairs(spec)

    def divisible(self) -> Iterator[Divisible]:
        yield Divisible("experts", self.features, "feed-forward features of each expert")
        if self.shared is not None:
            yield from self.shared.divisible()

    def own_features(self, spec: ParallelSpec) -> int:
        """Returns the features of each expert that a rank along tp has."""
        return self.features // spec.tp_size_of("experts")

    def kept_bytes(self, share: Share) -> float:
        """Counts for all experts of a token gate and up, the expert's output before it is weighted, and its product
        with an adapter's A; for the token, its products with the matrices that experts share."""
        numbers = 2 * self.own_features(share.spec) + share.lora_rank + self.hidden
        of_each = share.number_bytes * numbers + (3 if share.spec.ep_size_of("experts") == 1 else 5) * INT64
        of_shared = self.shared.kept_bytes(share) - share.inputs(self.hidden, 0) if self.shared else 0.0
        of_gate = share.number_bytes * (self.hidden + 1) if self.gates_shared else 0.0
        return share.inputs(self.hidden, 3) + self.per_token * of_each + FLOAT32 * self.num + of_shared + of_gate

    def working_bytes(self, share: Share) -> float:
        """Counts the experts' inputs, outputs and weighted outputs, and other ranks' tokens if these are exchanged.

        Assumes that all experts are chosen equally often.
        """
        pairs = self.per_token * (2 if share.spec.ep_size_of("experts") == 1 else 4)
        return share.number_bytes * (pairs + 2) * self.hidden
