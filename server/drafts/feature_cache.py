"""The captured features of one tenant, stored by content: files ADDRESS.safetensors, which the workers write, and
ADDRESS.json with the references to each, which this module writes.

An entry stays while a reference or a hold needs it.
"""

import asyncio
import json
import logging
import re
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ...schemas.bounds import load_json
from ...schemas.training import FeatureLocation
from ..files.directories import STAGING, move_into_place, read_regular, staging_path
from .space import FeatureSpace

logger = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_REF = re.compile(r"features-([0-9a-f]{32})-([0-9a-z]{1,40})")
_MAX_REMEMBERED = 10_000


@dataclass
class FeatureReference:
    """A name by which operations use captured features."""

    name: str
    run_id: str
    """The run that captured them."""
    expires_at: float
    uses: int | None = None
    """Uses that are left; None: unlimited."""
    taken: dict[str, int] = field(default_factory=dict)
    """The seq_id of the last step that took uses, by run: a retry after a crash does not take them twice."""


@dataclass(eq=False)
class FeatureHold:
    """Keeps the entries that an operation needs until its optimizer step has finished."""

    uses: Counter[str]
    """Uses of each reference by the step."""
    entries: list["FeatureEntry"] = field(default_factory=list)
    refusal: str | None = None
    """The reason if the operation must be refused."""
    has_ended: bool = False
    """The step has finished, but the files may not reflect it yet."""


@dataclass(eq=False)
class FeatureEntry:
    """The stored features of one sequence. references: by name."""

    address: str
    num_bytes: int
    references: dict[str, FeatureReference] = field(default_factory=dict)
    holds: set[FeatureHold] = field(default_factory=set)


class FeatureCache:
    """The entries of one tenant, by address.

    Changes of references and holds take effect in memory at once, and in the files with `settle`. While captures run no
    file is deleted, since their passes may be reusing it.
    """

    def __init__(self, tenant_id: str, directory: Path, space: FeatureSpace, *, may_delete: bool) -> None:
        self.may_delete = may_delete  # false until the holds of an earlier process's operations are restored
        self.entries: dict[str, FeatureEntry] = {}
        self.end_reasons: OrderedDict[str, str] = OrderedDict()  # of references that have ended
        self._tenant_id = tenant_id
        self._directory = directory
        self._files = FeatureFiles(directory)
        self._space = space
        self._num_capturing = 0
        self._writing = asyncio.Lock()  # held while existing files are changed
        self._changed: set[FeatureEntry] = set()  # those whose references are not yet written
        self._released: set[FeatureEntry] = set()  # those that may not be needed any more

    async def open(self) -> None:
        """Loads what an earlier process left."""
        self._released = {self._add(entry) for entry in await asyncio.to_thread(self._files.read)}

    def find(self, name: str) -> FeatureEntry | None:
        """Returns the entry that a reference of this name, which may have ended, is or was for."""
        found = _REF.fullmatch(name)
        return None if found is None else self.entries.get(found[1])

    def location(self) -> FeatureLocation:
        return FeatureLocation(str(self._directory))

    def reference(self, name: str) -> FeatureReference | None:
        entry = self.find(name)
        return None if entry is None else entry.references.get(name)

    @asynccontextmanager
    async def capturing(self) -> AsyncIterator[FeatureLocation]:
        """Enters a capture. Raises OSError if there can be no files."""
        self._num_capturing += 1
        has_failed = True
        try:
            async with self._writing:  # after a cleanup that began before this capture was counted
                await asyncio.to_thread(self._directory.mkdir, parents=True, exist_ok=True)
            yield replace(self.location(), captures=True)
            has_failed = False
        finally:
            self._num_capturing -= 1
            await self.settle()
            if has_failed:
                await self.delete_unknown_files()

    async def refer(self, sizes: Mapping[str, int], references: Mapping[str, FeatureReference]) -> bool:
        """Adds references to the captured files of these sizes, unless they exist, both by address; call it inside
        `capturing`. False if files have disappeared from the disk. Raises OSError."""
        async with self._writing:
            if not await asyncio.to_thread(self._files.exist, sizes):
                return False
            for address, size in sizes.items():
                entry = self.entries.get(address) or self._add(FeatureEntry(address, size))
                entry.references.setdefault(references[address].name, references[address])
                self._changed.add(entry)
        await self.settle()
        return True

    def end_hold(self, hold: FeatureHold) -> None:
        if hold.has_ended:
            return
        hold.has_ended = True
        for entry in hold.entries:
            entry.holds.remove(hold)
        self._released.update(hold.entries)

    def end_references(self, why: str, ends: Callable[[FeatureReference], bool]) -> int:
        """Ends the references for which `ends` is true; returns how many."""
        num_ended = 0
        for entry in self.entries.values():
            for reference in list(filter(ends, entry.references.values())):
                self._end(entry, reference, why)
                num_ended += 1
        return num_ended

    def take_uses(self, name: str, count: int, run_id: str, step: int) -> None:
        """Takes uses for a run's optimizer step with this seq_id, and ends the reference with its last one."""
        entry, reference = self.find(name), self.reference(name)
        if entry is None or reference is None or reference.uses is None:
            return
        reference.uses -= count
        reference.taken[run_id] = step
        self._changed.add(entry)
        if reference.uses <= 0:
            self._end(entry, reference, "it was captured for a limited number of uses, and none is left")

    async def settle(self) -> None:
        """Writes changed references to files, and deletes what is not needed any more."""
        async with self._writing:
            unneeded = self._drop_unneeded()
            changed, self._changed = self._changed, set()
            texts = {entry.address: json.dumps(list(map(asdict, entry.references.values()))) for entry in changed}
            try:
                if texts or unneeded:
                    await asyncio.to_thread(self._files.write, texts, unneeded)
            except OSError as error:
                self._changed |= changed
                logger.error("references to features of %s cannot be written: %s", self._tenant_id, error)

    async def delete_unknown_files(self) -> None:
        """Deletes files without entries, unless captures run, whose files have no entries yet."""
        async with self._writing:
            if self._num_capturing:
                return
            try:
                await asyncio.to_thread(self._files.delete_others, set(self.entries))
            except OSError as error:
                logger.error("unknown files in %s cannot be deleted: %s", self._directory, error)

    def _add(self, entry: FeatureEntry) -> FeatureEntry:
        self.entries[entry.address] = entry
        self._space.fill(self._tenant_id, entry.num_bytes)
        return entry

    def _end(self, entry: FeatureEntry, reference: FeatureReference, why: str) -> None:
        del entry.references[reference.name]
        self._changed.add(entry)
        self._released.add(entry)
        self.end_reasons[reference.name] = why
        if len(self.end_reasons) > _MAX_REMEMBERED:
            self.end_reasons.popitem(last=False)

    def _drop_unneeded(self) -> Sequence[str]:
        """Forgets entries that are not needed any more, and returns their addresses."""
        if self._num_capturing or not self.may_delete:
            return ()
        unneeded = [entry for entry in self._released if not (entry.references or entry.holds)]
        self._released = set()
        for entry in unneeded:
            del self.entries[entry.address]
            self._changed.discard(entry)
            self._space.free(self._tenant_id, entry.num_bytes)
        return [entry.address for entry in unneeded]


class FeatureFiles:
    """Reads and writes the files in one directory. All methods block, and may raise OSError."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self) -> list[FeatureEntry]:
        """Returns the features that have references."""
        found = []
        for path in self._directory.glob(f"*{_SUFFIX}"):
            try:
                references = [FeatureReference(**each) for each in load_json(read_regular(path.with_suffix(".json")))]
            except (OSError, ValueError, TypeError):
                continue  # left by a capture that was never answered
            by_name = {reference.name: reference for reference in references}
            found.append(FeatureEntry(path.stem, path.stat().st_size, by_name))
        return found

    def exist(self, addresses: Iterable[str]) -> bool:
        return all((self._directory / f"{address}{_SUFFIX}").exists() for address in addresses)

    def write(self, texts: Mapping[str, str], dropped: Sequence[str]) -> None:
        """Writes references, as text by address, and deletes the files of `dropped` addresses."""
        for address, text in texts.items():
            staging = staging_path(self._directory)
            staging.write_text(text)
            move_into_place(staging, self._directory / f"{address}.json")
        for address in dropped:
            for suffix in (".json", _SUFFIX):
                (self._directory / f"{address}{suffix}").unlink(missing_ok=True)

    def delete_others(self, known: Collection[str]) -> None:
        """Deletes all files except those of the `known` addresses."""
        for path in self._directory.iterdir() if self._directory.exists() else ():
            if path.name.partition(".")[0] not in known or path.name.startswith(STAGING):
                path.unlink(missing_ok=True)
