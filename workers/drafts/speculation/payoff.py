"""Decides for which sequences drafting pays: by the share of their draft tokens that is accepted, and its cost."""

from weakref import WeakKeyDictionary

from ...models.model import BaseModel
from ...registry.model_registry import ModelRegistry
from ...sampler.requests.jobs import AcceptanceStats, SequenceState
from ..model.draft_model import DraftModel

# Passes before statistics count; and before the statistics of a draft start over.
_PASSES_TO_JUDGE_BY, _PASSES_TO_REMEMBER = 8, 128
# One of this many jobs uses its draft even if that has not paid off lately, since it may by now.
_JOBS_FOR_A_TRIAL = 8
_MAX_REMEMBERED = 1000

# Number of tokens at which a pass takes about as long to compute as to read the weights, by device type.
_TOKENS_FOR_WEIGHTS = {"cpu": 9, "cuda": 150}


def draft_of(sequence: SequenceState, models: ModelRegistry) -> DraftModel:
    """Returns the draft that the sequence's request names, which must exist."""
    draft_id = sequence.job.spec.draft_id
    draft = None if draft_id is None else models.get(draft_id)
    assert isinstance(draft, DraftModel)
    return draft


class DraftPayoff:
    """Remembers how many recent draft tokens of each draft were accepted."""

    def __init__(self, base: BaseModel, models: ModelRegistry) -> None:
        self._base, self._models = base, models
        self._recent: WeakKeyDictionary[DraftModel, dict[int, AcceptanceStats]] = WeakKeyDictionary()

    def pays(self, sequence: SequenceState, num_sampled: int) -> bool:
        """True if enough draft tokens are accepted for the cost of verifying them.

        If the client gave the seed, only the sequence's own draft tokens count, as if it were sampled alone. So a seed
        gives the same tokens regardless of other requests and of the speed of the machine.

        Args:
            num_sampled: sequences in a pass. The more there are, the less compute is spare.
        """
        if not sequence.job.spec.seed_is_drawn:
            return sequence.draft_stats.num_passes % _PASSES_TO_JUDGE_BY != 0 or self._seems_to_pay(
                sequence, sequence.draft_stats, 1
            )
        is_seen = sequence.draft_stats.num_passes >= _PASSES_TO_JUDGE_BY
        stats = (
            sequence.draft_stats
            if is_seen
            else self.recent_stats(draft_of(sequence, self._models), sequence.weight_version)
        )
        return self._seems_to_pay(sequence, stats, num_sampled)

    def may_pay(self, sequence: SequenceState, weight_version: int, num_sampled: int) -> bool:
        """Like `pays`, for a sequence that has no draft tokens yet. Always true if nothing else is sampled.

        Args:
            weight_version: of the sampled weights.
        """
        if num_sampled == 1 or not sequence.job.spec.seed_is_drawn or sequence.job.seed % _JOBS_FOR_A_TRIAL == 0:
            return True
        return self._seems_to_pay(
            sequence, self.recent_stats(draft_of(sequence, self._models), weight_version), num_sampled
        )

    def _seems_to_pay(self, sequence: SequenceState, stats: AcceptanceStats, num_sampled: int) -> bool:
        """Judges by the statistics. True if they have too few passes."""
        if stats.num_passes < _PASSES_TO_JUDGE_BY:
            return True
        draft = draft_of(sequence, self._models)
        num = stats.num_draft_tokens / stats.num_passes
        of_draft = draft.draft_lengths.num_passes(num) * draft.layout.num_weights / self._base.weights.num_parameters
        to_check = num_sampled / (num_sampled + _TOKENS_FOR_WEIGHTS[self._base.device.type])
        return stats.acceptance_length >= 1 + of_draft + num * to_check

    def recent_stats(self, draft: DraftModel, weight_version: int) -> AcceptanceStats:
        """Returns the draft's recent statistics, kept by weight version: tenants learn nothing of each other."""
        of_draft = self._recent.setdefault(draft, {})
        if weight_version not in of_draft or of_draft[weight_version].num_passes >= _PASSES_TO_REMEMBER:
            if len(of_draft) > _MAX_REMEMBERED:
                of_draft.clear()
            of_draft[weight_version] = AcceptanceStats()
        return of_draft[weight_version]
