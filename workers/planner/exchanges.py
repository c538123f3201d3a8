"""Estimates the time that a layout takes for a token, from what its ranks compute, send and read. Imports no torch.

Passes are bound by products and exchanges, decode steps by reading and exchanges: only these are counted.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from ..protocol.parallel_spec import AXES, ParallelSpec
from ..protocol.worker_config import DispatchConfig
from ..shapes.model_shape import ModelShape
from ..shapes.parts import GatedDelta, LatentAttention, Layer, Mamba, Mixer, RoutedExperts, SoftmaxAttention
from ..shapes.sequence_split import SequenceSplit
from .flops import rank_flops
from .parameters import ParameterGroup, output_head, parameters
from .speeds import Speeds
from .workload import Workload

# Samples that are drawn at a time, by all ranks together, and the tokens that each has in the cache.
SAMPLES = 64
SAMPLE_TOKENS = 2048

_FLOAT32 = 4
_INT32 = 4


@dataclass(frozen=True)
class Exchanged:
    """The bytes that a rank sends along one axis. number: of exchanges."""

    axis: str
    num_bytes: float
    number: float


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
        pass_seconds=_seconds(spec, exchanged, speeds) / tokens,
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
    seconds = (read + cached) / speeds.memory_bytes_per_second + _seconds(spec, exchanged, speeds)
    num_tokens = num_samples * num_teams
    return TokenCost(
        decode_sent=sum(each.num_bytes for each in exchanged) / num_tokens, decode_seconds=seconds / num_tokens
    )


def _seconds(spec: ParallelSpec, exchanged: list[Exchanged], speeds: Speeds) -> float:
    total = 0.0
    for each in exchanged:
        # A team along an axis extends over all faster axes.
        way = speeds.way(prod(getattr(spec, axis) for axis in AXES[AXES.index(each.axis) :]))
        total += each.num_bytes / way.bytes_per_second + each.number * way.latency_seconds
    return total


def _pass_tokens(spec: ParallelSpec, load: Workload) -> int:
    """Returns the tokens of a micro-batch of each data share together, at most those of a pass."""
    return min(load.micro_batch_tokens * spec.num_data_shares, DispatchConfig.pass_tokens)


def _in_pass(shape: ModelShape, spec: ParallelSpec, load: Workload) -> Iterator[Exchanged]:
    """Yields what a rank sends in one micro-batch, forward and backward."""
    own = _pass_tokens(spec, load) / spec.num_data_shares / spec.sp
    # A recomputed layer runs forward again, with its communication.
    forward = 1 if load.activations == "keep" else 2
    for layer, count in Counter(shape.layers).items():
        for each in _of_layer(layer, spec, load, forward):
            yield Exchanged(each.axis, count * own * each.num_bytes, count * each.number)
    if spec.fsdp > 1:
        yield from _gathered(shape, spec, load)


def _of_layer(layer: Layer, spec: ParallelSpec, load: Workload, forward: int) -> Iterator[Exchanged]:
    """Yields what is sent for each token of a rank, forward and backward, and the exchanges of a micro-batch."""
    num_units = bool(layer.mixers) + (layer.feed_forward is not None)
    if spec.tp > 1:
        # States are gathered before a unit and summed after it; gradients likewise.
        yield Exchanged("tp", 2 * num_units * (forward + 1) * _state(layer.hidden, spec, load), 4 * num_units)
    if spec.sp > 1:
        for mixer in layer.mixers:
            yield from _along_sp(mixer, spec, load, forward)
    experts = layer.feed_forward
    if isinstance(experts, RoutedExperts) and spec.ep > 1:
        state = load.number_bytes * (experts.latent or experts.hidden) * (spec.ep - 1) / spec.ep
        # There and back in each direction; and for the gradients of experts' adapters the states again.
        yield Exchanged("ep", experts.per_token * state * (2 * forward + 2 + 1), 2 * forward + 4)


def _along_sp(mixer: Mixer, spec: ParallelSpec, load: Workload, forward: int) -> Iterator[Exchanged]:
    number, tp = load.number_bytes, spec.tp_size_of("self_attn")
    others = (spec.sp - 1) / spec.sp
    if isinstance(mixer, GatedDelta | Mamba):
        numbers = _recurrent_numbers(mixer, spec)
        yield Exchanged("sp", (forward + 1) * number * numbers * others, 5 * (forward + 1))
        return
    assert isinstance(mixer, SoftmaxAttention | LatentAttention)
    queries, keys = _attention_numbers(mixer, tp)
    split = SequenceSplit.of(spec.sp, mixer.heads // tp, mixer.kv_heads // tp)
    if split.ulysses > 1:
        repeated = max(1.0, split.ulysses / (mixer.kv_heads // tp))
        numbers = 2 * queries + 2 * keys * repeated
        of_others = (split.ulysses - 1) / split.ulysses
        yield Exchanged("sp", (forward + 1) * number * numbers * of_others, 4 * (forward + 1))
    if split.ring > 1:
        # Keys and values travel around in each direction, their gradients in float32 all the way back.
        steps = (split.ring - 1) * (forward + 1)
        yield Exchanged("sp", 2 * keys * (number * steps + _FLOAT32 * split.ring), steps + split.ring)
    indexer = mixer.own_indexer if isinstance(mixer, LatentAttention) else None
    if indexer is not None:
        chosen = _INT32 * indexer.most if load.longest > indexer.most else 0
        yield Exchanged("sp", forward * (spec.sp - 1) * (number * indexer.head_dim + chosen), 2 * forward)


def _attention_numbers(mixer: SoftmaxAttention | LatentAttention, tp: int) -> tuple[int, int]:
    """Returns the features of a token's queries, and of its keys, on a rank along tp."""
    if isinstance(mixer, LatentAttention):
        each = mixer.heads // tp * max(mixer.key_dim, mixer.value_dim)
        return each, each
    return mixer.heads // tp * mixer.head_dim, mixer.kv_heads // tp * mixer.head_dim


def _recurrent_numbers(mixer: GatedDelta | Mamba, spec: ParallelSpec) -> float:
    """Returns the inputs and outputs of the recurrence of a token on a rank along tp, copies for ranks along sp
    included."""
    if isinstance(mixer, Mamba):
        features, _, states, _, heads = mixer.sections
        return (2 * features + 2 * states * mixer.copies_along_sp(spec) + heads) / spec.tp_size_of("mamba")
    keys, values = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
    return (2 * keys + 2 * values + 2 * mixer.value_heads) / spec.tp_size_of("linear_attn")


def _gathered(shape: ModelShape, spec: ParallelSpec, load: Workload) -> Iterator[Exchanged]:
    """Yields what fsdp sends in a micro-batch: this rank's part of the weights to every other rank."""
    table = [each for each in parameters(shape, spec) if each.fsdp > 1]
    times = 2 if load.zero_stage == "3" else 1
    for each in table:
        ways = load.number_bytes * (times if each.is_of_layers else 1)
        ways += _FLOAT32 if load.training == "full" else 0
        yield Exchanged("fsdp", ways * each.kept * (each.fsdp - 1), 0)
    yield Exchanged("fsdp", 0.0, times * shape.num_layers)


def _in_decode_step(shape: ModelShape, spec: ParallelSpec, load: Workload, num_samples: int) -> Iterator[Exchanged]:
    """Yields what a rank sends in a step: sums over tp after each unit, and over ep after experts."""
    for layer, count in Counter(shape.layers).items():
        num_units = bool(layer.mixers) + (layer.feed_forward is not None)
        state = load.number_bytes * layer.hidden * num_samples * count
        if spec.tp > 1:
            yield Exchanged("tp", 2 * num_units * state * (spec.tp - 1) / spec.tp, count * num_units)
        if spec.ep > 1 and isinstance(layer.feed_forward, RoutedExperts):
            yield Exchanged("ep", 2 * state * (spec.ep - 1) / spec.ep, count)


def _read_of(group: ParameterGroup, shape: ModelShape, num_samples: int) -> float:
    """Returns the numbers of these parameters that a decode step reads: of experts those that are chosen, as if each
    were as likely as any other."""
    experts = shape.experts
    whole = group.count * prod(group.own_shape)
    if experts is None or group.style != "grouped":
        return whole
    return whole * (1 - (1 - experts.per_token / experts.num) ** num_samples)


def _state(hidden: int, spec: ParallelSpec, load: Workload) -> float:
    """Returns the bytes that a rank sends to gather, or to sum, a state of the residual stream over tp."""
    return load.number_bytes * hidden * (spec.tp - 1) / spec.tp
