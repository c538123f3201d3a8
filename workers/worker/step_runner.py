"""Applies the optimizer steps of many runs, in chunks that fit the device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from ...schemas.errors import OperationError
from ..parallel.mesh import Mesh
from ..protocol.calls import Failure, OptimizerStep
from ..registry.model_registry import ModelRegistry
from ..state.optim import apply_steps, refuse_window
from .rank_models import unknown_run


class StepRunner:
    """Loads runs and steps them, at most `max_adapters` in one chunk."""

    def __init__(self, models: ModelRegistry, mesh: Mesh, max_adapters: int) -> None:
        self._models, self._mesh, self._max_adapters = models, mesh, max_adapters

    def apply(self, steps: Sequence[OptimizerStep]) -> tuple[dict[str, float] | Failure, ...]:
        """Returns the metrics of each step, or why it failed. Runs with full weights go alone."""
        chunks = _chunks(steps, self._max_adapters, self._models.is_exclusive)
        return tuple(answer for chunk in chunks for answer in self._apply_chunk(chunk))

    def _apply_chunk(self, steps: list[OptimizerStep]) -> list[dict[str, float] | Failure]:
        known = [step for step in steps if step.run_id in self._models]
        answers = dict(zip((step.run_id for step in known), self._apply_known(known), strict=True))
        return [answers.get(step.run_id, Failure(unknown_run(step.run_id), "server")) for step in steps]

    def _apply_known(self, steps: list[OptimizerStep]) -> list[dict[str, float] | Failure]:
        with ExitStack() as held:
            failures = self._mesh.first_values([self._load(step, held) for step in steps])
            for step, failure in zip(steps, failures, strict=True):
                if failure is not None:
                    refuse_window(self._models.get(step.run_id), step)
            loaded = [step for step, failure in zip(steps, failures, strict=True) if failure is None]
            models = [self._models.get(step.run_id) for step in loaded]
            applied = iter(apply_steps(models, loaded, self._mesh))
            return [failure or next(applied) for failure in failures]

    def _load(self, step: OptimizerStep, held: ExitStack) -> Failure | None:
        try:
            held.enter_context(self._models.resident([step.run_id]))
        except OperationError as error:
            return Failure.of(error)


def _chunks(
    steps: Sequence[OptimizerStep], max_steps: int, is_exclusive: Callable[[str], bool]
) -> Iterator[list[OptimizerStep]]:
    """Yields chunks in order, none longer than `max_steps` and none with a run twice.

    Runs for which `is_exclusive` holds go alone.
    """
    chunk: dict[str, OptimizerStep] = {}
    for step in steps:
        if len(chunk) == max_steps or step.run_id in chunk or (chunk and any(map(is_exclusive, (step.run_id, *chunk)))):
            yield list(chunk.values())
            chunk = {}
        chunk[step.run_id] = step
    if chunk:
        yield list(chunk.values())
