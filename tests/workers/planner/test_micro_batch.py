"""The default size of micro-batches, by a device's rate and memory: of a worker and of its plan."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainhouse.schemas.models import FullConfig, LoraConfig
from trainhouse.server.cli import commands
from trainhouse.workers.batch import micro_batch
from trainhouse.workers.parallel.mesh import Mesh
from trainhouse.workers.planner.device_rates import rate_of
from trainhouse.workers.planner.estimate import estimate
from trainhouse.workers.planner.layout_search import usable_bytes
from trainhouse.workers.planner.micro_batches import fitting_micro_batch_tokens, wanted_micro_batch_tokens
from trainhouse.workers.planner.workload import Workload
from trainhouse.workers.protocol.calls import RunSpec
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec
from trainhouse.workers.protocol.worker_config import (
    LEAST_PASS_TOKENS,
    TRAININGS,
    ServedModel,
    Training,
    WorkerConfig,
    default_pass_tokens,
)
from trainhouse.workers.resources import machine
from trainhouse.workers.shapes.model_shape import ModelShape, describe_model
from trainhouse.workers.training import pass_runner
from trainhouse.workers.worker import loading

from ..training.test_full import a_worker, run, some_data, supervised

LOAD = Workload(8192, samples=False)
H100 = rate_of("nvlink", device="NVIDIA H100 80GB HBM3").flops_per_second
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
}
SIZES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}


def model(size: str) -> ModelShape:
    shape = describe_model(size, QWEN3 | SIZES[size])
    assert isinstance(shape, ModelShape)
    return shape


def test_a_gpu_computes_a_tenth_of_a_second() -> None:
    """A token multiplies 440 of the model's 596 million weights in layers forward and for its input's gradient, and
    the head's 156 likewise. Adapters, and scores of sequences of 1,024 tokens, add a fifth."""
    tokens = wanted_micro_batch_tokens(model("0.6B"), SINGLE, LOAD, H100)
    weights = 28 * (1024 * 128 * (2 * 16 + 2 * 8) + 3 * 1024 * 3072) + 1024 * 151936
    assert 0.08 < tokens * 4 * weights / H100 < 0.09
    assert tokens > 12000
    assert wanted_micro_batch_tokens(model("0.6B"), SINGLE, LOAD, 2 * H100) == pytest.approx(2 * tokens, rel=0.02)


def test_micro_batches_are_never_shorter_than_on_a_cpu() -> None:
    """An 8B model takes longer than a tenth of a second for the usual number, and longer to launch, too."""
    assert wanted_micro_batch_tokens(model("8B"), SINGLE, LOAD, H100) == 4096
    assert wanted_micro_batch_tokens(model("0.6B"), SINGLE, replace(LOAD, on_cpu=True), H100) == 4096
    assert wanted_micro_batch_tokens(model("0.6B"), SINGLE, LOAD, None) == 4096
    assert wanted_micro_batch_tokens(model("8B"), ParallelSpec.parse("tp=8"), LOAD, H100) > 8192


@pytest.mark.parametrize(("free", "expected"), [(1 << 20, 256), (10 << 30, None), (1 << 40, 16384)])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_memory_bounds_micro_batches(free: int, expected: int | None, on_cpu: bool) -> None:
    load = replace(LOAD, on_cpu=on_cpu)
    tokens = fitting_micro_batch_tokens(model("0.6B"), SINGLE, load, 16384, free, None)
    assert tokens == expected if expected else 256 < tokens < 16384


@pytest.mark.parametrize("gigabytes", [12, 16, 24, 40, 80])
@pytest.mark.parametrize("layout", ["single", "tp=2", "fsdp=2"])
@pytest.mark.parametrize(("training", "slots"), [("lora", 1), ("lora", 40), ("full", 1), ("full", 2)])
@pytest.mark.parametrize("cache_bytes", [None, 1 << 30, 6 << 30])
def test_the_default_fits_if_any_micro_batch_does(
    gigabytes: int, layout: str, training: Training, slots: int, cache_bytes: int | None
) -> None:
    """All slots and the planned cache fit, too, and above 4,096 tokens the cache that a worker takes by default."""
    shape, spec, device_bytes = model("0.6B"), ParallelSpec.parse(layout), gigabytes * 10**9
    load = Workload(256, training=training, kv_cache_bytes=cache_bytes or 1 << 30).with_slots(slots)
    free = device_bytes - estimate(shape, spec, load).base

    def planned(tokens: int) -> tuple[int, int]:
        of_load = estimate(shape, spec, replace(load, longest=tokens, micro_batch_tokens=tokens))
        beside_cache = of_load.trainable.total + of_load.in_pass
        return of_load.base + load.kv_cache_bytes + beside_cache, beside_cache

    tokens = fitting_micro_batch_tokens(shape, spec, load, 16384, free, cache_bytes)
    needed, beside_cache = planned(tokens)
    if planned(256)[0] <= usable_bytes(device_bytes):
        assert needed <= usable_bytes(device_bytes)
        assert tokens <= 4096 or beside_cache + (cache_bytes or free // 3) <= free
    assert tokens >= 256 and tokens % 256 == 0


def test_slots_and_cache_that_never_fit_do_not_shorten_micro_batches() -> None:
    """A server of adapters has two slots for full models by default. One of 8B weights takes 176 GB."""
    load = replace(LOAD, training="full", full_slots=2)
    assert fitting_micro_batch_tokens(model("8B"), SINGLE, load, 16384, 120 * 10**9, None) == 4096


CASES = {
    "one GPU": ({}, {}, 80),
    "a small GPU": ({}, {}, 12),
    "a set size": ({"micro_batch_tokens": 2048}, {}, 80),
    "a large cache": ({"kv_cache_bytes": 40 << 30}, {"kv_cache_bytes": "40GiB"}, 60),
    "slots": ({"adapter_slots": 20}, {"lora": "20"}, 16),
    "as many slots as by default": ({"adapter_slots": 64}, {"lora": "64"}, 16),
    "one full model": ({"full_slots": 1}, {"full": "1"}, 16),
    "full models": ({}, {}, 30),
    "recomputed": ({"activations": "recompute"}, {}, 16),
    "a cut model": ({"parallel": ParallelSpec.parse("tp=2")}, {}, 16),
    "replicas": ({"parallel": ParallelSpec.parse("replicas=4")}, {}, 16),
    "a packed base": ({"base_quantization": "nf4"}, {}, 16),
    "float32": ({"dtype": "float32"}, {}, 80),
    "a CPU": ({"dtype": "float32", "device": "cpu"}, {}, 12),
}


@pytest.mark.parametrize(
    ("case", "training"),
    [(case, training) for case in CASES for training in TRAININGS if (case, training) != ("a packed base", "full")],
)
def test_plan_prints_what_a_worker_chooses(
    case: str,
    training: Training,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A device has room that is not there: the base of the worker is not loaded."""
    options, flags, gigabytes = CASES[case]
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | SIZES["0.6B"]))
    shape, on_cpu = model("0.6B"), options.get("device") == "cpu"
    config = WorkerConfig(ServedModel("M", str(tmp_path)), **({"micro_batch_tokens": 0} | options))
    given = [f"--max-context-length=4096 --device-memory={gigabytes}GB --training={training} --json"]
    others = {name: each for name, each in options.items() if name in ("micro_batch_tokens", "activations", "parallel")}
    others |= {name: options[name] for name in ("base_quantization", "dtype") if name in options} | flags
    slots = others.pop(training, None)
    others = {name: each for name, each in others.items() if name not in TRAININGS}
    given += [f"--{name.replace('_', '-')}={each}" for name, each in others.items()]
    given += [f"--{'adapter' if training == 'lora' else 'full'}-slots={slots}"] if slots else []
    given += [] if on_cpu else ["--device-name=H100"]
    status = commands.main(["plan", f"--base-model=M={tmp_path}", *" ".join(given).split()])
    found = json.loads(capsys.readouterr().out)
    assert status == (0 if found["fits"] else 1)

    free = gigabytes * 10**9 - found["memory"]["base"]
    monkeypatch.setattr(loading, "available_bytes", lambda _: free)
    base: Any = SimpleNamespace(
        device=torch.device("cpu" if on_cpu else "cuda"),
        dtype=torch.float32 if "dtype" in options else torch.bfloat16,
        spec=shape.own_layout(config.parallel),
    )
    config = replace(config, is_local=False)
    tokens = loading.default_micro_batch_tokens(config, base, Mesh(), 0.75 * 989e12)
    assert found["default_micro_batch_tokens"] == tokens[training]
    assert found["load"]["micro_batch_tokens"] == tokens[training]
    assert found["default_pass_tokens"] == default_pass_tokens(tokens["lora"], config.parallel, on_cpu)

    again = ["plan", f"--base-model=M={tmp_path}", *" ".join(given).split()]
    again += [f"--micro-batch-tokens={tokens[training]}"] if "micro_batch_tokens" not in options else []
    commands.main(again)
    same = json.loads(capsys.readouterr().out)
    assert (same["memory"], same["fits"]) == (found["memory"], found["fits"])


def test_a_worker_runs_micro_batches_of_the_planned_size(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Passes over adapters and over full models keep different activations."""
    flags, planned = [f"--base-model=M={tiny_models['qwen3']}", "--dtype=float32", "--json"], []
    for training in TRAININGS:
        commands.main(["plan", *flags, f"--training={training}", "--device-memory=40000000", "--max-context-length=64"])
        planned.append(json.loads(capsys.readouterr().out))
    sizes = [each["default_micro_batch_tokens"] for each in planned]
    monkeypatch.setattr(machine, "available_bytes", lambda: 40_000_000 - planned[0]["memory"]["base"])
    worker = a_worker(tiny_models["qwen3"], device="cpu", micro_batch_tokens=0)
    assert worker.info().micro_batch_tokens == sizes[0]

    tried: list[int] = []

    def pack(batches: Any, token_budget: int, *arguments: Any) -> Any:
        tried.append(token_budget)
        return micro_batch.pack(batches, token_budget, *arguments)

    monkeypatch.setattr(pass_runner, "pack", pack)
    for run_id, training in (("adapter", LoraConfig(rank=4)), ("full", FullConfig())):
        worker.create_run(RunSpec(run_id, training))
        run(worker, supervised(run_id, some_data(0)))
    assert tried == sizes
    assert sizes[0] != sizes[1] and all(256 < each < 4096 for each in sizes)


def test_a_pass_has_a_micro_batch_for_each_data_share() -> None:
    spec = ParallelSpec.parse("replicas=8,tp=2")
    assert default_pass_tokens(4096, spec, on_cpu=False) == 8 * 4096
    assert default_pass_tokens(4096, SINGLE, on_cpu=False) == LEAST_PASS_TOKENS
    assert default_pass_tokens(16384, SINGLE, on_cpu=False) == 16384
    assert default_pass_tokens(4096, spec, on_cpu=True) == LEAST_PASS_TOKENS
