"""A pass of a draft: memory and time against guesses, vocabulary and length, online and from stored features, and on
two ranks."""

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from trainhouse.schemas.models import Algorithm, DraftConfig
from trainhouse.workers.drafts.algorithms.room import LogitRoom
from trainhouse.workers.protocol.parallel_spec import ParallelSpec

from ..tiny import tiny_model
from ..workers.parallel.test_stored_features import referring
from .draft_memory import Cost, lesson, student
from .report import Line, Row, Section

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 65536,
}
LARGE_VOCAB = 131072
TTT_LENGTHS = (1, 3, 7)
VOCABULARIES = (2048, 32768, LARGE_VOCAB)
LENGTH = 4096
LENGTHS = (8192, 16384, 32768)
LONGEST = LENGTHS[-1]
TTT_LENGTH = 3
RECOMPUTED = LENGTHS[1]
DRAFTS: dict[Algorithm, DraftConfig] = {
    "eagle3": DraftConfig(algorithm="eagle3", seed=3),
    "dflash": DraftConfig(algorithm="dflash", seed=3),
}
# What docs/performance.md states for this model.
KIB_PER_TOKEN = {"eagle3": 45, "dflash": 10}
KIB_PER_GUESS = 12
ROOMS_OF_LOGITS = 10
LAYOUT_TRIES = 2


def drafts(_: Path, scratch: Path, pool: str, rounds: int) -> Section:
    model = tiny_model("qwen3", scratch / "draft-target", **SHAPE)
    parts = [
        _by_ttt_length(model, scratch),
        _by_vocabulary(scratch),
        _by_activations(model, scratch, rounds),
        *(_by_length(algorithm, model, scratch, rounds) for algorithm in DRAFTS),
        _by_layout(model, scratch),
    ]
    notes = [
        f"A Qwen3 of hidden {SHAPE['hidden_size']} and {SHAPE['num_hidden_layers']} layers in float32; eagle3 with a",
        f"ttt_length of {TTT_LENGTH} where none is named. Peak resident memory above that before the pass, forward and",
        "backward, each in fresh processes: of the rank that takes most.",
    ]
    lines = [line for _, found in parts for line in found]
    return Section("Drafts", [row for table, _ in parts for row in table], lines, notes)


def _by_ttt_length(model: Path, scratch: Path) -> tuple[list[Row], list[Line]]:
    costs = [_alone(model, scratch, LENGTH, ttt_length) for ttt_length in TTT_LENGTHS]
    more = (costs[-1].growth - costs[0].growth) / (TTT_LENGTHS[-1] - TTT_LENGTHS[0])
    lines = [Line("a guess of ttt_length, KiB per token", more / 1024 / LENGTH, "at most", KIB_PER_GUESS)]
    named = [f"ttt_length {ttt_length}" for ttt_length in TTT_LENGTHS]
    return [_row(name, LENGTH, cost) for name, cost in zip(named, costs, strict=True)], lines


def _by_vocabulary(scratch: Path) -> tuple[list[Row], list[Line]]:
    model = tiny_model("qwen3", scratch / "large-vocabulary-target", **(SHAPE | {"vocab_size": LARGE_VOCAB}))
    costs = [_alone(model, scratch, LENGTH, draft_vocab_size=size) for size in VOCABULARIES]
    growth = costs[-1].growth - costs[0].growth
    more = 4 * (VOCABULARIES[-1] - VOCABULARIES[0])
    logits = LENGTH * TTT_LENGTH * more
    what = f"draft_vocab_size {VOCABULARIES[-1]}, growth above {VOCABULARIES[0]} over the bytes of"
    lines = [
        Line(f"{what} a chunk of logits", growth / LogitRoom.num_bytes, "at most", ROOMS_OF_LOGITS),
        Line(f"{what} all logits", growth / logits, "at most", 0.2),
    ]
    named = [f"draft_vocab_size {size}" for size in VOCABULARIES]
    return [_row(name, LENGTH, cost) for name, cost in zip(named, costs, strict=True)], lines


def _by_activations(model: Path, scratch: Path, rounds: int) -> tuple[list[Row], list[Line]]:
    """Peaks of first passes; seconds: medians of rounds in turn."""
    most = TTT_LENGTHS[-1]
    request = lesson("eagle3", RECOMPUTED, ttt_length=most)
    draft, threads = DRAFTS["eagle3"], _threads()
    with (
        student(model, scratch, draft, threads=threads) as keep,
        student(model, scratch, draft, threads=threads, activations="recompute") as recompute,
    ):
        kept, again = keep.cost(request), recompute.cost(request)
        turns = [(keep.cost(request).seconds, recompute.cost(request).seconds) for _ in range(max(1, rounds // 2))]
    seconds = [statistics.median(side) for side in zip(*turns, strict=True)]
    named = [f"ttt_length {most}, {name}" for name in ("keep", "recompute")]
    costs = [Cost(kept.growth, seconds[0]), Cost(again.growth, seconds[1])]
    lines = [
        Line(f"{named[1]}, times keep's peak", again.growth / kept.growth, "at most", 0.85),
        Line(f"{named[1]}, times keep's seconds", seconds[1] / seconds[0], "at most", 1.25),
    ]
    return [_row(name, RECOMPUTED, cost) for name, cost in zip(named, costs, strict=True)], lines


def _by_length(algorithm: Algorithm, model: Path, scratch: Path, rounds: int) -> tuple[list[Row], list[Line]]:
    table: list[Row] = []
    online: list[Cost] = []
    stored: list[Cost] = []
    for length in LENGTHS:
        pair = _online_and_stored(algorithm, model, scratch, length, max(1, rounds * LENGTHS[0] // length))
        for costs, name, cost in zip((online, stored), ("online", "stored"), pair, strict=True):
            costs.append(cost)
            table.append(_row(f"{algorithm}, {name}", length, cost))
    lines = [
        Line(
            f"{algorithm}, {LONGEST} tokens, {name}, KiB per token",
            costs[-1].growth / 1024 / LONGEST,
            "at most",
            KIB_PER_TOKEN[algorithm],
        )
        for name, costs in (("online", online), ("stored", stored))
    ]
    ratio = stored[-1].seconds / online[-1].seconds
    lines.append(Line(f"{algorithm}, {LONGEST} tokens, stored, times online's seconds", ratio, "at most", 1.0))
    return table, lines


def _online_and_stored(algorithm: Algorithm, model: Path, scratch: Path, length: int, rounds: int) -> tuple[Cost, Cost]:
    """Peaks of processes of their own; seconds: medians of rounds in turn in one of these."""
    request, features = lesson(algorithm, length, ttt_length=TTT_LENGTH), scratch / "features"
    with student(model, scratch, DRAFTS[algorithm], threads=_threads()) as one:
        online = one.cost(request)
        referred = referring(one.where, request, features)
    with student(model, scratch, DRAFTS[algorithm], threads=_threads()) as other:
        stored = other.cost(referred)
        turns = [(other.cost(request).seconds, other.cost(referred).seconds) for _ in range(rounds)]
    seconds = [statistics.median(side) for side in zip(*turns, strict=True)]
    return Cost(online.growth, seconds[0]), Cost(stored.growth, seconds[1])


def _by_layout(model: Path, scratch: Path) -> tuple[list[Row], list[Line]]:
    """tp: sequences go to one rank or the other, so that a single one keeps one busy."""
    whole, halves = (LONGEST,), (LONGEST // 2,) * 2
    of_one = {lengths: _of_layout(model, scratch, "single", lengths) for lengths in (whole, halves)}
    table = [_row(f"one rank, {_named(lengths)}", LONGEST, cost) for lengths, cost in of_one.items()]
    lines = []
    for layout, lengths, share in (("sp=2", whole, 0.65), ("tp=2", halves, 0.65), ("tp=2", whole, 1.25)):
        name, cost = f"{layout}, {_named(lengths)}", _of_layout(model, scratch, layout, lengths)
        table.append(_row(name, LONGEST, cost))
        lines.append(Line(f"{name}, times one rank's peak", cost.growth / of_one[lengths].growth, "at most", share))
    return table, lines


def _of_layout(model: Path, scratch: Path, layout: str, lengths: tuple[int, ...]) -> Cost:
    """In one micro-batch, a thread for each rank. The one that takes most of several: some allocators are lucky."""

    def once() -> Cost:
        knobs = {"threads": 1, "micro_batch_tokens": LONGEST}
        with student(model, scratch, DRAFTS["eagle3"], ParallelSpec.parse(layout), **knobs) as one:
            return one.cost(lesson("eagle3", *lengths, ttt_length=TTT_LENGTH))

    return max((once() for _ in range(LAYOUT_TRIES)), key=lambda cost: cost.growth)


def _alone(
    model: Path, scratch: Path, length: int, ttt_length: int = TTT_LENGTH, draft_vocab_size: int | None = None
) -> Cost:
    draft = DRAFTS["eagle3"].model_copy(update={"draft_vocab_size": draft_vocab_size})
    with student(model, scratch, draft, threads=_threads()) as one:
        return one.cost(lesson("eagle3", length, ttt_length=ttt_length))


def _threads() -> int:
    return os.cpu_count() or 1


def _named(lengths: Sequence[int]) -> str:
    return f"{len(lengths)}x{lengths[0]}"


def _row(what: str, tokens: int, cost: Cost) -> Row:
    return {
        "what": what,
        "tokens": tokens,
        "MiB": cost.growth / 2**20,
        "KiB per token": cost.growth / 1024 / tokens,
        "seconds": cost.seconds,
    }
