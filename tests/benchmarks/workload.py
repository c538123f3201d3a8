"""What every benchmark trains: a tiny Qwen3, rank 8 on attention and MLP, and rows of random tokens."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tinker import types

MODEL = "tiny/qwen3-bench"
RANK = 8
VOCAB = 4096
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "initializer_range": 0.02,
}
Rows = list[list[int]]
"""Token rows; a row of n + 1 tokens trains n positions."""


def rows(lengths: list[int], seed: int = 0) -> Rows:
    random = np.random.default_rng(seed)
    return [random.integers(3, VOCAB, length + 1).tolist() for length in lengths]


def log_uniform(low: int, high: int, num_rows: int, seed: int = 0) -> list[int]:
    """Many short and few long: equal steps of the logarithm from `low` to `high`, in random order."""
    lengths = np.geomspace(low, high, num_rows).round().astype(int)
    return np.random.default_rng(seed).permutation(lengths).tolist()


def batches() -> dict[str, Rows]:
    return {
        "16x128": rows([128] * 16),
        "4x512": rows([512] * 4),
        "16x(16..256)": rows(log_uniform(16, 256, 16)),
        "16x(8..512)": rows(log_uniform(8, 512, 16)),
    }


def num_tokens(batch: Rows) -> int:
    return sum(len(row) - 1 for row in batch)


def datum(row: list[int]) -> "types.Datum":
    from tinker import types  # a machine with a GPU may have no SDK

    return types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.asarray(row[1:], dtype=np.int64)),
            "weights": types.TensorData.from_numpy(np.ones(len(row) - 1, dtype=np.float32)),
        },
    )
