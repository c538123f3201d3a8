"""The chunk size for scoring draft tokens: as many rows as there is memory for their logits, for any size of
vocabulary. Imports no torch.

Chunks are whole rows, not tiles of the vocabulary with a running maximum and sum. Tiles would need each product three
times: for the sums, for the sum of min(p, q), and for the gradients (docs/performance.md compares both).
"""

from dataclasses import dataclass

_FLOAT32 = 4
_ON_CPU = 64 << 20
# Each chunk reads the whole output head. With fewer draft tokens a GPU would read for longer than it computes.
_ON_GPU = 256 << 20


@dataclass(frozen=True)
class LogitBudget:
    """The limits of a chunk.

    max_draft_tokens: the most draft tokens in a chunk.
    max_bytes: the most bytes of a tensor with their logits, unless a single row needs more. About five such tensors
    exist at a time.
    """

    max_draft_tokens: int
    max_bytes: int = _ON_CPU

    @staticmethod
    def on(is_cpu: bool, max_draft_tokens: int) -> "LogitBudget":
        return LogitBudget(max_draft_tokens, _ON_CPU if is_cpu else _ON_GPU)

    def chunk_rows(self, depth: int, num_logits: int) -> int:
        """Returns the number of rows in a chunk.

        Args:
            depth: draft tokens per row.
            num_logits: logits per row in the largest tensor.
        """
        return max(1, min(self.max_draft_tokens // depth, self.max_bytes // (_FLOAT32 * num_logits)))
