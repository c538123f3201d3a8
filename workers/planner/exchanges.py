"""Estimates the time that a layout takes for a token, from what its ranks compute, send and read. Imports no torch.

Passes are bound by products and exchanges, decode steps by reading and exchanges: only these are counted.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from ..protocol.parallel_spec import AXES, ParallelSpec
from ..protocol.worker_config import LEAST_PASS_TOKENS
from ..shapes.layouts.flops import ModelFlops, OwnFlops
from ..shapes.layouts.parameters import ParameterGroup, parameters
from ..shapes.model_shape import ModelShape
from ..shapes.parts import Exchange, Layer, Share
from .activations import share_of
from .estimate import output_head
from .speeds import Speeds
from .workload import Workload

# Samples that are drawn at a time, by all ranks together, and the tokens that each has in the cache.
SAMPLES = 64
SAMPLE_TOKENS = 2048

_FLOAT32 = 4


@dataclass(frozen=True)
class TokenCost:
    """The time and bytes for one token of all ranks' work together.

    compute_seconds: for the products of a pass, forward and backward.
    sent: bytes that a rank sends in a pass for one of its tokens, forward and backward. pass_seconds: for that.
    decode_sent: bytes that a rank sends to sample one token. decode_seconds: for that, and to read weights and cache.
    All are 0 for ranks that do not train, or do not sample.
    """

    compute_seconds: float = 0.0
    sent: float = 0.0
    pass_seconds: float = 0.0
    decode_sent: float = 0.0
    decode_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Returns the time to train on a token, which the same ranks may have sampled before."""
        return self.compute_seconds + self.pass_seconds + self.decode_seconds


def training_cost(shape: ModelShape, spec: ParallelSpec, load: Workload, speeds: Speeds) -> TokenCost:
    """Returns the cost of ranks that train, and also sample if the load says so."""
    exchanged = list(_in_pass(shape, spec, load))
    tokens = _pass_tokens(spec, load)
    decoding = sampling_cost(shape, spec, load, speeds) if load.samples else TokenCost()
    return replace(
        decoding,
        compute_seconds=rank_flops(shape, spec, load) / speeds.flops_per_second / (spec.num_data_shares * spec.sp),
        sent=sum(each.num_bytes for each in exchanged) / tokens,
        pass_seconds=exchange_seconds(spec, exchanged, speeds) / tokens,
    )


def sampling_cost(shape: ModelShape, spec: ParallelSpec, load: Workload, speeds: Speeds) -> TokenCost:
    """Returns the cost of a decode step for each of its tokens. Ranks along tp and ep decode the same samples."""
    num_teams = spec.num_ranks // (spec.tp * spec.ep)
    num_samples = max(1, SAMPLES // num_teams)
    exchanged = list(_in_decode_step(shape, spec, load, num_samples))
    table = parameters(shape, spec)
    head = output_head(table)
    # A step reads few rows of embeddings, unless one is also the head.
    weights = (each for each in table if each is head or "embed" not in each.pattern)
    read = sum(_read_of(each, shape, num_samples) for each in weights) * load.number_bytes
    cached = num_samples * SAMPLE_TOKENS * shape.cache_size(spec, load.number_bytes).bytes_per_token
    seconds = (read + cached) / speeds.memory_bytes_per_second + exchange_seconds(spec, exchanged, speeds)
    num_tokens = num_samples * num_teams
    return TokenCost(
        decode_sent=sum(each.num_bytes for each in exchanged) / num_tokens, decode_seconds=seconds / num_tokens
    )


def rank_flops(shape: ModelShape, spec: ParallelSpec, load: Workload) -> float:
    """Returns the operations of a rank for each of its tokens in a pass over sequences of the longest length.

    Counts adapters of all linear layers, the layers that the backward pass computes again, and what each of the ranks
    along tp computes for the same tokens.
    """
    import numpy as np  # imported late: the command line starts without it

    lengths, along_tp = np.array([load.longest]), ParallelSpec(tp=spec.tp, replicated=spec.replicated)
    counts = ModelFlops(shape, along_tp)
    own = OwnFlops(_adapter_flops(shape, along_tp, load.effective_lora_rank), trains_base=load.training == "full")
    of_pass = counts.of_pass(lengths, own, num_trained=load.longest)
    again = 0.0 if load.activations == "keep" else counts.trunk(lengths) + load.longest * own.trunk
    return (of_pass + again) / load.longest


def _adapter_flops(shape: ModelShape, spec: ParallelSpec, lora_rank: int) -> float:
    """Returns the operations of the adapters' products in a forward pass, for each token."""
    features = sum(number * _adapter_features(layer, spec) for layer, number in Counter(shape.layers).items())
    return 2.0 * lora_rank * features


def _adapter_features(layer: Layer, spec: ParallelSpec) -> int:
    return sum(sum(pair) for part in layer.parts for pair in part.of_token.adapter_pairs(spec))


def exchange_seconds(spec: ParallelSpec, exchanged: Iterable[Exchange], speeds: Speeds) -> float:
    """Returns the time that a rank takes for these exchanges, one after the other."""
    total = 0.0
    for each in exchanged:
        # A team along an axis extends over all faster axes.
        way = speeds.way(prod(getattr(spec, axis) for axis in AXES[AXES.index(each.axis) :]))
        total += each.num_bytes / way.bytes_per_second + each.number * way.latency_seconds
    return total


def _pass_tokens(spec: ParallelSpec, load: Workload) -> int:
    """Returns the tokens of a micro-batch of each data share together, on CPUs at most those of a pass."""
    tokens = load.micro_batch_tokens * spec.num_data_shares
    return min(tokens, LEAST_PASS_TOKENS) if load.on_cpu else tokens


def _in_pass(shape: ModelShape, spec: ParallelSpec, load: Workload) -> Iterator[Exchange]:
    """Yields what a rank sends in one micro-batch, forward and backward."""
    own = _pass_tokens(spec, load) / spec.num_data_shares / spec.sp
    share = share_of(shape, spec, load)
    for layer, count in Counter(shape.layers).items():
        for each in _of_layer(layer, share):
            yield Exchange(each.axis, count * own * each.num_bytes, count * each.number)
    if spec.fsdp > 1:
        yield from _gathered(shape, spec, load)


def in_forward_pass(shape: ModelShape, spec: ParallelSpec, load: Workload) -> Iterator[Exchange]:
    """Yields what a rank sends in one micro-batch without a backward pass: what recomputation adds to one with it, and
    the gathered weights once."""
    own = -(-load.tokens // spec.sp)
    share = share_of(shape, spec, load)
    for layer, count in Counter(shape.layers).items():
        several = (_of_layer(layer, replace(share, num_forward=number)) for number in (1, 2))
        for once, twice in zip(*several, strict=True):
            yield Exchange(once.axis, count * own * (twice.num_bytes - once.num_bytes), count * once.number / 2)
    if spec.fsdp > 1:
        yield from _gathered(shape, spec, replace(load, zero_stage="2", training="lora"))


def _of_layer(layer: Layer, share: Share) -> Iterator[Exchange]:
    """Yields what is sent for each token of a rank, forward and backward, and the exchanges of a micro-batch."""
    num_units, tp = bool(layer.mixers) + (layer.feed_forward is not None), share.spec.tp
    if tp > 1:
        # States are gathered before a unit and summed after it; gradients likewise.
        state = share.number_bytes * layer.hidden * (tp - 1) / tp
        yield Exchange("tp", 2 * num_units * (share.num_forward + 1) * state, 4 * num_units)
    for part in layer.parts:
        yield from part.exchanges(share)


def _gathered(shape: ModelShape, spec: ParallelSpec, load: Workload) -> Iterator[Exchange]:
    """Yields what fsdp sends in a micro-batch: this rank's part of the weights to every other rank."""
    table = [each for each in parameters(shape, spec) if each.fsdp > 1]
    times = 2 if load.zero_stage == "3" else 1
    for each in table:
        ways = load.number_bytes * (times if each.is_of_layers else 1)
        ways += _FLOAT32 if load.training == "full" else 0
        yield Exchange("fsdp", ways * each.kept * (each.fsdp - 1), 0)
    yield Exchange("fsdp", 0.0, times * shape.num_layers)


def _in_decode_step(shape: ModelShape, spec: ParallelSpec, load: Workload, num_samples: int) -> Iterator[Exchange]:
    """Yields what a rank sends in a step: sums over tp after each unit, and over ep after experts."""
    for layer, count in Counter(shape.layers).items():
        num_units = bool(layer.mixers) + (layer.feed_forward is not None)
        state = load.number_bytes * layer.hidden * num_samples * count
        if spec.tp > 1:
            yield Exchange("tp", 2 * num_units * state * (spec.tp - 1) / spec.tp, count * num_units)
        if spec.ep > 1 and layer.experts is not None:
            yield Exchange("ep", 2 * state * (spec.ep - 1) / spec.ep, count)


def _read_of(group: ParameterGroup, shape: ModelShape, num_samples: int) -> float:
    """Returns the numbers of these parameters that a decode step reads: of experts those that are chosen, as if each
    were as likely as any other."""
    experts = shape.experts
    whole = group.count * prod(group.own_shape)
    if experts is None or group.style != "grouped":
        return whole
    return whole * (1 - (1 - experts.per_token / experts.num) ** num_samples)
