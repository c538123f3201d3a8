"""The draft of a vLLM. It has one at a time, of a shape chosen at its start, for all requests; or none."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from ....schemas.adapters.peft import DESCRIPTION
from ....schemas.adapters.tensor_file import FileTensor, TensorFile, write_tensors
from ....schemas.bounds import load_json
from ....schemas.errors import OperationError
from ....schemas.models import DraftConfig, training_of
from ...protocol.calls import RunSpec
from ...protocol.worker_config import VllmConfig
from ...scheduler.rank_group import RankGroup
from ..weights import WeightStore, not_stored_error, save_untrained
from .adapters import READS_ON_SECONDS, VllmVersion, link_files
from .placed_weights import PlacedWeights

_FIRST = "first-draft"
"""Run id of the draft with which vLLM starts. Those of runs contain session ids."""
_HEAD = "lm_head.weight"


class DraftSlot(WeightStore[VllmVersion]):
    """Keeps drafts, and chooses the one that vLLM has. weights: those in the slot.

    Which one that is changes the speed of requests, not their distribution: rejection sampling is exact. So a request
    never waits for another draft: it takes the slot if no request uses the draft there, and else runs with that one.
    """

    def __init__(self, weights: PlacedWeights, training: RankGroup, config: VllmConfig, directory: Path | None) -> None:
        """config: without a draft, vLLM starts without one."""
        super().__init__(VllmVersion, directory, READS_ON_SECONDS)
        self.weights = weights
        self._training = training
        self._config = config
        self._in_slot: VllmVersion | None = None
        # A request that found the slot in use has named it: the slot is left to empty.
        self._wanted_next: VllmVersion | None = None
        self._shape: DraftConfig | None = None

    @property
    def exists(self) -> bool:
        return self._config.draft is not None

    async def first_draft(self) -> Mapping[str, object] | None:
        """Writes an untrained draft, with which vLLM starts, and returns vLLM's speculative configuration.

        Returns None if it starts without one. Raises ValueError if the base model has no drafts of this shape.
        """
        config = self._config.draft
        if config is None:
            return None
        try:
            directory = await self.path() / _FIRST
            directory.mkdir()
            spec = RunSpec(_FIRST, config.model_copy(update={"seed": 0}), "draft")
            await save_untrained(self._training, spec, directory)
            await asyncio.to_thread(_negate_head, directory)
        except (OSError, OperationError) as error:
            raise ValueError(f"the draft for vLLM (--vllm-draft) cannot be created: {error}") from None
        self._shape = await asyncio.to_thread(_shape_in, directory)
        block = self._shape.block_size
        tokens = self._config.draft_tokens if block is None else block - 1
        return {"method": self._shape.algorithm, "model": str(directory), "num_speculative_tokens": tokens}

    async def keep(self, draft_id: str, directory: Path) -> None:
        """Keeps the files of a draft, which may be deleted afterwards.

        Raises OperationError if vLLM has no draft, or one of another shape.
        """
        if self._shape is None:
            raise OperationError(
                "draft_path is not supported by a vLLM that started without a draft: leave it out, or start the server"
                " with --vllm-draft, which names the shape of drafts for the vLLM that it starts, or with --sampler"
                " native"
            )

        try:
            theirs = await asyncio.to_thread(_shape_in, directory)
        except (OSError, ValueError, KeyError) as error:
            raise not_stored_error(draft_id, error) from None
        _check_shape(self._shape, theirs)
        await self.put(draft_id, partial(link_files, directory, None))

    @asynccontextmanager
    async def in_use(self, draft_id: str | None) -> AsyncIterator[VllmVersion | None]:
        """Yields the draft if the request has the slot, which then keeps it to the end of the block; else None."""
        draft = self.get(draft_id) if draft_id is not None and draft_id in self else None
        if draft is None or not self._takes(draft):
            yield None
            return
        with self.using(draft):
            yield draft

    async def close(self) -> None:
        await self.weights.close()
        await super().close()

    def _takes(self, draft: VllmVersion) -> bool:
        """Gives the draft the slot unless another one is in use there; true if it has the slot."""
        if self._in_slot is None or not self._in_slot.num_users:
            self._in_slot, self._wanted_next = draft, None
        elif draft is not self._in_slot:
            self._wanted_next = draft
        return draft is self._in_slot and self._wanted_next is None


def _check_shape(ours: DraftConfig, theirs: DraftConfig) -> None:
    """Raises OperationError if the shapes of vLLM's draft and another one differ."""
    if (name := ours.differs_in(theirs)) is not None:
        raise OperationError(
            f"the draft has {name} {getattr(theirs, name)}, and vLLM has started for drafts with {getattr(ours, name)}:"
            " sample with a draft of that shape, or start the server with another --vllm-draft"
        )


def _negate_head(directory: Path) -> None:
    """Makes the output head of an untrained draft, if it has one, another than the target's, of which it is a copy.

    With equal ones vLLM would give the draft the target's, and the next draft has another.
    """
    for path in directory.glob("model*.safetensors"):
        if _HEAD in (file := TensorFile(path)):
            tensors = {name: file.copied(name) for name in file}
            write_tensors(path, tensors | {_HEAD: FileTensor.of(-file[_HEAD])})


def _shape_in(directory: Path) -> DraftConfig:
    """Returns the configuration of a saved draft, whose fields are filled in."""
    training = training_of(load_json((directory / DESCRIPTION).read_text()))
    assert isinstance(training, DraftConfig), "the server loads no other checkpoints as drafts"
    return training
