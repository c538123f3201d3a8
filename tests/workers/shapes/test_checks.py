"""Layouts that cannot work are refused before anything is loaded, with the value, the reason and what would work."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainhouse.server import __main__ as command_line
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import (
    DispatchConfig,
    RoleGroup,
    SamplingConfig,
    ServedModel,
    WorkerConfig,
)
from trainhouse.workers.resources.machine import cuda_devices
from trainhouse.workers.scheduler.supervision import pool_factory as sources
from trainhouse.workers.scheduler.supervision.pool_factory import PoolFactory, groups_of
from trainhouse.workers.shapes.layouts.checks import check_layout, valid_ep, valid_tp
from trainhouse.workers.shapes.model_shape import ModelShape, describe_model, read_model

CONFIGS = Path(__file__).parents[1] / "configs"
MOE, LLAMA = (str(CONFIGS / f"{name}.json") for name in ("Qwen3-30B-A3B", "Llama-3.1-8B"))

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
EXPERTS = DENSE | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 100, "intermediate_size": 128}
OF_EACH_EXPERT = {"top_k_experts": 8, "moe_intermediate_size": 64}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}

# Arguments of `trainhouse plan`, a model (a dictionary becomes its config.json), and the error.
IMPOSSIBLE: dict[str, tuple[str, str | dict[str, Any], str]] = {
    "query heads": ("--parallel tp=3", LLAMA, "tp=3 does not divide 32 query heads of M; valid tp: 1, 2, 4, 8"),
    "key/value heads": (
        "--parallel tp=8",
        DENSE | {"num_key_value_heads": 2},
        "tp=8 does not divide 2 key/value heads of M; valid tp: 1, 2",
    ),
    "key/value heads of experts": (
        "--parallel tp=8,ep=8",
        MOE,
        "tp=8 does not divide 4 key/value heads of M; valid tp",
    ),
    "features": (
        "--parallel tp=8",
        DENSE | {"intermediate_size": 1028},
        "tp=8 does not divide 1028 feed-forward features of M; valid tp: 1, 2, 4",
    ),
    "features of experts": (
        "--parallel tp=8",
        EXPERTS,
        "tp=8 does not divide 100 feed-forward features of each expert of M; valid tp: 1, 2, 4",
    ),
    "heads that all could have": (
        "--parallel tp=8",
        DENSE | {"num_key_value_heads": 2},
        "valid tp: 1, 2; with --parallel and --shard 'layers.*.self_attn.*=replicate' (each rank has them whole): 8",
    ),
    "features with replicated heads": (
        "--parallel tp=8 --shard *self_attn*=replicate",
        DENSE | {"num_key_value_heads": 2, "intermediate_size": 1028},
        "tp=8 does not divide 1028 feed-forward features of M; valid tp: 1, 2, 4",
    ),
    "part of attention": (
        "--parallel tp=2 --shard layers.*.self_attn.[qkv]_proj.*=replicate",
        LLAMA,
        "--shard: layers.*.self_attn.[qkv]_proj.* leaves out layers.*.self_attn.o_proj.weight, which must have "
        "the same style as layers.*.self_attn.q_proj.weight: use layers.*.self_attn.*=replicate",
    ),
    "other style": (
        "--parallel tp=2 --shard layers.*.self_attn.*=colwise",
        LLAMA,
        "layers.*.self_attn.*=colwise: layers.*.self_attn.o_proj.weight must be rowwise or replicate",
    ),
    "no such weights": (
        "--parallel tp=2 --shard lm_head.*=replicate",
        LLAMA,
        "lm_head.* matches no weights that ranks divide; those are layers.*.self_attn.*, "
        "layers.*.linear_attn.*, layers.*.mamba.*, layers.*.mlp.*_proj.*",
    ),
    "one layer": (
        "--parallel tp=2 --shard layers.0.self_attn.*=replicate",
        LLAMA,
        "layers.0.self_attn.* names one layer, but a style applies to all layers: use layers.*.self_attn.*=replicate",
    ),
    "no style": (
        "--parallel tp=2 --shard layers.*.self_attn.*",
        LLAMA,
        "'layers.*.self_attn.*' is not PATTERN=STYLE, such as layers.*.self_attn.*=replicate",
    ),
    "replicated without tp": (
        "--parallel fsdp=2 --shard layers.*.self_attn.*=replicate",
        LLAMA,
        "layers.*.self_attn.*=replicate: neither tp nor ep of fsdp=2 splits them: leave --shard out",
    ),
    "replicated experts of none": (
        "--parallel tp=2 --shard layers.*.mlp.experts.*=replicate",
        LLAMA,
        "layers.*.mlp.experts.*=replicate: M has no such weights; it has layers.*.mlp.*_proj.*, layers.*.self_attn.*",
    ),
    "no experts": ("--parallel ep=2", LLAMA, "ep=2: M has no experts to share out; valid ep: 1"),
    "experts": (
        "--parallel ep=3",
        MOE,
        "ep=3 does not divide 128 experts of M; valid ep: 1, 2, 4, 8, 16, 32, 64, 128",
    ),
    "no ranks": ("--parallel sp=0", LLAMA, "sp=0: an axis needs at least 1 rank"),
    "fewer than none": ("--parallel fsdp=-2", LLAMA, "fsdp=-2 is not a number of ranks; give one such as fsdp=2"),
    "no number": ("--parallel tp=two", LLAMA, "tp=two is not a number of ranks; give one such as tp=2"),
    "no size": ("--parallel tp", LLAMA, "tp= is not a number of ranks; give one such as tp=2"),
    "twice": ("--parallel tp=2,tp=4", LLAMA, "tp=2,tp=4: tp is given twice"),
    "unknown axis": ("--parallel dp=2", LLAMA, "dp=2 is not an axis of a layout (did you mean fsdp?): give some of"),
    "misspelt axis": ("--parallel replica=2", LLAMA, "(did you mean replicas?): give some of replicas, fsdp, ep, sp"),
    "pipeline": ("--parallel pp=2", LLAMA, "pipeline parallelism is not offered: passes of many tenants are too short"),
    "devices": (
        "--parallel fsdp=4,tp=4 --num-devices 8",
        LLAMA,
        "fsdp=4 x tp=4 is 16 ranks, but there are 8 devices, and each rank needs one: use at most 8 ranks",
    ),
    "one device": ("--parallel replicas=2 --num-devices 1", LLAMA, "replicas=2 is 2 ranks, but there is 1 device, and"),
    "context": (
        "--max-context-length 65536",
        MOE,
        "max_context_length 65536 exceeds the 40960 positions of M (no RoPE scaling): at most 40960",
    ),
    "parts of sequences": (
        "--parallel sp=4",
        DENSE | {"model_type": "llama4_text", "num_key_value_heads": 2},
        "sp=4 does not divide 2 key/value heads of M; valid sp: 1, 2",
    ),
    "indexer": (
        "--parallel sp=3",
        DENSE | {"model_type": "deepseek_v32"},
        "sp=3 does not divide 8 heads of M; valid sp: 1, 2, 4, 8",
    ),
    "dtype": ("--dtype float16", LLAMA, "dtype is 'float16': expected auto or float32 or bfloat16"),
    "another latent attention": (
        "--parallel tp=2",
        DENSE | {"model_type": "deepseek_v2", "kv_lora_rank": 512},
        "M: deepseek_v2 models are not supported: it was not verified",
    ),
    "soft-capping": (
        "--parallel fsdp=2",
        DENSE | {"model_type": "llama", "final_logit_softcapping": 30.0},
        "M: models with final_logit_softcapping are not supported",
    ),
    "linear attention": (
        "--parallel sp=2",
        DENSE | {"model_type": "olmo_hybrid"} | LINEAR,
        "M: olmo_hybrid models are not supported: it was not verified",
    ),
    "states": (
        "--parallel sp=2",
        DENSE | {"model_type": "jamba", "mamba_d_state": 16},
        "M: jamba models are not supported: trainhouse has no Mamba-1 layers",
    ),
    "quantized": (
        "--parallel tp=2",
        DENSE | {"quantization_config": {"quant_method": "aqlm"}},
        "M: weights quantized by aqlm are not supported, because each is a sum of vectors of trained codebooks",
    ),
    "other family": (
        "--parallel tp=2",
        DENSE | {"model_type": "olmo"},
        "tp=2: olmo models such as M support only replicas; docs/models.md lists the types of model that support all "
        "axes",
    ),
    "other family's sequences": ("--parallel sp=2", DENSE | {"model_type": "olmo"}, "sp=2: olmo models such"),
    "other family's shards": (
        "--parallel fsdp=2",
        DENSE | {"model_type": "persimmon"},
        "fsdp=2: persimmon models such as M",
    ),
    "other arithmetic": (
        "--parallel tp=2",
        DENSE | {"model_type": "olmoe", "clip_qkv": 8.0},
        "tp=2: M has another activation than silu or clip_qkv; such models support only replicas",
    ),
    "both directions": (
        "--parallel tp=2",
        DENSE | {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        "M: models with use_bidirectional_attention are not supported",
    ),
    "rotation of no known kind": (
        "--parallel tp=2",
        DENSE | {"rope_scaling": {"type": "axial", "factor": 2.0}},
        "M: models with RoPE scaling axial are not supported, only default, dynamic, linear,",
    ),
    "rotation of Phi-MoE": (
        "--parallel tp=2",
        DENSE | {"model_type": "phimoe", "rope_scaling": {"type": "yarn", "factor": 2.0}},
        "M: phimoe models with RoPE scaling yarn instead of longrope are not supported",
    ),
    "other activation": (
        "--parallel tp=2",
        DENSE | {"model_type": "gemma3_text", "hidden_activation": "gelu"},
        "tp=2: M has another activation than gelu_pytorch_tanh; such models support only replicas",
    ),
    "activation": (
        "--parallel tp=2",
        DENSE | {"hidden_act": "gelu"},
        "tp=2: M has another activation than silu; such models support only replicas",
    ),
    "experts of Gemma 4": (
        "--parallel ep=3",
        DENSE | {"model_type": "gemma4_text", "enable_moe_block": True, "num_experts": 128} | OF_EACH_EXPERT,
        "ep=3 does not divide 128 experts of M; valid ep: 1, 2, 4, 8, 16, 32, 64, 128",
    ),
    "another forward": (
        "--activations recompute",
        DENSE | {"model_type": "cohere_compass_text", "logit_scale": 0.25},
        "activations recompute: cohere_compass_text models such as M run with transformers' own forward, which keeps "
        "all activations: leave out --activations recompute",
    ),
    "text heads of an image model": (
        "--parallel tp=3",
        {"model_type": "gemma3", "vision_config": {}, "text_config": DENSE | {"model_type": "gemma3_text"}},
        "tp=3 does not divide 8 query heads of M; valid tp: 1, 2, 4, 8",
    ),
    "images": (
        "--parallel single",
        DENSE | {"model_type": "aya_vision", "vision_config": {}},
        "M: aya_vision models are not supported: transformers runs the whole without the logit_scale of its part for",
    ),
    "unknown layers": (
        "--parallel single",
        DENSE | {"model_type": "recurrent_gemma"},
        "M: recurrent_gemma models are not supported: it was not verified that sequences get the same "
        "numbers in a shared pass as alone; docs/models.md lists the models that are served",
    ),
    "rotation of another type's config": (
        "--parallel replicas=2",
        DENSE | {"rope_scaling": {"type": "deepseek_yarn", "factor": 2.0}},
        "M: models with RoPE scaling deepseek_yarn are not supported",
    ),
    "rotation without a number": (
        "--parallel replicas=2",
        DENSE | {"rope_scaling": {"type": "linear", "factor": "2"}},
        "M: its config.json has '2' as factor of the RoPE scaling linear: take the one of the release",
    ),
    "no config": (
        "--parallel tp=2",
        "/no/such/model",
        "/no/such/model is neither a directory nor a model in the cache",
    ),
    "no shape": (
        "--parallel tp=2",
        DENSE | {"hidden_size": None},
        "the config.json of M has hidden_size None: expected a number of at least 1",
    ),
    "no number of heads": (
        "--parallel tp=2",
        DENSE | {"num_attention_heads": "8"},
        "the config.json of M has num_attention_heads '8': expected a whole number",
    ),
}


Refusal = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refusal:
    """Runs a command that must be refused, and returns the one line that it prints."""

    def run(command: str, source: str, *options: str) -> str:
        assert command_line.main([command, f"--base-model=M={source}", *options]) in (1, 2)
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert captured.out == "" and line.startswith(f"trainhouse {command}: error: ")
        assert not state_dir(tmp_path).exists()
        return line

    return run


def state_dir(directory: Path) -> Path:
    return directory / "state"


def serve_options(directory: Path, *options: str) -> list[str]:
    return [*options, f"--state-dir={state_dir(directory)}", "--port=0"]


@pytest.mark.parametrize("reason", IMPOSSIBLE)
def test_plan_refuses_impossible_layouts(reason: str, tmp_path: Path, refusal: Refusal) -> None:
    arguments, source, message = IMPOSSIBLE[reason]
    assert message in refusal("plan", source_of_model(source, tmp_path), *arguments.split())


# Cases of serve: they depend on the model's config, or on the values that any layout may have.
OF_SERVE = [
    reason
    for reason, (arguments, source, _) in IMPOSSIBLE.items()
    if arguments.startswith(("--parallel", "--activations", "--max-context-length"))
    and "num-devices" not in arguments
    and reason != "no config"
]


@pytest.mark.parametrize("reason", OF_SERVE)
def test_serve_refuses_impossible_layouts_before_creating_state(reason: str, tmp_path: Path, refusal: Refusal) -> None:
    arguments, source, message = IMPOSSIBLE[reason]
    options = serve_options(tmp_path, *arguments.split())
    assert message in refusal("serve", source_of_model(source, tmp_path), *options)


@pytest.mark.parametrize("place", ["environment", "file"])
def test_serve_refuses_impossible_layouts_that_are_not_in_its_arguments(
    place: str, tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "trainhouse.toml"
    file.write_text('parallel = "tp=3"\n' if place == "file" else "")
    if place == "environment":
        monkeypatch.setenv("TRAINHOUSE_PARALLEL", "tp=3")
    options = serve_options(tmp_path, f"--config={file}")
    assert "tp=3 does not divide 32 query heads of M" in refusal("serve", source_of_model(LLAMA, tmp_path), *options)


def test_serve_refuses_a_model_that_no_chosen_layout_could_run(tmp_path: Path, refusal: Refusal) -> None:
    source = source_of_model(DENSE | {"model_type": "deepseek_v2", "kv_lora_rank": 512}, tmp_path)
    message = refusal("serve", source, *serve_options(tmp_path, "--parallel=auto", "--draft-parallel=tp=8"))
    assert "deepseek_v2 models are not supported: it was not verified" in message


def test_serve_refuses_a_directory_without_weights(tmp_path: Path, refusal: Refusal) -> None:
    message = refusal("serve", source_of_model(DENSE, tmp_path), *serve_options(tmp_path))
    assert "no .safetensors weights in this directory" in message


def test_serve_refuses_before_it_imports_the_application(tmp_path: Path) -> None:
    source = source_of_model(LLAMA, tmp_path)
    options = serve_options(tmp_path, f"--base-model=M={source}", "--parallel=tp=3")
    code = (
        "import sys; from trainhouse.server.cli.commands import main; status = main(sys.argv[1:])\n"
        "print(status, [name for name in sys.modules if name.startswith('trainhouse.server.serving')])"
    )
    done = subprocess.run([sys.executable, "-c", code, "serve", *options], capture_output=True, text=True, timeout=60)
    assert "tp=3 does not divide" in done.stderr and done.stdout == "1 []\n"


def test_serve_has_at_least_twenty_cases() -> None:
    assert len(OF_SERVE) >= 20


def source_of_model(source: str | dict[str, Any], directory: Path) -> str:
    """Returns the directory of a model with this config.json."""
    config = Path(source) if isinstance(source, str) else None
    if config is not None and not config.is_file():
        return str(config)
    (directory / "config.json").write_text(json.dumps(source) if config is None else config.read_text())
    return str(directory)


def model(source: str) -> ModelShape:
    shape = read_model(ServedModel("M", source))
    assert isinstance(shape, ModelShape)
    return shape


@pytest.mark.parametrize("spec", ["single", "tp=4", "tp=4,ep=32", "replicas=3,fsdp=5,sp=16", "ep=128,sp=8,tp=4"])
def test_possible_layouts_pass(spec: str) -> None:
    check_layout(ParallelSpec.parse(spec), model(MOE), num_devices=100_000, max_context_length=40960, dtype="bfloat16")


def test_replicas_pass_for_any_model() -> None:
    other = describe_model("M", DENSE | {"model_type": "gemma"})
    check_layout(ParallelSpec.parse("replicas=4"), other)
    check_layout(ParallelSpec(), describe_model("M", DENSE | {"hidden_act": "gelu"}))


def test_fused_layers_support_all_activation_modes() -> None:
    for activations in ("keep", "recompute", "offload"):
        check_layout(ParallelSpec(replicas=2), model(LLAMA), activations=activations)


def test_valid_choices_are_those_that_pass() -> None:
    shape = model(MOE)
    for tp in range(1, 40):
        passes = passes_check(ParallelSpec(tp=tp), shape)
        assert passes == (tp in valid_tp(shape))
    for ep in range(1, 140):
        passes = passes_check(ParallelSpec(ep=ep), shape)
        assert passes == (ep in valid_ep(shape))
    # Ring attention handles what heads cannot divide.
    assert all(passes_check(ParallelSpec(sp=sp, tp=2), shape) for sp in range(1, 40))


def passes_check(spec: ParallelSpec, shape: ModelShape) -> bool:
    try:
        check_layout(spec, shape)
    except ValueError:
        return False
    return True


def test_devices_follow_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, number in (("0,3", 2), ("", None), ("-1", None), ("GPU-a", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert cuda_devices() == number


def test_devices_before_the_named_one_are_not_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(sources, "check_cuda", lambda _: None)
    shutil.copy(LLAMA, tmp_path / "config.json")
    served = ServedModel("m", str(tmp_path))
    for device, is_enough in (("cuda:4", True), ("cuda:5", False), ("cuda", True)):
        model = WorkerConfig(served, device=device, parallel=ParallelSpec(tp=4))
        source = PoolFactory(DispatchConfig((model,)))
        if is_enough:
            asyncio.run(source.open())
        else:
            with pytest.raises(ValueError, match="tp=4 is 4 ranks, but there are 3 devices"):
                asyncio.run(source.open())


OF_SAMPLERS = {
    "heads": (LLAMA, "tp=3", "--sampler-parallel: tp=3 does not divide 32 query heads of M; valid tp: 1, 2, 4, 8"),
    "experts": (MOE, "ep=3,tp=2", "--sampler-parallel: ep=3 does not divide 128 experts of M; valid ep: 1, 2, 4"),
    "no experts": (LLAMA, "ep=2", "--sampler-parallel: ep=2: M has no experts to share out; valid ep: 1"),
    "no size": (LLAMA, "tp", "--sampler-parallel: tp= is not a number of ranks; give one such as tp=2"),
}


@pytest.mark.parametrize("reason", OF_SAMPLERS)
def test_serve_refuses_impossible_sampler_layouts(reason: str, tmp_path: Path, refusal: Refusal) -> None:
    source, layout, message = OF_SAMPLERS[reason]
    options = serve_options(tmp_path, "--sampler-workers=1", f"--sampler-parallel={layout}")
    assert message in refusal("serve", source_of_model(source, tmp_path), *options)


OF_DRAFTS = {
    "axis": ("fsdp=2", "--draft-parallel fsdp=2: drafts support the axes replicas, sp and tp: use only these"),
    "ranks": ("tp=4", "--draft-parallel tp=4: this is 4 ranks, but the model has 2, by fsdp=2"),
    "no axis": ("pp=2", "--draft-parallel: pipeline parallelism is not offered"),
}


@pytest.mark.parametrize("reason", OF_DRAFTS)
def test_serve_refuses_impossible_draft_layouts(reason: str, tmp_path: Path, refusal: Refusal) -> None:
    layout, message = OF_DRAFTS[reason]
    options = serve_options(tmp_path, "--parallel=fsdp=2", f"--draft-parallel={layout}")
    assert message in refusal("serve", source_of_model(LLAMA, tmp_path), *options)


@pytest.mark.parametrize(
    ("groups", "is_possible"),
    [
        ((), False),
        ((RoleGroup(("critic",), ParallelSpec(fsdp=2)),), False),
        ((RoleGroup(("draft",), ParallelSpec(fsdp=2)),), True),
        ((RoleGroup(("draft",), ParallelSpec(fsdp=4)),), False),
    ],
)
def test_draft_layout_must_fit_the_ranks_that_train_drafts(
    groups: tuple[RoleGroup, ...], is_possible: bool, tmp_path: Path
) -> None:
    shutil.copy(LLAMA, tmp_path / "config.json")
    model = WorkerConfig(ServedModel("M", str(tmp_path)), device="cpu", draft_parallel=ParallelSpec(tp=2))
    config = DispatchConfig((model,), role_groups=groups, sampling=SamplingConfig(1))
    laid_out = {name: each.draft_parallel for name, each in groups_of(config) if each.draft_parallel is not None}
    if is_possible:
        assert laid_out == {"M (draft)": ParallelSpec(tp=2)}
        asyncio.run(PoolFactory(config).open())
    else:
        with pytest.raises(ValueError, match=r"--draft-parallel tp=2: this is 2 ranks, but the model has [14], by"):
            asyncio.run(PoolFactory(config).open())


def test_impossible_sampler_layout_is_refused_outside_the_command_line(tmp_path: Path) -> None:
    shutil.copy(LLAMA, tmp_path / "config.json")
    sampling = SamplingConfig(1, ParallelSpec(tp=3))
    config = DispatchConfig((WorkerConfig(ServedModel("M", str(tmp_path)), device="cpu"),), sampling=sampling)
    with pytest.raises(ValueError, match="--sampler-parallel: tp=3 does not divide 32 query heads of M"):
        asyncio.run(PoolFactory(config).open())


@pytest.mark.parametrize(
    ("training", "device", "devices", "refusal"),
    [
        ("tp=2", "cuda", ("cuda:2", "cuda:4"), None),
        ("tp=2", "cuda", ("cuda:2",), None),
        ("tp=2", "cuda:4", ("cuda", "cuda:2"), None),
        ("tp=4", "cuda", ("cuda:2", "cuda:4"), None),
        ("single", "cuda", (), None),
        ("tp=2", "cpu", ("cpu",), None),
        (
            "tp=2",
            "cuda",
            ("cuda:2", "cuda:5"),
            r"m \(sampler 2\) takes cuda:5 to cuda:6, one for each rank of --sampler-p",
        ),
        ("tp=2", "cuda", ("cuda:6",), "takes cuda:6 to cuda:7, .* the machine has cuda:0 to cuda:5: name an earlier"),
        ("tp=2", "cuda:5", (), r"tp=2 is 2 ranks, but there is 1 device"),
        ("single", "cuda:5", (), r"m \(sampler 1\) takes cuda:5 to cuda:6, one for each rank"),
        (
            "tp=2",
            "cuda",
            ("cuda:1",),
            r"m \(sampler 1\) takes cuda:1 to cuda:2, and m cuda:0 to cuda:1, which overlap",
        ),
        (
            "tp=2",
            "cuda",
            ("cuda:2", "cuda:3"),
            r"cuda:3 to cuda:4, and m \(sampler 1\) cuda:2 to cuda:3, which overlap in",
        ),
    ],
)
def test_samplers_take_devices_from_the_named_one_up(
    training: str,
    device: str,
    devices: tuple[str, ...],
    refusal: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine has six devices. Two groups may have the same ones, or none in common."""
    monkeypatch.setattr(sources, "check_cuda", lambda _: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    shutil.copy(LLAMA, tmp_path / "config.json")
    model = WorkerConfig(ServedModel("m", str(tmp_path)), device=device, parallel=ParallelSpec.parse(training))
    source = PoolFactory(DispatchConfig((model,), sampling=SamplingConfig(2, ParallelSpec(tp=2), devices=devices)))
    if refusal is None:
        asyncio.run(source.open())
    else:
        with pytest.raises(ValueError, match=refusal):
            asyncio.run(source.open())


def test_sampler_ranks_get_a_device_and_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "num_cores", lambda: 24)
    model = WorkerConfig(ServedModel("m", "m"), device="cuda", parallel=ParallelSpec(fsdp=2))
    sampling = SamplingConfig(2, ParallelSpec(ep=2, tp=2), devices=("cuda:2", "cuda:6"))
    config = DispatchConfig((model,), sampling=sampling)
    source = PoolFactory(config)
    pools = {name: source.new_pool(name, group).spec for name, group in groups_of(config)}
    found = {name: [(each.rank, each.device) for each in spec.configs] for name, spec in pools.items()}  # pyright: ignore
    assert found == {
        "m": [(0, "cuda:0"), (1, "cuda:1")],
        "m (sampler 1)": [(rank, f"cuda:{2 + rank}") for rank in range(4)],
        "m (sampler 2)": [(rank, f"cuda:{6 + rank}") for rank in range(4)],
    }
    assert {spec.threads for spec in pools.values()} == {24 // (2 + 2 * 4)}
    assert [spec.blocks for spec in pools.values()] == [(2, 1), (4, 2, 1), (4, 2, 1)]
