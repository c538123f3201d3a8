"""The journal and its segments: appended entries survive a crash, and segments with nothing left to do are deleted."""

import asyncio
import os
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest
from trainhouse.schemas.errors import RequestError
from trainhouse.server.files import segment_log as segments_module
from trainhouse.server.files.segment import (
    HEAD_BYTES,
    MAGIC,
    MAX_BODY_BYTES,
    Damage,
    complete_bytes,
    read_segment,
    scan_segment,
)
from trainhouse.server.files.segment_log import RecordPosition, RecordTooLarge, SegmentLog
from trainhouse.server.journal.journal import Header, Journal, read_journal

from ...faults.disk import filled, small_disk

pytestmark = pytest.mark.anyio


def header(seq_id: int, **values) -> Header:
    return Header("optim_step", "tenant", "session:train:0", seq_id, f"session:train:0:{seq_id}", **values)


def segment_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.segment"))


async def wait_for_segments(directory: Path, numbers: list[int]) -> None:
    async with asyncio.timeout(30):
        while [int(path.stem) for path in segment_files(directory)] != numbers:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_entries_are_read_as_they_were_appended(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1 << 20)
    written = [(header(1, drawn={"seed": 7}), b"body \x00\xff"), (header(2, refused="too large"), b"")]
    for entry in written:
        await journal.append(*entry)
    await journal.close()
    (segment,) = segment_files(tmp_path)
    assert [(entry.header, entry.body) for entry in read_journal(segment)] == written


def test_an_entry_survives_kill_9_as_soon_as_append_has_returned(tmp_path: Path) -> None:
    program = f"""
import asyncio, os, signal
from trainhouse.server.journal.journal import Header, Journal
from pathlib import Path
async def main():
    journal = Journal(Path({str(tmp_path)!r}), 1 << 20)
    await journal.append(Header("optim_step", "t", "r", 1, "r:1"), b"body")
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    process = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert process.returncode == -9
    (segment,) = segment_files(tmp_path)
    assert [entry.body for entry in read_journal(segment)] == [b"body"]


@pytest.mark.parametrize("num_lost", [1, 3, 30])
async def test_a_torn_tail_ends_the_segment_at_the_last_whole_entry(
    tmp_path: Path, num_lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path, 1 << 20)
    for seq_id in (1, 2, 3):
        await journal.append(header(seq_id), bytes(20))
    await journal.close()
    (segment,) = segment_files(tmp_path)
    os.truncate(segment, segment.stat().st_size - num_lost)
    assert [entry.header.seq_id for entry in read_journal(segment)] == [1, 2]
    assert "torn" in caplog.text


async def test_a_damaged_byte_is_found_and_costs_one_record(tmp_path: Path) -> None:
    segments = SegmentLog(tmp_path, 1 << 20)
    places = [await segments.append({"number": number}, bytes(20)) for number in range(3)]
    await segments.close()
    (segment,) = segment_files(tmp_path)
    damaged = bytearray(segment.read_bytes())
    damaged[places[1].offset + 40] ^= 1
    segment.write_bytes(damaged)
    assert [record.header["number"] for record in read_segment(segment)] == [0, 2]
    assert Damage(places[1].offset, {"number": 1}) in list(scan_segment(segment))


@pytest.mark.parametrize("damaged_byte", [0, 8, 12, 16, 22])
async def test_a_record_with_a_damaged_head_does_not_hide_later_ones(tmp_path: Path, damaged_byte: int) -> None:
    segments = SegmentLog(tmp_path, 1 << 20)
    places = [await segments.append({"number": number}, bytes(20) + b'{"') for number in range(4)]
    await segments.close()
    (segment,) = segment_files(tmp_path)
    damaged = bytearray(segment.read_bytes())
    for place in places[1:3]:
        damaged[place.offset + damaged_byte] ^= 0xFF
    segment.write_bytes(damaged)
    assert [record.header["number"] for record in read_segment(segment)] == [0, 3]


def record_of_format_1(header: bytes, body: bytes) -> bytes:
    return struct.pack("<III", len(header), len(body), zlib.crc32(body, zlib.crc32(header))) + header + body


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", 0),
        (MAGIC[:5], 0),
        (MAGIC + b"tag", 0),
        (MAGIC + b"8 bytes.", HEAD_BYTES),
        (b"something", None),
        (b"X" + MAGIC[1:] + b"tag", None),
    ],
)
def test_a_torn_head_belongs_to_a_segment(tmp_path: Path, content: bytes, expected: int | None) -> None:
    (tmp_path / "0.segment").write_bytes(content)
    assert complete_bytes(tmp_path / "0.segment") == expected


async def test_a_forged_record_in_a_torn_body_is_ignored(tmp_path: Path) -> None:
    """Any client can put such bytes into a body."""
    segments = SegmentLog(tmp_path, 1 << 20)
    await segments.append({"number": 0})
    forged = record_of_format_1(b'{"number":666}', b"")
    (segment,) = segment_files(tmp_path)
    tag = segment.read_bytes()[21:29]
    await segments.append({"number": 1}, bytes(100) + forged + bytes(100))
    await segments.close()
    torn = segment.read_bytes()[:-50]
    segment.write_bytes(torn)
    assert [record.header["number"] for record in read_segment(segment)] == [0]
    # Control: a client that knew the tag could forge a record.
    segment.write_bytes(torn.replace(bytes(8) + forged, tag + forged))
    assert [record.header["number"] for record in read_segment(segment)] == [0, 666]


async def test_segments_of_format_1_are_read(tmp_path: Path) -> None:
    records = record_of_format_1(b'{"number":0}', b"body"), record_of_format_1(b'{"number":1}', b"")
    old = tmp_path / "00000003.segment"
    old.write_bytes(b"trainhouse segment 1\n" + records[0] + records[1] + b"torn")
    assert [(one.header["number"], one.body) for one in read_segment(old)] == [(0, b"body"), (1, b"")]
    segments = SegmentLog(tmp_path, 1 << 20)
    assert (await segments.read(RecordPosition(3, 21))).body == b"body"
    assert (await segments.append({})).segment == 4
    await segments.close()


@pytest.mark.parametrize("tail", [bytes(5000), bytes(5), b"\xff" * 40, b"\x10\0\0\0\x09\0\0\0abcd{"], ids=len)
async def test_any_bytes_after_the_last_record_are_a_torn_tail(
    tmp_path: Path, tail: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    segments = SegmentLog(tmp_path, 1 << 20)
    await segments.append({"number": 0}, b"body")
    await segments.close()
    (segment,) = segment_files(tmp_path)
    segment.write_bytes(segment.read_bytes() + tail)
    assert [getattr(found, "header", None) for found in scan_segment(segment)] == [{"number": 0}]
    assert f"its last {len(tail)} bytes are not a complete record" in caplog.text


async def test_a_damaged_entry_keeps_its_header_but_cannot_be_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1 << 20)
    places = [await journal.append(header(seq_id), b"a body") for seq_id in (1, 2, 3)]
    await journal.close()
    (segment,) = segment_files(tmp_path)
    segment.write_bytes(segment.read_bytes().replace(b"a body", b"A body", 2).replace(b"A body", b"a body", 1))
    again = Journal(tmp_path, 1 << 20)
    assert [(one.place, one.header.seq_id) for one in again.list_earlier()] == list(zip(places, (1, 2, 3), strict=True))
    with pytest.raises(ValueError, match="no whole record"):
        await again.read(places[1])
    assert (await again.read(places[2])).body == b"a body"
    await again.close()


async def test_failure_and_recovery_of_journal_writes_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", 256 << 10) as disk:
        journal = Journal(disk / "journal", 1 << 20)
        await journal.append(header(1))
        with filled(disk):
            for number in (2, 3):
                with pytest.raises(RequestError, match="free space there"):
                    await journal.append(header(number), bytes(10_000))
                reason = await journal.check_writable()
                words = f"the server's journal in {disk}/journal cannot be written (No space left on device)"
                assert reason == f"{words}: free space there"
        assert await journal.check_writable() is None
        await journal.append(header(2))
        await journal.close()
        assert [path.name for path in (disk / "journal").iterdir() if path.suffix != ".segment"] == []
    assert caplog.messages == [
        f"writing the journal in {disk}/journal failed, will retry: No space left on device",
        f"writing the journal in {disk}/journal works again",
    ]


async def test_a_full_disk_leaves_no_partial_records(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 256 << 10) as disk:
        segments = SegmentLog(disk, 1 << 20)
        await segments.append({"number": 0}, bytes(1000))
        with filled(disk, leaving=8192):
            for num_bytes in (100_000, 20_000, 100_000):
                with pytest.raises(OSError, match="No space left"):
                    await segments.append({"number": 1}, bytes(num_bytes))
        await segments.append({"number": 2})
        await segments.close()
        assert [[record.header["number"] for record in read_segment(path)] for path in segment_files(disk)] == [
            [0],
            [2],
        ]
        assert segment_files(disk)[0].stat().st_size < 2000


async def test_a_file_that_is_not_a_segment_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "00000000.segment").write_bytes(10 * b"something else")
    assert list(read_segment(tmp_path / "00000000.segment")) == []
    assert "is not a segment" in caplog.text


async def test_a_segment_with_a_damaged_head_is_read_or_reported_and_kept(tmp_path: Path) -> None:
    for damaged_byte, is_read in ((3, False), (25, True), (33, True)):
        directory = tmp_path / str(damaged_byte)
        journal = Journal(directory, 1 << 20)
        for seq_id in (1, 2):
            await journal.append(header(seq_id))
        await journal.close()
        (segment,) = segment_files(directory)
        damaged = bytearray(segment.read_bytes())
        damaged[damaged_byte] ^= 1
        segment.write_bytes(damaged)
        journal = Journal(directory, 1 << 20)
        found = [one.header.seq_id for one in journal.list_earlier()]
        assert found == [1, 2] if is_read else (found == [] and journal.unreadable == {0})
        journal.delete_unneeded_segments()
        assert segment.exists()
        await journal.close()


async def test_a_small_record_is_written_at_once_unless_a_large_one_is_being_written(tmp_path: Path) -> None:
    segments = SegmentLog(tmp_path, 1 << 30)
    small = segments.append({"number": 0}, b"small")
    assert small.done()
    large = segments.append({"number": 1}, bytes(8 << 20))
    behind = segments.append({"number": 2}, b"small")
    assert not large.done() and not behind.done()
    await asyncio.gather(large, behind)
    assert segments.append({"number": 3}).done()
    assert [record.header["number"] for record in read_segment(segment_files(tmp_path)[0])] == [0, 1, 2, 3]
    await segments.close()


async def test_records_are_read_at_their_places(tmp_path: Path) -> None:
    segments = SegmentLog(tmp_path, 200)
    places = [await segments.append({"number": number}, bytes([number]) * 50) for number in range(10)]
    assert {place.segment for place in places} > {0}
    for number in (7, 0, 9):
        assert (await segments.read(RecordPosition.parse(str(places[number])))).body == bytes([number]) * 50
    with pytest.raises(ValueError, match="no whole record"):
        await segments.read(RecordPosition(0, places[0].offset + 1))
    await segments.close()


async def test_a_segment_is_deleted_when_all_its_entries_are_released(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 200)
    places = [await journal.append(header(seq_id), bytes(100)) for seq_id in range(1, 5)]
    assert len(segment_files(tmp_path)) == 4
    journal.release(places[0])
    journal.release(places[2])
    await wait_for_segments(tmp_path, [places[1].segment, places[3].segment])
    journal.release(places[1])
    await journal.close()
    assert [int(path.stem) for path in segment_files(tmp_path)] == [places[3].segment]


async def test_segments_are_deleted_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting a large file takes time."""
    unlink, journal = os.unlink, Journal(tmp_path, 200)
    first, *_ = [await journal.append(header(seq_id), bytes(100)) for seq_id in (1, 2)]
    was_served = threading.Event()

    def slow(path: str | Path) -> None:
        assert was_served.wait(10)
        unlink(path)

    monkeypatch.setattr(os, "unlink", slow)
    journal.release(first)
    await asyncio.sleep(0)
    was_served.set()
    await journal.close()
    assert [int(path.stem) for path in segment_files(tmp_path)] == [1]


async def test_a_segment_stays_until_its_last_entries_are_acknowledged(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 600)  # more than the first entry has, less than two have
    first = await journal.append(header(1), bytes(100))
    both = asyncio.gather(journal.append(header(2), bytes(300)), journal.append(header(3)))
    while len(segment_files(tmp_path)) < 2:  # the writer thread runs; its answers wait for our await
        await asyncio.sleep(0)
        time.sleep(0.01)  # noqa: ASYNC251
    journal.release(first)
    second, third = await both
    assert (second.segment, third.segment) == (first.segment, first.segment + 1)
    assert [entry.header.seq_id for entry in read_journal(segment_files(tmp_path)[0])] == [1, 2]
    await journal.close()


async def test_entries_of_an_earlier_process_stay_until_released(tmp_path: Path) -> None:
    first = Journal(tmp_path, 1 << 20)
    await first.append(header(1), b"body")
    await first.append(header(2, refused="no"))
    await first.close()
    second = Journal(tmp_path, 1 << 20)
    found = second.list_earlier()
    assert [(one.header.seq_id, one.header.refused) for one in found] == [(1, None), (2, "no")]
    second.delete_unneeded_segments()
    place = await second.append(header(3))
    assert place.segment == 1
    second.release(found[1].place)
    assert (await second.read(found[0].place)).body == b"body"
    second.release(found[0].place)
    await second.close()
    assert [int(segment.stem) for segment in segment_files(tmp_path)] == [1]


async def test_a_segment_with_an_incomplete_head_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "00000000.segment").write_bytes(b"damaged")
    journal = Journal(tmp_path, 1 << 20)
    assert journal.list_earlier() == []
    journal.delete_unneeded_segments()
    await journal.close()
    assert segment_files(tmp_path) == []


async def test_a_journal_that_cannot_be_written_refuses_and_recovers(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", 1 << 20)
    (tmp_path / "journal").rmdir()
    with pytest.raises(RequestError, match="free space") as refusal:
        await journal.append(header(1))
    assert refusal.value.status == 503
    (tmp_path / "journal").mkdir()
    await journal.append(header(1))
    await journal.close()
    (segment,) = segment_files(tmp_path / "journal")
    assert [entry.header.seq_id for entry in read_journal(segment)] == [1]


async def test_releasing_an_entry_twice_affects_no_other_entry(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1 << 20)
    first, second = [await journal.append(header(seq_id)) for seq_id in (1, 2)]
    await journal.close()
    journal = Journal(tmp_path, 1 << 20)
    assert len(journal.list_earlier()) == 2
    await journal.append(header(3))
    for _ in range(2):
        journal.release(first)
    assert journal._held[0] == {second.offset}
    journal.release(second)
    await journal.close()
    assert [int(path.stem) for path in segment_files(tmp_path)] == [1]


async def test_a_refused_batch_leaves_nothing_in_the_previous_segment(tmp_path: Path) -> None:
    """Otherwise the next start would run operations that their clients know to be refused."""
    segments = SegmentLog(tmp_path, 1000)
    await segments.append({"number": 0}, bytes(900))
    (tmp_path / "00000001.segment").touch()  # the next segment cannot be created
    answers = await asyncio.gather(
        *(segments.append({"number": number}, bytes(40 << 10)) for number in (1, 2)),
        segments.append({"number": 3}),
        return_exceptions=True,
    )
    await segments.close()
    acknowledged = [0, *(number for number, answer in enumerate(answers, 1) if isinstance(answer, RecordPosition))]
    stored = [one.header["number"] for path in segment_files(tmp_path) for one in read_segment(path)]
    assert stored == acknowledged


async def test_a_record_that_is_too_large_is_refused_and_later_ones_are_written(tmp_path: Path) -> None:
    too_large = bytes(MAX_BODY_BYTES + 1)  # untouched pages take no memory
    segments = SegmentLog(tmp_path / "segments", 64 << 20)
    journal = Journal(tmp_path / "journal", 64 << 20)
    async with asyncio.timeout(60):
        with pytest.raises(RecordTooLarge, match=f"{MAX_BODY_BYTES + 1} of body is too large"):
            await segments.append({"number": 0}, too_large)
        with pytest.raises(RecordTooLarge):
            await segments.append({"number": 0, "words": "w" * (17 << 20)})
        with pytest.raises(RequestError, match="too large") as refusal:
            await journal.append(header(1), too_large)
        assert refusal.value.status == 413
        await segments.append({"number": 1}, bytes(1 << 20))
        await segments.append({"number": 2})
        await journal.append(header(2), bytes(1 << 20))
    await segments.close()
    await journal.close()
    (of_segments,), (of_journal,) = segment_files(tmp_path / "segments"), segment_files(tmp_path / "journal")
    assert [record.header["number"] for record in read_segment(of_segments)] == [1, 2]
    assert [entry.header.seq_id for entry in read_journal(of_journal)] == [2]


@pytest.mark.parametrize("num_bytes", [100, 1 << 20])
async def test_running_out_of_memory_within_a_record_keeps_the_journal_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    class Starved(segments_module.BufferedWriter):
        def write(self, buffer) -> int:
            if len(buffer) == num_bytes:
                raise MemoryError
            return super().write(buffer)

    monkeypatch.setattr(segments_module, "BufferedWriter", Starved)
    journal = Journal(tmp_path, 1 << 20)
    async with asyncio.timeout(60):
        await journal.append(header(1))
        with pytest.raises(RequestError, match="MemoryError") as refusal:
            await journal.append(header(2), bytes(num_bytes))
        assert refusal.value.status == 503
        for seq_id, body in ((3, b""), (4, bytes(64 << 10))):
            await journal.append(header(seq_id), body)
    await journal.close()
    found = [one for path in segment_files(tmp_path) for one in scan_segment(path)]
    assert [one.header["seq_id"] for one in found if one.header] == [1, 3, 4]
    assert not any(isinstance(one, Damage) for one in found)
