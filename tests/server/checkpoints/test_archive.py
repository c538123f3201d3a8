"""Archives of checkpoints, as SDKs up to 0.35 download them."""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from trainhouse.server.checkpoints.archive import _MOST_OF_TENANT, Archive
from trainhouse.server.checkpoints.downloads import sign_archive, signed_archive
from trainhouse.server.files.directories import STAGING
from trainhouse.server.store import CheckpointRecord, RunRecord

from ..api import ALICE, BOB, Api

pytestmark = pytest.mark.anyio

GZIP = {"Accept": "application/gzip"}
"""The header of SDKs up to 0.25, which follow a redirect."""


async def asked(api: Api, run: RunRecord, checkpoint_id: str = "weights/a", key: str = ALICE, **headers: str):
    path = f"/api/v1/training_runs/{run.run_id}/checkpoints/{checkpoint_id}/archive"
    return await (await api.client(key)).get(path, headers=headers)


async def fetch(api: Api, url: str, method: str = "GET") -> httpx.Response:
    """Requests a signed URL without an API key."""
    parts = urlsplit(url)
    return await (await api.client(None)).request(method, f"{parts.path}?{parts.query}")


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
async def test_an_archive_has_every_file_and_ends_with_checkpoint_complete(api: Api, kind: str) -> None:
    run = await api.run()
    content = bytes(range(256)) * 4000 + b"the end"  # of more than one piece
    await api.save(run, kind=kind, content=content)
    redirect = await asked(api, run, f"{kind}/a", **GZIP)
    assert redirect.status_code == 302
    assert parsedate_to_datetime(redirect.headers["Expires"]).timestamp() == int(api.clock.now) + 3600
    answer = await fetch(api, redirect.headers["Location"])
    assert answer.status_code == 200 and int(answer.headers["Content-Length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        assert archive.getnames() == ["adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"]
        assert archive.extractfile("adapter_model.safetensors").read() == content  # pyright: ignore
        assert all(one.isfile() and one.mode == 0o644 for one in archive.getmembers())
    head = await fetch(api, redirect.headers["Location"], "HEAD")
    assert head.status_code == 200 and head.headers["Content-Length"] == answer.headers["Content-Length"]
    assert head.content == b""


async def test_a_client_that_accepts_json_gets_the_url_in_it(api: Api) -> None:
    run = await api.run()
    await api.save(run)
    answer = (await asked(api, run, Accept="application/json")).json()
    assert answer.keys() == {"url", "expires"}
    assert (await fetch(api, answer["url"])).status_code == 200
    # These SDKs send both; they follow redirects only.
    assert (await asked(api, run, Accept="application/json, application/gzip")).status_code == 302


async def test_only_those_who_may_read_a_checkpoint_get_its_archive(api: Api) -> None:
    run = await api.run()
    await api.save(run)
    assert (await asked(api, run, key=BOB)).status_code == 404
    assert (await asked(api, run, "weights/b")).status_code == 404
    url = (await asked(api, run)).headers["Location"]
    expires = str(int(api.clock.now) + 3600)
    file = url.replace("/archives/", "/downloads/").replace("/weights/a?", "/weights/a/adapter_config.json?")
    forged = [
        url.replace(expires, str(int(expires) + 1)),
        url[:-1] + ("0" if url[-1] != "0" else "1"),
        url.replace("weights/a", "weights/b"),
    ]
    assert [(await fetch(api, one)).status_code for one in (*forged, file)] == [403] * 4
    await api.save(run, overwrite=True)
    assert (await fetch(api, url)).status_code == 403
    url = (await asked(api, run)).headers["Location"]
    api.clock.now += 3600
    assert (await fetch(api, url)).status_code == 403


async def test_an_archive_leaves_nothing_behind(api: Api, tmp_path: Path) -> None:
    run = await api.run()
    record = await api.save(run)
    before = sorted(path.name for path in Path(record.directory).parent.rglob("*"))
    for _ in range(3):
        assert (await fetch(api, (await asked(api, run)).headers["Location"])).status_code == 200
    assert sorted(path.name for path in Path(record.directory).parent.rglob("*")) == before


@asynccontextmanager
async def downloading(api: Api, *records: CheckpointRecord) -> AsyncIterator[list[Archive]]:
    """Downloads archives at the same time, none of which ends before the block does."""
    checkpoints = api.services.checkpoints
    async with AsyncExitStack() as stack:
        archives = [signed_archive(checkpoints, one.tinker_path, sign_archive(checkpoints, one)) for one in records]
        yield await asyncio.gather(*map(stack.enter_async_context, archives))


def staged(record: CheckpointRecord) -> list[Path]:
    return list(Path(record.directory).parent.glob(f"{STAGING}*"))


async def test_all_that_download_a_checkpoint_share_one_copy(api: Api) -> None:
    run = await api.run()
    record = await api.save(run)
    url = (await asked(api, run)).headers["Location"]
    async with downloading(api, *[record] * 3) as archives:
        assert len(staged(record)) == 1
        answer = await fetch(api, url)
        assert (await fetch(api, url, "HEAD")).headers["Content-Length"] == str(len(answer.content))
        assert len(staged(record)) == 1, "it stays while the others read it"
        assert {b"".join(archive.pieces()) for archive in archives} == {answer.content}
    assert not staged(record)


async def test_few_checkpoints_of_a_tenant_are_downloaded_at_a_time(api: Api) -> None:
    run = await api.run()
    records = [await api.save(run, f"c{number}") for number in range(_MOST_OF_TENANT + 1)]
    of_bob = await api.save(await api.run(BOB))
    url = (await asked(api, run, f"weights/{records[-1].name}")).headers["Location"]
    async with downloading(api, *records[:-1], of_bob):
        refused = await fetch(api, url)
        assert refused.status_code == 429 and "one after another" in refused.text
        assert int(refused.headers["Retry-After"]) > 0
    assert (await fetch(api, url)).status_code == 200


async def test_head_reads_no_file(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await api.run()
    await api.save(run)
    url = (await asked(api, run)).headers["Location"]
    length = (await fetch(api, url)).headers["Content-Length"]
    monkeypatch.setattr(Archive, "pieces", lambda self: pytest.fail("the files were read"))
    assert (await fetch(api, url, "HEAD")).headers["Content-Length"] == length


async def test_an_archive_that_cannot_be_made_is_made_again(api: Api) -> None:
    run = await api.run()
    record = await api.save(run)
    url = (await asked(api, run)).headers["Location"]
    config = Path(record.directory) / "adapter_config.json"
    content = config.read_bytes()
    config.write_bytes(b"damaged")
    answers = await asyncio.gather(*(fetch(api, url) for _ in range(3)))
    assert {one.status_code for one in answers} == {503} and not staged(record)
    config.write_bytes(content)
    assert (await fetch(api, url)).status_code == 200


async def test_a_download_that_is_given_up_while_it_is_prepared_leaves_nothing_behind(api: Api) -> None:
    record = await api.save(await api.run())

    async def download() -> None:
        async with downloading(api, record):
            pass

    given_up = asyncio.create_task(download())
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert not staged(record)
    async with downloading(api, record) as (archive,):
        assert b"".join(archive.pieces())
