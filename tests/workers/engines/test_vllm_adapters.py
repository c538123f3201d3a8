"""Adapters and full models of every family in a real vLLM: it computes our log-probabilities, and refuses what we do.

vLLM runs on a CPU here; vllm_models.py says what it lacks there, and replaces it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainhouse import AdamParams, Datum, ServiceClient, TrainingClient
from trainhouse.schemas.adapters.adapter_files import refusal_by_vllm, write_for_vllm
from trainhouse.schemas.adapters.vllm_form import FORMS, form_of
from trainhouse.schemas.models import FullConfig
from trainhouse.workers.checkpoint import TrainedState, save
from trainhouse.workers.lora import Adapter
from trainhouse.workers.parallel.mesh import Mesh
from trainhouse.workers.protocol.calls import RunSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.shapes.model_shape import read_architecture
from trainhouse.workers.worker.worker import Worker
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...live import live_server
from ...tiny import FAMILY_KINDS, KINDS, LONG_ROPE, PLAIN_KINDS, YARN_ROPE, tiny_config, tiny_model
from ..adapted import Adapted
from ..containers import CONTAINERS, tiny_container
from ..model_state import add_noise, weights_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("vllm_models.py")
PROMPTS, MAX_TOKENS, MAX_RANK = [[5, 9, 13, 17, 21, 25, 29, 33, 37], [100, 3, 7]], 6, 16
# Of log-probabilities; adapters move them by much more.
TOLERANCE, BFLOAT16_TOLERANCE = 1e-4, 0.3

KEY = "tml-vllm"

Rows = Sequence[Mapping[str, Any]]
Ask = Callable[..., dict[str, Any]]

# vLLM's attention on CPUs supports heads of 32 features, but not of 16.
HEADS: dict[str, Any] = {"head_dim": 32}
TWO_HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
# Of its latent attention, 512 and 64 alone.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
# Of its gated delta rule, 128.
DELTA_RULE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
TIED = {"tie_word_embeddings": True}
LONG = LONG_ROPE | {"short_factor": [1.0 + 0.1 * number for number in range(16)], "long_factor": [4.0] * 16}
YARN = YARN_ROPE | {"original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}

# Settings that vLLM needs: names that releases have in their config.json, and sizes that it supports.
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2", "phi3", "olmo2", "granite4", "granite4_moe"), TWO_HEADS),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "olmo3", "helium"), TWO_HEADS | HEADS),
    "qwen2_moe": TWO_HEADS | HEADS | {"use_sliding_window": False},
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), HEADS | DELTA_RULE),
    **dict.fromkeys(("gemma", "gemma2", "gemma3"), HEADS | TIED),
    **dict.fromkeys(("gemma4", "gemma4_large"), HEADS | TIED | {"global_head_dim": 64}),
    "cohere": TWO_HEADS | HEADS | TIED,
    # vLLM's windows have a token more.
    "cohere2": TWO_HEADS | HEADS | TIED | {"sliding_window": 64},
    "afmoe": HEADS | {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "deepseek_v3": LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe_lite": LATENT | {"first_k_dense_replace": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    # vLLM has no biases of ERNIE, nor have releases.
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), HEADS | {"use_bias": False}),
    "gpt_oss": HEADS | {"rope_parameters": YARN},
    "minimax_m2": HEADS | {"scoring_func": "sigmoid", "use_routing_bias": True},
    "ministral3": HEADS | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}},
    "olmoe": {"num_attention_heads": 2, "num_key_value_heads": 2} | HEADS,
    "flex_olmo": TWO_HEADS | HEADS,
    "mellum": HEADS | {"num_nextn_predict_layers": 0},
    # vLLM has nothing else of StableLM.
    "stablelm": TWO_HEADS | HEADS | {"qk_layernorm": False, "use_parallel_residual": False},
    "hy_v3": HEADS | {"expert_hidden_dim": 32, "first_k_dense_replace": 1, "qk_norm": True, "route_norm": True},
    # vLLM has neither this window nor another noise of the router than that of releases.
    "phimoe": TWO_HEADS | HEADS | {"sliding_window": 64, "router_jitter_noise": 0.01, "rope_parameters": LONG},
    # vLLM reads the steps of its layers alone, and cuts sequences where its blocks end.
    "llama4": HEADS
    | {"moe_layers": [1], "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0], "attention_chunk_size": 128},
}
# Run in bfloat16, because vLLM's gated delta rule runs in nothing else on CPUs.
IN_BFLOAT16 = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
# What vLLM 0.32 says of models that it does not run, or not with adapters.
REFUSED = {
    "bamba": "does not dispatch through the Transformers attention interface",
    "kolibri1": "does not recognize this architecture",
    "phimoe": "too many values to unpack",
    "stablelm": "does not support LoRA",
}
# Or not on CPUs.
NOT_RUN = {
    "deepseek_v32": "Sparse Attention is not supported on CPU",
    "glm_moe_dsa": "Sparse Attention is not supported on CPU",
    "mistral4": "not supported by MLA",
}
# Of those with images.
NOT_COMPARED_WHOLES = ("nemotron_h_moe",)
COMPARED = [
    kind
    for kind in dict.fromkeys((*KINDS, *FAMILY_KINDS, *PLAIN_KINDS))
    if kind not in REFUSED and MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(tiny_config(kind).model_type) in FORMS
]


@pytest.fixture(scope="module")
def ask(vllm_python: str) -> Iterator[Ask]:
    """Yields a function that runs a model in vLLM, see vllm_models.py."""
    command, pipe = [vllm_python, str(SCRIPT)], subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=os.environ
    ) as host:
        assert host.stdin is not None and host.stdout is not None
        requests, answers = host.stdin, host.stdout
        assert json.loads(answers.readline()) == "ready"

        def asked(
            model: Path,
            adapters: Sequence[Path] = (),
            dtype: str = "float32",
            is_mixed: bool = False,
            full: Path | None = None,
        ) -> Any:
            about: dict[str, Any] = {"model": str(model), "adapters": [str(each) for each in adapters], "dtype": dtype}
            about |= {"full": full and str(full)}
            about |= {"max_rank": MAX_RANK, "is_mixed": is_mixed, "prompts": PROMPTS, "max_tokens": MAX_TOKENS}
            print(json.dumps(about), file=requests, flush=True)
            return json.loads(answers.readline())

        yield asked
        requests.close()


def tiny(kind: str, directory: Path) -> Path:
    return tiny_model(kind, directory, **SETTINGS.get(kind, HEADS))


def written(adapter: Adapter, directory: Path, form: Any) -> Path:
    directory.mkdir()
    save(TrainedState.without_gradients(adapter, Mesh(), optimizer=False), directory, base_name="tiny")
    write_for_vllm(directory, form)
    return directory


@torch.no_grad()
def scored(adapted: Adapted, adapter: Adapter | None, rows: Rows) -> np.ndarray:
    """Returns our log-probabilities of the tokens that vLLM found likeliest."""
    found = []
    for prompt, row in zip(PROMPTS, rows, strict=True):
        logits = adapted.logits([torch.tensor(prompt + row["tokens"])], adapter).float()
        places = torch.arange(len(prompt) - 1, len(prompt) - 1 + MAX_TOKENS)
        found.append(logits.log_softmax(-1)[places, row["tokens"]].numpy())
    return np.concatenate(found)


def distance(adapted: Adapted, adapter: Adapter | None, rows: Rows) -> float:
    theirs = np.concatenate([row["logprobs"] for row in rows])
    return float(np.abs(theirs - scored(adapted, adapter, rows)).max())


@pytest.mark.parametrize("kind", COMPARED)
def test_vllm_computes_our_logprobs(kind: str, ask: Ask, tmp_path: Path) -> None:
    assert_vllm_computes_ours(kind, tiny(kind, tmp_path / "model"), ask, tmp_path)


@pytest.mark.parametrize("kind", [kind for kind in CONTAINERS if kind not in (*NOT_RUN, *NOT_COMPARED_WHOLES)])
def test_it_computes_them_in_models_with_images(kind: str, ask: Ask, tmp_path: Path) -> None:
    tiny_container(kind, tmp_path / "model", **SETTINGS.get(kind, HEADS))
    assert_vllm_computes_ours(kind, tmp_path / "model", ask, tmp_path)


@pytest.mark.parametrize("kind", COMPARED)
def test_vllm_computes_full_models(kind: str, ask: Ask, tmp_path: Path) -> None:
    """Their weights take the place of the base model's, which return. Control: the other's numbers differ. vLLM does
    not read what we do not send."""
    model, full = tiny(kind, tmp_path / "model"), tmp_path / "full"
    dtype, tolerance = ("bfloat16", BFLOAT16_TOLERANCE) if kind in IN_BFLOAT16 else ("float32", TOLERANCE)
    save_full(model, full)
    form = form_of(read_architecture(ServedModel("tiny", str(model))))
    answer = ask(model, [], dtype, form.experts == "mixed", full)
    assert "error" not in answer, answer["error"]
    rows, base, ours = answer["rows"], Adapted(model), Adapted(full)
    if refusal_by_vllm(full, form) is not None:
        assert isinstance(rows["full"], str) or distance(ours, None, rows["full"]) > tolerance
        return
    assert not isinstance(rows["full"], str), rows["full"]
    assert distance(ours, None, rows["full"]) < tolerance < distance(base, None, rows["full"])
    assert distance(base, None, rows["again"]) < tolerance < distance(ours, None, rows["again"])


def save_full(model: Path, directory: Path) -> None:
    """Saves a full model whose weights have changed."""
    directory.mkdir()
    worker = Worker(WorkerConfig(ServedModel("tiny", str(model)), threads=1, dtype="float32"))
    worker.create_run(RunSpec("full", FullConfig(seed=0)))
    add_noise(worker, "full", float(weights_of(worker, "full").abs().mean()))
    worker.save_run("full", str(directory), optimizer=False)


def test_it_computes_them_in_releases_of_phi_moe(ask: Ask, tmp_path: Path) -> None:
    """Releases name a class that transformers has under another name."""
    model = tiny("phimoe", tmp_path / "model")
    rewrite_config(model, {"architectures": ["PhiMoEForCausalLM"]})
    assert_vllm_computes_ours("phimoe", model, ask, tmp_path)


@pytest.mark.parametrize(
    ("model_type", "name"), [("internlm3", "InternLM3ForCausalLM"), ("iquestcoder", "IQuestCoderForCausalLM")]
)
def test_it_computes_them_in_releases_with_code(model_type: str, name: str, ask: Ask, tmp_path: Path) -> None:
    """vLLM's transformers reads these configs by code in the model's directory alone."""
    model = tiny("llama", tmp_path / "model")
    code = f'from transformers import LlamaConfig\n\n\nclass Config(LlamaConfig):\n    model_type = "{model_type}"\n'
    (model / "configuration.py").write_text(code)
    auto_map = {"AutoConfig": "configuration.Config"}
    rewrite_config(model, {"architectures": [name], "model_type": model_type, "auto_map": auto_map})
    assert_vllm_computes_ours(model_type, model, ask, tmp_path)


def rewrite_config(model: Path, changes: Mapping[str, object]) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))


def assert_vllm_computes_ours(kind: str, model: Path, ask: Ask, tmp_path: Path) -> None:
    """Control: none of the adapter's matrices may be left out. What we do not send, vLLM does not take either."""
    dtype, tolerance = ("bfloat16", BFLOAT16_TOLERANCE) if kind in IN_BFLOAT16 else ("float32", TOLERANCE)
    adapted, form = Adapted(model), form_of(read_architecture(ServedModel("tiny", str(model))))
    sparse = adapted.base.is_sparse
    names = [target.name for target in adapted.lora.all_targets]
    without = {flag for part, flag in form.ignored.items() if any(part in name for name in names)}
    without |= set() if form.adapts_head else {"train_unembed"}
    taken: dict[str, Any] = dict.fromkeys(without, False)
    taken |= {"expert_factors": "shared"} if sparse and "train_mlp" not in without else {}
    adapter = adapted.create("taken", **taken)
    good = written(adapter, tmp_path / "taken", form)
    assert refusal_by_vllm(good, form) is None
    refused = {}
    for flag in without:
        more = adapted.create(flag, **(taken | {flag: True}))
        refused[written(more, tmp_path / flag, form)] = more
        assert f"{flag}=False" in str(refusal_by_vllm(tmp_path / flag, form))
    answer = ask(model, [good, *refused], dtype, form.experts == "mixed")
    assert "error" not in answer, answer["error"]
    rows = answer["rows"]
    assert distance(adapted, None, rows["base"]) < tolerance
    assert not isinstance(rows[str(good)], str), rows[str(good)]
    assert distance(adapted, adapter, rows[str(good)]) < tolerance
    assert_every_matrix_matters(adapted, adapter, rows[str(good)], tolerance)
    for directory, more in refused.items():
        found = rows[str(directory)]
        assert isinstance(found, str) or distance(adapted, more, found) > tolerance


def assert_every_matrix_matters(adapted: Adapted, adapter: Adapter, rows: Rows, tolerance: float) -> None:
    for kind in {target.path for target in adapter.targets}:
        pairs = [adapter.pairs[target.name] for target in adapter.targets if target.path == kind]
        before = [pair.b.clone() for pair in pairs]
        for pair in pairs:
            pair.b.zero_()
        assert distance(adapted, adapter, rows) > tolerance, kind
        for pair, b in zip(pairs, before, strict=True):
            pair.b.copy_(b)


@pytest.mark.parametrize("kind", [*REFUSED, *NOT_RUN])
def test_models_that_vllm_does_not_run(kind: str, ask: Ask, tmp_path: Path) -> None:
    model = tiny(kind, tmp_path)
    assert (REFUSED | NOT_RUN)[kind] in ask(model)["error"]
    form = form_of(read_architecture(ServedModel("tiny", str(model))))
    assert (form.refusal is not None) == (kind in REFUSED)


def test_vllm_loads_what_export_writes(ask: Ask, tmp_path: Path) -> None:
    """Control: without the adapter, log-probabilities differ."""
    model, directory = tiny("gpt_oss", tmp_path / "model"), tmp_path / "adapter"
    inputs = {"target_tokens": np.array([6, 7, 8, 9]), "weights": np.ones(4, np.float32)}
    with live_server({"tiny": model}, tmp_path / "state") as server, ServiceClient(server.url, KEY) as service:
        client = service.create_lora_training_client("tiny", rank=4, seed=1, train_unembed=False)
        for _ in range(3):
            client.forward_backward([Datum([5, 6, 7, 8], inputs)], "cross_entropy")
            client.optim_step(AdamParams(learning_rate=0.05))
        path = client.save_state("trained").result(60).path
        command = [sys.executable, "-m", "trainhouse.server", "export", path, str(directory), "--for=vllm"]
        subprocess.run([*command, f"--base-url={server.url}", f"--api-key={KEY}"], check=True, timeout=120)
        found = ask(model, [directory])["rows"][str(directory)]
        assert not isinstance(found, str), found
        ours = np.concatenate([scored_by(client, *each) for each in zip(PROMPTS, found, strict=True)])
    theirs = np.concatenate([row["logprobs"] for row in found])
    assert np.abs(theirs - ours).max() < TOLERANCE
    assert distance(Adapted(model), None, found) > TOLERANCE


def scored_by(client: TrainingClient, prompt: Sequence[int], row: Mapping[str, Any]) -> np.ndarray:
    """Returns the server's log-probabilities of the tokens that vLLM found likeliest."""
    tokens = [*prompt, *row["tokens"]]
    passed = client.forward([Datum(tokens[:-1], {"target_tokens": np.array(tokens[1:])})], "cross_entropy").result(60)
    return passed.loss_fn_outputs[0]["logprobs"][-MAX_TOKENS:]
