"""A worker that tells what it holds, and counts what is alive during a pass."""

from trainhouse.schemas.models import LoraConfig
from trainhouse.workers.passes.progress import Answer
from trainhouse.workers.verbs import Pass
from trainhouse.workers.worker import Worker

from .live_bytes import LiveBytes


class MeasuringWorker(Worker):
    def run_pass(self, work: Pass) -> tuple[Answer, ...]:
        with LiveBytes() as live:
            answers = super().run_pass(work)
        self._peak = live.peak
        return answers

    def peak(self) -> int:
        """Bytes of tensors that the last pass made."""
        return self._peak

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters, by name, as the rank keeps them."""
        named = self._base.model.named_parameters()
        # Adapted layers hold the weight that they have from the model.
        return {name: tuple(parameter.shape) for name, parameter in named}

    def adapter_size(self, lora: LoraConfig) -> int:
        return self._models.build(lora).vector_size
