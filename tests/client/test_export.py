"""Checkpoints exported as directories that other programs load."""

import asyncio
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch_file
from safetensors.torch import save_file as save_torch_file
from trainhouse import Datum, ServiceClient, TrainingClient
from trainhouse.client.export_checkpoint import loaded_by
from trainhouse.schemas.adapters.peft import WEIGHTS
from trainhouse.schemas.adapters.vllm_form import form_of
from trainhouse.workers.engines.vllm.adapters import VllmVersion, link_files
from transformers import AutoModelForCausalLM

from ..live import LiveServer, live_server
from ..tiny import tiny_model

KEY = "tml-export"
MODEL = "tiny/chat"
DATA = [Datum([5, 6, 7, 8], {"target_tokens": np.array([6, 7, 8, 9])})]


@pytest.fixture(scope="module")
def service(shared_server: LiveServer) -> Iterator[ServiceClient]:
    with ServiceClient(shared_server.url, KEY) as client:
        yield client


def export(server: LiveServer, path: str, directory: Path, *options: str) -> str:
    """Runs the export command and returns its output."""
    command = [sys.executable, "-m", "trainhouse.server", "export", path, str(directory), *options]
    done = subprocess.run(
        [*command, f"--base-url={server.url}", f"--api-key={KEY}"], capture_output=True, text=True, timeout=120
    )
    return done.stdout if done.returncode == 0 else done.stderr


def train_and_save(client: TrainingClient, loss_fn: str) -> str:
    """Trains one step and returns the path of a checkpoint with the optimizer state."""
    inputs = {"target_tokens": np.array([6, 7, 8, 9]), "weights": np.ones(4, np.float32)}
    client.forward_backward([Datum([5, 6, 7, 8], {} if loss_fn == "eagle3" else inputs)], loss_fn)
    client.optim_step()
    return client.save_state("state").result(60).path


def logprobs(directory: Path) -> np.ndarray:
    """Returns those of transformers for the data of `train_and_save`."""
    logits = AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([[5, 6, 7, 8]])).logits[0]
    return logits.log_softmax(-1)[range(4), [6, 7, 8, 9]].detach().numpy()


@pytest.mark.slow
def test_an_adapter_is_exported_without_its_optimizer(
    service: ServiceClient, shared_server: LiveServer, tmp_path: Path
) -> None:
    path = train_and_save(service.create_lora_training_client(MODEL, rank=4, seed=1), "cross_entropy")
    output = export(shared_server, path, tmp_path / "adapter")
    base = re.escape("PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(")
    assert re.search(rf'{base}"/\S+"\), "{tmp_path}/adapter"\) of peft and transformers$', output.strip())
    names = {each.name for each in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "trainhouse.json"}
    assert "name a new directory" in export(shared_server, path, tmp_path / "adapter")
    missing = path.replace("state", "none")
    assert f"there is no checkpoint {missing}" in export(shared_server, missing, tmp_path / "missing")


@pytest.mark.slow
def test_an_adapter_is_exported_merged(
    service: ServiceClient, shared_server: LiveServer, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    client = service.create_lora_training_client(MODEL, rank=4, seed=1)
    path = train_and_save(client, "cross_entropy")
    passed = client.forward([Datum([5, 6, 7, 8], {"target_tokens": np.array([6, 7, 8, 9])})], "cross_entropy").result(
        60
    )
    base = tiny_models["llama"]  # the same weights
    output = export(shared_server, path, tmp_path / "merged", f"--merge-into={base}")
    assert f'AutoModelForCausalLM.from_pretrained("{tmp_path}/merged") of transformers' in output
    ours = passed.loss_fn_outputs[0]["logprobs"]
    np.testing.assert_allclose(logprobs(tmp_path / "merged"), ours, atol=1e-5)
    assert np.abs(logprobs(base) - ours).max() > 1e-3
    draft = train_and_save(service.create_draft_client(MODEL, "eagle3", capture_layers=[0, 1]), "eagle3")
    refused = export(shared_server, draft, tmp_path / "draft", f"--merge-into={base}")
    assert "the checkpoint is not an adapter that can be read here: export it without --merge-into" in refused
    assert not (tmp_path / "draft").exists()


@pytest.mark.slow
def test_an_adapter_is_exported_as_vllm_samplers_get_it(tmp_path: Path) -> None:
    """The adapter is one of gpt-oss, of which vLLM adapts the experts as one, and not the head."""
    model = tiny_model("gpt_oss", tmp_path / "model")
    with live_server({MODEL: model}, tmp_path / "state") as server, ServiceClient(server.url, KEY) as service:
        client = service.create_lora_training_client(MODEL, rank=4, seed=1, train_unembed=False)
        path, directory = train_and_save(client, "cross_entropy"), tmp_path / "adapter"
        output = export(server, path, directory, "--for=vllm")
        assert f"vllm serve {model} --enable-lora --max-lora-rank 8 --lora-modules" in output
        assert f'"path": "{directory}"' in output
        shown: list[tuple[int, int]] = []
        rest = service.create_rest_client()
        files = rest.download_checkpoint(
            path, tmp_path / "stored", on_progress=lambda done, total: shown.append((done, total))
        ).result(60)
        size = sum(file.stat().st_size for file in files)
        assert shown == sorted(shown) and shown[-1] == (size, size) and len(shown) >= len(files) > 1
        (sent := tmp_path / "sent").mkdir()
        version = VllmVersion("adapter", 1, "adapter-v1", sent)
        asyncio.run(link_files(tmp_path / "stored", form_of("GptOssForCausalLM"), version))
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            assert (directory / name).read_bytes() == (sent / name).read_bytes()
        stored = (tmp_path / "stored" / "adapter_model.safetensors").read_bytes()
        assert stored != (directory / "adapter_model.safetensors").read_bytes()
        whole = train_and_save(service.create_lora_training_client(MODEL, rank=4, seed=1), "cross_entropy")
        refused = export(server, whole, tmp_path / "refused", "--for=vllm")
        assert "vLLM does not adapt the output head of this model: train adapters with train_unembed=False" in refused
        assert not (tmp_path / "refused").exists()
        both = export(server, path, tmp_path / "both", "--for=vllm", "--merge-into=.")
        assert "writes no adapter: leave it or --for out" in both


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [None, 40])
def test_a_draft_is_exported_in_the_format_of_inference_engines(
    service: ServiceClient, shared_server: LiveServer, tmp_path: Path, vocabulary: int | None
) -> None:
    draft = service.create_draft_client(MODEL, "eagle3", draft_vocab_size=vocabulary, capture_layers=[0, 1])
    if vocabulary is not None:
        draft.build_vocab_map([[250, 251, 5, 6, 7, 8]]).result(60)
    directory = tmp_path / "draft"
    output = export(shared_server, train_and_save(draft, "eagle3"), directory)
    assert re.search(r"vllm serve /\S+ --speculative-config", output) and f'"model": "{directory}"' in output
    files = {each.name for each in directory.glob("*.safetensors")}
    index = {"model.safetensors.index.json"} if len(files) > 1 else set()
    assert {each.name for each in directory.iterdir()} - files == {"config.json", "trainhouse.json"} | index
    config = json.loads((directory / "config.json").read_text())
    found = {name: load_file(directory / name) for name in files}
    tensors = {name: tensor for each in found.values() for name, tensor in each.items()}
    names = set(tensors)
    if index:
        weight_map = json.loads((directory / index.pop()).read_text())["weight_map"]
        assert weight_map == {name: file for file, each in found.items() for name in each}
    else:
        assert files == {"model.safetensors"}
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == len(tensors["lm_head.weight"]) == (vocabulary or config["vocab_size"])
    # One of the two engines counts layers by their inputs, the other by their outputs.
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert {"fc.weight", "midlayer.self_attn.q_proj.weight", "norm.weight"} < names
    assert ({"d2t", "t2d"} <= names) == (vocabulary is not None)
    if vocabulary is not None:
        can_say = tensors["d2t"] + np.arange(vocabulary)
        assert {250, 251} < set(can_say.tolist()) and (np.flatnonzero(tensors["t2d"]) == can_say).all()


def test_the_loading_hint_depends_on_the_kind_of_model(tmp_path: Path) -> None:
    draft = {"base_model": "a/b", "training": "draft", "algorithm": "dflash", "block_size": 8}
    assert '"num_speculative_tokens": 7' in loaded_by(draft, Path("d"))
    full, adapter = {"base_model": "a/b", "training": "full"}, {"base_model": "a/b", "training": "lora"}
    for architecture, part, named in (
        ("Qwen3ForCausalLM", "", "AutoModelForCausalLM"),
        ("Qwen3_5ForConditionalGeneration", "language_model.", "AutoModelForImageTextToText"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        save_file({f"base_model.model.model.{part}layers.0.x.lora_A.weight": np.zeros(1)}, tmp_path / WEIGHTS)
        assert f'{named}.from_pretrained("{tmp_path}") of transformers' in loaded_by(full, tmp_path)
        loaded = f'PeftModel.from_pretrained({named}.from_pretrained("%s"), "{tmp_path}") of peft and transformers'
        assert loaded_by(adapter, tmp_path, served=tmp_path) == loaded % tmp_path
        other = loaded_by(adapter, tmp_path)
        assert other == f"{loaded % 'a/b'}; if a/b is no hub id, give the base model's directory"
        packed = {"architectures": [architecture], "quantization": {"bits": 4, "group_size": 32}}
        (tmp_path / "config.json").write_text(json.dumps(packed))
        assert "packed by MLX: if transformers does not read them" in loaded_by(adapter, tmp_path, served=tmp_path)


def test_nothing_is_offered_for_a_critic_that_peft_refuses() -> None:
    refused = {"base_model": "a/b", "training": "lora", "refused_by_peft": "out_proj"}
    hint = loaded_by({**refused, "role": "critic"}, Path("d"))
    assert hint == (
        "a program of yours: peft refuses adapters of out_proj in a/b, and vLLM samples no critics: one that peft is to"
        " load must be trained with train_attn=False"
    )
    assert "--merge-into" in loaded_by(refused, Path("d"))


def test_vllm_is_told_of_adapters_in_the_mixed_form(tmp_path: Path) -> None:
    about = {"base_model": "a/b", "architecture": "GraniteMoeHybridForCausalLM"}
    (tmp_path / "trainhouse.json").write_text(json.dumps(about))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 20, "rank_pattern": {"gate_up_proj": 40}}))
    hint = loaded_by(about, tmp_path, "vllm")
    assert "--max-lora-rank 64 --enable-mixed-moe-lora-format --lora-modules" in hint
    assert '"is_3d_lora_weight": true' in hint and hint.startswith("vllm serve a/b --enable-lora ")
    assert "not compared" not in hint


def test_vllms_hint_has_the_directory_of_the_base_model_and_says_what_was_not_compared(tmp_path: Path) -> None:
    about = {"base_model": "alias", "architecture": "Qwen3VLForConditionalGeneration"}
    (tmp_path / "trainhouse.json").write_text(json.dumps(about))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    hint = loaded_by(about, tmp_path, "vllm", tmp_path)
    assert hint.startswith(f"vllm serve {tmp_path} --enable-lora ")
    assert hint.endswith(
        "; adapters of Qwen3VLForConditionalGeneration were not compared in vLLM, so compare log-probabilities first"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["falcon_h1", pytest.param("nemotron_h", marks=pytest.mark.full)])
def test_an_adapter_that_peft_refuses_is_exported_merged(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_model(kind, tmp_path / "model")  # which the server on this machine names
    with live_server({f"here/{kind}": base}, tmp_path / "state") as server, ServiceClient(server.url, KEY) as service:
        client = service.create_lora_training_client(f"here/{kind}", rank=4, seed=1)
        path = train_and_save(client, "cross_entropy")
        ours = client.forward(DATA, "cross_entropy").result(60).loss_fn_outputs[0]["logprobs"]
        said = export(server, path, tmp_path / "merged")
        assert f"merged into the base model: peft refuses adapters of out_proj in here/{kind}; load " in said
        np.testing.assert_allclose(logprobs(tmp_path / "merged"), ours, atol=1e-5)
        assert np.abs(logprobs(base) - ours).max() > 1e-3
        caplog.set_level(logging.WARNING, "trainhouse.export")  # `trainhouse export` in this process raises it
        exported = service.create_rest_client().export_checkpoint(path, tmp_path / "same").result(60)
        assert exported.note == said.strip().replace(str(tmp_path / "merged"), str(tmp_path / "same"))
        assert f"{path} is {exported.note}" in caplog.text
        assert {each.name for each in exported.files} == {each.name for each in (tmp_path / "merged").iterdir()}
        for file in exported.files:
            assert file.read_bytes() == (tmp_path / "merged" / file.name).read_bytes()
        rest = service.create_rest_client()
        monkeypatch.setattr(rest._connection, "base_url", "http://gpu-server:8000")
        with pytest.raises(ValueError, match=f"here/{kind} is not on this machine"):
            rest.export_checkpoint(path, tmp_path / "none").result(60)
        assert "peft refuses adapters of out_proj" in export(server, path, tmp_path / "alone", "--for=peft")
        assert (tmp_path / "alone" / WEIGHTS).exists()
        without = service.create_lora_training_client(f"here/{kind}", rank=4, seed=1, train_attn=False)
        said = export(server, train_and_save(without, "cross_entropy"), tmp_path / "for-peft")
        assert "PeftModel.from_pretrained" in said and (tmp_path / "for-peft" / WEIGHTS).exists()
        critic = service.create_lora_training_client(f"here/{kind}", rank=4, seed=1, model_role="critic")
        said = export(server, critic.save_state("critic").result(60).path, tmp_path / "critic")
        assert "peft refuses" in said and (tmp_path / "critic" / WEIGHTS).exists()


@pytest.mark.slow
def test_an_adapter_that_peft_refuses_is_not_merged_into_what_is_not_its_whole_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is the one that the server names, or else one of the model's name."""
    monkeypatch.chdir(tmp_path)
    base = tiny_model("falcon_h1", tmp_path / "model")
    weights, config = base / "model.safetensors", base / "config.json"
    with live_server({"here/falcon": base}, tmp_path / "state") as server, ServiceClient(server.url, KEY) as service:
        path = train_and_save(service.create_lora_training_client("here/falcon", rank=4, seed=1), "cross_entropy")
        rest = service.create_rest_client()
        with pytest.raises(ValueError, match="leave out merge_into or reader"):
            rest.export_checkpoint(path, tmp_path / "none", "peft", base).result(60)

        def assert_refused(reason: str) -> None:
            said = export(server, path, tmp_path / "none")
            assert "peft refuses adapters of out_proj in here/falcon, so the adapter would be exported merged" in said
            assert reason in said and "by --merge-into BASE_DIRECTORY" in said and "--for vllm or --for peft" in said
            assert said.count("peft refuses") == 1 and not (tmp_path / "none").exists()
            with pytest.raises(ValueError, match=re.escape(reason)):
                rest.export_checkpoint(path, tmp_path / "none").result(60)
            assert not (tmp_path / "none").exists()

        tensors = load_torch_file(weights)
        save_torch_file({name: each.to(torch.float8_e4m3fn) for name, each in tensors.items()}, weights)
        assert_refused("has dtype F8_E4M3")
        index = {"weight_map": dict.fromkeys(tensors, "model-00002-of-00002.safetensors")}
        (base / "model.safetensors.index.json").write_text(json.dumps(index))
        assert_refused("lacks 1 of the 1 files")
        (base / "model.safetensors.index.json").unlink()
        weights.unlink()
        assert_refused("has no model.safetensors")
        config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["LlamaForCausalLM"]}))
        # The server's directory counts only with the config.json that the server has loaded.
        assert_refused("here/falcon is not on this machine")
        (tmp_path / "here").mkdir()
        base.rename(tmp_path / "here" / "falcon")
        assert_refused(f"{tmp_path}/here/falcon is not the base model: its config.json names no FalconH1ForCausalLM")
        (tmp_path / "here" / "falcon").rename(tmp_path / "elsewhere")
        assert_refused("here/falcon is not on this machine")
