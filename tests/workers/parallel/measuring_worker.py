"""Workers that report what they hold, and count live bytes during a pass."""

from trainhouse.schemas.models import TrainingConfig
from trainhouse.workers.protocol.calls import AdapterWeights, Failure, OptimizerStep, PartAnswer, Pass, RunInfo, RunSpec
from trainhouse.workers.protocol.worker_config import WorkerConfig
from trainhouse.workers.worker.worker import Worker

from .live_bytes import LiveBytes


class MeasuringWorker(Worker):
    def run_pass(self, parts: Pass) -> tuple[PartAnswer, ...]:
        with LiveBytes() as live:
            answers = super().run_pass(parts)
        self._peak = live.peak
        return answers

    def peak(self) -> int:
        """Returns the bytes of tensors that the last pass made."""
        return self._peak

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the rank's shapes of parameters, by name."""
        named = self._base.model.named_parameters()
        # Adapted layers hold the weight that they have from the model.
        return {name: tuple(parameter.shape) for name, parameter in named}

    def model_size(self, training: TrainingConfig) -> int:
        return self._models.build(training).layout.size


class AccountingWorker(Worker):
    """Counts the live bytes that runs allocated in any call."""

    def __init__(self, config: WorkerConfig) -> None:
        self._live = LiveBytes()
        super().__init__(config)

    def create_run(self, spec: RunSpec) -> RunInfo:
        with self._live:
            return super().create_run(spec)

    def run_pass(self, parts: Pass) -> tuple[PartAnswer, ...]:
        self._live.restart()
        with self._live:
            return super().run_pass(parts)

    def apply_steps(self, steps: tuple[OptimizerStep, ...]) -> tuple[dict[str, float] | Failure, ...]:
        with self._live:
            return super().apply_steps(steps)

    def export_adapter(self, run_id: str) -> AdapterWeights | None:
        self._live.restart()
        with self._live:
            return super().export_adapter(run_id)

    def alive(self) -> int:
        return self._live.count()

    def peak(self) -> int:
        """Returns the peak of the last pass or export."""
        return self._live.peak
