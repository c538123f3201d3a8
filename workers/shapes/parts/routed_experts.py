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
    gate, up and down.
    router: where the router is below the part.
    shared: a dense part that all tokens run through in addition. gates_shared: whether a number for each token scales
    its output.
    """

    hidden: int
    num: int
    per_token: int
    features: int
    saved_block: str = _NAME
    linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    shared: Dense | None = None
    gates_shared: bool = False
    name: str = _NAME
    module: str = "SparseMoeBlock"

    placements: ClassVar[Mapping[str, Placement]] = {
        f"{_NAME}.experts.gate_up_proj": Placement("experts", 1),
        f"{_NAME}.experts.down_proj": Placement("experts", 2),
    }

    def weights(self) -> Iterator[Weight]:
        yield Weight(f"{_NAME}.{self.router}.weight", (self.num, self.hidden))
        gate_up, down = self.placements
        features = self.features, self.features
        yield Weight(gate_up, (self.num, sum(features), self.hidden), self.placements[gate_up], features)
        yield Weight(down, (self.num, self.hidden, self.features), self.placements[down])
        if self.shared is not None:
            yield from self.shared.weights()
        if self.gates_shared:
            yield Weight(f"{_NAME}.shared_expert_gate.weight", (1, self.hidden))

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
