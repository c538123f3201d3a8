"""One version of an adapter or a full model, in a directory that vLLM reads."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(eq=False)
class VllmAdapterVersion:
    """One version of an adapter or a full model.

    number: increases with each version of any adapter.
    is_full: whether it is a full model.
    refusal: why vLLM cannot load it; None if it can, or has not tried.
    num_users: requests that use it.
    vllm_epoch: the start (VllmServer.num_starts) of the vLLM that has loaded the adapter.
    training_crash_epoch: the training group's count of crashes when it loaded it.
    """

    adapter_id: str
    number: int
    name: str
    directory: Path
    is_full: bool = False
    refusal: str | None = None
    num_users: int = 0
    is_current: bool = True
    vllm_epoch: int | None = None
    training_crash_epoch: int | None = None
    vllm_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    training_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in full_weight_files(self.directory))


def full_weight_files(directory: Path) -> list[Path]:
    """Returns the files with a full model's weights; none if the directory has an adapter."""
    return list(directory.glob("model*.safetensors"))


def weights_under(version: VllmAdapterVersion | None) -> VllmAdapterVersion | None:
    """Returns the full model whose weights vLLM must have to sample with the version; None for the base model's."""
    return version if version is not None and version.is_full else None
