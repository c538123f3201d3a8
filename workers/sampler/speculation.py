"""The interface of a sampler to the models that propose tokens for it."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

import numpy as np
from torch import Tensor

from ..heads import LogprobHead
from .cache.prefix_cache import StoredRange
from .rank_sync import RankSync
from .requests.jobs import SequenceState
from .requests.sequence_table import SequenceTable
from .requests.token_choice import DraftTokens


class Proposer(Protocol):
    """Proposes draft tokens for the sequences of one sampler; drafts register theirs by a row.

    A sequence uses its draft from its prefill on, as long as the draft's cache has room: the draft needs the captured
    features of all tokens. Methods with "any sequence" may be called for those that use no draft.
    """

    def load(self, draft_ids: Iterable[str | None], most: int, held: ExitStack) -> dict[str, bool]:
        """Loads at most so many drafts to the device until `held` closes. Returns whether each of them loaded."""
        ...

    def serve(self, draft_ids: Collection[str]) -> None:
        """Switches to these drafts, which are on the device. Sequences of others stop drafting: they would miss
        captured features.
        """

    def uses_draft(self, sequence: SequenceState) -> bool:
        """True if the draft of any sequence is available and should be used for it."""
        ...

    def is_ready(self, sequence: SequenceState) -> bool:
        """True if any sequence uses a draft and has a slot in its cache."""
        ...

    def pays(self, sequence: SequenceState, num_sampled: int) -> bool:
        """True if enough draft tokens are accepted. The more sequences a pass samples, the less compute is spare."""
        ...

    def may_pay(self, sequence: SequenceState, weight_version: int, num_sampled: int) -> bool:
        """Like `pays`, for a sequence without draft tokens yet. weight_version: of the sampled weights."""
        ...

    def num_logits(self, sequence: SequenceState) -> int:
        """Returns how many rows of logits one pass computes for any sequence."""
        ...

    def num_next(self, sequence: SequenceState, count: int) -> int:
        """Returns the number of draft tokens after `count` sampled ones. The last token is never a draft token."""
        ...

    def num_bytes(self, sequence: SequenceState, count: int) -> int:
        """Returns the bytes that the draft's cache needs after `count` sampled tokens."""
        ...

    def place(self, sequence: SequenceState, count: int) -> bool:
        """Gives the sequence a slot in the draft's cache. The draft must then get the features of all its tokens."""
        ...

    def has_room(self, sequence: SequenceState, count: int) -> bool:
        """True if the draft's slot has room for draft tokens after `count` sampled ones; grows it if necessary."""
        ...

    def find_prefix(
        self, sequence: SequenceState, weight_version: int, tokens: np.ndarray, most: int
    ) -> list[StoredRange]:
        """Returns the longest prefix in the draft's prefix cache, at most `most` of the tokens, int64."""
        ...

    def restore(self, sequence: SequenceState, ranges: Sequence[StoredRange]) -> None:
        """Fills the draft's slot with a cached prefix. The draft then needs the features of later tokens only."""

    def keep(self, sequence: SequenceState, weight_version: int, tokens: np.ndarray) -> None:
        """Stores those of `tokens`, int64, that the draft of any sequence has processed in its prefix cache."""

    def captured(self, sequences: Sequence[SequenceState]) -> dict[int, Tensor] | None:
        """Returns the layers to capture in a pass with any sequences: see BaseModel.hidden_states."""
        ...

    def observe(
        self, sequence: SequenceState, first: int, part: slice, captured: Mapping[int, Tensor], tokens: np.ndarray
    ) -> None:
        """Gives the draft of any sequence the captured features of `tokens`, int64, that have run from `first` on. If
        it missed earlier ones, the sequence stops using it.
        """

    def fork(self, leader: SequenceState, others: Sequence[SequenceState]) -> None:
        """Copies the draft's state of any sequence to others, which continue from the same tokens."""

    def propose(self, sequences: Sequence[SequenceState], table: SequenceTable) -> dict[SequenceState, DraftTokens]:
        """Proposes draft tokens for each sequence. All must have room."""
        ...

    def accept(self, sequence: SequenceState, part: slice, captured: Mapping[int, Tensor], num: int) -> None:
        """Records that `num` draft tokens were accepted; they and the token before them ran at `part`."""

    def forget(self, sequence: SequenceState) -> None:
        """Stops using a draft for any sequence."""

    def clear(self) -> None:
        """Forgets all sequences and what is cached."""


NewProposer = Callable[[LogprobHead, RankSync], Proposer]
"""Builds the proposer of one sampler. All proposers of a rank share caches, which its CacheBudget counts."""
