"""Case: a layout, what is chosen beside it, and the tiny model that it is tried on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainhouse.workers.config import ZeroStage
from trainhouse.workers.parallel.sequence_split import SequenceSplit
from trainhouse.workers.parallel.spec import ParallelSpec

from ...tiny import tiny_model

# Query and key/value heads that two ranks cannot share out, with one rank along tp, or with two.
HEADS: dict[str, dict[str, object]] = {
    "6x3": {"num_attention_heads": 6, "num_key_value_heads": 3}
    | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "6x2": {"num_attention_heads": 6, "num_key_value_heads": 2},
}


@dataclass(frozen=True)
class Case:
    spec: str
    kind: str = "qwen3"
    tp_activations: Literal["sharded", "whole"] = "sharded"
    heads: str = "4x2"
    zero_stage: ZeroStage = "3"

    def __str__(self) -> str:
        whole = "-whole" if self.tp_activations == "whole" else ""
        zero = "-zero2" if self.zero_stage == "2" else ""
        return f"{self.spec}-{self.kind}{whole}{zero}" + (f"-{self.heads}" if self.heads in HEADS else "")

    def model(self, tiny_models: dict[str, Path], directory: Path) -> Path:
        if self.heads not in HEADS:
            return tiny_models[self.kind]
        return tiny_model(self.kind, directory / "model", **HEADS[self.heads])

    @property
    def parallel(self) -> ParallelSpec:
        return ParallelSpec.parse(self.spec)

    @property
    def knobs(self) -> dict[str, str]:
        return {"tp_activations": self.tp_activations, "zero_stage": self.zero_stage}

    @property
    def split(self) -> SequenceSplit:
        heads, kv_heads = (int(number) for number in self.heads.split("x"))
        spec = self.parallel
        return SequenceSplit.of(spec.sp, heads // spec.tp, kv_heads // spec.tp)
