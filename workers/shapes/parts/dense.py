"""A feed-forward part that all tokens share: a gate, an up and a down projection."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...protocol.parallel_spec import SINGLE, ParallelSpec
from .part import FLOAT32, Divisible, Flops, Part, Placement, Share, Weight, product_flops

_ROWS, _COLUMNS = Placement("mlp", 0), Placement("mlp", 1)


@dataclass(frozen=True, kw_only=True)
class Dense(Part):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without gates.

    name: where it is below the layer. activation: a key of GATES in workers/ops/fused.py, or without gates of UNGATED.
    is_fused: whether one projection computes gate and up.
    names: of the projections to gate and up, and of the one after them; () for the usual ones.
    gate_scale: by which gates are multiplied before the activation.
    """

    hidden: int
    features: int
    name: str = "mlp"
    module: str = "MLP"
    activation: str = "silu"
    has_bias: bool = False
    is_fused: bool = False
    names: tuple[str, ...] = ()
    gate_scale: float = 1.0
    has_gate: bool = True
    placements: ClassVar[Mapping[str, Placement]] = {
        f"mlp.{name}": placement
        for name, placement in {
            "gate_proj.weight": _ROWS,
            "gate_proj.bias": _ROWS,
            "up_proj.weight": _ROWS,
            "up_proj.bias": _ROWS,
            "gate_up_proj.weight": _ROWS,
            "down_proj.weight": _COLUMNS,
        }.items()
    }

    @property
    def linears(self) -> tuple[str, ...]:
        """The names of the projections to gate and up, and of the one after them."""
        if self.names:
            return self.names
        if not self.has_gate:
            return "up_proj", "down_proj"
        return ("gate_up_proj", "down_proj") if self.is_fused else ("gate_proj", "up_proj", "down_proj")

    def weights(self) -> Iterator[Weight]:
        *before, down = self.linears
        sections = (self.features,) * (2 if self.is_fused else 1)
        for name in before:
            yield self._weight(f"{name}.weight", (sum(sections), self.hidden), _ROWS, sections, name)
            if self.has_bias:
                yield self._weight(f"{name}.bias", (sum(sections),), _ROWS, sections)
        yield self._weight(f"{down}.weight", (self.hidden, self.features), _COLUMNS, (), down)
        if self.has_bias:
            yield self._weight(f"{down}.bias", (self.hidden,))

    def _weight(
        self,
        name: str,
        shape: tuple[int, ...],
        placement: Placement | None = None,
        sections: tuple[int, ...] = (),
        *adapters: str,
    ) -> Weight:
        return Weight(f"{self.name}.{name}", shape, placement, sections if len(sections) > 1 else (), adapters)

    def divisible(self) -> Iterator[Divisible]:
        yield Divisible("mlp", self.features, "feed-forward features")

    def kept_bytes(self, share: Share) -> float:
        """Counts gate, up, the gate's activation, and the product of the two; without gates up and its activation.

        Kernels for float32 compute silu of the gate a second time.
        """
        gated = 3 if self.activation == "silu" and share.number_bytes == FLOAT32 else 4
        inputs = share.inputs(self.hidden, len(self.linears))
        return inputs + share.number_bytes * (gated if self.has_gate else 2) * self._own_features(share)

    def working_bytes(self, share: Share) -> float:
        """Counts the gathered gradient, and that by the features. The norm's inputs are already freed."""
        gathered = self.hidden * share.number_bytes if share.gathers_stream else 0
        # On some CPUs the sum with the product of several adapters is not computed in place. One adapter's is part of
        # the weight that multiplies its tokens.
        products = 2 if share.number_bytes == FLOAT32 and share.mixes_adapters else 1
        return gathered + products * share.number_bytes * self._own_features(share)

    def flops(self, spec: ParallelSpec = SINGLE) -> Flops:
        return Flops(product_flops(self.weights(), spec))

    def _own_features(self, share: Share) -> int:
        return self.features // share.spec.tp_size_of("mlp")
