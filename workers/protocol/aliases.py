"""Aliases: names of base models that are one, which is loaded once and has all that is planned for it once."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from .config import DispatchConfig, ServedModel, WorkerConfig

Each = TypeVar("Each")


def unified(config: DispatchConfig) -> DispatchConfig:
    """Of models that differ in nothing but their names it has the first one alone, and the others' names as aliases."""
    first: dict[object, str] = {}
    aliases, numbers = dict(config.aliases), list[int]()
    for number, model in enumerate(config.models):
        name = model.model.name
        known = first.setdefault(_all_but_the_name(config, number, model), name)
        if known == name:
            numbers.append(number)
        else:
            aliases[name] = known
    if len(numbers) == len(config.models):
        return config
    groups = tuple(replace(group, devices=_of(group.devices, numbers)) for group in config.role_groups)
    vllm = config.sampling.vllm
    sampling = replace(config.sampling, vllm=vllm and replace(vllm, urls=_of(vllm.urls, numbers)))
    models = tuple(config.models[number] for number in numbers)
    return replace(config, models=models, aliases=aliases, role_groups=groups, sampling=sampling)


def _all_but_the_name(config: DispatchConfig, number: int, model: WorkerConfig) -> object:
    """number: the model's, by which lists of devices and servers name its own."""
    path = Path(model.model.source)
    source = str(path.resolve()) if path.exists() else model.model.source
    devices = [_own(group.devices, number) for group in config.role_groups]
    urls = config.sampling.vllm.urls if config.sampling.vllm is not None else ()
    return replace(model, model=ServedModel("", source, model.model.origin)), *devices, _own(urls, number)


def _own(values: Sequence[str], number: int) -> str | None:
    return values[number % len(values)] if values else None


def _of(values: tuple[Each, ...], numbers: Sequence[int]) -> tuple[Each, ...]:
    """Where there is one for each base model, those of these; else one for all of them, or none."""
    return values if len(values) <= 1 else tuple(values[number] for number in numbers)
