"""Runs batches on the base model with their adapters, and samples from the output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..heads import LogprobHead
from ..lora import Adapter, BatchPlan, Segment
from ..ops.kv_cache import PendingInputs
from .batch import Batch, Chunk, DecodeRows
from .decode_steps import DecodeSteps, StepGraphs
from .rank_sync import RankSync
from .requests.token_choice import SamplingTensors, VerifyResult, choose, probabilities, uniforms, verify
from .sampling import AdapterSpan, SampledTokens, SamplingMetadata, adapter_spans
from .shared_state import SharedState
from .speculation import Proposer


@dataclass(frozen=True)
class VerifiedChunk:
    """Draft tokens of which the first are accepted."""

    chunk: Chunk
    rows: slice
    """The places of the draft tokens and of the token before them in the packed row."""
    result: VerifyResult
    logits: Tensor
    """The model's, float32, [rows, vocab]."""

    @property
    def tokens(self) -> np.ndarray:
        """The accepted tokens, and the one after them, int64."""
        return np.append(self.chunk.tokens[1 : 1 + self.result.num_accepted], self.result.token)


@dataclass(frozen=True)
class PassOutput:
    """The tokens that a pass sampled, and what drafts need of it."""

    sampled: SampledTokens | None
    """The next token of each sequence whose known tokens have all run, except those with draft tokens."""
    verified: Sequence[VerifiedChunk] = ()
    captured: Mapping[int, Tensor] | None = None
    """The layers that drafts read, see BaseModel.hidden_states."""
    pending: Sequence[PendingInputs] = ()
    """Inputs of recurrences at draft tokens, see CachedRow."""


class ModelRunner:
    """Runs batches. Keeps tensors of the last one, for batches of the same sequences or adapters."""

    def __init__(self, shared: SharedState, head: LogprobHead, proposer: Proposer | None, ranks: RankSync) -> None:
        self._base, self._models, self._cache = shared.base, shared.models, shared.cache
        self._vocab_size, self._score_tokens = shared.limits.vocab_size, shared.config.head_chunk_tokens
        self._head, self._proposer, self._ranks = head, proposer, ranks
        # Exchanges between ranks are not captured.
        is_captured = shared.base.device.type == "cuda" and not ranks.exchange_in_passes
        self.graphs = StepGraphs(shared.base.device) if is_captured else None
        self._plan: BatchPlan | None = None
        self._steps: DecodeSteps | None = None

    def run(self, batch: Batch) -> PassOutput:
        return self._run_row(batch) if batch.chunks else PassOutput(self._run_step(batch))

    def forget(self) -> None:
        """Drops tensors derived from the current weights, and references to jobs and adapters."""
        self._plan = self._steps = None

    # Decode steps

    def _run_step(self, batch: Batch) -> SampledTokens:
        """Runs a batch without chunks: a step that is recorded once and then repeated, if it can be."""
        steps = self._steps if batch.is_repeated and self._steps is not None else self._begin_steps(batch.decoding)

        def logits() -> Tensor:
            assert steps.plan is not None
            with self._models.lora.applied(steps.plan):
                hidden = self._base.hidden_states(steps.tokens, steps.positions, steps.packing())
            return self._logits(hidden, steps.adapter_spans)

        found = steps.run(logits, (steps.plan, self._base.weights.num_moves))
        sampled = self._sample(steps.metadata, found, steps.noise())
        steps.advance(sampled.chosen.tokens)
        return sampled

    def _begin_steps(self, decoding: DecodeRows) -> DecodeSteps:
        """Returns what runs the steps of these sequences: what ran the last step if it can serve them."""
        steps = self._steps
        if steps is None or not steps.serve(decoding):
            self._steps = steps = None  # frees the memory of its graph
            self._steps = steps = DecodeSteps(decoding, self._vocab_size, self._base.device, self.graphs)
        steps.plan = self._plan_for(steps.adapter_spans, len(steps.tokens), steps.plan)
        return steps

    # Packed rows

    def _run_row(self, batch: Batch) -> PassOutput:
        tokens, positions, packing = self._tensor(batch.tokens()), self._tensor(batch.positions()), batch.packing()
        sequences = [chunk.sequence for chunk in batch.chunks]
        captured = self._proposer.captured(sequences) if self._proposer is not None else None
        with self._models.lora.applied(self._plan_for(batch.adapter_spans(), batch.num_tokens)):
            hidden = self._base.hidden_states(tokens, positions, packing, captured=captured)
        for rows, chunk in batch.rows():
            self._observe(chunk, rows, hidden, captured or {})
        return PassOutput(self._sample_after(batch, hidden), self._verify(batch, hidden), captured, packing.pending)

    def _observe(self, chunk: Chunk, rows: slice, hidden: Tensor, captured: Mapping[int, Tensor]) -> None:
        """Gives a draft what it reads of a part of a prompt, and scores the prompt.

        A prompt is scored once per job: later samples may be prefilled separately or again.
        """
        if (prefill := chunk.prefill) is None:
            return
        if self._proposer is not None:
            self._proposer.observe(chunk.sequence, chunk.start, rows, captured, prefill.tokens)
        if not prefill.job.scores.is_done:
            adapter_id = prefill.job.adapter_id
            model = None if adapter_id is None else self._models.get(adapter_id)
            logits_of = partial(self._head.logits, pair=model.unembed if isinstance(model, Adapter) else None)
            prefill.job.scores.score(chunk.start, hidden[rows], logits_of, self._score_tokens)

    def _sample_after(self, batch: Batch, hidden: Tensor) -> SampledTokens | None:
        """Samples the next token of every sequence whose known tokens have all run, except those with draft tokens."""
        sequences = list(batch.decoding.sequences)
        last = list(range(len(sequences)))
        for rows, chunk in batch.rows():
            if chunk.is_last and (prefill := chunk.prefill) is not None and prefill.samples_next:
                sequences += prefill.sequences
                last += [rows.stop - 1] * len(prefill.sequences)
        if not sequences:
            return None
        metadata = SamplingMetadata(sequences, batch.table, self._vocab_size, self._base.device)
        logits = self._logits(hidden[self._tensor(last)], metadata.adapter_spans)
        drawn = uniforms(batch.table.noise_key[metadata.lines], batch.table.length[metadata.lines])
        return self._sample(metadata, logits, torch.from_numpy(drawn).to(self._base.device))

    def _verify(self, batch: Batch, hidden: Tensor) -> list[VerifiedChunk]:
        """Verifies draft tokens by the logits of the pass that they ran in; all ranks get the same results."""
        drafted = [(rows, chunk, chunk.draft) for rows, chunk in batch.rows() if chunk.draft is not None]
        if not drafted:
            return []
        lengths = [chunk.length for _, chunk, _ in drafted]
        rows = np.concatenate([np.arange(rows.start, rows.stop) for rows, _, _ in drafted])
        spans = adapter_spans((chunk.sequence.job.adapter_id, chunk.length) for _, chunk, _ in drafted)
        logits = self._logits(hidden[self._tensor(rows)], spans)
        lines = np.array([chunk.sequence.line for _, chunk, _ in drafted])
        settings = batch.table.settings(np.repeat(lines, lengths))
        target = probabilities(logits, SamplingTensors.of(settings, logits.shape[-1], logits.device))
        own = [
            verify(draft, of_target, key, int(length))
            for (_, _, draft), of_target, key, length in zip(
                drafted, target.split(lengths), batch.table.noise_key[lines], batch.table.length[lines], strict=True
            )
        ]
        results = zip(drafted, self._ranks.agree_on_verified(own), logits.split(lengths), strict=True)
        return [VerifiedChunk(chunk, rows, result, own) for (rows, chunk, _), result, own in results]

    def _sample(self, metadata: SamplingMetadata, logits: Tensor, noise: Tensor) -> SampledTokens:
        chosen = choose(logits, metadata.choice, noise.to(logits.dtype), metadata.processed(logits))
        return SampledTokens(metadata, logits, self._ranks.agree_on_tokens(chosen))

    def _logits(self, hidden: Tensor, spans: Sequence[AdapterSpan]) -> Tensor:
        return self._head.logits_of_segments(hidden, self._segments(spans))

    def _plan_for(self, spans: Sequence[AdapterSpan], num_tokens: int, plan: BatchPlan | None = None) -> BatchPlan:
        """Returns the plan that applies the adapters, and sets the number of threads that suits `num_tokens`.

        Args:
            plan: an earlier one, which is used if it is valid.
        """
        self._base.threads.set_for(self._base.weights_per_product, num_tokens, self._cache.values_per_layer())
        segments = self._segments(spans)
        known = (each for each in (plan, self._plan) if each is not None and each.is_valid_for(segments))
        self._plan = next(known, None) or self._models.lora.plan(segments, self._plan)
        return self._plan

    def _segments(self, spans: Sequence[AdapterSpan]) -> tuple[Segment, ...]:
        segments, start = [], 0
        for span in spans:
            model = None if span.adapter_id is None else self._models.get(span.adapter_id)
            segments.append(Segment(start, start + span.length, model))
            start += span.length
        return tuple(segments)

    def _tensor(self, integers: object) -> Tensor:
        """Returns int64 on the model's device."""
        return torch.as_tensor(integers, dtype=torch.int64).to(self._base.device)
