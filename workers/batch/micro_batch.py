"""Packs validated operations into micro-batches without padding, with the losses to compute, and sorts outputs
back into the client's order."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ..losses import Loss, LossOutput
from ..ops.attention import Packing, pack_lengths
from .bins import balance_bins
from .validated import ValidatedBatch

# Lanes with fewer tokens lose more to small matrix products than they gain by running in parallel.
_LEAST_LANE_TOKENS = 128

Values = TypeVar("Values", np.ndarray, Tensor)


@dataclass(frozen=True)
class MicroBatchSegment:
    """Tokens start:stop of a micro-batch that belong to one operation.

    operation: its index. examples: the indices of its examples, in their order here.
    bounds: where each of these examples starts, counted from `start`, and at the end the number of tokens.
    """

    operation: int
    start: int
    stop: int
    examples: tuple[int, ...]
    bounds: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Objective:
    """Tokens start:stop of a micro-batch, n in all: whole examples of operations that agree in loss, config and weight.

    targets: int64 [n] or [n, K]. inputs: float32, in the same shape. weight: a factor of the loss.
    bounds: where each example starts, and at the end n. segments: those of its operations.
    """

    start: int
    stop: int
    loss: Loss
    config: Mapping[str, float]
    weight: float
    targets: Tensor
    inputs: Mapping[str, Tensor]
    bounds: tuple[int, ...]
    segments: tuple[MicroBatchSegment, ...] = ()

    def evaluate(self, scores: Tensor, tokens: slice) -> LossOutput:
        """Returns the loss for the scores of `tokens`, counted from `start`. Sequence-wise losses need all n tokens."""
        by_sequence = self.loss.sequence_wise
        outputs = []
        for part in map(slice, self.bounds, self.bounds[1:]) if by_sequence else (tokens,):
            inputs = {name: value[part] for name, value in self.inputs.items()}
            outputs.append(self.loss.function(scores[part] if by_sequence else scores, inputs, self.config))
        output = join_outputs(outputs)
        return output if self.weight == 1.0 else LossOutput(self.weight * output.losses, output.metrics)


def join_outputs(parts: list[LossOutput]) -> LossOutput:
    """Concatenates the outputs for consecutive tokens."""
    if len(parts) == 1:
        return parts[0]
    metrics = {name: torch.cat([part.metrics[name] for part in parts]) for name in parts[0].metrics}
    return LossOutput(torch.cat([part.losses for part in parts]), metrics)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Examples packed into one row of tokens.

    tokens, positions: int64 [tokens]; positions restart with each example.
    segments, objectives: in the order of the tokens; each of the two covers all tokens.
    """

    tokens: Tensor
    positions: Tensor
    packing: Packing
    segments: tuple[MicroBatchSegment, ...]
    objectives: tuple[Objective, ...]


@dataclass(frozen=True, eq=False)
class Lane:
    """Micro-batches that run one after the other, in parallel with those of other lanes.

    operations: the indices of the operations that have examples in them.
    """

    operations: frozenset[int]
    num_micro_batches: int
    micro_batches: Iterator[MicroBatch]


def pack(
    operations: Sequence[ValidatedBatch], token_budget: int, device: torch.device, max_lanes: int = 1
) -> list[Lane]:
    """Packs all examples into micro-batches with at most `token_budget` tokens at a time over all lanes.

    An example that is longer than that runs alone. In a micro-batch the examples of an operation are neighbours, and so
    are operations that are scored together.
    """
    places = [(i, j) for i, operation in enumerate(operations) for j in range(len(operation.examples))]
    lengths = [len(operations[i].examples[j].tokens) for i, j in places]
    return [
        Lane(
            frozenset(places[k][0] for members in bins for k in members),
            len(bins),
            (_micro_batch(operations, [places[k] for k in members], device) for members in bins),
        )
        for bins in distribute(lengths, token_budget, max_lanes)
    ]


def select_examples(micro_batch: MicroBatch, bounds: Sequence[tuple[int, int]]) -> MicroBatch:
    """Returns a micro-batch of some of the examples, given their bounds, without segments and objectives."""
    if not bounds:
        return empty_micro_batch(micro_batch.tokens.device)
    tokens, positions = (
        torch.cat([whole[start:stop] for start, stop in bounds])
        for whole in (micro_batch.tokens, micro_batch.positions)
    )
    return MicroBatch(tokens, positions, Packing(pack_lengths([stop - start for start, stop in bounds])), (), ())


def empty_micro_batch(device: torch.device) -> MicroBatch:
    """Returns one token that is not scored, for ranks that only take part in the collectives of others."""
    token = torch.zeros(1, dtype=torch.int64, device=device)
    return MicroBatch(token, token, Packing(pack_lengths([1])), (), ())


def distribute(lengths: Sequence[int], budget: int, max_lanes: int) -> list[list[list[int]]]:
    """Divides the lengths into lanes, and those into bins of indices. Lanes are about equally long and share the
    budget, since they run in parallel."""
    num_lanes = min(max_lanes, len(lengths), sum(lengths) // _LEAST_LANE_TOKENS, budget // max(lengths, default=1))
    if num_lanes < 2:
        return [best_fit_bins(lengths, budget)]
    share = budget // num_lanes
    num_bins = num_lanes * -(-sum(lengths) // (num_lanes * share))
    bins = balance_bins(lengths, num_bins)
    while max(sum(lengths[i] for i in members) for members in bins) > share:
        num_bins += num_lanes
        bins = balance_bins(lengths, num_bins)
    return [[members for members in bins[lane::num_lanes] if members] for lane in range(num_lanes)]


def best_fit_bins(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Returns the indices by bin, by best fit decreasing: the longest first, each in the fullest bin with room."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (rest of the budget, bin), fullest bin first
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(room, (lengths[i],))
        if at < len(room):
            left, chosen = room.pop(at)
        else:
            left, chosen = max(budget, lengths[i]), len(bins)
            bins.append([])
        bins[chosen].append(i)
        insort(room, (left - lengths[i], chosen))
    return bins


def smaller_budget(operation: ValidatedBatch, token_budget: int) -> int | None:
    """Returns half the size of the operation's largest micro-batch, but at least its longest example.

    Returns None if it cannot be smaller: the largest micro-batch is a single example, or this rank has none.
    """
    lengths = [len(example.tokens) for example in operation.examples]
    largest, longest = min(token_budget, sum(lengths)), max(lengths, default=0)
    return max(largest // 2, longest) if largest > longest else None


def _micro_batch(
    operations: Sequence[ValidatedBatch], places: list[tuple[int, int]], device: torch.device
) -> MicroBatch:
    """Packs the examples at these places, (operation, example), an operation's longest first."""
    segments: list[MicroBatchSegment] = []
    start = 0
    for i, members in groupby(sorted(places, key=itemgetter(0)), key=itemgetter(0)):
        examples = tuple(j for _, j in members)
        bounds = (0, *accumulate(len(operations[i].examples[j].tokens) for j in examples))
        segments.append(MicroBatchSegment(i, start, start + bounds[-1], examples, bounds))
        start += bounds[-1]
    tokens = [operations[each.operation].examples[j].tokens for each in segments for j in each.examples]
    lengths = [len(each) for each in tokens]
    scored_together = groupby(segments, key=lambda segment: operations[segment.operation].loss_key)
    return MicroBatch(
        tokens=_tensor(tokens, device),
        positions=_tensor([np.arange(length) for length in lengths], device),
        packing=Packing(pack_lengths(lengths)),
        segments=tuple(segments),
        objectives=tuple(_objective(operations, tuple(members), device) for _, members in scored_together),
    )


def _objective(
    operations: Sequence[ValidatedBatch], segments: tuple[MicroBatchSegment, ...], device: torch.device
) -> Objective:
    operation, start = operations[segments[0].operation], segments[0].start
    examples = [operations[each.operation].examples[j] for each in segments for j in each.examples]
    return Objective(
        start=start,
        stop=segments[-1].stop,
        loss=operation.loss,
        config=operation.config,
        weight=operation.weight,
        targets=_tensor([example.targets for example in examples], device),
        inputs={name: _tensor([example.inputs[name] for example in examples], device) for name in examples[0].inputs},
        bounds=(0, *accumulate(len(example.tokens) for example in examples)),
        segments=segments,
    )


def _tensor(arrays: list[np.ndarray], device: torch.device) -> Tensor:
    """Concatenates arrays [T] and [T, K] to [n], or to [n, largest K] with zeros where one has fewer columns."""
    if any(array.ndim == 2 for array in arrays):
        arrays = [array.reshape(len(array), -1) for array in arrays]
        widest = max(array.shape[1] for array in arrays)
        arrays = [np.pad(array, ((0, 0), (0, widest - array.shape[1]))) for array in arrays]
    return torch.from_numpy(np.concatenate(arrays)).to(device, non_blocking=True)


def in_shape_of(targets: Values, values: Values) -> Values:
    """Returns the view of joined values, [n] or [n, largest K], that belongs to tokens with these targets."""
    if values.ndim == 1:
        return values
    return values[:, 0] if targets.ndim == 1 else values[:, : targets.shape[1]]
