"""Import of peft's adapters: they compute the same as in peft, and their export equals what was imported."""

import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainhouse.schemas.adapters import peft as peft_rules
from trainhouse.schemas.adapters.adapter_files import write_for_peft
from trainhouse.schemas.errors import OperationError, RequestError
from trainhouse.schemas.models import LoraConfig
from trainhouse.workers.checkpoint import read_new_model
from trainhouse.workers.checkpoint.peft_import import import_adapter
from trainhouse.workers.protocol.calls import AdapterFile, Failure, RunSpec
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from transformers import AutoModelForCausalLM

from ...tiny import FAMILY_KINDS, KINDS, PLAIN_KINDS, declared, tiny_model
from ..adapted import Adapted, peft_logits, peft_parameters, quieten_peft, sequences
from ..parallel.test_families import assert_sampled
from ..parallel.training import greedy, layout, supervised
from ..peft_reference import PeftReference

TOLERANCE = 1e-4
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def made_by_peft(model: Path, directory: Path, **config: Any) -> PeftModel:
    """Creates an adapter with random matrices, and saves it in the directory."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with warnings.catch_warnings():
        quieten_peft()
        warnings.filterwarnings("ignore", message=".*target_parameters.*")
        tuned = get_peft_model(base, PeftConfig(**({"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | config)))
        generator = torch.Generator().manual_seed(3)
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        tuned.save_pretrained(str(directory), save_embedding_layers=False)
    return tuned.eval()


def imported(adapted: Adapted, source: Path, target: Path, **changes: Any) -> Path:
    target.mkdir()
    config = peft_rules.PeftConfig.read(json.loads((source / "adapter_config.json").read_text()))
    lora = LoraConfig(rank=config.rank, alpha=config.alpha, seed=0).model_copy(update=changes)
    file = AdapterFile(str(source / "adapter_model.safetensors"), config.peft_version, config.parameters)
    import_adapter(adapted.lora, lora, file, target, "tiny/model")
    return target


def logprobs(logits: Tensor) -> Tensor:
    return logits.detach().log_softmax(-1)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "two of attention": ("qwen3", {"target_modules": ["q_proj", "v_proj"]}),
    "everything": ("llama", {"target_modules": [*ATTENTION, *MLP, "lm_head"]}),
    "rslora": ("qwen3", {"target_modules": ATTENTION, "use_rslora": True}),
    "one layer": ("qwen3", {"target_modules": MLP, "layers_to_transform": [1]}),
    "tied head": ("qwen3_tied", {"target_modules": ["lm_head", "q_proj"]}),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "experts": ("qwen3_moe", {"target_modules": ATTENTION, "target_parameters": EXPERTS}),
    "experts whose rows alternate": ("gpt_oss", {"target_modules": ATTENTION, "target_parameters": EXPERTS}),
    "experts without gates": (
        "nemotron_h_moe",
        {"target_modules": ["q_proj"], "target_parameters": ["experts.up_proj", "experts.down_proj"]},
    ),
    "a layer of several parts": ("qwen3_5", {"target_modules": ["in_proj_qkv"]}),
    "down of experts": ("qwen3_moe", {"target_modules": ["o_proj"], "target_parameters": EXPERTS[1:]}),
}


@pytest.mark.parametrize("case", CASES)
def test_imported_adapter_computes_the_same_as_in_peft(case: str, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    kind, config = CASES[case]
    tuned = made_by_peft(tiny_models[kind], tmp_path / "peft", **config)
    adapted = Adapted(tiny_models[kind])
    here = imported(adapted, tmp_path / "peft", tmp_path / "here")
    adapter = read_new_model(adapted.models, here)
    wanted = logprobs(peft_logits(tuned, sequences()))
    assert (logprobs(adapted.logits(sequences(), adapter)) - wanted).abs().max() < TOLERANCE
    assert (logprobs(adapted.logits(sequences(), None)) - wanted).abs().max() > 100 * TOLERANCE

    other = imported(adapted, tmp_path / "peft", tmp_path / "other", alpha=6.1 if "rslora" not in case else 6.0)
    changed = read_new_model(adapted.models, other)
    assert (logprobs(adapted.logits(sequences(), changed)) - wanted).abs().max() > TOLERANCE, (
        "a wrong scale is detected"
    )


@pytest.mark.parametrize("case", ["two of attention", "everything", "one layer"])
def test_export_of_an_imported_adapter_is_unchanged(case: str, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    kind, config = CASES[case]
    made_by_peft(tiny_models[kind], tmp_path / "peft", **config)
    before = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    after = load_file(
        imported(Adapted(tiny_models[kind]), tmp_path / "peft", tmp_path / "h") / "adapter_model.safetensors"
    )
    assert before.keys() <= after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    added = {name: after[name] for name in after.keys() - before.keys()}
    assert all(bool(tensor.any()) == ("lora_A" in name) for name, tensor in added.items())
    assert bool(added) == (case != "everything")


def test_own_exports_are_imported_unchanged(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", tmp_path / "model", mlp_only_layers=[0])
    made_by_peft(model, tmp_path / "peft", target_modules=ATTENTION, target_parameters=EXPERTS)
    adapted = Adapted(model)
    once = imported(adapted, tmp_path / "peft", tmp_path / "once")
    twice = imported(adapted, once, tmp_path / "twice")
    for file in ("adapter_model.safetensors", "adapter_config.json", "trainhouse.json"):
        assert (twice / file).read_bytes() == (once / file).read_bytes()


def test_bfloat16_adapter_is_imported_exactly(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    made_by_peft(tiny_models["qwen3"], tmp_path / "peft", target_modules=ATTENTION)
    path = tmp_path / "peft" / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    after = load_file(imported(Adapted(tiny_models["qwen3"]), path.parent, tmp_path / "here") / path.name)
    assert all(torch.equal(after[name], tensor.float()) for name, tensor in load_file(path).items())


A_NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B_NAME = A_NAME.replace("lora_A", "lora_B")
ROUTER = "base_model.model.model.layers.0.mlp.gate.lora_A.weight"


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no B": (drop(B_NAME), r"lora_A.weight has no matching lora_B: send both"),
    "no A": (drop(A_NAME), r"lora_B.weight has no matching lora_A: send both"),
    "another width": (put(A_NAME, torch.ones(4, 65)), r"q_proj.lora_A.weight has shape \[4, 65\], .* needs \[4, 64\]"),
    "another rank": (put(A_NAME, torch.ones(5, 64)), r"has shape \[5, 64\], .* needs \[4, 64\] at rank 4"),
    "not a number": (
        put(A_NAME, torch.full((4, 64), math.nan)),
        "q_proj.lora_A.weight has numbers that are not finite",
    ),
    "too large": (put(A_NAME, torch.full((4, 64), 1e300, dtype=torch.float64)), "not finite in float32"),
    "whole numbers": (put(A_NAME, torch.ones(4, 64, dtype=torch.int64)), "has dtype torch.int64"),
    "a router": (
        put(ROUTER, torch.ones(4, 64)),
        r"mlp.gate.lora_A.weight is of a layer that cannot be adapted here: .*q_proj",
    ),
    "an embedding": (
        put("base_model.model.model.embed_tokens.weight", torch.ones(2, 2)),
        "save_embedding_layers=False",
    ),
    "nothing": (dict.clear, "has no tensors"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_adapter_that_does_not_fit_the_base_model_is_refused(
    damage: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    made_by_peft(tiny_models["qwen3"], tmp_path / "peft", target_modules=ATTENTION)
    change, reason = DAMAGES[damage]
    path = tmp_path / "peft" / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(OperationError, match=reason) as refused:
        imported(Adapted(tiny_models["qwen3"]), path.parent, tmp_path / "here")
    assert refused.value.category == "user"
    assert not list((tmp_path / "here").iterdir())


SPARSE = [kind for kind in (*KINDS, *FAMILY_KINDS, *PLAIN_KINDS) if declared(kind).experts is not None]
QUICK = ("qwen3_moe", "gpt_oss", "llama4", "nemotron_h_moe")
every_sparse = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.full) for kind in SPARSE]
)


def sparse_model(kind: str, features: int, directory: Path) -> Path:
    """Saves a model of 64 hidden features whose experts have so many features."""
    for key in ("moe_intermediate_size", "intermediate_size"):
        experts = declared(kind, **{key: features}).experts
        if experts is not None and experts.features == features:
            latent = {} if experts.latent is None else {"moe_latent_size": 64}
            return tiny_model(kind, directory, **{key: features}, **latent)
    raise AssertionError(f"{kind} names the features of its experts in another way")


def exchanged(source: Path, target: Path, **changes: Any) -> Path:
    """Copies an adapter with the two matrices of each parameter of experts in the other layout of peft's versions,
    which compute delta[expert, first, second] or delta[expert, second, first] of the same product."""
    target.mkdir()
    tensors = load_file(source / "adapter_model.safetensors")
    config = json.loads((source / "adapter_config.json").read_text())
    for name in [name for name in tensors if "experts.lora_A" in name or "experts.base_layer.lora_A" in name]:
        other = name.replace("lora_A", "lora_B")
        a, b = tensors[name], tensors[other]
        num = len(a) // config["r"]
        tensors[name] = b.unflatten(1, (-1, num)).permute(2, 1, 0).flatten(0, 1).contiguous()
        tensors[other] = a.unflatten(0, (num, -1)).permute(2, 1, 0).flatten(1).contiguous()
    save_file(tensors, target / "adapter_model.safetensors")
    (target / "adapter_config.json").write_text(json.dumps(config | changes))
    return target


@every_sparse
@pytest.mark.parametrize("features", [32, 64, 48], ids=["half", "same", "other"])
def test_experts_are_read_in_the_layout_of_the_version_of_peft_that_saved_them(
    kind: str, features: int, tmp_path: Path
) -> None:
    """The shapes of gate and up fit both layouts with half of the hidden features, those of down with all; with 48 they
    decide. Compared with PEFT 0.18.1, 0.19.0 and 0.21.0 itself when it was written."""
    model = sparse_model(kind, features, tmp_path / "model")
    experts = declared(kind).experts
    assert experts is not None
    parameter = experts.matrices[0 if features == 32 and experts.has_gate else 1]
    config = {"target_modules": ["o_proj"], "target_parameters": [f"experts.{parameter}"]}
    tuned = made_by_peft(model, tmp_path / "new", **config)
    wanted = logprobs(peft_logits(tuned, sequences()))
    adapted = Adapted(model)

    def error(source: Path) -> float:
        target = source.with_name(f"{source.name} imported")
        adapter = read_new_model(adapted.models, imported(adapted, source, target))
        return float((logprobs(adapted.logits(sequences(), adapter)) - wanted).abs().max())

    assert error(tmp_path / "new") < 3e-5
    # Of Transformers' classes, only those of transposed experts that say so were read alike by 0.18.
    if not experts.is_transposed or experts.is_misread:
        assert error(exchanged(tmp_path / "new", tmp_path / "0.18", peft_version="0.18.1")) < 3e-5
    assert error(exchanged(tmp_path / "new", tmp_path / "0.19.0", peft_version="0.19.0")) < 3e-5
    unknown = [
        exchanged(tmp_path / "new", tmp_path / f"unknown{number}", peft_version=version)
        for number, version in enumerate((None, "0.18.2.dev0@4e9b1f2", "newest"))
    ]
    if features == 48:
        # Without gates, up in one layout has the shapes of down in the other.
        assert all(error(each) < 3e-5 for each in unknown)
        return
    if features == 64 or experts.has_gate:
        assert error(exchanged(tmp_path / "new", tmp_path / "wrong", peft_version="0.21.0")) > 1e-3
        for each in unknown:
            with pytest.raises(
                OperationError, match=r"before 0.19.1 and .* (no peft_version|peft_version '.*'): set it"
            ):
                error(each)


@pytest.mark.parametrize("features", [32, 64])
def test_layers_whose_shapes_tell_the_layout_tell_it_for_the_file(features: int, tmp_path: Path) -> None:
    model = sparse_model("qwen3_moe", features, tmp_path / "model")
    tuned = made_by_peft(model, tmp_path / "new", target_modules=["o_proj"], target_parameters=EXPERTS)
    wanted, adapted = logprobs(peft_logits(tuned, sequences())), Adapted(model)
    old = exchanged(tmp_path / "new", tmp_path / "old", peft_version=None)
    adapter = read_new_model(adapted.models, imported(adapted, old, tmp_path / "here"))
    assert (logprobs(adapted.logits(sequences(), adapter)) - wanted).abs().max() < 3e-5


def test_experts_without_gates_are_told_apart_by_name(tmp_path: Path) -> None:
    model = sparse_model("nemotron_h_moe", 64, tmp_path / "model")
    adapted = Adapted(model)
    for parameters in (["experts.up_proj"], ["experts.down_proj"], ["experts.up_proj", "experts.down_proj"]):
        source = tmp_path / "-".join(parameters)
        wanted = logprobs(
            peft_logits(
                made_by_peft(model, source, target_modules=["o_proj"], target_parameters=parameters), sequences()
            )
        )
        adapter = read_new_model(adapted.models, imported(adapted, source, source.with_name(f"{source.name} imported")))
        assert (logprobs(adapted.logits(sequences(), adapter)) - wanted).abs().max() < 3e-5
    path = tmp_path / "experts.up_proj" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_parameters": None}))
    with pytest.raises(OperationError, match="fits up_proj and down_proj of experts: name the one in target_param"):
        imported(adapted, path.parent, tmp_path / "refused")


def test_exports_say_the_first_version_of_peft_that_reads_their_experts(tmp_path: Path) -> None:
    model = sparse_model("gpt_oss", 32, tmp_path / "model")
    made_by_peft(model, tmp_path / "peft", target_modules=["o_proj"], target_parameters=EXPERTS)
    here = imported(Adapted(model), tmp_path / "peft", tmp_path / "here")
    assert json.loads((here / "adapter_config.json").read_text())["peft_version"] == "0.19.1"


@every_sparse
@pytest.mark.parametrize("features", [32, 64], ids=["half", "same"])
def test_exports_of_earlier_versions_which_name_no_version_of_peft_are_imported(
    kind: str, features: int, tmp_path: Path
) -> None:
    """Exports adapt all layers of experts, and where there are gates one of these shows the layout."""
    model, experts = sparse_model(kind, features, tmp_path / "model"), declared(kind).experts
    assert experts is not None
    parameters = [f"experts.{each}" for each in experts.matrices]
    made_by_peft(model, tmp_path / "peft", target_modules=["o_proj"], target_parameters=parameters)
    adapted = Adapted(model)
    here = imported(adapted, tmp_path / "peft", tmp_path / "here")
    exported = Path(shutil.copytree(here, tmp_path / "exported"))
    write_for_peft(exported)
    path = exported / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in config.items() if name != "peft_version"}))
    if features == 64 and not experts.has_gate:
        with pytest.raises(OperationError, match=r"no peft_version: set it .*an export of trainhouse"):
            imported(adapted, exported, tmp_path / "refused")
        path.write_text(json.dumps(config))
    again = load_file(imported(adapted, exported, tmp_path / "again") / "adapter_model.safetensors")
    wanted = load_file(here / "adapter_model.safetensors")
    assert again.keys() == wanted.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in wanted.items())


def test_experts_whose_gate_and_up_mix_ranks_are_refused(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    config = {"target_modules": ["o_proj"], "target_parameters": EXPERTS}
    config |= {"rank_pattern": {peft_rules.GATE_UP_PATTERN: 8}, "alpha_pattern": {peft_rules.GATE_UP_PATTERN: 12}}
    made_by_peft(tiny_models["mistral4"], tmp_path / "peft", **config)
    with pytest.raises(OperationError, match="has 8 ranks for several parts of a layer that all use them"):
        imported(Adapted(tiny_models["mistral4"]), tmp_path / "peft", tmp_path / "here")


def test_outputs_that_adapters_here_leave_alone_are_refused(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """Such as the time steps of Mamba-2."""
    made_by_peft(tiny_models["granite4"], tmp_path / "peft", target_modules=["in_proj"])
    with pytest.raises(
        OperationError, match="all use them, or adapts other outputs too: adapters here have 4 for each"
    ):
        imported(Adapted(tiny_models["granite4"]), tmp_path / "peft", tmp_path / "here")
    path = tmp_path / "peft" / "adapter_model.safetensors"
    tensors = load_file(path)
    for tensor in tensors.values():
        if len(tensor) != 4:
            tensor[256:] = 0  # after 128 gates and 128 inputs of heads
    save_file(tensors, path)
    adapted = Adapted(tiny_models["granite4"])
    adapter = read_new_model(adapted.models, imported(adapted, path.parent, tmp_path / "there"))
    base = AutoModelForCausalLM.from_pretrained(tiny_models["granite4"], dtype=torch.float32)
    with warnings.catch_warnings():
        quieten_peft()
        wanted = logprobs(peft_logits(PeftModel.from_pretrained(base, str(path.parent)).eval(), sequences()))
    assert (logprobs(adapted.logits(sequences(), adapter)) - wanted).abs().max() < TOLERANCE
    assert (logprobs(adapted.logits(sequences(), None)) - wanted).abs().max() > 100 * TOLERANCE


def test_a_pickle_or_a_torn_file_is_refused(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    made_by_peft(tiny_models["qwen3"], tmp_path / "peft", target_modules=ATTENTION)
    adapted, path = Adapted(tiny_models["qwen3"]), tmp_path / "peft" / "adapter_model.safetensors"
    whole = path.read_bytes()
    torch.save({"a": torch.ones(2)}, tmp_path / "pickle")
    for number, content in enumerate((whole[:-1], whole[:100], b"", (tmp_path / "pickle").read_bytes())):
        path.write_bytes(content)
        with pytest.raises(
            OperationError, match=r"adapter_model.safetensors cannot be read .*: send the file as peft saved"
        ):
            imported(adapted, path.parent, tmp_path / f"here{number}")


def test_a_rank_beyond_the_limit_is_refused(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    made_by_peft(tiny_models["qwen3"], tmp_path / "peft", target_modules=ATTENTION)
    with pytest.raises(OperationError, match="rank 4 exceeds max_lora_rank 3: lower the rank or start"):
        imported(Adapted(tiny_models["qwen3"], max_rank=3), tmp_path / "peft", tmp_path / "here")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("task_type", "SEQ_CLS"),
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("init_lora_weights", "pissa_niter_4"),
        ("lora_bias", True),
        ("layer_replication", [[0, 2]]),
        ("something_of_tomorrow", True),
        ("r", 0),
        ("lora_alpha", 0),
        ("lora_alpha", math.inf),
        ("peft_version", 0.18),
        ("target_parameters", "experts.down_proj"),
    ],
)
def test_settings_that_change_the_computation_are_refused_by_name(key: str, value: object) -> None:
    config = PeftConfig(r=4, target_modules=["q_proj"]).to_dict()
    assert peft_rules.PeftConfig.read(config) == peft_rules.PeftConfig(4, 8.0, None, peft.__version__), (
        "peft's own defaults pass"
    )
    with pytest.raises(RequestError, match=f"adapter_config.json has {key} "):
        peft_rules.PeftConfig.read(config | {key: value})


@pytest.mark.full
@pytest.mark.parametrize(("kind", "spec"), [("qwen3", "tp=2"), ("qwen3_moe", "ep=2"), ("qwen3_moe", "tp=2")])
def test_imported_adapter_runs_and_exports_on_a_layout(
    kind: str, spec: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    experts = {"target_parameters": EXPERTS} if kind == "qwen3_moe" else {}
    made_by_peft(tiny_models[kind], tmp_path / "peft", target_modules=[*ATTENTION, "lm_head"], **experts)
    (tmp_path / "here").mkdir()
    source = tmp_path / "peft" / "adapter_model.safetensors"
    request = supervised("a", 7, 9, 30, 17, 4, forward_only=True)
    with layout(tiny_models[kind], ParallelSpec.parse(spec), tmp_path / "scratch") as where:
        lora = where.call(
            "convert_adapter", AdapterFile(str(source)), LoraConfig(rank=4, alpha=6.0, seed=0), str(tmp_path / "here")
        )
        where.call("create_run", RunSpec("a", lora))
        where.call("load_run", "a", str(tmp_path / "here"), False)
        (output,) = where.run_pass(request)
        where.call("load_adapter", "s", str(tmp_path / "here"))
        job = greedy("j", "s", 11)
        samples = where.sample(job)
        exported = load_file(where.saved("a") / source.name)
        refused = tmp_path / "refused"
        refused.mkdir()
        with pytest.raises(OperationError, match=r"(fit|at) rank 5"):
            where.call("convert_adapter", AdapterFile(str(source)), LoraConfig(rank=5, seed=0), str(refused))
        assert where.run_pass(request)[0] is not None, "the ranks still work after a refusal"

    assert not isinstance(output, Failure) and output is not None, output
    reference = PeftReference(tiny_models[kind], source.parent)
    _, wanted = reference.loss_of(request.data)
    found = [each["logprobs"] for each in output.loss_fn_outputs]
    assert max(abs(one - other).max() for one, other in zip(found, wanted, strict=True)) < TOLERANCE
    assert_sampled(reference, job.prompt, samples["j"])
    saved = load_file(tmp_path / "here" / source.name)
    assert exported.keys() == saved.keys() and all(torch.equal(exported[name], saved[name]) for name in saved)
    with torch.no_grad():
        for parameter in peft_parameters(reference.model).values():
            parameter.mul_(1.003)
    assert abs(found[1] - reference.loss_of(request.data)[1][1]).max() > TOLERANCE, "wrong matrices are detected"
