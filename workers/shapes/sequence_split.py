"""Sequence parallelism of attention: ranks along sp divide heads, and form a ring for the rest. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SequenceSplit:
    """The division sp = ulysses * ring.

    `ulysses` neighbouring ranks are a team with the tokens of one stripe: of a row of N tokens, stripe i has those at
    i, i + ring, i + 2 * ring and so on. Each rank attends for the whole stripe with some of the heads. Keys and values
    of the other stripes travel around a ring of the `ring` teams.
    """

    ulysses: int = 1
    ring: int = 1

    @staticmethod
    def of(sp: int, heads: int, kv_heads: int) -> "SequenceSplit":
        """Divides heads as far as possible, and uses a ring for the rest.

        Tokens that are exchanged by heads are sent only once, and their amount does not grow with the number of ranks.
        If there are fewer key/value heads than ranks, each rank gets a copy of one.

        Args:
            heads, kv_heads: of a rank along tp.
        """
        ulysses = max(size for size in range(1, sp + 1) if sp % size == 0 and _shares_out(size, heads, kv_heads))
        return SequenceSplit(ulysses, sp // ulysses)


def _shares_out(size: int, heads: int, kv_heads: int) -> bool:
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
