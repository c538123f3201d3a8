"""`--parallel auto` and `--sampler-parallel auto` of serve: which layouts and devices base models and samplers get."""

from pathlib import Path

import pytest
from trainhouse.server.config.load import load_config
from trainhouse.server.planning.auto_layout import with_layouts, with_sampler_layout
from trainhouse.workers.protocol.worker_config import DispatchConfig

from ..config.test_config import CONFIGS, config_of


def test_auto_chooses_the_fewest_ranks_that_fit_each_base_model(tmp_path: Path) -> None:
    small = f"small={CONFIGS}/Llama-3.1-8B.json"
    large = f"large={CONFIGS}/Llama-3.1-70B.json"
    flags = {"base_models": [small, large], "parallel": "auto", "max_context_length": "8192", "adapter_slots": "4"}
    config = load_config({**flags, "device": "cpu", "dtype": "bfloat16"}, {}, None)
    said: list[str] = []
    chosen = with_layouts(config.dispatch_config(), 80 * 10**9, "nvlink", said.append)
    found = [(str(model.parallel), model.activations) for model in chosen.models]
    assert found == [("single", "keep"), ("tp=4", "recompute")]
    assert said[0].startswith("small: --parallel single (7")
    assert said[0].endswith(" GB of 80.0 GB on each rank, as planned)")
    assert chosen.models[1].model == config.models.base_models[1]
    with pytest.raises(ValueError, match=r"no layout of small fits: .*: lower --max-context-length and"):
        with_layouts(config.dispatch_config(), 10**9, "nvlink", said.append)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    other = load_config({"base_models": f"other={tmp_path}", "parallel": "auto"}, {}, None)
    with pytest.raises(ValueError, match=r"other \(gpt2\) runs by transformers' modules.*give a layout"):
        with_layouts(other.dispatch_config(), 10**9, "nvlink", said.append)


def config_on_gpus(
    monkeypatch: pytest.MonkeyPatch, number: int, *models: str, **flags: str | list[str]
) -> DispatchConfig:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(number))))
    sources = [f"{name}={CONFIGS}/{file}.json" for name, _, file in (model.partition("=") for model in models)]
    common = {
        "parallel": "auto",
        "device": "cuda",
        "micro_batch_tokens": "2048",
        "max_context_length": "2048",
        "adapter_slots": "2",
    }
    return load_config({"base_models": sources, **common, **flags}, {}, None).dispatch_config()


def test_auto_gives_every_rank_a_separate_device(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    config = config_on_gpus(monkeypatch, 8, "a=Llama-3.1-8B", "b=Llama-3.1-8B", "c=Llama-3.1-8B")
    chosen = with_layouts(config, 24 * 10**9, "nvlink", said.append).models
    assert [(str(model.parallel), model.device) for model in chosen] == [
        ("tp=2", "cuda"),
        ("tp=2", "cuda:2"),
        ("tp=2", "cuda:4"),
    ]
    assert "--parallel tp=2 --device cuda:2 (" in said[1]
    apart = config_on_gpus(monkeypatch, 8, "a=Llama-3.1-8B", "b=Llama-3.1-8B", device="cuda:4,cuda:0")
    chosen = with_layouts(apart, 24 * 10**9, "nvlink", said.append).models
    assert [model.device for model in chosen] == ["cuda:4", "cuda:0"]
    too_many = config_on_gpus(monkeypatch, 4, "a=Llama-3.1-8B", "b=Llama-3.1-8B", "c=Llama-3.1-8B")
    with pytest.raises(ValueError, match="no device is left for c: others use all 4"):
        with_layouts(too_many, 24 * 10**9, "nvlink", said.append)
    overlapping = config_on_gpus(monkeypatch, 4, "a=Llama-3.1-8B", "b=Llama-3.1-8B", device="cuda:0,cuda:1")
    with pytest.raises(ValueError, match="b has device cuda:1, which a uses: name another"):
        with_layouts(overlapping, 24 * 10**9, "nvlink", said.append)
    sampling = config_on_gpus(monkeypatch, 4, "a=Llama-3.1-8B", sampler_workers="1")
    with pytest.raises(ValueError, match="name devices for them with --sampler-device"):
        with_layouts(sampling, 24 * 10**9, "nvlink", said.append)
    with_others = config_on_gpus(monkeypatch, 4, "a=Llama-3.1-8B", sampler_workers="1", sampler_device="cuda:3")
    assert with_layouts(with_others, 24 * 10**9, "nvlink", said.append).models[0].device == "cuda"
    sampling_first = config_on_gpus(monkeypatch, 4, "a=Llama-3.1-8B", sampler_workers="1", sampler_device="cuda:0")
    assert with_layouts(sampling_first, 24 * 10**9, "nvlink", said.append).models[0].device == "cuda:1"
    of_two = {"sampler_device": "cuda:0", "sampler_parallel": "tp=2"}
    sampling_first = config_on_gpus(monkeypatch, 4, "a=Llama-3.1-8B", sampler_workers="1", **of_two)
    assert with_layouts(sampling_first, 24 * 10**9, "nvlink", said.append).models[0].device == "cuda:2"


def test_auto_chooses_the_layout_of_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    auto = {"parallel": "single", "sampler_workers": "2", "sampler_parallel": "auto", "kv_cache_bytes": "8GiB"}

    def chosen(number: int, *models: str, **flags: str) -> str:
        config = config_on_gpus(monkeypatch, number, *(models or ("a=Qwen3-30B-A3B",)), **{**auto, **flags})
        sampling = with_sampler_layout(config, 24 * 10**9, number, said.append).sampling
        assert sampling.devices == config.sampling.devices
        return str(sampling.parallel)

    assert chosen(17, sampler_device="cuda:1,cuda:9") == "ep=2,tp=4"
    assert said[0].startswith("samplers of a: --sampler-parallel ep=2,tp=4 (") and "as planned" in said[0]
    with pytest.raises(ValueError, match=r"no layout of tp and ep of a fits its samplers on 4 devices: .* needs least"):
        chosen(17, sampler_device="cuda:1,cuda:5")
    with pytest.raises(ValueError, match="cannot divide devices with training: name devices with --sampler-device"):
        chosen(17)
    with pytest.raises(ValueError, match="chooses for one base model, and there are 2: name a layout"):
        chosen(17, "a=Llama-3.1-8B", "b=Llama-3.1-8B", sampler_device="cuda:1,cuda:9")
    assert chosen(17, "a=Llama-3.1-8B", device="cpu", dtype="bfloat16", kv_cache_bytes="1GiB") == "single"


def test_auto_reads_device_memory_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = f"m={CONFIGS}/Llama-3.1-8B.json"
    config = config_of(parallel="auto", base_models=model, max_context_length="4096", adapter_slots="1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="nvidia-smi reports none here: give --device-memory"):
        with_layouts(config.dispatch_config(), config.ranks.device_memory_bytes, "nvlink", print)
    asked = tmp_path / "nvidia-smi"
    asked.write_text("#!/bin/sh\necho 81559\necho 24564\n")
    asked.chmod(0o755)
    said: list[str] = []
    with_layouts(config.dispatch_config(), config.ranks.device_memory_bytes, "nvlink", said.append)
    assert " of 25.8 GB on each rank" in said[0]
    assert config_of(parallel="auto", device_memory_bytes="80GB").ranks.device_memory_bytes == 80 * 10**9


def test_auto_avoids_the_devices_of_role_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    with_others = config_on_gpus(monkeypatch, 4, "a=Llama-3.1-8B", role_groups=["reference=tp=2@cuda:0"])
    assert with_layouts(with_others, 24 * 10**9, "nvlink", print).models[0].device == "cuda:2"
    nowhere = config_on_gpus(monkeypatch, 4, "a=Llama-3.1-8B", role_groups=["reference=tp=2"])
    with pytest.raises(ValueError, match=r"for --role-group reference=tp=2: name devices for it, as in .*=tp=2@cuda:3"):
        with_layouts(nowhere, 24 * 10**9, "nvlink", print)
