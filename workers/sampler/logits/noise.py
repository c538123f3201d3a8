"""Counter-based noise: a number depends only on (seed, stream, position), never on earlier draws.

So batching, preemption and replay do not change a sample. The generator is SplitMix64 (Steele, Lea, Flood 2014, "Fast
splittable pseudorandom number generators"), whose n-th output is a hash of its key plus n times an odd constant.
"""

import numpy as np

# Streams of a seed: the tokens of its samples, and alternative tokens sampled at positions of the prompt.
SAMPLE_STREAM, ALTERNATIVE_STREAM = 0, 1

# Further streams of a sample's key: the draft tokens, and whether each is accepted.
DRAFT_STREAM, ACCEPT_STREAM = 1, 2

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def noise_key(seed: int, *stream: int) -> int:
    """Returns the key of one stream of a seed, for instance of one sample. The low 64 bits of each number count."""
    key = _mix(np.array([seed & _MASK], dtype=np.uint64))
    for part in stream:
        key = _mix(key ^ (np.array([part & _MASK], dtype=np.uint64) * _GOLDEN))
    return int(key[0])


def noise_keys(seed: int, stream: int, numbers: np.ndarray) -> np.ndarray:
    """Returns noise_key(seed, stream, number) for each of the non-negative integers, uint64 of their shape."""
    return _mix(np.uint64(noise_key(seed, stream)) ^ (numbers.astype(np.uint64) * _GOLDEN))


def derive_keys(keys: np.ndarray, stream: int) -> np.ndarray:
    """Derives the keys, uint64, of another stream."""
    return _mix(keys ^ (np.array([stream], dtype=np.uint64) * _GOLDEN))


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns float64 in [0, 1).

    Args:
        keys: uint64.
        positions: non-negative integers; broadcast with the keys.
    """
    counter = (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(keys + counter) >> np.uint64(11)) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
