"""The sums over some data of an operation, which are added up over segments, ranks and passes."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ..protocol.calls import Failure


@dataclass
class PartialResult:
    """Sums over the data of a segment, of a rank's share, of a part on all ranks, or of all finished parts.

    failure: why the operation contributes nothing; None if all of it succeeded.
    loss, metrics: sums over positions.
    ratios, denominator: see LossOutput and Loss.denominator; for drafts, the ratios include acceptance lengths.
    expert_counts: the tokens of each expert, integers [experts] for each sparse layer; empty if they are not counted.
    flops: the operations that the model needs for them, 0 if they are not counted.
    achieved, possible: operations of everything that ran together with them, and those that the devices could have done
    in that time; 0 if not measured.
    """

    failure: Failure | None = None
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    num_tokens: int = 0
    expert_counts: tuple[np.ndarray, ...] = ()
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
        if other.expert_counts:
            self.expert_counts = sum_counts((self.expert_counts, other.expert_counts))
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
        return found | _expert_balance(self.expert_counts) if self.expert_counts else found


def sum_counts(counts: Iterable[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Adds up counts of experts by layer, of which some may be empty, to int64."""
    given = [of_layers for of_layers in counts if of_layers]
    return tuple(np.stack(of_layer).sum(0, dtype=np.int64) for of_layer in zip(*given, strict=True))


def narrowed(counts: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Returns the counts in the smallest integer dtype that holds them."""
    return tuple(of_layer.astype(np.min_scalar_type(of_layer.max())) for of_layer in counts)


def _expert_balance(counts: tuple[np.ndarray, ...]) -> dict[str, float]:
    """Returns the metrics of balance between experts, with the names and formulas of Tinker's SDK
    (tinker.types.ForwardBackwardOutput)."""
    loads = [of_layer * len(of_layer) / of_layer.sum() for of_layer in counts]  # 1 is an expert's even share
    most = [load.max() - 1 for load in loads]
    return {
        "e_frac_with_tokens:mean": float(np.mean([(load > 0).mean() for load in loads])),
        "e_frac_oversubscribed:mean": float(np.mean([(load > 1).mean() for load in loads])),
        "e_max_violation:mean": float(np.mean(most)),
        "e_max_violation:max": float(np.max(most)),
        "e_min_violation:mean": float(np.mean([load.min() - 1 for load in loads])),
    }
