"""Configurations that differ only in their names are one base model; any other difference keeps two apart."""

from dataclasses import replace
from pathlib import Path

from trainhouse.server.serving.base_models import merge_identical_models
from trainhouse.workers.protocol.worker_config import (
    DispatchConfig,
    RoleGroup,
    SamplingConfig,
    ServedModel,
    VllmConfig,
    WorkerConfig,
)


def config_of(*models: WorkerConfig, **config: object) -> DispatchConfig:
    return replace(DispatchConfig(models), **config)


def model(name: str, source: str, **config: object) -> WorkerConfig:
    return replace(WorkerConfig(ServedModel(name, source), device="cpu"), **config)


def names(config: DispatchConfig) -> list[str]:
    return [each.model.name for each in config.models]


def test_spellings_of_one_directory_are_one_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    sources = [tmp_path / "model", tmp_path / "link", tmp_path / "x" / ".." / "model", tmp_path]
    (tmp_path / "x").mkdir()
    found = merge_identical_models(
        config_of(*(model(name, str(source)) for name, source in zip("abcd", sources, strict=True)))
    )
    assert names(found) == ["a", "d"] and found.aliases == {"b": "a", "c": "a"}
    assert found.models[0].model.source == str(tmp_path / "model")


def test_names_of_one_hub_id_are_one_model() -> None:
    found = merge_identical_models(config_of(model("a", "org/model"), model("b", "org/model"), model("c", "org/other")))
    assert names(found) == ["a", "c"] and found.aliases == {"b": "a"}


def test_models_with_other_settings_stay_apart() -> None:
    both = model("a", "org/model"), model("b", "org/model")
    assert names(merge_identical_models(config_of(both[0], replace(both[1], device="cuda:1")))) == ["a", "b"]
    apart = RoleGroup(("critic",), devices=("cuda:0", "cuda:1"))
    assert names(merge_identical_models(config_of(*both, role_groups=(apart,)))) == ["a", "b"]
    assert names(merge_identical_models(config_of(*both, role_groups=(replace(apart, devices=("cuda:0",)),)))) == ["a"]
    vllm = VllmConfig(urls=("http://one", "http://other"))
    assert names(merge_identical_models(config_of(*both, sampling=SamplingConfig(vllm=vllm)))) == ["a", "b"]


def test_per_model_lists_lose_the_entries_of_aliases() -> None:
    models = model("a", "org/model"), model("b", "org/model"), model("c", "org/other")
    vllm = VllmConfig(urls=("http://one", "http://one", "http://other"))
    group = RoleGroup(("critic",), devices=("cuda:0", "cuda:0", "cuda:1"))
    found = merge_identical_models(config_of(*models, sampling=SamplingConfig(vllm=vllm), role_groups=(group,)))
    assert names(found) == ["a", "c"] and found.sampling.vllm is not None
    assert found.sampling.vllm.urls == ("http://one", "http://other")
    assert found.role_groups[0].devices == ("cuda:0", "cuda:1")
