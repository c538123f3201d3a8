"""Divides sequences into bins with about equally many tokens. Imports no torch."""

from collections.abc import Sequence
from heapq import heapreplace


def balance_bins(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Returns the indices by bin: the longest first, each in the bin with the fewest tokens so far."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    least = [(0, number) for number in range(num_bins)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        taken, chosen = least[0]
        heapreplace(least, (taken + lengths[i], chosen))
        bins[chosen].append(i)
    return bins
