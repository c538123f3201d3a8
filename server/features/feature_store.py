"""Captured features of draft models' targets: who owns them, how much space they use, and how long they are kept.

The workers write and read the features. Content is stored once and counted by reference; a reference ends when it
expires, when its uses are spent, when its run ends, or when it is released. Features are held while an operation whose
optimizer step has not finished needs them, and deleted only after that.
"""

import asyncio
import hashlib
import logging
import re
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...schemas.drafts import CaptureResponse
from ...schemas.errors import OperationError, RequestError
from ...schemas.models import FeatureStock, draft_of
from ...schemas.training import FeatureLocation, ForwardBackwardOutput, ForwardBackwardRequest
from ..config.server_config import ServerConfig
from ..store import RunRecord
from .feature_files import FeatureFiles, FeatureRecord, FeatureReference, as_text
from .space import FeatureSpace

logger = logging.getLogger(__name__)

FEATURES = "features"
"""Output of workers with the address of a datum's features and their size in bytes."""

_REF = re.compile(r"features-([0-9a-f]{32})-([0-9a-z]{1,40})")
_MOST_REMEMBERED = 10_000
_OVER = "the run that captured it has ended"


@dataclass(eq=False)
class _Hold:
    """The features that one operation holds.

    uses: see `FeatureStore.hold`. reason: why the operation must be refused.
    """

    kept: list[FeatureRecord]
    uses: Counter[str]
    reason: str | None = None


@dataclass(eq=False)
class _TenantFeatures:
    """A tenant's bookkeeping.

    num_capturing: captures in progress. writing: held while existing files are changed. changed: features whose
    references are not yet written to files. maybe_unneeded: features that may be unneeded now.
    has_unrecorded_files: a capture failed and may have left files that are not recorded.
    """

    num_capturing: int = 0
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    changed: set[FeatureRecord] = field(default_factory=set)
    maybe_unneeded: set[FeatureRecord] = field(default_factory=set)
    has_unrecorded_files: bool = False


class FeatureStore:
    """Owns the captured features of all tenants; `room` reserves space for captures.

    clock: seconds since 1970.
    """

    def __init__(self, root: Path, config: ServerConfig, clock: Callable[[], float] = time.time) -> None:
        self.room = FeatureSpace(config, self.expire)
        self._files = FeatureFiles(root)
        self._ttl_seconds = config.features.feature_ttl_seconds
        self._clock = clock
        self._kept: dict[tuple[str, str], FeatureRecord] = {}
        # By run and seq_id. Those in _leaving have ended, but the files may not reflect it yet.
        self._holds: defaultdict[str, dict[int, _Hold]] = defaultdict(dict)
        self._leaving: defaultdict[str, dict[int, _Hold]] = defaultdict(dict)
        self._usages: dict[str, _TenantFeatures] = {}
        self._end_reasons: OrderedDict[str, str] = OrderedDict()  # references that have ended, and why
        self._is_swept = False  # until then runs may still be resumed that hold features without references

    async def open(self) -> None:
        """Loads what an earlier process left."""
        for kept in await asyncio.to_thread(self._files.read):
            self._kept[kept.tenant_id, kept.address] = kept
            self.room.fill(kept.tenant_id, kept.num_bytes)
            self._usage(kept.tenant_id).maybe_unneeded.add(kept)
        for tenant_id in await asyncio.to_thread(self._files.tenants):
            self._usage(tenant_id)  # it may have unrecorded files

    async def sweep(self, live: Collection[str]) -> None:
        """Ends the references of runs that are not live; called at start, after resumed runs hold what they need."""
        self._is_swept = True
        for kept, reference in self._references():
            if reference.run_id not in live:
                self._end(kept, reference, _OVER)
        await self.delete_unneeded()

    def stock(self) -> FeatureStock:
        return FeatureStock(
            num_bytes=self.room.num_bytes,
            num_sequences=len(self._kept),
            num_references=sum(len(kept.references) for kept in self._kept.values()),
            num_held=sum(bool(kept.holders) for kept in self._kept.values()),
            num_waiting=self.room.num_waiting,
            num_put_off=self.room.num_put_off,
        )

    def check_ttl(self, ttl_seconds: float | None) -> None:
        """Raises RequestError if a capture requests a longer TTL than the server allows."""
        most = self._ttl_seconds
        if ttl_seconds is not None and ttl_seconds > most:
            asked = f"{ttl_seconds:.15g}"
            raise RequestError(
                f"ttl_seconds is {asked}, more than the {most:.15g} for which features are kept here: request at most"
                f" that, leave it out, or start the server with --feature-ttl-seconds {asked}"
            )

    # Capturing

    @asynccontextmanager
    async def capturing(self, tenant_id: str) -> AsyncIterator[FeatureLocation]:
        """Enters a capture, during which no file of the tenant is deleted, since the pass may be reusing it."""
        usage, directory = self._usage(tenant_id), self._files.of(tenant_id)
        usage.num_capturing += 1
        try:
            async with usage.writing:  # after a cleanup that began before this capture was counted
                await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
            yield FeatureLocation(str(directory), captures=True)
        except BaseException:
            usage.has_unrecorded_files = True
            raise
        finally:
            usage.num_capturing -= 1
            if usage.maybe_unneeded:
                await self._settle(tenant_id)
            if usage.has_unrecorded_files:
                await self._delete_unknown(tenant_id)

    async def keep(
        self,
        run: RunRecord,
        request_id: str,
        output: ForwardBackwardOutput,
        uses: int | None = None,
        ttl_seconds: float | None = None,
    ) -> CaptureResponse | None:
        """Creates references to what was captured; call it inside `capturing`.

        Repeating the same operation returns the same references. Returns None if files have disappeared from the disk.
        Raises OSError if the disk cannot be read.
        """
        found = [each[FEATURES].tobytes().decode().split() for each in output.loss_fn_outputs]
        usage, most = self._usage(run.tenant_id), self._ttl_seconds
        expires_at = self._clock() + min(most, ttl_seconds or most)  # it may have been accepted under a longer limit
        addresses = Counter(address for address, _ in found)
        async with usage.writing:
            if not await asyncio.to_thread(self._files.exist, run.tenant_id, addresses):
                return None
            for address, count in addresses.items():
                kept = self._kept.get((run.tenant_id, address))
                if kept is None:
                    size = next(int(size) for each, size in found if each == address)
                    kept = self._kept[run.tenant_id, address] = FeatureRecord(run.tenant_id, address, size)
                    self.room.fill(run.tenant_id, size)
                name = f"features-{address}-{_handle(request_id)}"
                of_all = None if uses is None else count * uses
                kept.references.setdefault(name, FeatureReference(name, run.run_id, expires_at, of_all))
                usage.changed.add(kept)
        num_bytes = sum(self._kept[run.tenant_id, address].num_bytes for address in addresses)
        await self._settle(run.tenant_id)
        refs = [f"features-{address}-{_handle(request_id)}" for address, _ in found]
        return CaptureResponse(feature_refs=refs, num_bytes=num_bytes, expires_at=expires_at)

    async def release(self, run: RunRecord, names: Sequence[str] | None) -> int:
        """Ends these references of the run, or all if `names` is None. Returns how many existed."""
        wanted = None if names is None else set(names)
        found = [
            (kept, reference)
            for kept, reference in self._references()
            if reference.run_id == run.run_id and (wanted is None or reference.name in wanted)
        ]
        for kept, reference in found:
            self._end(kept, reference, "it was released")
        await self._settle(run.tenant_id)
        return len(found)

    async def expire(self) -> None:
        """Deletes expired references and the features that are no longer needed."""
        now = self._clock()
        for kept, reference in self._references():
            if reference.expires_at <= now:
                self._end(kept, reference, "it has expired")
        for tenant_id in list(self._usages):
            await self._settle(tenant_id)

    async def delete_unneeded(self) -> None:
        """Deletes expired features, and files that are not recorded."""
        await self.expire()
        for tenant_id in list(self._usages):
            await self._delete_unknown(tenant_id)

    # Using

    def hold(self, run: RunRecord, seq_id: int, uses: Counter[str]) -> None:
        """Holds the features that an accepted operation uses; call it in the order of acceptance.

        Args:
            uses: by reference; 0 for passes that read features without consuming a use.
        """
        if not uses:
            return
        hold = _Hold([], uses)
        for name, count in uses.items():
            kept, reason = self._find(run.tenant_id, name, count)
            if kept is not None:
                hold.kept.append(kept)
            else:
                hold.reason = hold.reason or reason
        self._add(run, seq_id, hold)

    def restore_hold(self, run: RunRecord, seq_id: int, uses: Mapping[str, int]) -> None:
        """Restores the hold of an operation of an earlier process whose optimizer step has not finished; for server
        start.

        References that ended since are held too. Features that are gone do not cause a refusal: the target is run
        again.
        """
        found = {name: kept for name in uses if (kept := self._kept.get((run.tenant_id, _address(name)))) is not None}
        taken = {name for name, kept in found.items() if _has_taken_uses(kept.references.get(name), run, seq_id)}
        left = Counter({name: count for name, count in uses.items() if name not in taken})
        if uses:
            self._add(run, seq_id, _Hold(list(found.values()), left))

    def pending_uses(self, run: RunRecord, seq_id: int) -> Mapping[int, Mapping[str, int]]:
        """Returns the uses of ended operations up to this seq_id whose step has not finished, by seq_id, for
        `restore_hold`.
        """
        holds = self._leaving[run.run_id] | self._holds[run.run_id]
        return {number: dict(+hold.uses) for number, hold in holds.items() if number <= seq_id and +hold.uses}

    def _add(self, run: RunRecord, seq_id: int, hold: _Hold) -> None:
        for kept in hold.kept:
            kept.holders.add((run.run_id, seq_id))
        self._holds[run.run_id][seq_id] = hold

    def with_feature_place(self, run: RunRecord, operation: ForwardBackwardRequest) -> ForwardBackwardRequest:
        """Returns the operation with the place of the features that its data refer to.

        Raises:
            OperationError: the run is no draft, or a reference cannot be used.
        """
        if all(datum.feature_ref is None for datum in operation.data):
            return operation
        if run.role != "draft":
            raise OperationError(f"feature_ref is only for draft models, and this is a {run.role}: leave it out")
        hold = self._holds[run.run_id].get(operation.seq_id)
        if hold is not None and hold.reason is not None:
            raise OperationError(hold.reason)
        return replace(operation, features=FeatureLocation(str(self._files.of(run.tenant_id))))

    async def release_hold(self, run: RunRecord, seq_id: int) -> None:
        """Ends the hold of an operation that was never accepted, or contributes nothing to a step."""
        await self._release_holds(run, [seq_id])

    async def release_holds_before(self, run: RunRecord, seq_id: int, *, were_used: bool) -> None:
        """Ends the holds before a finished optimizer step, or before gradients were cleared (not were_used)."""
        before = [number for number in self._holds[run.run_id] if number < seq_id]
        await self._release_holds(run, before, seq_id if were_used else None)

    async def end_run(self, run: RunRecord) -> None:
        """Ends the run's holds and the references to what it captured."""
        await self._release_holds(run, list(self._holds[run.run_id]))
        for of_runs in (self._holds, self._leaving):
            of_runs.pop(run.run_id, None)
        for kept, reference in self._references():
            if reference.run_id == run.run_id:
                self._end(kept, reference, _OVER)
        await self._settle(run.tenant_id)

    async def _release_holds(self, run: RunRecord, seq_ids: Sequence[int], step: int | None = None) -> None:
        """Ends holds and returns as soon as the files reflect it.

        Args:
            step: seq_id of the optimizer step that used them, if one did.
        """
        holds = self._holds[run.run_id]
        popped = {seq_id: holds.pop(seq_id) for seq_id in seq_ids if seq_id in holds}
        if not popped:
            return
        for seq_id, hold in popped.items():
            for kept in hold.kept:
                kept.holders.discard((run.run_id, seq_id))
                self._usage(run.tenant_id).maybe_unneeded.add(kept)
            if step is not None:
                self._use(run, hold.uses, step)
        self._leaving[run.run_id] |= popped
        await self._settle(run.tenant_id)
        for seq_id in popped:
            self._leaving[run.run_id].pop(seq_id, None)

    def _use(self, run: RunRecord, uses: Counter[str], step: int) -> None:
        for name, count in (+uses).items():
            kept = self._kept.get((run.tenant_id, _address(name)))
            reference = None if kept is None else kept.references.get(name)
            if kept is None or reference is None or reference.uses is None:
                continue
            reference.uses -= count
            reference.taken[run.run_id] = step
            self._usage(run.tenant_id).changed.add(kept)
            if reference.uses <= 0:
                self._end(kept, reference, "it was captured for a limited number of uses, and none is left")

    def _find(self, tenant_id: str, name: str, count: int) -> tuple[FeatureRecord | None, str]:
        """Returns the features behind this reference, to be used `count` times, or None and the reason why they cannot
        be.
        """
        kept = self._kept.get((tenant_id, _address(name)))
        reference = None if kept is None else kept.references.get(name)
        if kept is None or reference is None:
            why = self._end_reasons.get(
                f"{tenant_id} {name}", "it does not exist, or is not yours: it may have expired"
            )
            return None, f"feature_ref {name} cannot be used: {why}; capture it again"
        if reference.expires_at <= self._clock():
            return None, f"feature_ref {name} cannot be used: it has expired; capture it again"
        if reference.uses is not None:
            promised = sum(self._holds[run_id][seq_id].uses[name] for run_id, seq_id in kept.holders)
            if reference.uses < promised + count:
                return None, (
                    f"feature_ref {name} cannot be used: it has {reference.uses} uses left, {promised} of them for"
                    " operations before this one; capture it again, for more uses"
                )
        return kept, ""

    def _end(self, kept: FeatureRecord, reference: FeatureReference, why: str) -> None:
        del kept.references[reference.name]
        usage = self._usage(kept.tenant_id)
        usage.changed.add(kept)
        usage.maybe_unneeded.add(kept)
        self._end_reasons[f"{kept.tenant_id} {reference.name}"] = why
        if len(self._end_reasons) > _MOST_REMEMBERED:
            self._end_reasons.popitem(last=False)

    def _references(self) -> list[tuple[FeatureRecord, FeatureReference]]:
        return [(kept, reference) for kept in self._kept.values() for reference in kept.references.values()]

    def _usage(self, tenant_id: str) -> _TenantFeatures:
        return self._usages.setdefault(tenant_id, _TenantFeatures())

    # Files

    async def _settle(self, tenant_id: str) -> None:
        """Writes changed references to files, and deletes features without references or holds unless captures are in
        progress.
        """
        usage = self._usage(tenant_id)
        async with usage.writing:
            dropped = self._drop_unneeded(usage)
            changed, usage.changed = usage.changed, set()
            told = [(kept.address, as_text(kept)) for kept in changed]
            try:
                if told or dropped:
                    await asyncio.to_thread(self._files.write, tenant_id, told, dropped)
            except OSError as error:
                usage.changed |= changed
                usage.has_unrecorded_files = True
                logger.error("references to features of %s cannot be written: %s", tenant_id, error)

    def _drop_unneeded(self, usage: _TenantFeatures) -> Sequence[str]:
        """Forgets features that are not needed any more, and returns their addresses."""
        if usage.num_capturing or not self._is_swept:
            return ()
        let_go, usage.maybe_unneeded = usage.maybe_unneeded, set()
        unneeded = [kept for kept in let_go if not (kept.references or kept.holders)]
        for kept in unneeded:
            del self._kept[kept.tenant_id, kept.address]
            usage.changed.discard(kept)
            self.room.free(kept.tenant_id, kept.num_bytes)
        return [kept.address for kept in unneeded]

    async def _delete_unknown(self, tenant_id: str) -> None:
        """Deletes files that are not recorded, unless captures are in progress, whose files are not recorded yet."""
        usage = self._usage(tenant_id)
        async with usage.writing:
            if usage.num_capturing:
                return
            known = {address for of_tenant, address in self._kept if of_tenant == tenant_id}
            try:
                await asyncio.to_thread(self._files.delete_others, tenant_id, known)
                usage.has_unrecorded_files = False
            except OSError as error:
                logger.error("unrecorded files in %s cannot be deleted: %s", self._files.of(tenant_id), error)


def _has_taken_uses(reference: FeatureReference | None, run: RunRecord, seq_id: int) -> bool:
    """True if a step after the operation with this seq_id has taken its uses."""
    return reference is not None and reference.taken.get(run.run_id, -1) > seq_id


def _address(name: str) -> str:
    found = _REF.fullmatch(name)
    return found[1] if found else ""


def check_captures(run: RunRecord, draft: RunRecord | None, draft_id: str) -> None:
    """Raises OperationError if this run's passes cannot be captured for that draft."""
    if draft is None or draft.tenant_id != run.tenant_id:
        raise OperationError(f"there is no draft {draft_id} to capture for: create one, and name its model_id")
    if draft.role != "draft":
        raise OperationError(f"capture_for {draft_id} is a {draft.role}: name a draft")
    if draft.base_model != run.base_model:
        raise OperationError(f"capture_for {draft_id} is a draft of {draft.base_model}, and this is {run.base_model}")
    if run.role != "policy":
        raise OperationError(f"capture_for is only for policies, and this is a {run.role}: leave it out")


def with_capture_layers(place: FeatureLocation, draft: RunRecord) -> FeatureLocation:
    """Returns the place with what a policy's pass must capture for the draft while it trains."""
    config = draft_of(draft.training)
    assert config is not None and config.capture_layers is not None
    return replace(place, captures=False, algorithm=config.algorithm, layers=config.capture_layers)


def _handle(request_id: str) -> str:
    """Returns the part of a reference that identifies the operation that captured it."""
    return hashlib.sha256(request_id.encode()).hexdigest()[:16]
