"""Features: what was captured of drafts' targets: whose it is, how much and how long. The workers write and read it.

Content is stored once and counted by reference; a reference ends with its time, its uses, its run, or when it is given
up. What an operation needs whose optimizer step has not finished is held, and deleted only behind that.
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
from ...schemas.training import FeaturePlace, ForwardBackwardOutput, ForwardBackwardRequest
from ..config.knobs import ServerConfig
from ..store import RunRecord
from .files import FeatureFiles, Kept, Reference, as_text
from .room import FeatureRoom

logger = logging.getLogger(__name__)

FEATURES = "features"
"""Among the outputs of workers: where those of a datum are, and how many bytes they have."""

_REF = re.compile(r"features-([0-9a-f]{32})-([0-9a-z]{1,40})")
_MOST_REMEMBERED = 10_000
_OVER = "the run that captured it is over"


@dataclass(eq=False)
class _Hold:
    """Of an operation. uses: see `uses_of`. reason: why it has to be refused."""

    kept: list[Kept]
    uses: Counter[str]
    reason: str | None = None


@dataclass(eq=False)
class _Usage:
    """Of a tenant. num_capturing: captures under way. writing: held by who changes files that are there.

    changed: whose references the files do not tell yet. let_go: which may be needed no more. has_unknown: a capture has
    failed, and may have left files that nobody knows.
    """

    num_capturing: int = 0
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    changed: set[Kept] = field(default_factory=set)
    let_go: set[Kept] = field(default_factory=set)
    has_unknown: bool = False


class Features:
    """clock: seconds since 1970. room: for what is captured."""

    def __init__(self, root: Path, config: ServerConfig, clock: Callable[[], float] = time.time) -> None:
        self.room = FeatureRoom(config, self.expire)
        self._files = FeatureFiles(root)
        self._ttl_seconds = config.feature_ttl_seconds
        self._clock = clock
        self._kept: dict[tuple[str, str], Kept] = {}
        # By run and seq_id. Those that leave have ended, but the files may not tell it yet.
        self._holds: defaultdict[str, dict[int, _Hold]] = defaultdict(dict)
        self._leaving: defaultdict[str, dict[int, _Hold]] = defaultdict(dict)
        self._usages: dict[str, _Usage] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()  # references that were there, and why they are not any more
        self._is_swept = False  # until then runs may come that hold what nobody seems to need

    async def open(self) -> None:
        """What an earlier process left."""
        for kept in await asyncio.to_thread(self._files.read):
            self._kept[kept.tenant_id, kept.address] = kept
            self.room.fill(kept.tenant_id, kept.num_bytes)
            self._usage(kept.tenant_id).let_go.add(kept)
        for tenant_id in await asyncio.to_thread(self._files.tenants):
            self._usage(tenant_id)  # whose files nobody may know

    async def sweep(self, live: Collection[str]) -> None:
        """At start, once runs hold what they need: what runs have captured that are not live."""
        self._is_swept = True
        for kept, reference in self._references():
            if reference.run_id not in live:
                self._end(kept, reference, _OVER)
        await self.tidy()

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
        """Of a capture that is asked for. Raises RequestError."""
        most = self._ttl_seconds
        if ttl_seconds is not None and ttl_seconds > most:
            asked = f"{ttl_seconds:.15g}"
            raise RequestError(
                f"ttl_seconds is {asked}, more than the {most:.15g} for which features are kept here: ask for at most"
                f" that, leave it out, or start the server with --feature-ttl-seconds {asked}"
            )

    # Capturing

    @asynccontextmanager
    async def capturing(self, tenant_id: str) -> AsyncIterator[FeaturePlace]:
        """Inside, nothing is deleted that nobody refers to yet, nor what nobody needs any more: it may be what a pass
        has found there."""
        usage, directory = self._usage(tenant_id), self._files.of(tenant_id)
        usage.num_capturing += 1
        try:
            async with usage.writing:  # behind a cleaning that does not know of this
                await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
            yield FeaturePlace(str(directory), captures=True)
        except BaseException:
            usage.has_unknown = True
            raise
        finally:
            usage.num_capturing -= 1
            if usage.let_go:
                await self._settle(tenant_id)
            if usage.has_unknown:
                await self._delete_unknown(tenant_id)

    async def keep(
        self,
        run: RunRecord,
        request_id: str,
        output: ForwardBackwardOutput,
        uses: int | None = None,
        ttl_seconds: float | None = None,
    ) -> CaptureResponse | None:
        """References to what was captured, inside `capturing`. The same operation again: the same ones. None: some
        of it is not there, which is not the server's doing. Raises OSError where nobody can tell."""
        found = [each[FEATURES].tobytes().decode().split() for each in output.loss_fn_outputs]
        usage, most = self._usage(run.tenant_id), self._ttl_seconds
        expires_at = self._clock() + min(most, ttl_seconds or most)  # it may have been accepted under a longer one
        addresses = Counter(address for address, _ in found)
        async with usage.writing:
            if not await asyncio.to_thread(self._files.are_there, run.tenant_id, addresses):
                return None
            for address, count in addresses.items():
                kept = self._kept.get((run.tenant_id, address))
                if kept is None:
                    size = next(int(size) for each, size in found if each == address)
                    kept = self._kept[run.tenant_id, address] = Kept(run.tenant_id, address, size)
                    self.room.fill(run.tenant_id, size)
                name = f"features-{address}-{_handle(request_id)}"
                of_all = None if uses is None else count * uses
                kept.references.setdefault(name, Reference(name, run.run_id, expires_at, of_all))
                usage.changed.add(kept)
        num_bytes = sum(self._kept[run.tenant_id, address].num_bytes for address in addresses)
        await self._settle(run.tenant_id)
        refs = [f"features-{address}-{_handle(request_id)}" for address, _ in found]
        return CaptureResponse(feature_refs=refs, num_bytes=num_bytes, expires_at=expires_at)

    async def release(self, run: RunRecord, names: Sequence[str] | None) -> int:
        """Of what the run has captured. Returns how many there were."""
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
        """Deletes what nobody may use any more."""
        now = self._clock()
        for kept, reference in self._references():
            if reference.expires_at <= now:
                self._end(kept, reference, "it has expired")
        for tenant_id in list(self._usages):
            await self._settle(tenant_id)

    async def tidy(self) -> None:
        """Deletes that, and what nobody knows."""
        await self.expire()
        for tenant_id in list(self._usages):
            await self._delete_unknown(tenant_id)

    # Using

    def hold(self, run: RunRecord, seq_id: int, operation: object) -> None:
        """To be called for each operation that is accepted, in order."""
        if not (uses := uses_of(operation)):
            return
        hold = _Hold([], uses)
        for name, count in uses.items():
            kept, reason = self._find(run.tenant_id, name, count)
            if kept is not None:
                hold.kept.append(kept)
            else:
                hold.reason = hold.reason or reason
        self._add(run, seq_id, hold)

    def hold_again(self, run: RunRecord, seq_id: int, uses: Mapping[str, int]) -> None:
        """At start, for each operation of an earlier process whose step may come yet: what it was accepted with,
        whatever has become of the reference. What is gone is not to be refused: the target tells it again."""
        found = {name: kept for name in uses if (kept := self._kept.get((run.tenant_id, _address(name)))) is not None}
        taken = {name for name, kept in found.items() if _has_taken(kept.references.get(name), run, seq_id)}
        left = Counter({name: count for name, count in uses.items() if name not in taken})
        if uses:
            self._add(run, seq_id, _Hold(list(found.values()), left))

    def held(self, run: RunRecord, seq_id: int) -> Mapping[int, Mapping[str, int]]:
        """The uses of operations up to this one, which have ended, by seq_id: what `hold_again` wants of those whose
        step is not finished."""
        holds = self._leaving[run.run_id] | self._holds[run.run_id]
        return {number: dict(+hold.uses) for number, hold in holds.items() if number <= seq_id and +hold.uses}

    def _add(self, run: RunRecord, seq_id: int, hold: _Hold) -> None:
        for kept in hold.kept:
            kept.holders.add((run.run_id, seq_id))
        self._holds[run.run_id][seq_id] = hold

    def told(self, run: RunRecord, operation: ForwardBackwardRequest) -> ForwardBackwardRequest:
        """With where the features are that its data refer to. Raises OperationError where it may not have them."""
        if all(datum.feature_ref is None for datum in operation.data):
            return operation
        if run.role != "draft":
            raise OperationError(f"feature_ref is of draft models, and this is a {run.role}: leave it out")
        hold = self._holds[run.run_id].get(operation.seq_id)
        if hold is not None and hold.reason is not None:
            raise OperationError(hold.reason)
        return replace(operation, features=FeaturePlace(str(self._files.of(run.tenant_id))))

    async def let_go(self, run: RunRecord, seq_id: int) -> None:
        """The operation was never accepted, or contributes nothing to a step."""
        await self._let_go(run, [seq_id])

    async def stepped(self, run: RunRecord, seq_id: int, *, were_used: bool) -> None:
        """An optimizer step has finished, or whatever came before was cleared (not were_used)."""
        before = [number for number in self._holds[run.run_id] if number < seq_id]
        await self._let_go(run, before, seq_id if were_used else None)

    async def end_run(self, run: RunRecord) -> None:
        """What it has captured goes with it."""
        await self._let_go(run, list(self._holds[run.run_id]))
        for of_runs in (self._holds, self._leaving):
            of_runs.pop(run.run_id, None)
        for kept, reference in self._references():
            if reference.run_id == run.run_id:
                self._end(kept, reference, _OVER)
        await self._settle(run.tenant_id)

    async def _let_go(self, run: RunRecord, seq_ids: Sequence[int], step: int | None = None) -> None:
        """step: the one that has used them. Returns once the files tell that."""
        holds = self._holds[run.run_id]
        popped = {seq_id: holds.pop(seq_id) for seq_id in seq_ids if seq_id in holds}
        if not popped:
            return
        for seq_id, hold in popped.items():
            for kept in hold.kept:
                kept.holders.discard((run.run_id, seq_id))
                self._usage(run.tenant_id).let_go.add(kept)
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
                self._end(kept, reference, "it was captured for a number of uses, which it has had")

    def _find(self, tenant_id: str, name: str, count: int) -> tuple[Kept | None, str]:
        """What an operation that uses it so often may hold; else why not."""
        kept = self._kept.get((tenant_id, _address(name)))
        reference = None if kept is None else kept.references.get(name)
        if kept is None or reference is None:
            why = self._gone.get(f"{tenant_id} {name}", "it is not there, or not yours: it may have expired")
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

    def _end(self, kept: Kept, reference: Reference, why: str) -> None:
        del kept.references[reference.name]
        usage = self._usage(kept.tenant_id)
        usage.changed.add(kept)
        usage.let_go.add(kept)
        self._gone[f"{kept.tenant_id} {reference.name}"] = why
        if len(self._gone) > _MOST_REMEMBERED:
            self._gone.popitem(last=False)

    def _references(self) -> list[tuple[Kept, Reference]]:
        return [(kept, reference) for kept in self._kept.values() for reference in kept.references.values()]

    def _usage(self, tenant_id: str) -> _Usage:
        return self._usages.setdefault(tenant_id, _Usage())

    # Files

    async def _settle(self, tenant_id: str) -> None:
        """Files are as references are; what is neither referred to nor held is deleted, behind captures."""
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
                usage.has_unknown = True
                logger.error("references to features of %s cannot be written: %s", tenant_id, error)

    def _drop_unneeded(self, usage: _Usage) -> Sequence[str]:
        """Their addresses."""
        if usage.num_capturing or not self._is_swept:
            return ()
        let_go, usage.let_go = usage.let_go, set()
        unneeded = [kept for kept in let_go if not (kept.references or kept.holders)]
        for kept in unneeded:
            del self._kept[kept.tenant_id, kept.address]
            usage.changed.discard(kept)
            self.room.free(kept.tenant_id, kept.num_bytes)
        return [kept.address for kept in unneeded]

    async def _delete_unknown(self, tenant_id: str) -> None:
        """Unless captures are under way, whose files nobody knows yet."""
        usage = self._usage(tenant_id)
        async with usage.writing:
            if usage.num_capturing:
                return
            known = {address for of_tenant, address in self._kept if of_tenant == tenant_id}
            try:
                await asyncio.to_thread(self._files.delete_others, tenant_id, known)
                usage.has_unknown = False
            except OSError as error:
                logger.error("files in %s that nobody knows cannot be deleted: %s", self._files.of(tenant_id), error)


def _has_taken(reference: Reference | None, run: RunRecord, seq_id: int) -> bool:
    """A step behind the operation with this seq_id has."""
    return reference is not None and reference.taken.get(run.run_id, -1) > seq_id


def _address(name: str) -> str:
    found = _REF.fullmatch(name)
    return found[1] if found else ""


def uses_of(operation: object) -> Counter[str]:
    """Of features, by reference, for the step behind the operation: 0 where it only looks at them."""
    uses: Counter[str] = Counter()
    if isinstance(operation, ForwardBackwardRequest):
        for datum in operation.data:
            if datum.feature_ref is not None:
                uses[datum.feature_ref] += 0 if operation.forward_only else 1
    return uses


def check_captures(run: RunRecord, draft: RunRecord | None, draft_id: str) -> None:
    """Whether this run's passes can be captured for that draft. Raises OperationError."""
    if draft is None or draft.tenant_id != run.tenant_id:
        raise OperationError(f"there is no draft {draft_id} to capture for: create one, and name its model_id")
    if draft.role != "draft":
        raise OperationError(f"capture_for {draft_id} is a {draft.role}: name a draft")
    if draft.base_model != run.base_model:
        raise OperationError(f"capture_for {draft_id} is a draft of {draft.base_model}, and this is {run.base_model}")
    if run.role != "policy":
        raise OperationError(f"capture_for is of policies, and this is a {run.role}: leave it out")


def for_draft(place: FeaturePlace, draft: RunRecord) -> FeaturePlace:
    """What a policy's pass puts there besides."""
    config = draft_of(draft.training)
    assert config is not None and config.capture_layers is not None
    return replace(place, captures=False, algorithm=config.algorithm, layers=config.capture_layers)


def _handle(request_id: str) -> str:
    """By which references of one operation are told from those of others."""
    return hashlib.sha256(request_id.encode()).hexdigest()[:16]
