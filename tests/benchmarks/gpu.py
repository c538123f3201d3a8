"""`make bench-gpu`: measures one GPU in steps of a few minutes, each of which writes a JSON file, even if interrupted.

Everything runs in this process. Random weights of a real model's shape are created once, in --out.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.sampling import SamplingParams
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.ops import kernels
from trainhouse.workers.planner.estimate import estimate
from trainhouse.workers.planner.workload import Workload
from trainhouse.workers.protocol.calls import (
    Failure,
    OperationPart,
    OptimizerStep,
    RunSpec,
    SampleJob,
    SamplingSlice,
)
from trainhouse.workers.protocol.parallel_spec import SINGLE
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.sampler import runner
from trainhouse.workers.shapes.model_shape import ModelShape, read_model
from trainhouse.workers.worker.worker import Worker
from transformers import AutoConfig, AutoModelForCausalLM

QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 32_768}
QWEN3 |= {"num_key_value_heads": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    | {"vocab_size": 512, "max_position_embeddings": 2048},
    "0.6b": QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"tie_word_embeddings": True},
    "8b": QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32},
    # Those below have the widths of a released model, and some of its layers.
    "qwen3.5-4b": {"model_type": "qwen3_5_text", "hidden_size": 2560, "intermediate_size": 9216, "head_dim": 256}
    | {"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 248_320}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
    | {"linear_value_head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 32_768},
    "qwen3-30b": {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 32}
    | {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 768, "vocab_size": 151_936, "max_position_embeddings": 32_768},
    "gpt-oss-20b": {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 6}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32}
    | {"vocab_size": 201_088, "sliding_window": 128},
    "glm-4.7-flash": {"model_type": "glm4_moe_lite", "hidden_size": 2048, "num_hidden_layers": 8}
    | {"num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512}
    | {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64}
    | {"num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_shared_experts": 1, "intermediate_size": 10_240}
    | {"vocab_size": 154_880, "max_position_embeddings": 32_768},
    "granite-4-h": {"model_type": "granitemoehybrid", "hidden_size": 1536, "num_hidden_layers": 20}
    | {"layer_types": (["mamba"] * 9 + ["attention"]) * 2, "num_attention_heads": 12, "num_key_value_heads": 4}
    | {"num_local_experts": 64, "num_experts_per_tok": 6, "intermediate_size": 512, "shared_intermediate_size": 1024}
    | {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
    | {"vocab_size": 100_352, "max_position_embeddings": 32_768},
}
RANK = 32
MAX_ADAPTERS = 16
PEFT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Plan = Sequence[tuple[int, int]]
"""The number of rows and the tokens of each, for each tenant."""


@dataclass
class Bench:
    """options: of the command line. figures: by name; every one is written as soon as it is known."""

    options: argparse.Namespace
    file: Path
    figures: dict[str, Any] = field(default_factory=dict)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @property
    def device(self) -> str:
        return self.options.device

    @property
    def shape(self) -> dict[str, Any]:
        return SHAPES[self.options.model]

    @property
    def length(self) -> int:
        return 64 if self.options.model == "tiny" else 1024

    @property
    def model(self) -> Path:
        return self.options.out / f"model-{self.options.model}"

    def report(self, name: str, figure: Any) -> None:
        self.figures[name] = figure
        self.file.write_text(json.dumps(self.figures, indent=1))
        print(name, json.dumps(figure), flush=True)

    def seconds(self, run: Callable[[], object], rounds: int | None = None, warm_ups: int = 1) -> float:
        """Returns the median; the device is idle before and after each round."""
        found = []
        for number in range(warm_ups + (rounds or self.options.rounds)):
            self.wait()
            started = time.perf_counter()
            run()
            self.wait()
            if number >= warm_ups:
                found.append(time.perf_counter() - started)
        return statistics.median(found)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak_gigabytes(self) -> float | None:
        """Returns the most since the last call, on CUDA."""
        if self.device != "cuda":
            return None
        most = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
        return most

    def tokens(self, *size: int) -> np.ndarray:
        return self.random.integers(0, self.shape["vocab_size"], size).astype(np.int32)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.without_triton:
        kernels.load_triton_kernels = lambda device: None
    if options.without_graphs:
        runner.StepGraphs = lambda device: None
    for step in options.steps:
        started = time.monotonic()
        bench = Bench(options, options.out / f"{step}-{options.model}.json")
        bench.report("hardware", hardware(options.device))
        STEPS[step](bench)
        bench.report("seconds", round(time.monotonic() - started, 1))
        gc.collect()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="0.6b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=_steps, default=list(STEPS), help=f"of {','.join(STEPS)}; all unless given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-triton", action="store_true", help="use torch's own operations")
    parser.add_argument("--without-graphs", action="store_true", help="launch the kernels of decode steps one by one")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-figures")))
    return parser.parse_args(arguments)


def _steps(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - STEPS.keys():
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: known are {', '.join(STEPS)}")
    return names


def hardware(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "device": device, "cores": os.cpu_count()}
    if device == "cuda":
        found |= {"name": torch.cuda.get_device_name(), "GB": torch.cuda.get_device_properties(0).total_memory / 1e9}
    return found


def peak(bench: Bench) -> None:
    """Measures the rate of a product of two square matrices in bfloat16, and of a copy."""
    bench.report("product", {"TFLOP/s": _product_rate(bench) / 1e12})
    source = torch.empty(1 << (32 if bench.device == "cuda" else 24), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    bench.report("copy", {"GB/s": 2 * source.numel() / bench.seconds(lambda: target.copy_(source), 10, 3) / 1e9})


def train(bench: Bench) -> None:
    """Measures passes and steps of one tenant and of many, even and ragged."""
    worker, product = _worker(bench), _product_rate(bench)
    length = bench.length
    ragged = [(2, length), (1, length // 2), (3, length // 4), (2, length), (1, length), (4, length // 4)]
    plans: dict[str, Plan] = {
        f"1 tenant 16x{length}": [(16, length)],
        f"16 tenants 1x{length}": [(1, length)] * 16,
        f"1 tenant 1x{16 * length}": [(1, 16 * length)],
        "8 tenants ragged": [*ragged, (2, length // 2), (2, length)],
        "16 tenants 1x64": [(1, 64)] * 16,
        "1 tenant 1x64": [(1, 64)],
    }
    shape = _planned_shape(bench)
    for name, plan in plans.items():
        bench.peak_gigabytes()
        run = _pass(bench, worker, plan)
        seconds, tokens = bench.seconds(run), sum(rows * length for rows, length in plan)
        share = run() / seconds / product
        figure = {"tokens/s": tokens / seconds, "ms": 1000 * seconds, "of the product's rate, %": 100 * share}
        bench.report(name, figure | {"peak GB": bench.peak_gigabytes()})
    load = Workload(length, "bfloat16", micro_batch_tokens=16 * length, lora_rank=RANK, adapter_slots=1, samples=False)
    bench.report("plan's GB for one tenant", estimate(shape, SINGLE, load).total / 1e9)
    steps = tuple(OptimizerStep(f"run{number}", AdamParams()) for number in range(MAX_ADAPTERS))
    small = _pass(bench, worker, [(1, 64)] * MAX_ADAPTERS)
    both = bench.seconds(lambda: (small(), worker.apply_steps(steps)))
    bench.report(f"optim_step of {MAX_ADAPTERS}", {"ms": 1000 * (both - bench.seconds(small))})


def decode(bench: Bench) -> None:
    """Measures samples of short prompts, at 1 and at 64 rows, and of long prompts."""
    worker, is_tiny = _worker(bench), bench.options.model == "tiny"
    num_tokens, long = (16, 128) if is_tiny else (128, 8000)
    for name, jobs, adapters, prompt, ragged in (
        ("64 rows, base", 64, 0, 64, 0),
        ("64 rows, 1 adapter", 64, 1, 64, 0),
        ("64 rows, 8 adapters", 64, 8, 64, 0),
        ("64 rows, 8 adapters, ragged", 64, 8, 64, 1),
        ("1 row", 1, 0, 64, 0),
        ("8 long prompts", 8, 0, long, 0),
    ):
        lengths = [num_tokens - (number * ragged) % max(1, num_tokens // 2) for number in range(jobs)]
        seconds = bench.seconds(_sampling(bench, worker, lengths, adapters, prompt), 2)
        bench.report(
            name, {"tokens/s": sum(lengths) / seconds, "ms a step, prefill in it": 1000 * seconds / num_tokens}
        )


def profiles(bench: Bench) -> None:
    """Writes tables of torch's profiler next to the JSON."""
    worker = _worker(bench)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    runs = {
        "train": _pass(bench, worker, [(16, bench.length)]),
        "decode": _sampling(bench, worker, [16] * 64, 8, 64),
    }
    for name, run in runs.items():
        run()
        with torch.profiler.profile(activities=activities) as profile:
            run()
            bench.wait()
        order = "cuda_time_total" if bench.device == "cuda" else "cpu_time_total"
        table = profile.key_averages().table(sort_by=order, row_limit=40)
        file = bench.options.out / f"profile-{name}-{bench.options.model}.txt"
        file.write_text(table)
        bench.report(f"profile of {name}", file.name)


def reference(bench: Bench) -> None:
    """Compares with the same model by transformers and PEFT: training of four rows, and `generate` of 64."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    rows, length, num_tokens = 4, bench.length, 16 if bench.options.model == "tiny" else 64
    _save_model(bench)
    base = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = get_peft_model(base.to(bench.device), PeftConfig(r=RANK, lora_alpha=32, target_modules=list(PEFT_TARGETS)))
    ids = torch.from_numpy(bench.tokens(rows, length)).long().to(bench.device)
    prompts = torch.from_numpy(bench.tokens(64, 64)).long().to(bench.device)
    options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": True}

    def backward() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    @torch.no_grad()
    def generate() -> None:
        model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), **options)

    theirs = {"train": bench.seconds(backward), "sample": bench.seconds(generate, 1)}
    bench.report("transformers + PEFT, peak GB", bench.peak_gigabytes())
    model = base = None
    worker = _worker(bench)
    ours = {
        "train": bench.seconds(_pass(bench, worker, [(rows, length)])),
        "sample": bench.seconds(_sampling(bench, worker, [num_tokens] * 64, 1, 64), 1),
    }
    for name, tokens in (("train", rows * length), ("sample", 64 * num_tokens)):
        rates = {"transformers + PEFT": tokens / theirs[name], "ours": tokens / ours[name]}
        bench.report(f"{name}, tokens/s", rates | {"ratio": theirs[name] / ours[name]})


STEPS: dict[str, Callable[[Bench], None]] = {
    "peak": peak,
    "train": train,
    "decode": decode,
    "reference": reference,
    "profiles": profiles,
}


def _save_model(bench: Bench) -> None:
    if (bench.model / "config.json").exists():
        return
    torch.manual_seed(0)
    with torch.device(bench.device):
        config = AutoConfig.for_model(**bench.shape, initializer_range=0.02)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(bench.model)


def _worker(bench: Bench) -> Worker:
    _save_model(bench)
    model = ServedModel("measured", str(bench.model))
    options: dict[str, Any] = {"kv_cache_bytes": 64 << 20} if bench.options.model == "tiny" else {}
    tokens = 16 * bench.length
    options |= {"micro_batch_tokens": tokens, "prefill_chunk_tokens": 0}
    worker = Worker(WorkerConfig(model, device=bench.device, dtype="bfloat16", **options))
    for number in range(MAX_ADAPTERS):
        worker.create_run(RunSpec(f"run{number}", LoraConfig(rank=RANK, seed=number, train_unembed=False)))
    for number in range(8):
        worker.copy_adapter(f"run{number}", f"sampler{number}")
    return worker


def _pass(bench: Bench, worker: Worker, plan: Plan) -> Callable[[], float]:
    """Returns a call that runs a pass, and returns the operations that the model needs for it."""

    def request(run: int, rows: int, length: int) -> ForwardBackwardRequest:
        ids = bench.tokens(rows, length + 1)
        weights = np.ones(length, np.float32)
        data = [Datum(row[:-1], {"target_tokens": row[1:].astype(np.int64), "weights": weights}) for row in ids]
        return ForwardBackwardRequest(f"run{run}", 1, tuple(data), "cross_entropy")

    parts = tuple(OperationPart(run, request(run, *rows)) for run, rows in enumerate(plan))

    def run() -> float:
        answers = worker.run_pass(parts)
        if failures := [answer for answer in answers if isinstance(answer, Failure)]:
            raise SystemExit(f"a pass failed: {failures[0].message}")
        return sum(answer.metrics["model_flops:sum"] for answer in answers if isinstance(answer, ForwardBackwardOutput))

    return run


def _sampling(
    bench: Bench, worker: Worker, lengths: Sequence[int], num_adapters: int, prompt: int
) -> Callable[[], None]:
    """Returns a call that samples. lengths: tokens of each sample, all of which decode at once."""

    def job(number: int, length: int) -> SampleJob:
        adapter = f"sampler{number % num_adapters}" if num_adapters else None
        params = SamplingParams(max_tokens=length, seed=number)
        return SampleJob(f"job{number}-{time.monotonic_ns()}", adapter, bench.tokens(prompt), params, (), ())

    def run() -> None:
        jobs = tuple(job(*each) for each in enumerate(lengths))
        result = worker.sample_slice(SamplingSlice(jobs, (), 50.0))
        while result.num_active:
            result = worker.sample_slice(SamplingSlice((), (), 50.0))

    return run


def _product_rate(bench: Bench) -> float:
    """Returns operations a second of a product in bfloat16."""
    size = 8192 if bench.device == "cuda" else 512
    left, right = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / bench.seconds(lambda: left @ right, 10, 3)


def _planned_shape(bench: Bench) -> ModelShape:
    shape = read_model(ServedModel("measured", str(bench.model)))
    assert isinstance(shape, ModelShape), shape
    return shape


if __name__ == "__main__":
    main()
