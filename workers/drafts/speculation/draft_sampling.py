"""Samples draft tokens from the draft's logits."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...sampler.logits.noise import DRAFT_STREAM, derive_keys, uniforms
from ...sampler.logits.token_choice import DraftTokens, SamplingSettings, SamplingTensors, invert_cdf, probabilities
from ...sampler.rank_sync import RankSync
from ...sampler.requests.jobs import SequenceState
from ...sampler.requests.sequence_table import SequenceTable
from ..model.draft_model import DraftModel


class DraftSampling:
    """Samples draft tokens, one position of all sequences at a time."""

    def __init__(
        self,
        draft: DraftModel,
        sequences: Sequence[SequenceState],
        table: SequenceTable,
        device: torch.device,
        ranks: RankSync,
    ) -> None:
        lines = np.array([sequence.line for sequence in sequences], dtype=np.int64)
        self._vocabulary, self._ranks = draft.vocabulary, ranks
        self._choice = SamplingTensors.of(_without_filters(table.settings(lines)), draft.shape.vocabulary, device)
        self._keys, self._lengths = derive_keys(table.noise_key[lines], DRAFT_STREAM), table.length[lines]
        self._tokens: list[Tensor] = []
        self._probabilities: list[Tensor] = []

    def draw(self, logits: Tensor) -> Tensor:
        of_draft = probabilities(logits.float(), self._choice)
        noise = torch.from_numpy(uniforms(self._keys, self._lengths + len(self._tokens))).to(of_draft)
        drawn = self._ranks.from_leader(invert_cdf(of_draft, noise[:, None]).squeeze(1))
        self._tokens.append(self._vocabulary[drawn])
        self._probabilities.append(of_draft)
        return self._tokens[-1]

    def draft_tokens(self) -> list[DraftTokens]:
        tokens, of_draft = torch.stack(self._tokens, dim=1).cpu().numpy(), torch.stack(self._probabilities, dim=1)
        return [DraftTokens(row, each, self._vocabulary) for row, each in zip(tokens, of_draft, strict=True)]


def _without_filters(settings: SamplingSettings) -> SamplingSettings:
    """Removes the filters: the target applies them when it verifies."""
    nothing = np.zeros_like(settings.min_p)
    return SamplingSettings(settings.temperature, nothing, np.zeros_like(settings.top_k), np.ones_like(settings.top_p))
