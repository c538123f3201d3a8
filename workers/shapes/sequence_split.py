"""SequenceSplit: how the ranks along sp share out attention, by heads and by a ring. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SequenceSplit:
    """sp = ulysses * ring. Neighbours are a team of `ulysses` ranks that have the tokens of one stripe: of a row of N
    tokens stripe i has those at i, i + ring, i + 2 * ring and so on. Each attends for the whole stripe, with some of
    the heads. Keys and values of the other stripes come around a ring of the `ring` teams.
    """

    ulysses: int = 1
    ring: int = 1

    @staticmethod
    def of(sp: int, heads: int, kv_heads: int) -> "SequenceSplit":
        """heads, kv_heads: of queries, and of keys and values, that a rank along tp has.

        Heads first, as far as they can be shared out: what comes by them is sent once, and does not grow with the
        ranks. Where there are fewer key/value heads than ranks each gets a copy of one.
        """
        ulysses = max(size for size in range(1, sp + 1) if sp % size == 0 and _shares_out(size, heads, kv_heads))
        return SequenceSplit(ulysses, sp // ulysses)


def _shares_out(size: int, heads: int, kv_heads: int) -> bool:
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
