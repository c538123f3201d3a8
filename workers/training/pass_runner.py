"""Runs forward and backward over the operations of many runs at once, for all kinds of models.

PassRunner owns the order of a pass: rounds, agreement between ranks, splitting after an error. It leaves to a
PassStrategy how a micro-batch runs.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, repeat, takewhile
from typing import Any, Protocol

import numpy as np

from ...schemas.errors import OperationError
from ..batch.micro_batch import empty_micro_batch, pack, smaller_budget
from ..batch.validated import ModelLimits
from ..models.model import BaseModel
from ..parallel.mesh import Mesh
from ..protocol.calls import Failure, OperationPart, PartAnswer
from ..protocol.log_lines import log_remote_failure
from ..protocol.plugins import plugin_rows
from ..protocol.worker_config import WorkerConfig
from ..registry.model_registry import ModelRegistry
from ..resources.machine import DeviceSpeed
from ..resources.memory import bounded_memory
from ..resources.threads import Lanes
from ..shapes.layouts.flops import ModelFlops
from ..shapes.model_shape import ModelShape
from .batch_failure import BatchFailure, batch_failure_of, out_of_memory_message
from .rank_part import FinishedParts, PartialResult, RankPart
from .scoring import RunMicroBatch, ScoringStrategy

logger = logging.getLogger(__name__)


class PassStrategy(Protocol):
    """Runs the micro-batches of a round in its own way."""

    def read(self, part: RankPart, limits: ModelLimits) -> None:
        """Validates the part's data into `part.batch`, and finds what else it needs for `part.prepared`.

        Raises OperationError if the part cannot run.
        """
        ...

    def plan(self, parts: Sequence[RankPart]) -> Any:
        """Returns what the ranks that share collectives must know of each other's operations before they run."""
        ...

    def start(
        self,
        parts: Sequence[RankPart],
        num_lanes: int,
        plans: Sequence[Any] = (),
    ) -> RunMicroBatch:
        """Returns the function that runs a micro-batch of these operations, in `num_lanes` threads at a time.

        Args:
            plans: of each rank; none if this rank runs alone.
        """
        ...


@dataclass(frozen=True)
class RankPlan:
    """A rank's state before a round, exchanged with the ranks that it shares collectives with.

    failures: by part. of_strategy: see PassStrategy.plan.
    """

    failures: list[Failure | None]
    num_micro_batches: int
    of_strategy: Any


class PassRunner:
    """Runs passes. Keeps the results of finished parts until the last part of an operation has run."""

    def __init__(
        self,
        base: BaseModel,
        models: ModelRegistry,
        limits: ModelLimits,
        config: WorkerConfig,
        mesh: Mesh | None = None,
        speed: DeviceSpeed | None = None,
        exclusive_tokens: int | None = None,
    ) -> None:
        """Creates the runner; `mesh` None means a single rank, `speed` None that passes are not timed.

        exclusive_tokens: of a micro-batch of a model that replaces the base's weights; None for those of the config.
        """
        self._base, self._speed = base, speed
        self._flops = ModelFlops(base.shape) if isinstance(base.shape, ModelShape) else None
        self._mesh = mesh = mesh or Mesh()
        self._models, self._limits = models, limits
        self._lanes = Lanes(base.device)
        self._max_lanes = self._lanes.num_lanes if base.is_concurrent else 1
        self.scoring = ScoringStrategy(base, models.lora, mesh, config.head_chunk_tokens)
        others = plugin_rows("workers.drafts.rows", "STRATEGIES").items()
        self.strategies: Mapping[str, PassStrategy] = {name: make(base, models, self.scoring) for name, make in others}
        self._token_budget = config.micro_batch_tokens
        self._exclusive_budget = exclusive_tokens or config.micro_batch_tokens
        self._max_runs = config.adapter_slots
        self._unfinished: dict[int, FinishedParts] = {}

    def run_pass(self, sent: Sequence[OperationPart]) -> tuple[PartAnswer, ...]:
        """Returns an answer for each part, see Pass. An error in one operation does not affect another."""
        answers: dict[int, PartAnswer] = {}
        for members in rounds(sent, self._max_runs, self._models.is_exclusive):
            started = time.perf_counter()
            strategy = self._strategy([sent[i] for i in members])
            parts = [self._begin(sent[i], strategy) for i in members]
            if self._mesh.has_forward_collectives:
                self._run_coupled(parts, strategy)
            else:
                self._run_or_split(parts, strategy)
            results = [each.result(self._mesh.is_leader) for each in parts]
            if not self._mesh.is_single:
                results, *of_others = self._mesh.all_gather_object(results)
                for of_rank in of_others:
                    for result, other in zip(results, of_rank, strict=True):
                        result.add(other)
            if self._speed is not None and (achieved := sum(result.flops for result in results)):
                seconds = time.perf_counter() - started
                self._speed.record("training", achieved, seconds)
                for result in results:
                    result.achieved, result.possible = achieved, seconds * self._speed.peak
            for i, part, result in zip(members, parts, results, strict=True):
                answers[i] = self._finish(part, result)
        return tuple(answers[i] for i in range(len(sent)))

    def forget(self, run_id: str) -> None:
        """Drops the run's unfinished operations; their remaining parts will fail."""
        self._unfinished = {key: each for key, each in self._unfinished.items() if each.run_id != run_id}

    def _strategy(self, sent: Sequence[OperationPart]) -> PassStrategy:
        """Returns how the parts of a round run; the same on all ranks, whichever of them fail there."""
        run_id, locations = sent[0].request.model_id, [each.request.features for each in sent]
        kind = self._models.get(run_id).kind if run_id in self._models else ""
        captures = any(location is not None and location.draft is not None for location in locations)
        return self.strategies.get(kind) or self.strategies.get("captures" if captures else "", self.scoring)

    def _begin(self, sent: OperationPart, strategy: PassStrategy) -> RankPart:
        """Returns the part, which has failed already if it cannot run."""
        part = RankPart(sent, self._unfinished.get(sent.work_number) if sent.first_datum else None)
        try:
            self._read(part, strategy)
        except Exception as error:
            self._fail_part(part, batch_failure_of(error))
        return part

    def _read(self, part: RankPart, strategy: PassStrategy) -> None:
        """Reads the part's data. Raises OperationError if it cannot run."""
        if part.run_id not in self._models:
            raise OperationError(f"run {part.run_id} is not on this worker: create it first", "server")
        model = part.model = self._models.get(part.run_id)
        if not (model.program.trains or part.forward_only):
            role = model.program.role
            raise OperationError(f"a {role} is not trained: use forward, or create a model of another role")
        part.token_budget = self._exclusive_budget if model.replaces_base else self._token_budget
        strategy.read(part, self._limits)
        if self._flops is not None and model.flops is not None:
            lengths = np.array([len(example.tokens) for example in part.batch.examples], np.int64)
            num_trained = None if part.forward_only else part.batch.num_tokens
            part.flops = self._flops.of_pass(lengths, model.flops, num_trained)
        if part.finished.num_data != part.sent.first_datum:
            raise OperationError(
                f"the results of the {part.sent.first_datum} data before these are gone: since they were computed,"
                " the run's gradients were cleared or its weights loaded; send the whole operation again",
                "server",
            )

    def _run_coupled(self, parts: list[RankPart], strategy: PassStrategy) -> None:
        """Runs a round on ranks that share collectives in forward or backward.

        An exception inside a collective cannot be recovered, so the ranks first exchange what could fail, and then all
        of them run the same number of micro-batches, without the failed operations.
        """
        with ExitStack() as held:
            usable = _runnable(parts)
            for part in usable:
                try:
                    held.enter_context(self._models.resident([part.run_id], part.vectors))
                except OperationError as error:
                    part.abandon(Failure.of(error))
            usable = _without_diverged([each for each in usable if not each.computed])
            token_budget = usable[0].token_budget if usable else 0
            lanes = pack([each.batch for each in usable], token_budget, self._base.device)
            num_micro_batches = sum(lane.num_micro_batches for lane in lanes)
            failures = [each.failure for each in parts]
            plans = self._mesh.all_gather_object(RankPlan(failures, num_micro_batches, strategy.plan(usable)))
            for part, *of_ranks in zip(parts, *(each.failures for each in plans), strict=True):
                if found := [failure for failure in of_ranks if failure is not None]:
                    part.abandon(found[0])
            self._run([each for each in usable if not each.computed], strategy, token_budget, plans)

    def _run_or_split(self, parts: list[RankPart], strategy: PassStrategy) -> None:
        """Runs the operations together. After an error that any of them may have caused, runs each alone; after running
        out of memory, in smaller micro-batches."""
        together = _runnable(parts)
        attempts = [(together, together[0].token_budget)] if together else []
        while attempts:
            tried, token_budget = attempts.pop()
            run_ids = [each.run_id for each in tried]
            try:
                with bounded_memory(self._base.device), self._models.resident(run_ids, tried[0].vectors):
                    self._run(_without_diverged(tried), strategy, token_budget)
                continue
            except Exception as error:
                failure = batch_failure_of(error)
            for part in [each for each in reversed(tried) if not each.computed]:
                if len(tried) > 1:
                    attempts.append(([part], token_budget))
                elif failure.out_of_memory and (smaller := smaller_budget(part.batch, token_budget)):
                    attempts.append(([part], smaller))
                else:
                    self._fail_part(part, failure, token_budget)

    def _run(
        self,
        parts: list[RankPart],
        strategy: PassStrategy,
        token_budget: int,
        plans: Sequence[RankPlan] = (),
    ) -> None:
        """Runs operations that can share micro-batches (see `rounds`).

        Args:
            plans: of the ranks that share collectives, which all run as many micro-batches; none if this rank is alone.
        """
        if not parts:
            return
        models, trains = [each.model for each in parts], not parts[0].forward_only
        max_lanes = 1 if models[0].is_exclusive else self._max_lanes
        lanes = pack([each.batch for each in parts], token_budget, self._base.device, max_lanes)
        for i, (part, model) in enumerate(zip(parts, models, strict=True)):
            part.restart()
            model.vectors.weight_views()  # makes the copy in the base's dtype before several lanes use it
            if trains:
                model.gradients.begin_operation([number for number, lane in enumerate(lanes) if i in lane.operations])
        run = strategy.start(parts, len(lanes), [plan.of_strategy for plan in plans])
        if plans:  # these ranks run one lane
            missing = max(plan.num_micro_batches for plan in plans) - lanes[0].num_micro_batches
            micro_batches = [chain(lanes[0].micro_batches, repeat(empty_micro_batch(self._base.device), missing))]
        else:
            # No other rank takes part in them, so they end when all operations have failed.
            micro_batches = [
                takewhile(lambda _: not all(each.failure for each in parts), lane.micro_batches) for lane in lanes
            ]
        try:
            with self._models.with_weights_of(models, trains):
                self._lanes.run(run, micro_batches)
        finally:
            if len(lanes) > 1:
                for model in models:
                    model.gradients.join_lanes()
        for part in parts:
            if trains and not part.failure:
                part.add_earlier_gradient()
            part.computed = True

    def _fail_part(self, part: RankPart, failure: BatchFailure, token_budget: int | None = None) -> None:
        """Ends the part with the error; `token_budget` is the size of the micro-batches that were too large."""
        message = failure.message
        if failure.out_of_memory and token_budget is not None:
            message = out_of_memory_message(part.batch, part.token_budget, token_budget, self._base.device)
        if failure.traceback:
            log_remote_failure(logger, f"an operation of run {part.run_id} failed", failure.traceback)
        part.abandon(Failure(message, failure.category))

    def _finish(self, part: RankPart, result: PartialResult) -> PartAnswer:
        """Ends a part, in the same way on all ranks.

        The last part commits the operation's gradients to the accumulator; earlier parts keep theirs until then. A
        failure ends the operation; the window lacks a part of its batch then, so its optimizer step will be refused.
        """
        sent, run_id = part.sent, part.run_id
        self._unfinished.pop(sent.work_number, None)
        if result.failure is None:
            with self._models.resident([run_id], part.vectors):
                answer = part.end_part(result)
            if not sent.last:
                self._unfinished[sent.work_number] = part.finished
            return answer
        if run_id in self._models and not part.forward_only:
            gradients = part.model.gradients
            gradients.abandon_operation()
            if part.model.program.trains:
                gradients.window.refused = gradients.window.refused or result.failure.message
        return result.failure


def rounds(
    parts: Sequence[OperationPart], max_runs: int, is_exclusive: Callable[[str], bool] = lambda _: False
) -> Iterator[list[int]]:
    """Yields the rounds as indices of their parts; every part is in exactly one.

    A round has parts of at most `max_runs` runs, all with or all without gradients. Parts of one run that need
    gradients go to different rounds, in order, because they share the adapter's scratch. Those without share nothing.

    Args:
        is_exclusive: true for a run whose parts cannot be in a round with those of other runs.
    """
    waiting = list(range(len(parts)))
    if len(parts) == 1:
        yield waiting
        return
    while waiting:
        chosen = _next_round(parts, waiting, max_runs, is_exclusive)
        yield chosen
        waiting = sorted(set(waiting).difference(chosen))


def _next_round(
    parts: Sequence[OperationPart], waiting: list[int], max_runs: int, is_exclusive: Callable[[str], bool]
) -> list[int]:
    """Returns the first waiting part and all that can run with it."""
    first = parts[waiting[0]].request
    runs: set[str] = set()
    chosen = []
    for i in waiting:
        run_id = parts[i].request.model_id
        if run_id in runs:
            has_room = first.forward_only
        else:
            has_room = not runs or (len(runs) < max_runs and not (is_exclusive(run_id) or is_exclusive(first.model_id)))
        if has_room and parts[i].request.forward_only == first.forward_only:
            runs.add(run_id)
            chosen.append(i)
    return chosen


def _runnable(parts: Sequence[RankPart]) -> list[RankPart]:
    """Returns the operations that have not failed, in order: neighbours in a micro-batch share matrix products if their
    models are alike, and loss computations if their losses agree."""
    runnable = [each for each in parts if not each.computed]
    if len(runnable) == 1:
        return runnable

    def key(part: RankPart) -> tuple[Any, ...]:
        batch, (layers, rank) = part.batch, part.model.batching_key
        return batch.loss.head, layers, batch.loss_key, rank, part.run_id

    return sorted(runnable, key=key)


def _without_diverged(parts: list[RankPart]) -> list[RankPart]:
    """Gives up operations whose weights are not finite, and returns the others."""
    for part in parts:
        if not part.model.has_finite_weights():
            message = (
                f"the weights of run {part.run_id} are not finite: they have diverged; continue from an"
                " earlier checkpoint with a lower learning rate"
            )
            part.abandon(Failure(message, "user"))
    return [each for each in parts if not each.computed]
