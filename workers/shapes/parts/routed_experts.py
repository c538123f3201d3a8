"""Feed-forward experts, of which a router chooses some for each token, and the experts that all tokens share."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from ...protocol.parallel_spec import SINGLE, ParallelSpec
from .dense import Dense
from .part import FLOAT32, INT64, Divisible, Flops, Part, Placement, Share, Weight, product_flops

_NAME = "mlp"
_WHOLE = Placement("experts", None, is_common=True)


@dataclass(frozen=True)
class ExpertNorms:
    """Norms of experts and of the part that all tokens share, which both read the residual stream: names below the
    layer.

    before_shared, after_shared: of the shared part's input and output. before, after: of the experts'.
    """

    before_shared: str
    after_shared: str
    before: str
    after: str

    @property
    def names(self) -> tuple[str, ...]:
        return self.before_shared, self.after_shared, self.before, self.after


@dataclass(frozen=True, kw_only=True)
class RoutedExperts(Part):
    """Experts, of which each token uses `per_token`.

    features: of each expert. latent: features of the vectors that experts map instead of hidden states; linear layers
    project to and from them.
    saved_block, saved_router, linears: names in checkpoint files of the whole part, if not `name`, of the router, if
    not `router`, and of an expert's gate, up and down, or up and down if there are no gates. are_stacked: whether files
    have the matrices of all experts in one tensor, as modules do.
    router, router_weight: where the router is below the part, and its weight below it. router_biases: its other
    parameters.
    block_correction: the part's tensor with the biases by which the router chooses, if the router has none of its own.
    scale: by which the experts' outputs are multiplied in addition to the router's weights. scales_inputs: whether the
    router, which chooses one expert for each token, returns a weight for each, zero for others, and that multiplies
    the inputs of the expert instead of its outputs.
    has_bias: whether the experts have biases. is_transposed: whether matrices are stored [in, out];
    marks_transposed: whether the class of the experts says so, without which peft takes them for [out, in].
    alternates: whether gates and ups take turns.
    shared: a dense part that all tokens run through in addition, inside of this part or next to it.
    gates_shared: whether a number for each token scales its output.
    norms: those that this part has of its own, so that the layer has none before it; None for none. With them the
    router has a norm of its own, too, and a factor of each expert's weights.
    name: "" if the router and the experts are directly below the layer.
    """

    hidden: int
    num: int
    per_token: int
    features: int
    latent: int | None = None
    saved_block: str | None = None
    saved_router: str | None = None
    linears: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    are_stacked: bool = False
    router: str = "gate"
    router_weight: str = "weight"
    router_biases: tuple[Weight, ...] = ()
    block_correction: str | None = None
    scale: float = 1.0
    scales_inputs: bool = False
    has_bias: bool = False
    is_transposed: bool = False
    marks_transposed: bool = True
    alternates: bool = False
    shared: Dense | None = None
    gates_shared: bool = False
    norms: ExpertNorms | None = None
    name: str = _NAME
    module: str = "SparseMoeBlock"

    placements: ClassVar[Mapping[str, Placement]] = {
        f"{_NAME}.experts.gate_up_proj": Placement("experts", 1),
        f"{_NAME}.experts.up_proj": Placement("experts", 1),
        f"{_NAME}.experts.down_proj": Placement("experts", 2),
    }

    def weights(self) -> Iterator[Weight]:
        yield Weight(self.below(f"{self.router}.{self.router_weight}"), (self.num, self.hidden))
        yield from self.router_biases
        yield from self._expert_weights()
        yield from self._latent_weights()
        if self.shared is not None:
            yield from self.shared.weights()
        if self.gates_shared:
            yield Weight(f"{self.name}.shared_expert_gate.weight", (1, self.hidden))
        if self.norms is not None:
            yield from (Weight(f"{norm}.weight", (self.hidden,)) for norm in self.norms.names)

    def below(self, name: str) -> str:
        """Returns the path below the layer of what has this name below the part."""
        return f"{self.name}.{name}" if self.name else name

    @property
    def has_gate(self) -> bool:
        return len(self.linears) == 3

    @property
    def is_misread(self) -> bool:
        """True if peft takes inputs of the matrices for outputs."""
        return self.is_transposed and not self.marks_transposed

    @property
    def matrices(self) -> tuple[str, str]:
        """The names of the two parameters with the matrices of all experts."""
        return "gate_up_proj" if self.has_gate else "up_proj", "down_proj"

    @property
    def _mapped(self) -> int:
        """The features of the vectors that experts map."""
        return self.latent or self.hidden

    def _expert_weights(self) -> Iterator[Weight]:
        before, down = (self.below(f"experts.{name}") for name in self.matrices)
        rows = (2 if self.has_gate else 1) * self.features
        # Where gates and ups take turns, each rank has whole pairs of one section.
        sections = (self.features, self.features) if self.has_gate and not self.alternates else ()
        shapes = [self.num, rows, self._mapped], [self.num, self._mapped, self.features]
        dims = (1, 2)
        if self.is_transposed:
            shapes, dims = tuple([num, columns, rows] for num, rows, columns in shapes), (2, 1)
        for name, shape, dim, parts in zip((before, down), shapes, dims, (sections, ()), strict=True):
            yield Weight(name, tuple(shape), Placement("experts", dim), parts)
        if self.has_bias:
            of_features = Placement("experts", 1, is_gathered=False)
            yield Weight(f"{before}_bias", (self.num, rows), of_features, sections)
            yield Weight(f"{down}_bias", (self.num, self._mapped), Placement("experts", None, is_gathered=False))

    def _latent_weights(self) -> Iterator[Weight]:
        if self.latent is None:
            return
        sizes = {"fc1_latent_proj": (self.latent, self.hidden), "fc2_latent_proj": (self.hidden, self.latent)}
        for name, shape in sizes.items():
            yield Weight(f"{self.name}.{name}.weight", shape, _WHOLE, (), (name,))

    def adapter_pairs(self, spec: ParallelSpec) -> Iterator[tuple[int, int]]:
        """Yields those of adapters whose experts share the matrices at the side of the hidden states, see
        schemas/models.py, ExpertFactors."""
        features = self.num // spec.ep_size_of("experts") * self.own_features(spec)
        yield from ((self._mapped, features),) * (len(self.linears) - 1)
        yield features, self._mapped
        for weight in self._latent_weights():
            yield from weight.adapter_pairs(spec)
        if self.shared is not None:
            yield from self.shared.adapter_pairs(spec)

    @property
    def of_token(self) -> Self:
        return replace(self, num=self.per_token)

    def divisible(self) -> Iterator[Divisible]:
        yield Divisible("experts", self.features, "feed-forward features of each expert")
        if self.shared is not None:
            yield from self.shared.divisible()

    def own_features(self, spec: ParallelSpec) -> int:
        """Returns the features of each expert that a rank along tp has."""
        return self.features // spec.tp_size_of("experts")

    def kept_bytes(self, share: Share) -> float:
        """Counts for all experts of a token gate and up, the expert's output before it is weighted, and its product
        with an adapter's A; for the token, its products with the matrices that experts share, and latent vectors before
        and after the experts."""
        num_features = (2 if self.has_gate else 1) * self.own_features(share.spec)
        numbers = num_features + share.lora_rank + self._mapped
        of_each = share.number_bytes * numbers + (3 if share.spec.ep_size_of("experts") == 1 else 5) * INT64
        of_shared = self.shared.kept_bytes(share) if self.shared else 0.0
        if self.norms is not None:
            of_shared += 3 * share.stream(self.hidden)  # their input, and both outputs
        elif self.shared is not None:
            of_shared -= share.inputs(self.hidden, 0)
        of_gate = share.number_bytes * (self.hidden + 1) if self.gates_shared else 0.0
        of_latents = share.inputs(2 * self.latent, 2) if self.latent else 0.0
        of_token = share.inputs(self.hidden, len(self.linears)) + FLOAT32 * self.num
        return of_token + self.per_token * of_each + of_latents + of_shared + of_gate

    def working_bytes(self, share: Share) -> float:
        """Counts the experts' inputs, outputs and weighted outputs, and other ranks' tokens if these are exchanged.

        Kernels for float32 weight outputs and sum gradients where they are, and the outputs are then free. Assumes that
        all experts are chosen equally often.
        """
        if share.spec.ep_size_of("experts") > 1:
            return share.number_bytes * (4 * self.per_token + 2) * self._mapped
        if share.number_bytes == FLOAT32:
            return share.number_bytes * (self.per_token + 1) * self._mapped
        return share.number_bytes * (2 * self.per_token + 2) * self._mapped

    def flops(self, spec: ParallelSpec = SINGLE) -> Flops:
        """Counts the router whole on each rank along tp, but one with a norm of its own for the rank's own tokens."""
        of_experts = 2.0 * self.per_token * len(self.linears) * self.own_features(spec) * self._mapped
        num_router_ranks = spec.tp if self.norms is not None else 1
        of_router = 2.0 * self.hidden * (self.num / num_router_ranks + self.gates_shared / spec.tp)
        of_shared = self.shared.flops(spec).weights if self.shared is not None else 0.0
        return Flops(of_router + of_experts + product_flops(self._latent_weights(), spec) + of_shared)
