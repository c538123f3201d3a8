"""The bytes that sequences need in a rank's cache. Imports no torch."""

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class CacheSize:
    """The part of a model's cache that one rank has.

    bytes_per_token: keys and values, in all layers with attention.
    bytes_per_sequence: the states of fixed size, in all layers with a recurrence.
    values_per_token: numbers in the keys and values of one layer with attention.
    """

    bytes_per_token: int
    bytes_per_sequence: int
    values_per_token: int

    def bytes_of(self, num_tokens: int) -> int:
        return num_tokens * self.bytes_per_token + self.bytes_per_sequence

    def longest_within(self, num_bytes: int) -> int:
        """Returns the most tokens that one sequence can have, 0 if its states alone need more than `num_bytes`."""
        if num_bytes < self.bytes_per_sequence:
            return 0
        return (num_bytes - self.bytes_per_sequence) // self.bytes_per_token if self.bytes_per_token else sys.maxsize
