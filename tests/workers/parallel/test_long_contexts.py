"""Sequences of 16k to 64k tokens under sp: memory as planned, and log-probabilities and gradients of one rank."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from trainhouse.schemas.training import ForwardBackwardOutput
from trainhouse.workers.planner.estimate import estimate
from trainhouse.workers.planner.workload import Workload
from trainhouse.workers.protocol.calls import RunSpec
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec
from trainhouse.workers.protocol.worker_config import ServedModel
from trainhouse.workers.shapes.model_shape import ModelShape, read_model
from trainhouse.workers.shapes.sequence_split import SequenceSplit

from ...tiny import tiny_model
from .measuring import HANG_SECONDS, LORA, measured
from .training import Layout, largest_error, layout, supervised

pytestmark = [pytest.mark.full, pytest.mark.timeout(7200)]

LOAD = Workload(65536, "float32", head_chunk_tokens=64, lora_rank=LORA.rank, adapter_slots=1, samples=False)
OPTIONS = {"dtype": "float32", "head_chunk_tokens": 64, "hang_seconds": 6 * HANG_SECONDS}

# Numbers of query and key/value heads that divide by two ranks, and that do not.
HEADS = {"heads": (4, 2), "ring": (3, 1)}
SPECS = {"sp=2": ParallelSpec(sp=2), "sp=4": ParallelSpec(sp=4), "fsdp=2,sp=2": ParallelSpec(fsdp=2, sp=2)}


def long_model(directory: Path, split: str, num_layers: int = 2) -> Path:
    heads, kv_heads = HEADS[split]
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16, "initializer_range": 0.1}
    return tiny_model("qwen3", directory, max_position_embeddings=65536, num_hidden_layers=num_layers, **sizes)


@pytest.mark.parametrize(
    ("layout_name", "split", "way", "lengths"),
    [
        ("sp=2", "heads", "keep", (16384, 32768, 65536)),
        ("sp=2", "heads", "recompute", (16384, 32768, 65536)),
        ("sp=2", "ring", "keep", (16384, 32768, 65536)),
        ("sp=2", "ring", "recompute", (16384, 32768, 65536)),
        ("sp=4", "heads", "keep", (16384, 32768, 65536)),
        ("sp=4", "ring", "keep", (16384, 32768, 65536)),
        ("fsdp=2,sp=2", "heads", "keep", (16384, 32768, 65536)),
        ("fsdp=2,sp=2", "heads", "recompute", (16384, 32768, 65536)),
    ],
)
def test_long_sequences_use_the_planned_memory(
    layout_name: str, split: str, way: str, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    spec = SPECS[layout_name]
    if spec.sp == 2:
        assert (SequenceSplit.of(spec.sp, *HEADS[split]).ring > 1) == (split == "ring")
    model = long_model(tmp_path, split)
    shape = read_model(ServedModel("m", str(model)))
    assert isinstance(shape, ModelShape)
    with measured(model, spec, activations=way, **OPTIONS) as where:
        for length in lengths:
            peak = where.peak(length, length)
            planned = _planned(shape, spec, length, way)
            sizes = f"{peak / 1e6:.1f} | {planned / 1e6:.1f}"
            print(f"| {length // 1024}k | `{layout_name}` | {split} {HEADS[split]} | {way} | {sizes} |", flush=True)
            assert 0.9 * peak < planned < 1.1 * peak
            other = _planned(shape, spec, length, "recompute" if way == "keep" else "keep")
            assert not 0.9 * peak < other < 1.1 * peak
            # One number per pair of a rank's tokens would be far more.
            assert (length // spec.sp) ** 2 * 4 > planned


def _planned(shape: ModelShape, spec: ParallelSpec, length: int, way: str) -> int:
    of_pass = estimate(shape, spec, replace(LOAD, longest=length, activations=way))
    return of_pass.work + of_pass.trainable.weights  # the gradients of an operation


@pytest.mark.parametrize("split", HEADS)
@pytest.mark.parametrize(("length", "num_layers"), [(16384, 2), (32768, 2), (65536, 1)])
def test_long_sequences_train_as_on_one_rank(length: int, num_layers: int, split: str, tmp_path: Path) -> None:
    """The other ranks of fsdp have a second sequence, a short one. One token less is the control."""
    model, found = long_model(tmp_path / "model", split, num_layers), {}
    two = (length, 1024)
    for name, spec in {"one": SINGLE, **SPECS}.items():
        with layout(model, spec, tmp_path, **OPTIONS) as where:
            found[name] = _trained(where, two if "fsdp" in name else (length,))
            if name == "one":
                found["one of two"] = _trained(where, two)
                if length == 16384:
                    found["control"] = _trained(where, (length - 1,))
        if name != "one":
            wanted = found["one of two" if "fsdp" in name else "one"]
            logprobs = float(np.abs(found[name][0] - wanted[0]).max())
            gradients = largest_error([found[name][1]], [wanted[1]])
            print(f"| {length // 1024}k | `{name}` | {split} | {logprobs:.1e} | {gradients:.1e} |", flush=True)
            assert logprobs < 1e-4 and gradients < 1e-4
    if "control" in found:
        assert largest_error([found["control"][1]], [found["one"][1]]) > 1e-3


def _trained(where: Layout, lengths: tuple[int, ...]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the log-probabilities and the gradients of a pass over sequences of these lengths."""
    where.call("create_run", RunSpec("run", LORA))
    (output,) = where.run_pass(supervised("run", 3, *lengths))
    assert isinstance(output, ForwardBackwardOutput), output
    gradients = load_file(where.snapshot("run") / "window.safetensors")
    where.call("drop_run", "run")
    return np.concatenate([each["logprobs"] for each in output.loss_fn_outputs]), gradients
