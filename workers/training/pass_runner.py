"""Runs forward and backward over the operations of many runs at once, for all kinds of models.

PassRunner owns the order of a pass: rounds, agreement between ranks, splitting after an error. Micro-batches, scoring
and draft passes are in their own modules.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...schemas.errors import OperationError
from ...schemas.training import FeatureLocation, ForwardBackwardRequest
from ..batch.micro_batch import Lane, MicroBatch, empty_micro_batch, pack, smaller_budget
from ..batch.validated import ModelLimits, ValidatedBatch, validate_request
from ..drafts.algorithms.draft_programs import DraftProgram
from ..drafts.sequences.captured_features import CapturedFeatures
from ..heads import HEADS, LogprobHead
from ..lora import Adapter, Segment
from ..lora.segment import clip_segments
from ..losses import CAPTURES
from ..models.model import BaseModel
from ..ops.lanes import Lanes
from ..ops.memory import bounded_memory
from ..parallel.mesh import Mesh
from ..parallel.token_shard import TokenShard, overlap
from ..protocol.calls import Failure, OperationPart
from ..protocol.worker_config import WorkerConfig
from ..registry.model_registry import ModelRegistry
from ..state.trainable import Trainable
from ..state.vectors import BACKWARD_VECTORS, FORWARD_VECTORS
from .batch_failure import BatchFailure, batch_failure_of, out_of_memory_message
from .draft_pass import DraftPassRunner, NeededSources, drop_partly_stored, find_stored_rows
from .feature_capture import PolicyCapture, set_feature_versions
from .operation_progress import (
    HostScores,
    OperationProgress,
    OperationTotals,
    PartAnswer,
    Task,
    TaskVerdict,
    merge_verdicts,
)
from .rounds import rounds
from .scoring import Heads, ObjectiveScores, score, score_with_gradient

logger = logging.getLogger(__name__)

RunMicroBatch = Callable[[MicroBatch, list[Task], list[Segment]], None]


@dataclass(frozen=True)
class RankPlan:
    """A rank's state before a round, exchanged with the ranks that it shares collectives with.

    failures: by part. versions: by run, see PolicyCapture. stored: see find_stored_rows.
    """

    failures: list[Failure | None]
    num_micro_batches: int
    needed: NeededSources
    versions: Mapping[str, str]
    stored: Mapping[int, frozenset[int]]


class PassRunner:
    """Runs passes, and holds the operations whose later parts are still to be run between them."""

    def __init__(
        self,
        base: BaseModel,
        models: ModelRegistry,
        limits: ModelLimits,
        config: WorkerConfig,
        mesh: Mesh | None = None,
    ) -> None:
        """Creates the runner; `mesh` None means a single rank."""
        self._base = base
        self._mesh = mesh or Mesh()
        self._models = models
        self._limits = limits
        self._lanes = Lanes(base.device)
        self._most_lanes = self._lanes.num_lanes if base.is_concurrent else 1
        self._heads = {name: make(base, config.head_chunk_tokens) for name, make in HEADS.items()}
        self._draft_passes = DraftPassRunner(base, models, LogprobHead(base, config.head_chunk_tokens), self._share_of)
        self._capturing = PolicyCapture(base, models)
        self._token_budget = config.micro_batch_tokens
        self._most_runs = config.adapter_slots
        self._unfinished: dict[int, OperationProgress] = {}
        self._changes_when_finite: WeakKeyDictionary[Trainable, int] = WeakKeyDictionary()

    def run_pass(self, parts: Sequence[OperationPart]) -> tuple[PartAnswer, ...]:
        """Returns an answer for each part, see Pass. An error in one operation does not affect another."""
        answers: dict[int, PartAnswer] = {}
        for members in rounds(parts, self._most_runs, self._models.is_exclusive):
            answers |= zip(members, self._run_round([parts[i] for i in members]), strict=True)
        return tuple(answers[i] for i in range(len(parts)))

    def forget(self, run_id: str) -> None:
        """Drops the run's unfinished operations; their remaining parts will fail."""
        self._unfinished = {key: progress for key, progress in self._unfinished.items() if progress.run_id != run_id}

    def _run_round(self, parts: list[OperationPart]) -> list[PartAnswer]:
        begun = [self._begin(part) for part in parts]
        tasks = [each for each in begun if isinstance(each, Task)]
        if self._mesh.has_forward_collectives:
            self._run_coupled_round(begun)
        elif tasks:
            self._run_or_split(sorted(tasks, key=self._sort_key), self._token_budget)
        told = self._mesh.all_gather_object([_verdict(each, self._mesh.is_leader) for each in begun])
        verdicts = [merge_verdicts(of_part) for of_part in zip(*told, strict=True)]
        return [self._finish(*each) for each in zip(parts, begun, verdicts, strict=True)]

    def _sort_key(self, task: Task) -> tuple[Any, ...]:
        """Returns the sort key of a task: neighbours in a micro-batch share matrix products if their models are alike,
        and loss computations if their losses agree."""
        operation, (layers, rank) = task.operation, self._models.get(task.run_id).batching_key
        return operation.loss.scores, layers, operation.loss_key, rank, task.run_id

    def _begin(self, part: OperationPart) -> Task | Failure:
        if part.request.model_id not in self._models:
            return Failure(f"run {part.request.model_id} is not on this worker: create it first", "server")
        try:
            model = self._models.get(part.request.model_id)
            program = model.program
            if not (program.trains or part.request.forward_only):
                raise OperationError(f"a {program.role} is not trained: use forward, or create a model of another role")
            place = part.request.features
            losses = CAPTURES if place is not None and place.captures else program.losses
            operation = validate_request(part.request, self._limits, part.share, losses)
            if losses is not CAPTURES and model.missing_state is not None:
                raise OperationError(model.missing_state)
            stored = self._stored(part.request, place, operation)
            return Task(part, operation, self._progress(part, operation), stored)
        except Exception as error:
            trouble = batch_failure_of(error)
            self._log(part.request.model_id, trouble)
            return Failure(trouble.message, trouble.category)

    def _stored(
        self, request: ForwardBackwardRequest, place: FeatureLocation | None, operation: ValidatedBatch
    ) -> dict[int, CapturedFeatures]:
        """Returns the stored features by row. Raises OperationError if the run is not a draft or they are not its."""
        if place is None:
            return {}
        if place.algorithm is not None:
            self._capturing.check(request.model_id, place)
            return {}
        return self._draft_passes.find_stored(request, place, operation.datum_indices)

    def _progress(self, part: OperationPart, operation: ValidatedBatch) -> OperationProgress:
        """Returns the operation's progress, new for its first part. Raises OperationError if earlier parts are
        missing."""
        if not part.first_datum:
            progress = OperationProgress(part.request.model_id, operation.loss)
            if not part.last:
                self._unfinished[part.operation_id] = progress
            return progress
        progress = self._unfinished.get(part.operation_id)
        if progress is None or progress.num_data != part.first_datum:
            raise OperationError(
                f"the results of the {part.first_datum} data before these are gone: since they were computed, the run's"
                " gradients were cleared or its weights loaded; send the whole operation again",
                "server",
            )
        return progress

    def _run_coupled_round(self, begun: list[Task | Failure]) -> None:
        """Runs a round on ranks that share collectives in forward or backward.

        An exception inside a collective cannot be recovered, so the ranks first exchange what could fail, and then all
        of them run the same number of micro-batches, without the failed tasks.
        """
        tasks = sorted((each for each in begun if isinstance(each, Task)), key=self._sort_key)
        with ExitStack() as held:
            by_run = self._load_models(tasks, held)
            self._refuse_diverged([task for task in tasks if not task.computed], by_run)
            usable = [task for task in tasks if not task.computed]
            failures, versions = [_failure_of(each) for each in begun], self._capturing.versions(usable)
            num_micro_batches = self._num_micro_batches(usable)
            own = RankPlan(failures, num_micro_batches, _needed(usable), versions, find_stored_rows(begun))
            told = self._mesh.all_gather_object(own)
            _take_failures([each.failures for each in told], begun)
            drop_partly_stored(begun, [told[rank].stored for rank in self._mesh.along("sp", "tp").ranks])
            usable = [task for task in usable if not task.computed]
            if usable:
                most = max(each.num_micro_batches for each in told)
                needed = NeededSources.union([each.needed for each in told])
                set_feature_versions(usable, [each.versions for each in told])
                self._compute(usable, [by_run[task.run_id] for task in usable], self._token_budget, most, needed)
            self._end_computed(usable, by_run)

    def _load_models(self, tasks: list[Task], held: ExitStack) -> dict[str, Trainable]:
        """Moves the tasks' models to the device and returns them by run. Gives up tasks whose model cannot be moved."""
        by_run: dict[str, Trainable] = {}
        for task in tasks:
            try:
                (by_run[task.run_id],) = held.enter_context(self._models.resident([task.run_id], _wanted(task)))
            except OperationError as error:
                task.abandon(Failure(error.message, error.category))
        return by_run

    def _num_micro_batches(self, tasks: list[Task]) -> int:
        lanes = pack([task.operation for task in tasks], self._token_budget, self._base.device)
        return sum(lane.num_micro_batches for lane in lanes)

    def _run_or_split(self, tasks: list[Task], token_budget: int) -> None:
        """Runs the tasks together. After an error that any of them may have caused, runs each alone; after running out
        of memory, in smaller micro-batches."""
        trouble = self._attempt(tasks, token_budget)
        if trouble is None:
            return
        for task in [task for task in tasks if not task.computed]:
            if len(tasks) > 1:
                self._run_or_split([task], token_budget)
            elif trouble.out_of_memory and (smaller := smaller_budget(task.operation, token_budget)):
                self._run_or_split([task], smaller)
            else:
                self._give_up(task, trouble, token_budget)

    def _attempt(self, tasks: list[Task], token_budget: int) -> BatchFailure | None:
        """Returns the error that stopped the tasks, or None. It holds no tensors of the attempt."""
        run_ids = list(dict.fromkeys(task.run_id for task in tasks))
        try:
            with bounded_memory(self._base.device), self._models.resident(run_ids, _wanted(*tasks)) as models:
                by_run = dict(zip(run_ids, models, strict=True))
                self._refuse_diverged(tasks, by_run)
                usable = [task for task in tasks if not task.computed]
                set_feature_versions(usable, [self._capturing.versions(usable)])
                self._compute(usable, [by_run[task.run_id] for task in usable], token_budget)
                self._end_computed(usable, by_run)
        except Exception as error:
            return batch_failure_of(error)
        return None

    def _end_computed(self, tasks: list[Task], models: Mapping[str, Trainable]) -> None:
        for task in tasks:
            if not (task.failure or task.forward_only):
                task.add_earlier_gradient(models[task.run_id])
            task.computed = True

    def _refuse_diverged(self, tasks: list[Task], models: Mapping[str, Trainable]) -> None:
        """Gives up tasks whose weights are not finite. Losses would not show it: attention returns finite numbers for
        scores that are NaN."""
        for task in tasks:
            if not self._is_finite(models[task.run_id]):
                message = (
                    f"the weights of run {task.run_id} are not finite: they have diverged; continue from an earlier"
                    " checkpoint with a lower learning rate"
                )
                task.abandon(Failure(message, "user"))

    def _is_finite(self, model: Trainable) -> bool:
        """True if the model's weights are finite; checked only after a change."""
        if self._changes_when_finite.get(model) != model.vectors.num_changes:
            low, high = torch.aminmax(model.weights)
            if not bool(torch.isfinite(low) & torch.isfinite(high)):
                return False
            self._changes_when_finite[model] = model.vectors.num_changes
        return True

    def _give_up(self, task: Task, trouble: BatchFailure, token_budget: int) -> None:
        if trouble.out_of_memory:
            message = out_of_memory_message(task.operation, self._token_budget, token_budget, self._base.device)
        else:
            message = trouble.message
        self._log(task.run_id, trouble)
        task.abandon(Failure(message, trouble.category))

    def _log(self, run_id: str, trouble: BatchFailure) -> None:
        if trouble.traceback:
            logger.error("an operation of run %s failed\n%s", run_id, trouble.traceback)

    def _finish(self, part: OperationPart, begun: Task | Failure, verdict: TaskVerdict) -> PartAnswer:
        """Ends a part, in the same way on all ranks. The last part commits the operation's gradients to the
        accumulator; earlier parts keep theirs until then."""
        if verdict.failure is not None or not isinstance(begun, Task):
            assert verdict.failure is not None
            return self._failed(part, verdict.failure)
        with self._models.resident([begun.run_id], _wanted(begun)) as (model,):
            if part.last:
                self._unfinished.pop(part.operation_id, None)
                return begun.complete(model, verdict.totals)
            begun.suspend(model, verdict.totals)
            return None

    def _failed(self, part: OperationPart, failure: Failure) -> Failure:
        """Ends the operation. The window lacks a part of its batch now, so its optimizer step will be refused."""
        self._unfinished.pop(part.operation_id, None)
        run_id = part.request.model_id
        if run_id in self._models and not part.request.forward_only:
            model = self._models.get(run_id)
            model.gradients.abandon_operation()
            if model.program.trains:
                model.gradients.window.refused = model.gradients.window.refused or failure.message
        return failure

    def _compute(
        self,
        tasks: list[Task],
        models: list[Trainable],
        token_budget: int,
        num_runs: int = 0,
        needed: NeededSources | None = None,
    ) -> None:
        """Computes tasks that can share micro-batches (see `rounds`).

        Args:
            num_runs: the least number of micro-batches to run, so that all ranks run as many.
            needed: see DraftPassRunner.run.
        """
        gradients = any(not task.forward_only for task in tasks)
        most_lanes = 1 if self._models.is_exclusive(tasks[0].run_id) else self._most_lanes
        lanes = pack([task.operation for task in tasks], token_budget, self._base.device, most_lanes)
        for i, (task, model) in enumerate(zip(tasks, models, strict=True)):
            task.begin()
            model.vectors.weight_views()  # makes the copy in the base's dtype before several lanes use it
            if gradients:
                model.gradients.begin_operation([number for number, lane in enumerate(lanes) if i in lane.operations])
        run = self._micro_batch_function(tasks, models, gradients, needed)
        heads = {name: head.split_budget(len(lanes)) for name, head in self._heads.items()}
        is_alone = not self._mesh.has_forward_collectives
        try:
            with self._models.with_weights_of(models, gradients):
                run_here = partial(run, heads)
                self._lanes.run([partial(_run_lane, lane, tasks, models, run_here, is_alone) for lane in lanes])
                for _ in range(num_runs - sum(lane.num_micro_batches for lane in lanes)):
                    run(heads, empty_micro_batch(self._base.device), tasks, [])
        finally:
            for model in models:
                model.gradients.join_lanes()

    def _micro_batch_function(
        self, tasks: list[Task], models: list[Trainable], gradients: bool, needed: NeededSources | None
    ) -> "Callable[..., None]":
        """Returns the function that runs a micro-batch of these tasks."""
        if isinstance(models[0].program, DraftProgram):
            return partial(self._run_guesses, gradients, needed)
        return partial(
            self._run_forward_backward if gradients else self._run_forward, self._expert_adapters(tasks, models)
        )

    def _run_guesses(
        self,
        gradients: bool,
        needed: NeededSources | None,
        heads: Heads,
        micro_batch: MicroBatch,
        tasks: list[Task],
        segments: list[Segment],
    ) -> None:
        self._draft_passes.run(gradients, needed, micro_batch, tasks)

    def _expert_adapters(self, tasks: list[Task], models: list[Trainable]) -> list[Adapter]:
        """Returns the adapters whose tokens can arrive from another rank of the expert-parallel group, in the same
        order on all ranks."""
        if self._mesh.along("ep").size == 1:
            return []
        by_run = {task.run_id: model for task, model in zip(tasks, models, strict=True)}
        in_order = (by_run[run_id] for run_id in sorted(by_run))
        return [model for model in in_order if isinstance(model, Adapter)]

    def _share_of(self, micro_batch: MicroBatch) -> TokenShard:
        ring = self._base.sequence_split.ring
        return TokenShard(len(micro_batch.tokens), self._mesh, self._base.shards_activations, ring)

    @torch.no_grad()
    def bare_hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """Returns the base model's final hidden states [tokens, hidden]. All ranks call this together, with the same
        tokens."""
        share = self._share_of(micro_batch)
        with self._models.lora.applied(()):
            hidden = self._base.shared_hidden_states(micro_batch, share)
        return share.joined(share.scored(hidden))

    @torch.no_grad()
    def _run_forward(
        self, company: list[Adapter], heads: Heads, micro_batch: MicroBatch, tasks: list[Task], segments: list[Segment]
    ) -> None:
        share = self._share_of(micro_batch)
        segments = _with_padding(segments, share)
        captured = self._capturing.layers_to_capture(micro_batch, tasks)
        with self._models.lora.applied(clip_segments(segments, share.tokens), company):
            hidden = self._base.shared_hidden_states(micro_batch, share, captured)
        with _using_heads(heads, tasks):
            if not micro_batch.objectives:
                return
            of_rows = clip_segments(segments, share.rows)
            _take(micro_batch, score(heads, share.scored(hidden), of_rows, micro_batch.objectives, share), tasks)
        self._capturing.store(micro_batch, tasks, captured, hidden, share)

    def _run_forward_backward(
        self, company: list[Adapter], heads: Heads, micro_batch: MicroBatch, tasks: list[Task], segments: list[Segment]
    ) -> None:
        share = self._share_of(micro_batch)
        segments = _with_padding(segments, share)
        captured = self._capturing.layers_to_capture(micro_batch, tasks)
        with self._models.lora.applied(clip_segments(segments, share.tokens), company):
            hidden = self._base.shared_hidden_states(micro_batch, share, captured)
            self._capturing.store(micro_batch, tasks, captured, hidden, share)
            own, of_rows = share.scored(hidden.detach()), clip_segments(segments, share.rows)
            of_own = torch.empty_like(own)
            with _using_heads(heads, tasks):
                if micro_batch.objectives:
                    found = score_with_gradient(heads, own, of_rows, micro_batch.objectives, of_own, share)
                    _take(micro_batch, found, tasks)
                else:
                    of_own.zero_()
            gradient = share.joined_to_hidden(of_own)
            _zero_failed(micro_batch, tasks, gradient, share)
            if hidden.requires_grad:
                hidden.backward(gradient)


@contextmanager
def _using_heads(heads: Heads, tasks: list[Task]) -> Iterator[None]:
    """Holds the heads that score these tasks in use, on all ranks alike, even if a micro-batch has no rows for one."""
    with ExitStack() as held:
        for scores in sorted({task.operation.loss.scores for task in tasks}):
            held.enter_context(heads[scores].gathered())
        yield


def _wanted(*tasks: Task) -> frozenset[str]:
    """Returns the vectors of the tasks' models that must be on the device."""
    return FORWARD_VECTORS if all(task.forward_only for task in tasks) else BACKWARD_VECTORS


def _failure_of(begun: Task | Failure) -> Failure | None:
    return begun.failure if isinstance(begun, Task) else begun


def _needed(tasks: list[Task]) -> NeededSources:
    """Returns the sources of features that this rank's share of the data needs."""
    return NeededSources.for_sequences(
        [task.stored.get(row) for task in tasks for row in range(len(task.operation.rows))]
    )


def _take_failures(of_ranks: list[list[Failure | None]], begun: list[Task | Failure]) -> None:
    """Gives up the tasks that failed on another rank."""
    for each, failures in zip(begun, zip(*of_ranks, strict=True), strict=True):
        failure = next((one for one in failures if one is not None), None)
        if failure is not None and isinstance(each, Task):
            each.abandon(failure)


def _verdict(begun: Task | Failure, counts: bool) -> TaskVerdict:
    """Returns the rank's verdict; `counts` is false if another rank has the same totals and reports them."""
    verdict = begun.verdict() if isinstance(begun, Task) else TaskVerdict(begun, OperationTotals())
    return verdict if counts else TaskVerdict(verdict.failure, OperationTotals())


def _run_lane(lane: Lane, tasks: list[Task], models: list[Trainable], run: RunMicroBatch, is_alone: bool) -> None:
    """Runs a lane's micro-batches. If `is_alone`, no other rank takes part in them, and the lane stops as soon as all
    tasks have failed."""
    for micro_batch in lane.micro_batches:
        if is_alone and all(task.failure for task in tasks):
            return
        run(micro_batch, tasks, _segments(micro_batch, models))


def _segments(micro_batch: MicroBatch, models: list[Trainable]) -> list[Segment]:
    """Returns the micro-batch's segments, with neighbours of the same model merged."""
    segments: list[Segment] = []
    for part in micro_batch.segments:
        model = models[part.operation]
        start = segments.pop().start if segments and segments[-1].model is model else part.start
        segments.append(Segment(start, part.stop, model))
    return segments


def _take(micro_batch: MicroBatch, found: list[ObjectiveScores], tasks: list[Task]) -> None:
    for objective, of_objective in zip(micro_batch.objectives, found, strict=True):
        scores = HostScores.of(of_objective)
        for segment in micro_batch.segments_of(objective):
            rows = slice(segment.start - objective.start, segment.stop - objective.start)
            tasks[segment.operation].add_scores(segment, scores.of_rows(rows))


def _zero_failed(micro_batch: MicroBatch, tasks: list[Task], gradient: Tensor, share: TokenShard) -> None:
    """Zeroes the gradient, of the tokens `share.hidden`, where tasks failed: other tasks share the backward pass."""
    for segment in micro_batch.segments:
        if tasks[segment.operation].failure:
            gradient[overlap(share.hidden, segment.start, segment.stop)] = 0


def _with_padding(segments: list[Segment], share: TokenShard) -> list[Segment]:
    """Returns the segments and one for the padding, which no adapter adapts."""
    return [*segments, Segment(share.num_tokens, share.num_padded, None)] if share.num_padding else segments
