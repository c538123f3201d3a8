"""Splits data into pieces of bounded size, and merges the outputs of the passes over the pieces."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from .training import Datum, ForwardBackwardOutput


def split_into_chunks(data: Sequence[Datum], max_datums: int, max_bytes: int) -> Iterator[tuple[Datum, ...]]:
    """Yields consecutive pieces within both limits; a datum larger than max_bytes is a piece by itself."""
    piece: list[Datum] = []
    size = 0
    for datum in data:
        more = num_bytes(datum)
        if piece and (len(piece) == max_datums or size + more > max_bytes):
            yield tuple(piece)
            piece, size = [], 0
        piece.append(datum)
        size += more
    yield tuple(piece)


def num_bytes(datum: Datum) -> int:
    return datum.tokens.nbytes + sum(array.nbytes for array in datum.loss_fn_inputs.values())


def merge_outputs(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Merges the outputs of one call's chunks into one. Metrics without a known reduction are dropped."""
    if len(outputs) == 1:
        return outputs[0]
    metrics = merge_metrics([output.metrics for output in outputs], [len(output.loss_fn_outputs) for output in outputs])
    rows = tuple(row for output in outputs for row in output.loss_fn_outputs)
    refs = tuple(ref for output in outputs for ref in output.feature_refs)
    return ForwardBackwardOutput(rows, metrics, outputs[0].loss_fn_output_type, refs)


def merge_metrics(of_passes: Sequence[Mapping[str, float]], sizes: Sequence[float]) -> dict[str, float]:
    """Merges the metrics of passes by the reduction in their names; those without a known one, or that a pass does not
    have, are dropped. Means without sums are weighted by `sizes`."""
    if len(of_passes) == 1:  # arrays would take fifty times as long, and a history has thousands of such steps
        metrics = {name: float(one) for name, one in of_passes[0].items() if name.rpartition(":")[2] in _REDUCTIONS}
        return metrics | _ratios(metrics)
    weights, metrics = np.maximum(np.asarray(sizes, np.float64), 1e-9), {}
    for name in of_passes[0]:
        reduce = _REDUCTIONS.get(name.rpartition(":")[2])
        if reduce and all(name in one for one in of_passes):
            metrics[name] = reduce(np.asarray([one[name] for one in of_passes]), weights)
    return metrics | _ratios(metrics)


def _ratios(metrics: Mapping[str, float]) -> dict[str, float]:
    """Recomputes means whose numerator and denominator are reported as sums, because averages of means are wrong."""
    names = [name.removesuffix("/of:sum") for name in metrics if name.endswith("/of:sum")]
    return {
        f"{name}:mean": metrics[f"{name}:sum"] / max(metrics[f"{name}/of:sum"], 1.0)
        for name in names
        if {f"{name}:sum", f"{name}:mean"} <= metrics.keys()
    }


# reduction -> (values by chunk, number of datums by chunk) -> value
_REDUCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "sum": lambda values, sizes: float(values.sum()),
    "min": lambda values, sizes: float(values.min()),
    "max": lambda values, sizes: float(values.max()),
    "mean": lambda values, sizes: float(np.average(values, weights=sizes)),
}
