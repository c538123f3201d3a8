"""Speculation: drafts guess how samples go on, so that one pass of the model checks several tokens of each.

Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative Decoding (2023),
https://arxiv.org/abs/2211.17192: what comes out is distributed as without.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ..drafts.model import DraftModel
from ..drafts.sequences.drafting import Told
from ..heads import LogprobHead
from ..lora import Segment
from ..models.model import BaseModel
from ..ops.kv_cache import Chunk
from ..registry.models import Models
from ..state.trainable import Learner
from .cache.draft_caches import DraftCaches
from .cache.prefixes import Stretch, length_of
from .logits.choice import Choice, Settings, chances, invert_cdf
from .logits.noise import ACCEPT_STREAM, GUESS_STREAM, streams, uniforms
from .rank_sync import Together, Verified
from .requests.jobs import Guessed, Row
from .requests.sequence_table import Table

# Before it is seen whether guessing pays; and of a draft, before that is to be seen anew.
_PASSES_TO_JUDGE_BY, _PASSES_TO_REMEMBER = 8, 128
# Of so many jobs one is guessed although guesses have not paid of late, since they may pay by now.
_JOBS_FOR_A_TRIAL = 8
_MOST_REMEMBERED = 1000

# Tokens for which a pass computes as long as it reads weights, about, by the device's type.
_TOKENS_FOR_WEIGHTS = {"cpu": 9, "cuda": 150}


@dataclass(frozen=True, eq=False)
class Guesses:
    """tokens: int64 [k]. chances: float32 [k, V], with which each token of the draft's vocabulary was drawn; None of a
    greedy row."""

    tokens: np.ndarray
    chances: Tensor | None


@dataclass(eq=False)
class _State:
    """Of a row. num_changes: the draft's (see Learner) when it was placed. num_told: tokens of its sequence that the
    draft has in its cache. waiting: [m, layers * hidden], what the target had at those behind them, up to the last but
    one."""

    draft: DraftModel
    num_changes: int
    num_told: int = 0
    waiting: list[Tensor] = field(default_factory=list)

    @property
    def num_seen(self) -> int:
        """Tokens of which it has been told what the target had there, or is to be."""
        return self.num_told + sum(map(len, self.waiting))


class Speculation:
    """Of one sampler. A row takes part from its first token on, as long as its draft has room for it."""

    def __init__(
        self, base: BaseModel, models: Models, head: LogprobHead, together: Together, caches: DraftCaches
    ) -> None:
        self._base, self._models, self._together = base, models, together
        self._head, self._caches = head, caches
        self._served: Collection[str] = ()
        self._states: dict[Row, _State] = {}
        self._fared: WeakKeyDictionary[DraftModel, dict[int, Guessed]] = WeakKeyDictionary()

    def serve(self, draft_ids: Collection[str]) -> None:
        """From now on these guess, which are on the device. Rows of others would miss what the target has meanwhile,
        and take no part any more."""
        self._served = draft_ids
        for row, state in list(self._states.items()):
            if not self.wants(row) or self._draft(row) is not state.draft:
                self.forget(row)

    def wants(self, row: Row) -> bool:
        """Whether a draft is to guess it, which is there."""
        return row.job.request.draft_id in self._served and may_be_guessed(row)

    def pays(self, row: Row, num_sampled: int) -> bool:
        """Whether guesses are right often enough for what it takes to check them. num_sampled: rows of a pass; the more
        there are, the less it has to spare.

        Of a row whose client gave the seed by its own guesses alone, as if it were sampled alone: a seed gives the same
        tokens whatever else is sampled, and however fast the machine is.
        """
        if not row.job.request.seed_is_drawn:
            return row.guessed.num_passes % _PASSES_TO_JUDGE_BY != 0 or self._seems_to_pay(row, row.guessed, 1)
        is_seen = row.guessed.num_passes >= _PASSES_TO_JUDGE_BY
        guessed = row.guessed if is_seen else self._fared_so_far(self._draft(row), row.namespace)
        return self._seems_to_pay(row, guessed, num_sampled)

    def may_pay(self, row: Row, namespace: int, num_sampled: int) -> bool:
        """As `pays`, before its draft is told of it; alone it may always. namespace: of what is sampled."""
        if num_sampled == 1 or not row.job.request.seed_is_drawn or row.job.seed % _JOBS_FOR_A_TRIAL == 0:
            return True
        return self._seems_to_pay(row, self._fared_so_far(self._draft(row), namespace), num_sampled)

    def _seems_to_pay(self, row: Row, guessed: Guessed, num_sampled: int) -> bool:
        """guessed: by which it is judged; before that is enough it does."""
        if guessed.num_passes < _PASSES_TO_JUDGE_BY:
            return True
        draft = self._draft(row)
        num = guessed.num_guesses / guessed.num_passes
        of_draft = draft.reach.num_passes(num) * draft.num_parameters / self._base.num_parameters
        to_check = num_sampled / (num_sampled + _TOKENS_FOR_WEIGHTS[self._base.device.type])
        return guessed.acceptance_length >= 1 + of_draft + num * to_check

    def num_guesses(self, row: Row) -> int:
        """At a time, of a row that is wanted; fewer at its end."""
        reach, asked = self._draft(row).reach, row.job.request.num_draft_tokens
        return reach.usual if asked is None else min(asked, reach.most)

    def is_ready(self, row: Row) -> bool:
        return row in self._states and self.wants(row)

    def captured(self, rows: Sequence[Row]) -> dict[int, Tensor] | None:
        """What is to be captured of a pass in which these are: see BaseModel.hidden_states."""
        drafts = [self._states[row].draft for row in rows if row in self._states]
        layers = {layer for draft in drafts for layer in draft.draft.capture_layers or ()}
        return dict.fromkeys(layers, torch.empty(0)) if layers else None

    def num_bytes(self, row: Row, count: int) -> int:
        """That its draft has to have then."""
        draft = self._draft(row)
        return self._caches.of(draft).num_bytes_for(self._num_cached(row, draft, count))

    def place(self, row: Row, count: int) -> bool:
        """As has_room, of one that has no place: then it is to be told of all that comes before."""
        draft = self._draft(row)
        if not self._caches.of(draft).place(row, self._num_cached(row, draft, count)):
            return False
        self._states[row] = _State(draft, draft.num_changes)
        return True

    def known(self, row: Row, namespace: int, sequence: np.ndarray, most: int) -> list[Stretch]:
        """The beginning of its sequence int64, of at most so many tokens, that its draft was told of for a row before.
        namespace: of what is sampled."""
        draft = self._draft(row)
        return self._caches.of(draft).prefixes.find(_namespace(draft, namespace), sequence, most)

    def restore(self, row: Row, stretches: Sequence[Stretch]) -> None:
        """It is to be told of what comes behind these alone."""
        state = self._states[row]
        self._caches.of(state.draft).restore(row, stretches)
        state.num_told = length_of(stretches)

    def keep(self, row: Row, namespace: int, sequence: np.ndarray) -> None:
        """For later rows, what its draft was told of its sequence int64."""
        state = self._states.get(row)
        if state is not None and state.num_changes == state.draft.num_changes:
            known = sequence[: state.num_told + 1]
            self._caches.of(state.draft).keep(row, _namespace(state.draft, namespace), known)

    def tell(self, row: Row, first: int, part: slice, captured: Mapping[int, Tensor], sequence: np.ndarray) -> None:
        """A part of its sequence int64 has run, from token `first` on. A row of which it has not been told all before
        takes no part."""
        state = self._states.get(row)
        if state is None or first != state.num_seen:
            self.forget(row)
            return
        state.waiting.append(_features(state.draft, captured, part))
        # What follows the last one may not be known yet.
        known = state.num_seen - state.num_told - 1
        if known:
            waiting = torch.cat(state.waiting)
            following = sequence[state.num_told + 1 : state.num_told + 1 + known]
            told = self._told([row], [waiting[:known]], [following])
            state.draft.network(trains=False).take_in(told, self._ends([row]))
            state.waiting = [waiting[known:]]

    def fork(self, leader: Row, others: Sequence[Row]) -> None:
        """The others, which have places too, go on from the same tokens."""
        state = self._states.get(leader)
        placed = [row for row in others if row in self._states]
        if state is None:
            for row in placed:
                self.forget(row)
            return
        self._caches.of(state.draft).fork(leader, placed)
        for row in placed:
            self._states[row] = replace(state, waiting=list(state.waiting))

    def num_next(self, row: Row, count: int) -> int:
        """How many are guessed behind so many tokens of it; its last one never is."""
        return min(self.num_guesses(row), row.job.max_new_tokens - count - 1)

    def has_room(self, row: Row, count: int) -> bool:
        """Whether its draft has, to guess what follows so many tokens of it."""
        state = self._states[row]
        length, cache = self._num_cached(row, state.draft, count), self._caches.of(state.draft)
        seat = cache.seat(row)
        assert seat is not None
        return length <= seat.capacity or cache.grow(row, length)

    def guess(self, rows: Sequence[Row], table: Table) -> dict[Row, Guesses]:
        """All have room."""
        found: dict[Row, Guesses] = {}
        by_draft: dict[tuple[DraftModel, int], list[Row]] = {}
        for row in rows:
            num = self.num_next(row, int(table.count[row.line]))
            if num > 0:
                by_draft.setdefault((self._states[row].draft, num), []).append(row)
            else:
                found[row] = Guesses(np.zeros(0, np.int64), None)
        for (draft, num), together in by_draft.items():
            together = sorted(together, key=lambda row: row.job.adapter_key)
            found |= zip(together, self._drawn(draft, together, num, table), strict=True)
        return found

    def accept(self, row: Row, part: slice, captured: Mapping[int, Tensor], num: int) -> None:
        """So many of its guesses were right. part: where they ran, behind the token that was known."""
        state = self._states.get(row)
        if state is not None:
            state.waiting.append(_features(state.draft, captured, slice(part.start, part.start + num + 1)))
            self._fared_so_far(state.draft, row.namespace).add(part.stop - part.start - 1, num)

    def vocabulary(self, row: Row) -> Tensor:
        """int64, ascending: the tokens that its draft can say."""
        return self._states[row].draft.vocabulary

    def forget(self, row: Row) -> None:
        """Rows that take no part are ignored."""
        state = self._states.pop(row, None)
        if state is None:
            return
        cache = self._caches.of(state.draft)
        cache.remove(row)
        if not cache.held_bytes():
            cache.shrink()

    def clear(self) -> None:
        self._states = {}
        self._caches.clear()

    def _num_cached(self, row: Row, draft: DraftModel, count: int) -> int:
        """Tokens of it that its draft has in its cache when it guesses behind so many of its own."""
        num = self.num_next(row, count)
        return len(row.job.prompt) + count - 1 + (draft.reach.num_ahead(num) if num > 0 else 0)

    def _fared_so_far(self, draft: DraftModel, namespace: int) -> Guessed:
        """All its guesses of late where this is sampled: of others' samples it tells nobody."""
        fared = self._fared.setdefault(draft, {})
        if namespace not in fared or fared[namespace].num_passes >= _PASSES_TO_REMEMBER:
            if len(fared) > _MOST_REMEMBERED:
                fared.clear()
            fared[namespace] = Guessed()
        return fared[namespace]

    def _draft(self, row: Row) -> DraftModel:
        draft_id = row.job.request.draft_id
        assert draft_id is not None
        return self._models.drafts.get(draft_id)

    def _drawn(self, draft: DraftModel, rows: list[Row], num: int, table: Table) -> list[Guesses]:
        waiting = [torch.cat(self._states[row].waiting) for row in rows]
        following = [table.last_tokens(row, len(each)) for row, each in zip(rows, waiting, strict=True)]
        drawing = _Drawing(draft, rows, table, self._base.device, self._together)
        told = self._told(rows, waiting, following)
        draft.network(trains=False).guess(told, num, self._ends(rows), drawing.draw)
        for row in rows:
            self._states[row].waiting = []
        return drawing.guesses()

    def _told(self, rows: Sequence[Row], waiting: Sequence[Tensor], following: Sequence[np.ndarray]) -> Told:
        """Of the rows, which have been told of it from now on. following: the tokens behind those that waited."""
        chunks, start = [], 0
        for row, each in zip(rows, waiting, strict=True):
            state, stop = self._states[row], start + len(each)
            chunks.append(self._chunk(row, start, stop, state.num_told))
            state.num_told, start = state.num_told + len(each), stop
        return Told(torch.cat(list(waiting)), self._tensor(np.concatenate(following)), chunks)

    def _ends(self, rows: Sequence[Row]) -> "_Ends":
        return _Ends(self._base, self._head, [self._model(row) for row in rows])

    def _model(self, row: Row) -> Learner | None:
        """What it samples."""
        return None if row.job.adapter_id is None else self._models.get(row.job.adapter_id)

    def _chunk(self, row: Row, start: int, stop: int, cached: int) -> Chunk:
        seat = self._caches.of(self._states[row].draft).seat(row)
        assert seat is not None
        return Chunk(start, stop, seat.shelf, seat.slot, cached)

    def _tensor(self, integers: np.ndarray) -> Tensor:
        return torch.as_tensor(integers, dtype=torch.int64).to(self._base.device)


class _Drawing:
    """Of some rows' guesses, one after the other."""

    def __init__(
        self, draft: DraftModel, rows: Sequence[Row], table: Table, device: torch.device, together: Together
    ) -> None:
        lines = np.array([row.line for row in rows], dtype=np.int64)
        self._vocabulary, self._together = draft.vocabulary, together
        self._choice = Choice.of(_by_temperature(table.settings(lines)), draft.shape.vocabulary, device)
        self._keys, self._lengths = streams(table.noise_key[lines], GUESS_STREAM), table.length[lines]
        self._tokens: list[Tensor] = []
        self._chances: list[Tensor] = []

    def draw(self, logits: Tensor) -> Tensor:
        """See Draw."""
        of_draft = chances(logits.float(), self._choice)
        noise = torch.from_numpy(uniforms(self._keys, self._lengths + len(self._tokens))).to(of_draft)
        drawn = self._together.same(invert_cdf(of_draft, noise[:, None]).squeeze(1))
        self._tokens.append(self._vocabulary[drawn])
        self._chances.append(of_draft)
        return self._tokens[-1]

    def guesses(self) -> list[Guesses]:
        """Of each row."""
        tokens, of_rows = torch.stack(self._tokens, dim=1).cpu().numpy(), torch.stack(self._chances, dim=1)
        return [Guesses(row, each) for row, each in zip(tokens, of_rows, strict=True)]


@dataclass(frozen=True, eq=False)
class _Ends:
    """See Ends. models: what each sequence is of; None = the base model."""

    base: BaseModel
    head: LogprobHead
    models: Sequence[Learner | None]

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.base.embedded(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        num = hidden.shape[1]
        segments = [Segment(at * num, (at + 1) * num, model) for at, model in enumerate(self.models)]
        return self.head.logits_of_segments(hidden.flatten(0, 1), segments).unflatten(0, (-1, num))


def may_be_guessed(row: Row) -> bool:
    """Whether it asks for nothing that no draft knows, and guessing it pays."""
    return not (row.is_adjusted or row.goes_alone)


def verify(guesses: Guesses, target: Tensor, vocabulary: Tensor, key: np.uint64, length: int) -> Verified:
    """target: float32 [k + 1, V], the chances of each token at the guesses' places and behind them. vocabulary: int64,
    the tokens that the draft can say. length: of the sequence before."""
    num = len(guesses.tokens)
    positions = length + np.arange(num + 1)
    accept = uniforms(streams(np.array([key]), ACCEPT_STREAM), positions[:num])
    tokens = torch.from_numpy(guesses.tokens).to(target.device)
    number = 0
    if num:
        assert guesses.chances is not None
        of_target = target[torch.arange(num, device=target.device), tokens]
        of_draft = guesses.chances.gather(1, torch.searchsorted(vocabulary, tokens)[:, None]).squeeze(1)
        # Of what is not finite nothing is right.
        wrong = np.flatnonzero(~(accept * of_draft.cpu().numpy() < of_target.cpu().numpy()))
        number = int(wrong[0]) if len(wrong) else num
    left = target[number]
    if number < num:
        assert guesses.chances is not None
        left = left.index_add(0, vocabulary, guesses.chances[number].to(left.dtype), alpha=-1).clamp_(min=0)
        left = left if float(left.sum()) > 0 else target[number]
    noise = uniforms(np.array([key]), positions[number : number + 1])
    token = invert_cdf(left[None], torch.from_numpy(noise).to(left)[:, None])
    return Verified(number, int(token))


def _namespace(draft: DraftModel, of_target: int) -> int:
    """See Prefixes: of what the draft, with its weights of now, makes of its target's features."""
    return of_target << 32 | draft.num_changes


def _features(draft: DraftModel, captured: Mapping[int, Tensor], part: slice) -> Tensor:
    return torch.cat([captured[layer][part] for layer in draft.draft.capture_layers or ()], dim=-1)


def _by_temperature(settings: Settings) -> Settings:
    """Alone: the target chooses among all that a draft may guess."""
    nothing = np.zeros_like(settings.min_p)
    return Settings(settings.temperature, nothing, np.zeros_like(settings.top_k), np.ones_like(settings.top_p))
