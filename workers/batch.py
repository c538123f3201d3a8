"""Data to packed micro-batches and back: the only conversion between schema types and tensors, each way.

Reads and checks the data of an operation, packs its sequences into rows without padding, and puts the outputs back in
the client's order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..schemas.errors import OperationError
from ..schemas.training import Datum, ForwardBackwardRequest
from .attention import Packing, pack_lengths
from .losses import LOSSES, Loss

TARGETS = "target_tokens"


@dataclass(frozen=True)
class ModelLimits:
    vocab_size: int
    max_context_length: int


@dataclass(frozen=True, eq=False)
class Row:
    """One checked sequence. tokens int64 [T]; targets int64 [T] or [T, K]; inputs float32 of the targets' shape."""

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Operation:
    """A checked request. weight: multiplies its loss.

    num_tokens: positions that count in the loss. denominator: see Loss.denominator.
    """

    loss_name: str
    loss: Loss
    config: Mapping[str, float]
    weight: float
    rows: tuple[Row, ...]
    num_tokens: int
    denominator: float


@dataclass(frozen=True, eq=False)
class MicroBatchSegment:
    """Tokens start:stop of a micro-batch, n in all, that belong to one operation.

    operation: its index. datums: which of its rows follow one another here. bounds: where each starts, and n.
    targets: int64 [n] or [n, K]. inputs: float32 of the same shape. Rows with fewer targets than K have zeros behind.
    """

    operation: int
    start: int
    stop: int
    datums: tuple[int, ...]
    bounds: tuple[int, ...]
    targets: Tensor
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One packed row. tokens, positions: int64 [tokens], positions restart with each sequence."""

    tokens: Tensor
    positions: Tensor
    packing: Packing
    segments: tuple[MicroBatchSegment, ...]


def read_operation(request: ForwardBackwardRequest, limits: ModelLimits) -> Operation:
    """Raises OperationError naming the datum, the value and the remedy."""
    if request.loss_fn not in LOSSES:
        raise OperationError(f"unknown loss_fn {request.loss_fn!r}: one of {_listed(LOSSES)}")
    if not request.data:
        raise OperationError("the batch is empty: send at least one datum")
    loss = LOSSES[request.loss_fn]
    config = _read_config(request, loss)
    for i, datum in enumerate(request.data):
        _check_names(i, datum, request.loss_fn, loss)
        _check_shapes(i, datum, request.loss_fn, loss, limits)
    _check_ids("model_input", [datum.tokens for datum in request.data], limits)
    _check_ids(TARGETS, [datum.loss_fn_inputs[TARGETS] for datum in request.data], limits)
    rows = tuple(_row(datum, loss, config) for datum in request.data)
    for name in (*loss.required, *loss.optional):
        _check_finite(name, rows)
    counts = np.concatenate([row.inputs[loss.counted_by].ravel() for row in rows])
    num_tokens = sum(_num_counted(row.inputs[loss.counted_by]) for row in rows)
    return Operation(request.loss_fn, loss, config, _loss_weight(request), rows, num_tokens, loss.denominator(counts))


def pack(operations: Sequence[Operation], token_budget: int, device: torch.device) -> Iterator[MicroBatch]:
    """Longest sequences first, as many as fit the budget (one longer than it runs alone); nothing is padded."""
    places = [(i, j) for i, operation in enumerate(operations) for j in range(len(operation.rows))]
    places.sort(key=lambda place: -len(operations[place[0]].rows[place[1]].tokens))
    taken: list[tuple[int, int]] = []
    num_tokens = 0
    for i, j in places:
        length = len(operations[i].rows[j].tokens)
        if taken and num_tokens + length > token_budget:
            yield _micro_batch(operations, taken, device)
            taken, num_tokens = [], 0
        taken.append((i, j))
        num_tokens += length
    yield _micro_batch(operations, taken, device)


def unpack(segment: MicroBatchSegment, values: Tensor, operation: Operation, into: list[np.ndarray | None]) -> None:
    """values [n] or [n, K] of a segment -> float32 of each datum's targets' shape, at its place in `into`."""
    array = values.float().cpu().numpy()
    for datum, start, stop in zip(segment.datums, segment.bounds, segment.bounds[1:], strict=False):
        into[datum] = _cut(array[start:stop], operation.rows[datum].targets)


def _read_config(request: ForwardBackwardRequest, loss: Loss) -> dict[str, float]:
    config = dict(loss.config)
    for key, value in request.loss_fn_config.items():
        if key not in config:
            raise OperationError(f"{request.loss_fn} has no config key {key!r}: {_allowed(loss.config)}")
        if isinstance(value, str) or not np.isfinite(value):
            raise OperationError(f"{request.loss_fn} config {key} is {value!r}: it must be a finite number")
        config[key] = float(value)
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", np.inf)
    if low > high:
        raise OperationError(
            f"{request.loss_fn} config clip_low_threshold {low} exceeds clip_high_threshold {high}:"
            " they are bounds on the ratio itself, such as 0.8 and 1.2"
        )
    return config


def _loss_weight(request: ForwardBackwardRequest) -> float:
    if not np.isfinite(request.loss_weight):
        raise OperationError(f"loss_weight is {request.loss_weight}: it must be a finite number")
    return float(request.loss_weight)


def _check_names(index: int, datum: Datum, loss_name: str, loss: Loss) -> None:
    required = (TARGETS, *loss.required)
    if missing := [name for name in required if name not in datum.loss_fn_inputs]:
        raise OperationError(f"datum {index}: {loss_name} needs the input {_listed(missing)}: it reads {_inputs(loss)}")
    if unknown := [name for name in datum.loss_fn_inputs if name not in required and name not in loss.optional]:
        raise OperationError(f"datum {index}: {loss_name} has no input {_listed(unknown)}: it reads {_inputs(loss)}")


def _check_shapes(index: int, datum: Datum, loss_name: str, loss: Loss, limits: ModelLimits) -> None:
    tokens, targets = datum.tokens, datum.loss_fn_inputs[TARGETS]
    length = len(tokens) if tokens.ndim == 1 else 0
    if not length:
        raise OperationError(f"datum {index}: model_input is empty: send at least one token")
    if length > limits.max_context_length:
        raise OperationError(
            f"datum {index}: model_input has {length} tokens, more than this model's context of"
            f" {limits.max_context_length}: shorten or split it"
        )
    for name, array in (("model_input", tokens), (TARGETS, targets)):
        if array.dtype.kind not in "iu":
            raise OperationError(f"datum {index}: {name} is {array.dtype}: token ids must be integers")
    if targets.ndim != 1 and not (loss.many_targets and targets.ndim == 2 and targets.shape[1]):
        wanted = "[T] or [T, K]" if loss.many_targets else "[T]"
        raise OperationError(f"datum {index}: {TARGETS} has shape {list(targets.shape)}: {loss_name} takes {wanted}")
    if len(targets) != length:
        raise OperationError(
            f"datum {index}: {TARGETS} has {len(targets)} positions, model_input {length}: position i of the targets"
            " is predicted from model_input up to i, so the lengths must be equal"
        )
    for name, array in datum.loss_fn_inputs.items():
        if array.dtype.kind not in "fiub":
            raise OperationError(f"datum {index}: {name} is {array.dtype}: it must be numeric")
        if array.shape != targets.shape:
            raise OperationError(
                f"datum {index}: {name} has shape {list(array.shape)}, {TARGETS} {list(targets.shape)}:"
                " they must be equal"
            )


def _check_ids(name: str, arrays: list[np.ndarray], limits: ModelLimits) -> None:
    ids = np.concatenate([array.ravel() for array in arrays])
    if ids.min() >= 0 and ids.max() < limits.vocab_size:
        return
    at = int(np.argmax((ids < 0) | (ids >= limits.vocab_size)))
    datum, position = _find(at, arrays)
    remedy = "; give a position that is to be ignored weight or advantage 0" if name == TARGETS else ""
    raise OperationError(
        f"datum {datum}: {name} has token id {ids[at]} at position {position}, outside the vocabulary of"
        f" {limits.vocab_size}: ids go from 0 to {limits.vocab_size - 1}{remedy}"
    )


def _check_finite(name: str, rows: tuple[Row, ...]) -> None:
    """The sampler's log-probabilities may be anything where nothing reads them: prompts often have none."""
    arrays = [row.inputs[name] for row in rows]
    values = np.concatenate([array.ravel() for array in arrays])
    if np.isfinite(values).all():
        return
    if name == "logprobs":
        values = np.where(np.concatenate([_reads_logprobs(row) for row in rows]), values, 0.0)
        if np.isfinite(values).all():
            return
    at = int(np.argmin(np.isfinite(values)))
    datum, position = _find(at, arrays)
    raise OperationError(f"datum {datum}: {name} is {values[at]} at position {position}: it must be finite")


def _reads_logprobs(row: Row) -> np.ndarray:
    advantages = row.inputs["advantages"]
    return (advantages != 0) | (row.inputs.get("sequence_ratio_mask", advantages) != 0)


def _find(at: int, arrays: list[np.ndarray]) -> tuple[int, int]:
    """Element `at` of the concatenated arrays -> (datum, position)."""
    for datum, array in enumerate(arrays):
        if at < array.size:
            return datum, at // (array.size // len(array))
        at -= array.size
    raise AssertionError("beyond the last array")


def _row(datum: Datum, loss: Loss, config: Mapping[str, float]) -> Row:
    given = datum.loss_fn_inputs
    targets = given[TARGETS].astype(np.int64)
    # A number beyond float32 becomes infinite, which is then refused with its position.
    with np.errstate(over="ignore"):
        inputs = {name: given[name].astype(np.float32) for name in given if name != TARGETS}
    for name, fill in loss.optional.items():
        if name not in inputs:
            inputs[name] = np.broadcast_to(np.float32(fill(inputs, config)), targets.shape)
    return Row(datum.tokens.astype(np.int64), targets, inputs)


def _num_counted(counts: np.ndarray) -> int:
    return int(np.count_nonzero(counts if counts.ndim == 1 else (counts != 0).any(axis=1)))


def _micro_batch(operations: Sequence[Operation], taken: list[tuple[int, int]], device: torch.device) -> MicroBatch:
    """taken: (operation, row) of each sequence; an operation's sequences become one segment."""
    taken = sorted(taken, key=lambda place: place[0])
    rows = [operations[i].rows[j] for i, j in taken]
    lengths = [len(row.tokens) for row in rows]
    starts = np.cumsum([0, *lengths])
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    segments = []
    for i in dict.fromkeys(i for i, _ in taken):
        members = [k for k, place in enumerate(taken) if place[0] == i]
        bounds = starts[members[0] : members[-1] + 2]
        datums = tuple(taken[k][1] for k in members)
        segments.append(_segment(i, datums, bounds, [rows[k] for k in members], device))
    return MicroBatch(
        tokens=_tensor(np.concatenate([row.tokens for row in rows]), device),
        positions=_tensor(positions, device),
        packing=Packing(pack_lengths(lengths)),
        segments=tuple(segments),
    )


def _segment(
    operation: int, datums: tuple[int, ...], bounds: np.ndarray, rows: list[Row], device: torch.device
) -> MicroBatchSegment:
    return MicroBatchSegment(
        operation=operation,
        start=int(bounds[0]),
        stop=int(bounds[-1]),
        datums=datums,
        bounds=tuple((bounds - bounds[0]).tolist()),
        targets=_tensor(_join([row.targets for row in rows]), device),
        inputs={name: _tensor(_join([row.inputs[name] for row in rows]), device) for name in rows[0].inputs},
    )


def _join(arrays: list[np.ndarray]) -> np.ndarray:
    """[T] and [T, K] arrays one after another: [n], or [n, largest K] with zeros where a row has fewer."""
    if all(array.ndim == 1 for array in arrays):
        return np.concatenate(arrays)
    columns = [array.reshape(len(array), -1) for array in arrays]
    widest = max(array.shape[1] for array in columns)
    return np.concatenate([np.pad(array, ((0, 0), (0, widest - array.shape[1]))) for array in columns])


def _cut(values: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The part of a joined array that has the shape of `targets`, as a copy."""
    if values.ndim == 1:
        return values.copy()
    return values[:, : targets[0].size].reshape(targets.shape).copy()


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _inputs(loss: Loss) -> str:
    optional = f" and optionally {_listed(loss.optional)}" if loss.optional else ""
    return _listed((TARGETS, *loss.required)) + optional


def _allowed(config: Mapping[str, float]) -> str:
    return f"allowed: {_listed(config)}" if config else "it takes none"


def _listed(names: Mapping[str, object] | Sequence[str]) -> str:
    return ", ".join(names)
