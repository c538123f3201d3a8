"""Versions of weights stay while requests use them, and are loaded once into each process."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import LoraConfig
from trainhouse.workers.engines.adapter_versions import AdapterCopy
from trainhouse.workers.engines.weights import LoadedCopy, WeightStore, WeightVersion
from trainhouse.workers.protocol.calls import AdapterWeights

pytestmark = pytest.mark.anyio


async def write(version: WeightVersion) -> None:
    (version.directory / "weights").write_text(str(version.number))


async def settle() -> None:
    await asyncio.sleep(0.05)


async def test_a_version_stays_until_it_is_replaced_and_no_request_uses_it(tmp_path: Path) -> None:
    unloaded: list[WeightVersion] = []

    class Store(WeightStore[WeightVersion]):
        async def unload(self, version: WeightVersion) -> None:
            assert (version.directory / "weights").exists()
            unloaded.append(version)

    store = Store(WeightVersion, tmp_path / "store")
    first = await store.put("a", write)
    with store.using(first), store.using(first):
        second = await store.put("a", write)
        await settle()
        assert store.get("a") is second and first.directory.exists()
    await settle()
    assert unloaded == [first] and not first.directory.exists(), "it is deleted once"
    with store.using(second):
        store.drop("a")
        await settle()
        assert "a" not in store and second.directory.exists()
        with pytest.raises(OperationError, match="a is gone"):
            store.get("a")
    await settle()
    assert unloaded == [first, second] and not list((tmp_path / "store").iterdir())


async def test_unused_versions_are_deleted_at_once(tmp_path: Path) -> None:
    store = WeightStore(WeightVersion, tmp_path / "store")
    versions = [await store.put(owner, write) for owner in ("a", "b", "a")]
    await settle()
    assert [each.directory.exists() for each in versions] == [False, True, True]
    assert set(store) == {versions[1], versions[2]}
    assert [each.number for each in versions] == [1, 2, 3] and len({each.name for each in versions}) == 3
    await store.close()
    assert not (tmp_path / "store").exists()


async def test_files_of_an_earlier_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / "left").write_text("")
    store = WeightStore(WeightVersion, tmp_path)
    version = await store.put("a", write)
    assert os.listdir(tmp_path) == [version.directory.name]


async def test_a_failed_or_cancelled_copy_leaves_no_file(tmp_path: Path) -> None:
    copies = WeightStore(AdapterCopy, tmp_path / "copies")
    weights = AdapterWeights(LoraConfig(rank=4, seed=0), np.ones(1 << 20, np.float32))

    async def write_to_a_full_disk(copy: AdapterCopy) -> None:
        copy.file.symlink_to("/dev/full")
        await copy.write(weights)

    kept = await copies.put("adapter", lambda copy: copy.write(weights))
    with pytest.raises(OperationError, match="adapter adapter cannot be kept for sampling: ") as failed:
        await copies.put("adapter", write_to_a_full_disk)
    assert failed.value.category == "server"
    for num_steps in range(4):
        putting = asyncio.create_task(copies.put("adapter", lambda copy: copy.write(weights)))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        putting.cancel()
        await asyncio.wait({putting})
        if not putting.cancelled():  # on a busy machine it may have ended before
            kept = putting.result()
    await asyncio.sleep(0.5)
    assert list((tmp_path / "copies").iterdir()) == [kept.directory] and copies.get("adapter") is kept
    np.testing.assert_array_equal(kept.read().weights, weights.weights)
    await copies.close()


async def test_a_process_loads_a_copy_once_after_each_start() -> None:
    copy, loads, results = LoadedCopy(), [], iter([None, OSError("down"), None])

    async def load() -> None:
        loads.append(copy.start)
        await asyncio.sleep(0)
        if error := next(results):
            raise error

    await asyncio.gather(*(copy.load(0, load) for _ in range(3)))
    assert loads == [None]
    with pytest.raises(OSError, match="down"):
        await copy.load(1, load)
    await copy.load(1, load)
    assert loads == [None, 0, 0] and copy.start == 1
