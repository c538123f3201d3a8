"""Captured features of draft models' targets: how long they are kept, and which operations use them.

The workers write and read the features. A reference ends when it expires, when its uses are spent, when its run ends,
or when it is released. An operation holds its features until its optimizer step has finished, regardless of that.
"""

import asyncio
import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, unquote

from ...schemas.drafts import CaptureResponse
from ...schemas.errors import OperationError, RequestError
from ...schemas.models import FeatureStock, Limit
from ...schemas.training import FeatureLocation, ForwardBackwardOutput, ForwardBackwardRequest
from ..config.server_config import ServerConfig
from ..operations.features import Features
from ..store import RunRecord
from .feature_cache import FeatureCache, FeatureHold, FeatureReference
from .space import FeatureSpace

FEATURES = "features"
"""Output of workers with the address of a datum's features and their size in bytes."""

_OVER = "the run that captured it has ended"


class FeatureStore(Features):
    """Owns the captured features of all tenants; `space` limits what they take on disk."""

    def __init__(self, root: Path, config: ServerConfig, clock: Callable[[], float] = time.time) -> None:
        self.space = FeatureSpace(config, self.expire)
        self._root = root.absolute()
        self._ttl_seconds = config.features.feature_ttl_seconds
        self._clock = clock
        self._caches: dict[str, FeatureCache] = {}
        self._holds: defaultdict[str, dict[int, FeatureHold]] = defaultdict(dict)  # by run and seq_id
        self._is_swept = False

    async def open(self) -> None:
        """Loads what an earlier process left."""
        tenants = await asyncio.to_thread(lambda: [path for path in self._root.glob("*") if path.is_dir()])
        for path in tenants:
            await self._cache(unquote(path.name)).open()

    async def sweep(self, live: Collection[str]) -> None:
        """Ends the references of runs that are not live; called at start, after resumed runs hold what they need."""
        self._is_swept = True
        for cache in self._caches.values():
            cache.may_delete = True
            cache.end_references(_OVER, lambda reference: reference.run_id not in live)
        await self.delete_unneeded()

    def stock(self) -> FeatureStock:
        entries = [entry for cache in self._caches.values() for entry in cache.entries.values()]
        return FeatureStock(
            num_bytes=sum(entry.num_bytes for entry in entries),
            num_sequences=len(entries),
            num_references=sum(len(entry.references) for entry in entries),
            num_held=sum(bool(entry.holds) for entry in entries),
            num_waiting=self.space.num_waiting,
            num_put_off=self.space.num_put_off,
        )

    def limits(self, tenant_id: str) -> Mapping[str, Limit]:
        return self.space.limits(tenant_id)

    def reserve_again(self, tenant_id: str, num_bytes: int) -> Callable[[], None]:
        return self.space.reserve_unchecked(tenant_id, num_bytes)

    def check_ttl(self, ttl_seconds: float | None) -> None:
        """Raises RequestError if a capture requests a longer TTL than the server allows."""
        most = self._ttl_seconds
        if ttl_seconds is not None and ttl_seconds > most:
            wanted = f"{ttl_seconds:.15g}"
            raise RequestError(
                f"ttl_seconds is {wanted}, more than the {most:.15g} for which features are kept here: request at most"
                f" that, leave it out, or start the server with --feature-ttl-seconds {wanted}"
            )

    # Capturing

    def capturing(self, tenant_id: str) -> AbstractAsyncContextManager[FeatureLocation]:
        """Enters a capture, during which no file of the tenant is deleted. Raises OSError if there can be no files."""
        return self._cache(tenant_id).capturing()

    async def keep(
        self,
        run: RunRecord,
        request_id: str,
        output: ForwardBackwardOutput,
        uses: int | None = None,
        ttl_seconds: float | None = None,
    ) -> CaptureResponse | None:
        """Creates references to what was captured, the same if the operation is repeated; call it inside `capturing`.
        Returns None if files have disappeared from the disk. Raises OSError."""
        found = [each[FEATURES].tobytes().decode().split() for each in output.loss_fn_outputs]
        sizes = {address: int(size) for address, size in found}
        most = self._ttl_seconds
        expires_at = self._clock() + min(most, ttl_seconds or most)  # it may have been accepted under a longer limit
        handle = hashlib.sha256(request_id.encode()).hexdigest()[:16]  # identifies the operation
        references = {}
        for address, count in Counter(address for address, _ in found).items():
            name, num_uses = f"features-{address}-{handle}", None if uses is None else count * uses
            references[address] = FeatureReference(name, run.run_id, expires_at, num_uses)
        if not await self._cache(run.tenant_id).refer(sizes, references):
            return None
        refs = [references[address].name for address, _ in found]
        return CaptureResponse(feature_refs=refs, num_bytes=sum(sizes.values()), expires_at=expires_at)

    async def release(self, run: RunRecord, names: Sequence[str] | None) -> int:
        """Ends these references of the run, or all if `names` is None. Returns how many existed."""
        cache, wanted = self._cache(run.tenant_id), None if names is None else set(names)
        num_released = cache.end_references(
            "it was released",
            lambda reference: reference.run_id == run.run_id and (wanted is None or reference.name in wanted),
        )
        await cache.settle()
        return num_released

    async def expire(self) -> None:
        """Deletes expired references and the features that are no longer needed."""
        now = self._clock()
        for cache in list(self._caches.values()):
            cache.end_references("it has expired", lambda reference: reference.expires_at <= now)
            await cache.settle()

    async def delete_unneeded(self) -> None:
        """Deletes expired features, and files that are not recorded."""
        await self.expire()
        for cache in list(self._caches.values()):
            await cache.delete_unknown_files()

    # Using

    def hold(self, run: RunRecord, seq_id: int, uses: Counter[str]) -> None:
        """Holds the features that an accepted operation uses; call it in the order of acceptance.

        Args:
            uses: uses by reference, 0 for passes that consume none.
        """
        cache, hold = self._cache(run.tenant_id), FeatureHold(uses)
        for name, count in uses.items():
            reason = self._refusal(cache, name, count)
            if reason is not None:
                hold.refusal = hold.refusal or f"feature_ref {name} cannot be used: {reason}"
            elif (entry := cache.find(name)) is not None:
                hold.entries.append(entry)
        self._add(run, seq_id, hold)

    def restore_hold(self, run: RunRecord, seq_id: int, uses: Mapping[str, int]) -> None:
        """Restores, at start, the hold of an operation whose optimizer step has not finished. Ended references
        are held, too; features that are gone do not cause a refusal: the target is run again."""
        if not uses:
            return
        cache = self._cache(run.tenant_id)
        left = {name: count for name, count in uses.items() if not _has_taken_uses(cache.reference(name), run, seq_id)}
        entries = [entry for name in uses if (entry := cache.find(name)) is not None]
        self._add(run, seq_id, FeatureHold(Counter(left), entries))

    def pending_uses(self, run: RunRecord, seq_id: int) -> Mapping[int, Mapping[str, int]]:
        """Returns, for `restore_hold`, the uses of ended operations up to this seq_id whose step has not finished."""
        holds = self._holds[run.run_id]
        return {number: dict(+hold.uses) for number, hold in holds.items() if number <= seq_id and +hold.uses}

    def with_feature_location(self, run: RunRecord, request: ForwardBackwardRequest) -> ForwardBackwardRequest:
        """Returns the request with the location of the features that its data refer to. Raises OperationError if the
        run is no draft, or a reference cannot be used."""
        if run.role != "draft":
            return super().with_feature_location(run, request)
        hold = self._holds[run.run_id].get(request.seq_id)
        if hold is not None and hold.refusal is not None:
            raise OperationError(hold.refusal)
        return replace(request, features=self._cache(run.tenant_id).location())

    async def release_hold(self, run: RunRecord, seq_id: int) -> None:
        """Ends the hold of an operation that was never accepted, or contributes nothing to a step."""
        await self._release_holds(run, range(seq_id, seq_id + 1))

    async def release_holds_before(self, run: RunRecord, seq_id: int, *, were_used: bool) -> None:
        """Ends the holds before a finished optimizer step, or before gradients were cleared (not were_used)."""
        await self._release_holds(run, range(seq_id), seq_id if were_used else None)

    async def end_run(self, run: RunRecord) -> None:
        """Ends the run's holds and the references to what it captured."""
        cache = self._cache(run.tenant_id)
        for hold in self._holds.pop(run.run_id, {}).values():
            cache.end_hold(hold)
        cache.end_references(_OVER, lambda reference: reference.run_id == run.run_id)
        await cache.settle()

    def _add(self, run: RunRecord, seq_id: int, hold: FeatureHold) -> None:
        holds, cache = self._holds[run.run_id], self._cache(run.tenant_id)
        if seq_id in holds:
            cache.end_hold(holds[seq_id])
        holds[seq_id] = hold
        for entry in hold.entries:
            entry.holds.add(hold)

    async def _release_holds(self, run: RunRecord, seq_ids: range, step: int | None = None) -> None:
        """Ends holds, which the optimizer step of this seq_id used, if any; returns as soon as the files reflect it."""
        holds = self._holds[run.run_id]
        ended = {number: hold for number, hold in holds.items() if number in seq_ids and not hold.has_ended}
        if not ended:
            return
        cache = self._cache(run.tenant_id)
        for hold in ended.values():
            cache.end_hold(hold)
            if step is not None:
                for name, count in (+hold.uses).items():
                    cache.take_uses(name, count, run.run_id, step)
        await cache.settle()
        for number, hold in ended.items():
            if holds.get(number) is hold:  # else an operation with this seq_id was accepted meanwhile
                del holds[number]

    def _refusal(self, cache: FeatureCache, name: str, count: int) -> str | None:
        """Returns why a reference cannot be used `count` times, and what to do; None if it can."""
        entry, reference = cache.find(name), cache.reference(name)
        if entry is None or reference is None:
            gone = "it does not exist, or is not yours: it may have expired"
            return f"{cache.end_reasons.get(name, gone)}; capture it again"
        if reference.expires_at <= self._clock():
            return "it has expired; capture it again"
        promised = sum(hold.uses[name] for hold in entry.holds)
        if reference.uses is not None and reference.uses < promised + count:
            return (
                f"it has {reference.uses} uses left, {promised} of them for operations before this one; capture it"
                " again, for more uses"
            )
        return None

    def _cache(self, tenant_id: str) -> FeatureCache:
        if tenant_id not in self._caches:
            directory = self._root / quote(tenant_id, safe="")
            self._caches[tenant_id] = FeatureCache(tenant_id, directory, self.space, may_delete=self._is_swept)
        return self._caches[tenant_id]


def store_of(features: Features) -> FeatureStore:
    assert isinstance(features, FeatureStore)
    return features


def _has_taken_uses(reference: FeatureReference | None, run: RunRecord, seq_id: int) -> bool:
    return reference is not None and reference.taken.get(run.run_id, -1) > seq_id
