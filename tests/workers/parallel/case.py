"""Case: a layout, further options, and the tiny model that it runs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trainhouse.workers.protocol.parallel_spec import ParallelSpec, ShardedUnit
from trainhouse.workers.protocol.worker_config import ZeroStage
from trainhouse.workers.shapes.sequence_split import SequenceSplit

from ...tiny import tiny_model

# Numbers of query and key/value heads that do not divide by two ranks, with one or two ranks along tp.
HEADS: dict[str, dict[str, object]] = {
    "6x3": {"num_attention_heads": 6, "num_key_value_heads": 3}
    | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "6x2": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "4x1": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "6x3-96": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
}


@dataclass(frozen=True)
class Case:
    spec: str
    kind: str = "qwen3"
    tp_activations: Literal["sharded", "whole"] = "sharded"
    heads: str = "4x2"
    zero_stage: ZeroStage = "3"
    replicated: tuple[ShardedUnit, ...] = ()
    draft: str | None = None

    def __str__(self) -> str:
        whole = "-whole" if self.tp_activations == "whole" else ""
        zero = "-zero2" if self.zero_stage == "2" else ""
        heads = f"-{self.heads}" if self.heads in HEADS else ""
        draft = f"-draft-{self.draft}" if self.draft else ""
        return "-".join([f"{self.spec}-{self.kind}{whole}{zero}{heads}{draft}", *self.replicated])

    def model(self, tiny_models: dict[str, Path], directory: Path) -> Path:
        if self.heads not in HEADS:
            return tiny_models[self.kind]
        return tiny_model(self.kind, directory / "model", **HEADS[self.heads])

    @property
    def parallel(self) -> ParallelSpec:
        return replace(ParallelSpec.parse(self.spec), replicated=self.replicated)

    @property
    def units(self) -> list[list[ShardedUnit]]:
        """Returns the sharded units of each of the two layers."""
        of_kinds: dict[str, list[ShardedUnit]] = {"qwen3_moe": ["experts"] * 2, "mixtral": ["experts"] * 2}
        of_kinds["qwen3_moe_mixed"] = ["mlp", "experts"]
        return [["self_attn", features] for features in of_kinds.get(self.kind, ["mlp"] * 2)]

    @property
    def options(self) -> dict[str, object]:
        draft_parallel_spec = ParallelSpec.parse(self.draft) if self.draft else None
        return {
            "tp_activations": self.tp_activations,
            "zero_stage": self.zero_stage,
            "draft_parallel": draft_parallel_spec,
        }

    @property
    def split(self) -> SequenceSplit:
        heads, kv_heads = (int(number) for number in self.heads.partition("-")[0].split("x"))
        spec = self.parallel
        tp = spec.tp_size_of("self_attn")
        return SequenceSplit.of(spec.sp, heads // tp, kv_heads // tp)
