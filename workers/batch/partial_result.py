"""The sums over some data of an operation, which are added up over segments, ranks and passes."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..protocol.calls import Failure


@dataclass
class PartialResult:
    """Sums over the data of a segment, of a rank's share, of a part on all ranks, or of all finished parts.

    failure: why the operation contributes nothing; None if all of it succeeded.
    loss, metrics: sums over positions.
    ratios, denominator: see LossOutput and Loss.denominator; for drafts, the ratios include acceptance lengths.
    flops: the operations that the model needs for them, 0 if they are not counted.
    achieved, possible: operations of everything that ran together with them, and those that the devices could have done
    in that time; 0 if not measured.
    """

    failure: Failure | None = None
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    num_tokens: int = 0
    denominator: float = 0.0
    flops: float = 0.0
    achieved: float = 0.0
    possible: float = 0.0

    def add(self, other: "PartialResult") -> None:
        """Adds other data of the operation; a failure of either is one of both."""
        self.failure = self.failure or other.failure
        self.loss += other.loss
        self.num_tokens += other.num_tokens
        self.denominator += other.denominator
        self.flops += other.flops
        self.achieved += other.achieved
        self.possible += other.possible
        for name, value in other.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        for name, (numerator, denominator) in other.ratios.items():
            so_far = self.ratios.get(name, (0.0, 0.0))
            self.ratios[name] = so_far[0] + numerator, so_far[1] + denominator

    @staticmethod
    def merge(results: Iterable["PartialResult"]) -> "PartialResult":
        """Adds up the results in their order, from which a failure is the first."""
        whole = PartialResult()
        for result in results:
            whole.add(result)
        return whole

    def client_metrics(self) -> dict[str, float]:
        """Returns the metrics as clients get them.

        Ratios have a numerator and a denominator, too; clients sum these to get the ratio over several operations.
        """
        found = {"loss:sum": self.loss, "num_tokens:sum": float(self.num_tokens)}
        found |= {f"{name}:mean": value / max(self.num_tokens, 1) for name, value in self.metrics.items()}
        for name, (numerator, denominator) in self.ratios.items():
            found |= {f"{name}:mean": numerator / max(denominator, 1.0), f"{name}:sum": numerator}
            found[f"{name}/of:sum"] = denominator
        if self.flops:
            found["model_flops:sum"] = self.flops
        if self.possible:
            found["mfu:mean"] = self.achieved / self.possible
        return found
