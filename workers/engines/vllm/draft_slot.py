"""The draft of a vLLM. It has one at a time, of a shape chosen at its start, for all requests; or none."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from ....schemas.adapters.adapter_files import DESCRIPTION
from ....schemas.bounds import load_json
from ....schemas.errors import OperationError
from ....schemas.models import DraftConfig, training_of
from ...protocol.calls import RunSpec
from ...protocol.methods import CREATE_RUN, DROP_RUN, SAVE_RUN
from ...protocol.worker_config import VllmConfig
from ...scheduler.rank_group import RankGroup
from ...scheduler.work import MethodWork
from ..in_flight import cancel_and_wait
from ..weights import ScratchDirectory, adapter_not_stored_error
from .adapter_version import VllmAdapterVersion
from .adapters import READS_ON_SECONDS, link_files
from .placed_weights import PlacedWeights

_FIRST = "first-draft"
"""Run id of the draft with which vLLM starts. Those of runs contain session ids."""


class DraftSlot:
    """Holds drafts by id, and chooses the one that vLLM has. weights: those in the slot.

    Which one that is changes the speed of requests, not their distribution: rejection sampling is exact. So a request
    never waits for another draft: it takes the slot if no request uses the draft there, and else runs with that one.
    """

    def __init__(self, weights: PlacedWeights, training: RankGroup, config: VllmConfig, directory: Path | None) -> None:
        """config: without a draft, vLLM starts without one.

        directory: emptied of an earlier process's files; None means a temporary one.
        """
        self.weights = weights
        self._training = training
        self._config = config
        self._scratch = ScratchDirectory(directory)
        self._held: dict[str, VllmAdapterVersion] = {}
        self._in_slot: VllmAdapterVersion | None = None
        # A request that found the slot in use has named it: the slot is left to empty.
        self._wanted_next: VllmAdapterVersion | None = None
        self._shape: DraftConfig | None = None
        self._numbers = count(1)
        self._discarding: set[asyncio.Task[None]] = set()

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
            directory = await self._scratch.path() / _FIRST
            directory.mkdir()
            spec = RunSpec(_FIRST, config.model_copy(update={"seed": 0}), "draft")
            await self._training.submit(MethodWork(_FIRST, "", CREATE_RUN, (spec,), creates=_FIRST))
            await self._training.submit(MethodWork(_FIRST, "", SAVE_RUN, (_FIRST, str(directory), False)))
            await self._training.submit(MethodWork(_FIRST, "", DROP_RUN, (_FIRST,), drops=_FIRST))
        except (OSError, OperationError) as error:
            raise ValueError(f"the draft for vLLM (--vllm-draft) cannot be created: {error}") from None
        self._shape = await asyncio.to_thread(_shape_in, directory)
        block = self._shape.block_size
        tokens = self._config.draft_tokens if block is None else block - 1
        return {"method": self._shape.algorithm, "model": str(directory), "num_speculative_tokens": tokens}

    def holds(self, draft_id: str) -> bool:
        return draft_id in self._held

    async def put(self, draft_id: str, directory: Path) -> None:
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
            raise adapter_not_stored_error(draft_id, error) from None
        _check_shape(self._shape, theirs)
        number = next(self._numbers)
        try:
            kept = await self._scratch.path() / str(number)
            kept.mkdir()
        except OSError as error:
            raise adapter_not_stored_error(draft_id, error) from None
        try:
            await link_files(directory, None, kept)
        except BaseException:
            shutil.rmtree(kept, ignore_errors=True)
            raise
        self.drop(draft_id)
        self._held[draft_id] = VllmAdapterVersion(draft_id, number, draft_id, kept)

    def drop(self, draft_id: str) -> None:
        """Drops the draft. Requests that use it keep it until they end. Unknown ids are ignored."""
        if (draft := self._held.pop(draft_id, None)) is not None:
            draft.is_current = False
            self._discard_unused(draft)

    @asynccontextmanager
    async def in_use(self, draft_id: str | None) -> AsyncIterator[VllmAdapterVersion | None]:
        """Yields the draft if the request has the slot, which then keeps it to the end of the block; else None."""
        draft = self._taken(draft_id)
        if draft is None:
            yield None
            return
        draft.num_users += 1
        try:
            yield draft
        finally:
            draft.num_users -= 1
            self._discard_unused(draft)

    async def close(self) -> None:
        await self.weights.close()
        await cancel_and_wait(self._discarding)
        self._scratch.close()

    def _taken(self, draft_id: str | None) -> VllmAdapterVersion | None:
        draft = None if draft_id is None else self._held.get(draft_id)
        if draft is None:
            return None
        if self._in_slot is None or not self._in_slot.num_users:
            self._in_slot, self._wanted_next = draft, None
        elif draft is not self._in_slot:
            self._wanted_next = draft
        return draft if draft is self._in_slot and self._wanted_next is None else None

    def _discard_unused(self, draft: VllmAdapterVersion) -> None:
        if not draft.is_current and not draft.num_users:
            task = asyncio.create_task(_remove(draft.directory))
            self._discarding.add(task)
            task.add_done_callback(self._discarding.discard)


def _check_shape(ours: DraftConfig, theirs: DraftConfig) -> None:
    """Raises OperationError if the shapes of vLLM's draft and another one differ."""
    if (name := ours.differs_in(theirs)) is not None:
        raise OperationError(
            f"the draft has {name} {getattr(theirs, name)}, and vLLM has started for drafts with {getattr(ours, name)}:"
            " sample with a draft of that shape, or start the server with another --vllm-draft"
        )


async def _remove(directory: Path) -> None:
    await asyncio.sleep(READS_ON_SECONDS)
    await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


def _shape_in(directory: Path) -> DraftConfig:
    """Returns the configuration of a saved draft, whose fields are filled in."""
    training = training_of(load_json((directory / DESCRIPTION).read_text()))
    assert isinstance(training, DraftConfig), "the server loads no other checkpoints as drafts"
    return training
