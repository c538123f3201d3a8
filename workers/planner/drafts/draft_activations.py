"""Estimates what a draft's training pass needs on a rank, for the micro-batch in which it needs most.

Tests compare it with real passes. Imports no torch.
"""

from dataclasses import dataclass
from math import prod

from ...protocol.parallel_spec import ParallelSpec
from ...shapes.parts.windows import MAX_SCORES
from ..workload import Workload
from .draft_load import DraftLoad

_FLOAT32 = 4
_INT64 = 8


@dataclass(frozen=True)
class DraftActivations:
    """Bytes of a draft's pass.

    features: the target's hidden states, of the tokens that the rank needs. kept: for the backward pass, with the
    gradients of the outputs. logits: of a chunk, with the gradient of the draft's output head, if that is not in
    scratch. working: of the backward pass. The last two are never there at the same time.
    """

    features: int
    kept: int
    logits: int
    working: int

    @property
    def total(self) -> int:
        return self.features + self.kept + max(self.logits, self.working)


@dataclass(frozen=True)
class Sequences:
    """The sequences that a shard group of ranks trains on, all of this length in tokens.

    number: those whose features it gets. at_once: of one micro-batch, which it trains on together.
    """

    number: int
    at_once: int
    length: int

    @property
    def num_tokens(self) -> int:
        return self.number * self.length


def draft_activations(
    draft: DraftLoad, spec: ParallelSpec, load: Workload, sequences: Sequences, sums_in_backward: bool
) -> DraftActivations:
    """Returns the bytes for a rank of the draft's layout, in which ranks along sp have shards of the sequences.

    Args:
        sums_in_backward: see draft_spec.py.
    """
    kind = _Eagle3 if draft.algorithm == "eagle3" else _DFlash
    of_pass = kind(draft, spec, load, sequences)
    own = -(-sequences.num_tokens // spec.sp)
    return DraftActivations(
        features=own * feature_bytes(draft, load),
        kept=int(of_pass.kept()),
        logits=int(of_pass.logits()) + (of_pass.of_head() if sums_in_backward else 0),
        working=int(of_pass.working()),
    )


def feature_bytes(draft: DraftLoad, load: Workload) -> int:
    """Returns the bytes of a token's features: the embedding, captured layers, and for eagle3 the last states."""
    states = 1 + draft.sizes.captured + (draft.algorithm == "eagle3")
    return states * draft.sizes.hidden * load.number_bytes


class _Pass:
    """Counts a pass. All numbers of heads and features are those of a rank along tp."""

    def __init__(self, draft: DraftLoad, spec: ParallelSpec, load: Workload, sequences: Sequences) -> None:
        sizes = draft.sizes
        self._draft, self._spec, self._sizes, self._sequences = draft, spec, sizes, sequences
        self._tokens = tokens = sequences.at_once * sequences.length
        self._number = load.number_bytes
        self._recomputes = load.activations != "keep"
        self._own = -(-tokens // spec.sp)
        self._hidden = sizes.hidden
        self._features = sizes.intermediate // spec.tp
        self._heads = sizes.heads // spec.tp
        self._queries, self._keys = sizes.queries // spec.tp, sizes.keys // spec.tp
        self._rotation = 2 * self._number * sizes.head_dim

    def _norm(self, size: int) -> float:
        """Returns the bytes that a norm keeps: its input in float32, its result before and after its weight, and a
        float32 for each row."""
        return self._head_norm(size) + self._number * size

    def _head_norm(self, size: int) -> float:
        """Returns the same of a norm before a rotation, which does not keep its input."""
        return _FLOAT32 * size + self._number * size + _FLOAT32

    def _mlp(self) -> float:
        return 4 * self._number * self._features

    def _mlp_way_back(self) -> float:
        """Returns the bytes of gradients in the backward pass of the MLP and its norm, per token."""
        return 2 * self._number * self._features + (_FLOAT32 + 2 * self._number) * self._hidden


class _Eagle3(_Pass):
    def kept(self) -> float:
        depth = self._draft.ttt_length
        outputs = 2 * self._number * self._hidden * depth  # with their gradients
        first = self._number * (3 * self._hidden) + _FLOAT32
        return self._own * (first + depth * self._step() + outputs)

    def logits(self) -> float:
        """Returns the bytes of log-probabilities, probabilities, their difference to the target's, and its product with
        the gradients of losses, and the target's distributions of two chunks."""
        sizes, depth = self._sizes, self._draft.ttt_length
        rows = min(self._rows_of_chunk(), self._own)
        distributions = _FLOAT32 * rows * (depth * 4 + 2) * sizes.vocabulary
        return distributions + 2 * self._number * rows * depth * self._hidden

    def of_head(self) -> int:
        return _FLOAT32 * self._sizes.vocabulary * self._sizes.hidden

    def working(self) -> float:
        """Returns the bytes of the backward pass of the last step, which is the first, or of what is held when that
        has ended: the gradients of all weights, which are summed over the steps."""
        again = self._run_again() if self._recomputes else 0.0
        shapes = self._draft.shapes(self._spec.tp)
        of_weights = _FLOAT32 * sum(prod(shape) for name, shape in shapes.items() if name != "lm_head")
        of_step = self._own * (self._step() + self._number * self._hidden)
        return max(self._own * (again + self._mlp_way_back()), of_weights - of_step)

    def _rows_of_chunk(self) -> int:
        depth, sizes = self._draft.ttt_length, self._sizes
        return self._draft.budget.chunk_rows(depth, max(depth * sizes.vocabulary, sizes.target_vocabulary))

    def _step(self) -> float:
        """Returns the bytes of a step of the unrolling, per token, without the output."""
        attention = self._number * (2 * self._queries + 2 * self._keys) + _FLOAT32 * self._heads
        beside = attention + self._rotation + _INT64
        return beside + (self._number * self._hidden if self._recomputes else self._layer())

    def _run_again(self) -> float:
        """Returns the bytes of a step's MLP, norm and output that run again. In other dtypes states are cast."""
        casts = -1 if self._number == _FLOAT32 else 3
        return 2 * self._norm(self._hidden) + casts * self._number * self._hidden + self._mlp()

    def _layer(self) -> float:
        """Returns the bytes of its norms and the MLP. In float32 the state is the input of two norms."""
        shared = 2 if self._number == _FLOAT32 else 1
        return 3 * self._norm(self._hidden) - shared * self._number * self._hidden + self._mlp()


class _DFlash(_Pass):
    def kept(self) -> float:
        number, sizes = self._number, self._sizes
        # The first norm's input has no gradient.
        end = self._norm(self._hidden) + (number - _FLOAT32) * self._hidden
        of_block = sizes.layers * self._layer() + end + self._rotation
        of_context = self._norm(self._hidden) + self._rotation
        of_all = sizes.layers * number * 2 * self._keys
        heads = sizes.layers * self._head_norm(self._keys)
        return self._rows * of_block + self._own * (of_context + heads) + self._tokens * of_all

    def logits(self) -> float:
        """Returns the bytes of the last chunk's log-probabilities, of this one's logits and of their cast."""
        sizes, depth = self._sizes, self._draft.block_size - 1
        rows = min(self._draft.budget.chunk_rows(depth, depth * sizes.target_vocabulary), self._num_blocks)
        return 3 * _FLOAT32 * rows * depth * sizes.target_vocabulary

    def of_head(self) -> int:
        """Returns 0: the head is the target's."""
        return 0

    def working(self) -> float:
        """Returns the bytes of the backward pass of the MLP, or of attention, when what the MLP and its norms kept is
        free: float32 gradients, and scores of some blocks with their gradients."""
        of_block = self._heads * self._draft.block_size * (self._sequences.length + self._draft.block_size)
        scores = 2 * max(of_block, min(MAX_SCORES, self._num_blocks * of_block))
        gradients = self._rows * (2 * self._queries + 2 * self._keys) + self._tokens * 2 * self._keys
        freed = self._rows * (self._mlp() + 2 * self._norm(self._hidden))
        return max(_FLOAT32 * (scores + gradients) - freed, self._rows * self._mlp_way_back())

    def _layer(self) -> float:
        number = self._number
        norms = 2 * self._norm(self._hidden) + self._head_norm(self._queries) + self._head_norm(self._keys)
        attention = number * (2 * self._queries + 2 * self._keys) + _FLOAT32 * self._heads
        return norms + attention + self._mlp()

    @property
    def _num_blocks(self) -> int:
        """Returns the blocks of a rank along sp."""
        sequences = self._sequences
        return -(-sequences.at_once * min(self._draft.num_anchors, sequences.length) // self._spec.sp)

    @property
    def _rows(self) -> int:
        return self._num_blocks * self._draft.block_size
