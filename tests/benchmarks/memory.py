"""Peak memory of a worker process against the tokens of a pass, each measured in a fresh process."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..tiny import tiny_model
from .child import child
from .report import Line, Row, Section

LENGTH = 512
MICRO_BATCH_SIZES = (1024, 2048, 4096, 8192, 16384)
PASS_SIZES = (4096, 8192, 16384, 32768, 65536)
KIB_PER_TOKEN = 100
"""What docs/performance.md states for a micro-batch of the benchmarks' model."""
LARGE_VOCAB, LARGE_VOCAB_TOKENS = 65536, 8192


def memory(model: Path, scratch: Path, pool: str, rounds: int) -> Section:
    in_one = [_growth(model, tokens, micro_batch_tokens=MICRO_BATCH_SIZES[-1]) for tokens in MICRO_BATCH_SIZES]
    in_many = [_growth(model, tokens) for tokens in PASS_SIZES]
    slope, residual = _line_fit(MICRO_BATCH_SIZES, in_one)
    slope_of_pass, _ = _line_fit(PASS_SIZES, in_many)
    large = tiny_model("qwen3", scratch / "large-vocabulary", vocab_size=LARGE_VOCAB)
    large_growth = _growth(large, LARGE_VOCAB_TOKENS, micro_batch_tokens=LARGE_VOCAB_TOKENS)
    logits = 4 * LARGE_VOCAB * LARGE_VOCAB_TOKENS
    lines = [
        Line("one micro-batch, KiB per token", slope / 1024, "at most", KIB_PER_TOKEN),
        Line("its largest distance from a line, as a share of the largest growth", residual, "at most", 0.1),
        Line("many micro-batches, KiB per token of the pass", slope_of_pass / 1024, "at most", 4),
        Line(f"vocabulary {LARGE_VOCAB}: growth over the bytes of all logits", large_growth / logits, "at most", 0.5),
    ]
    notes = [
        f"Peak resident memory above that of the loaded worker; forward and backward of sequences of {LENGTH} tokens.",
    ]
    table = [*_rows("one micro-batch", MICRO_BATCH_SIZES, in_one), *_rows("of 4096", PASS_SIZES, in_many)]
    table += _rows(f"one, vocabulary {LARGE_VOCAB}", [LARGE_VOCAB_TOKENS], [large_growth])
    return Section("Memory of a pass", table, lines, notes)


def _growth(model: Path, tokens: int, **knobs: int) -> int:
    """Bytes."""
    with child("pass_memory") as worker:
        worker.ask({"model": str(model), "threads": os.cpu_count() or 1, **knobs})
        return worker.ask({"tokens": tokens, "length": LENGTH})


def _line_fit(tokens: Sequence[int], growths: Sequence[int]) -> tuple[float, float]:
    """Bytes per token, and the largest residual as a share of the largest growth."""
    slope, start = np.polyfit(tokens, growths, 1)
    residuals = np.asarray(growths) - (slope * np.asarray(tokens) + start)
    return float(slope), float(np.abs(residuals).max() / max(growths))


def _rows(kind: str, sizes: Sequence[int], growths: Sequence[int]) -> list[Row]:
    return [
        {"micro-batches": kind, "tokens": tokens, "MiB": growth / 2**20, "KiB per token": growth / 1024 / tokens}
        for tokens, growth in zip(sizes, growths, strict=True)
    ]
