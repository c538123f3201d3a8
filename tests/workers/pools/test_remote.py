"""Ranks that a worker daemon keeps: one server at a time attaches with the secret, and they outlive it."""

import asyncio
import logging
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.tests.workers.echo_worker import ECHO, EchoConfig
from trainhouse.tests.workers.pools.test_pool import wait_until_gone
from trainhouse.workers.pools.base import PerRank, PlacementError, PoolSpec, WorkerDied
from trainhouse.workers.pools.local import LocalPool
from trainhouse.workers.pools.remote.pool import RemotePool, describe
from trainhouse.workers.pools.remote.protocol import protocol_fingerprint
from trainhouse.workers.pools.remote.secure_channel import AuthenticationFailed, SecureConnection, read_secret
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import AttachClaim, KeptWorkersAddress, ServedModel, WorkerConfig
from trainhouse.workers.scheduler import worker_daemon as keeper
from trainhouse.workers.scheduler.fair_queue import PassLimits
from trainhouse.workers.scheduler.rank_group import RankGroup
from trainhouse.workers.scheduler.ranks import Ranks
from trainhouse.workers.scheduler.worker_daemon import KeptGroup, WorkerDaemon

ROOT = Path(__file__).resolve().parents[3]

SECRET = b"s" * 32
FIRST, SECOND = AttachClaim("first"), AttachClaim("second")
KNOBS = {
    "base_models": (ServedModel("tiny", "a"), ServedModel("other", "b")),
    "parallel": ParallelSpec(fsdp=2),
    "dtype": "float32",
    "adapter_slots": 64,
}


@dataclass
class KeptWorkers:
    keeper: WorkerDaemon
    address: str
    num_ranks: int

    def pool(
        self,
        claim: AttachClaim = FIRST,
        secret: bytes = SECRET,
        group: str = "echo",
        knobs: Mapping[str, object] = KNOBS,
    ) -> RemotePool:
        return RemotePool(self._spec(), group, KeptWorkersAddress(self.address, secret, claim, knobs))

    @asynccontextmanager
    async def attached(self, claim: AttachClaim = FIRST, call_seconds: float = 20) -> AsyncIterator[RemotePool]:
        """Attaches like a server's group."""
        pool = self.pool(claim)
        ranks = Ranks(pool, ParallelSpec(replicas=self.num_ranks))
        await ranks.start(20, call_seconds)
        try:
            yield pool
        finally:
            await ranks.close()

    def _spec(self) -> PoolSpec:
        return PoolSpec(ECHO, tuple(EchoConfig(rank) for rank in range(self.num_ranks)))


@asynccontextmanager
async def kept_workers(num_ranks: int = 1, hang_seconds: float = 60.0) -> AsyncIterator[KeptWorkers]:
    spec = PoolSpec(ECHO, tuple(EchoConfig(rank) for rank in range(num_ranks)))
    parallel = ParallelSpec(replicas=num_ranks)
    config = WorkerConfig(ServedModel("echo", "echo"), parallel=parallel, hang_seconds=hang_seconds)
    keeper = WorkerDaemon({"echo": KeptGroup("echo", config, partial(LocalPool, spec))}, KNOBS, SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        receiving = asyncio.create_task(keeper.serve(listener))
        try:
            await keeper.start(lambda _: None)
            yield KeptWorkers(keeper, f"127.0.0.1:{listener.getsockname()[1]}", num_ranks)
        finally:
            receiving.cancel()
            await asyncio.wait({receiving})
            await keeper.close()


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 200))


async def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(400):
        if condition():
            return
        await asyncio.sleep(0.025)
    pytest.fail("the condition did not become true in 10 s")


def test_kept_ranks_serve_calls_like_others() -> None:
    async def check() -> None:
        async with kept_workers(num_ranks=2) as workers, workers.attached() as pool:
            assert await pool.call("rank") == [0, 1]
            assert await pool.call("echo", PerRank(("first", "second"))) == ["first", "second"]
            values = np.random.default_rng(0).normal(size=1 << 20).astype(np.float32)
            for doubled in await pool.call("double", values):
                np.testing.assert_array_equal(doubled, values * 2)
                doubled += 1
            with pytest.raises(OperationError, match="too low"):
                await pool.call("refuse", "rank 0 is too low")
            calls = [asyncio.create_task(pool.call("count", values)) for _ in range(5)]
            assert await asyncio.gather(*calls) == [[number, number] for number in range(1, 6)]

    run(check())


def test_next_server_gets_the_same_ranks_with_fresh_state() -> None:
    async def check() -> None:
        async with kept_workers(num_ranks=2) as workers:
            async with workers.attached(FIRST) as pool:
                pids = pool.pids
                assert await pool.call("count", None) == [1, 1]
            async with workers.attached(SECOND) as pool:
                assert pool.pids == pids
                assert await pool.call("count", None) == [1, 1]
        await wait_until_gone(pids)

    run(check())


def test_calls_of_a_server_that_left_finish_before_the_next_one_starts() -> None:
    async def check() -> None:
        async with kept_workers(num_ranks=2) as workers:
            async with workers.attached(FIRST) as pool:
                slow = asyncio.create_task(pool.call("sleep", 0.5))
                counted = asyncio.create_task(pool.call("count", None))
                await asyncio.sleep(0.1)
                assert not slow.done()
            for call in (slow, counted):
                with pytest.raises(WorkerDied, match="stopped"):
                    await call
            async with workers.attached(SECOND) as pool:
                assert await pool.call("count", None) == [1, 1]

    run(check())


def test_connections_without_the_secret_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with kept_workers() as workers:
            with pytest.raises(ValueError, match="the secrets of the two sides differ"):
                await workers.pool(secret=b"x" * 32).start()
            with pytest.raises(ValueError, match="the secrets of the two sides differ"):
                await describe(KeptWorkersAddress(workers.address, b"x" * 32, FIRST))
            with socket.create_connection(KeptWorkersAddress(workers.address, b"", FIRST).host_and_port) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: workers\r\n\r\n" + bytes(100))
                stranger.setblocking(False)
                said = b""
                with suppress(ConnectionResetError):
                    while heard := await asyncio.get_running_loop().sock_recv(stranger, 1000):
                        said += heard
                assert len(said) < 100  # its greeting
            async with workers.attached() as pool:
                assert await pool.call("rank") == [0]

    run(check())
    assert "not trainhouse" in caplog.text and "sss" not in caplog.text and "xxx" not in caplog.text


@pytest.mark.parametrize(
    ("said", "linger", "level"),
    [(b"", (0, 0), "DEBUG"), (b"", (1, 0), "DEBUG"), (b"GET / HTTP/1.1\r\n", (0, 0), "WARNING")],
    ids=["closed", "reset", "said something"],
)
def test_only_probes_that_send_data_are_warnings(
    said: bytes, linger: tuple[int, int], level: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Load balancers and health checks connect without sending anything."""

    async def check() -> None:
        async with kept_workers() as workers:
            with socket.create_connection(KeptWorkersAddress(workers.address, b"", FIRST).host_and_port) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", *linger))
                probe.sendall(said)
            await wait_until(lambda: "a connection to the workers" in caplog.text)

    with caplog.at_level(logging.DEBUG, "trainhouse"):
        run(check())
    [logged] = [record for record in caplog.records if "a connection to the workers" in record.getMessage()]
    assert logged.levelname == level


def test_newer_lease_epoch_takes_over_and_an_older_one_is_refused() -> None:
    async def check() -> None:
        older, newer = AttachClaim("older", 1), AttachClaim("newer", 2)
        async with kept_workers() as workers:
            async with workers.attached(older) as first:
                assert await first.call("count", None) == [1]
                async with workers.attached(newer) as second:
                    death = await asyncio.wait_for(asyncio.shield(first.death), 30)
                    assert "a server with lease epoch 2 has taken over the workers" in str(death)
                    with pytest.raises(WorkerDied):
                        await first.call("count", None)
                    assert await second.call("count", None) == [1]
                    with pytest.raises(PlacementError, match="a server with lease epoch 2 has used them"):
                        await workers.pool(older).start()
                    assert await second.call("count", None) == [2]
            with pytest.raises(
                PlacementError, match="this server's lease has epoch 1"
            ):  # even after the newer server left
                await workers.pool(older).start()

    run(check())


def test_servers_without_a_lease_do_not_take_over_from_each_other() -> None:
    async def check() -> None:
        async with kept_workers() as workers:
            async with workers.attached(FIRST) as pool:
                with pytest.raises(PlacementError, match="another server is attached to them"):
                    await workers.pool(SECOND).start()
                with pytest.raises(PlacementError, match="another server is attached to them"):
                    await workers.pool(AttachClaim("leased", 7)).start()
                assert await pool.call("rank") == [0]
                async with workers.attached(FIRST) as again:  # as after a lost connection
                    assert await again.call("rank") == [0]
                    assert "attached again" in str(await asyncio.wait_for(asyncio.shield(pool.death), 30))
            async with workers.attached(SECOND) as pool:
                assert await pool.call("rank") == [0]

    run(check())


def test_dead_rank_is_replaced_and_its_call_fails() -> None:
    async def check() -> None:
        async with kept_workers(num_ranks=2) as workers:
            async with workers.attached() as pool:
                pids = pool.pids
                call = asyncio.create_task(pool.call("sleep", 50))
                await asyncio.sleep(0.1)
                os.kill(pids[1], signal.SIGKILL)
                with pytest.raises(WorkerDied, match=r"the worker died: killed by SIGKILL \(out of memory\?\)"):
                    await call
            async with workers.attached() as pool:
                assert not set(pids) & set(pool.pids)
                assert await pool.call("rank") == [0, 1]
            await wait_until_gone(pids)

    run(check())


def test_a_death_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with kept_workers() as workers, workers.attached() as pool:
            os.kill(pool.pids[0], signal.SIGKILL)
            await asyncio.wait_for(asyncio.shield(pool.death), 10)
            await wait_until(lambda: "echo is back" in caplog.text)

    run(check())
    [logged] = [record for record in caplog.records if "SIGKILL" in record.getMessage()]
    assert (logged.levelname, logged.getMessage()[:27]) == ("ERROR", "echo: the worker died: kill")


def test_each_reason_for_a_failed_restart_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_PLACE_SECONDS", 0.01)
    reasons = iter(["", "no room", "no room", "no room", "no file", ""])

    def new_pool() -> LocalPool:
        if reason := next(reasons):
            raise ValueError(reason)
        return LocalPool(PoolSpec(ECHO, (EchoConfig(0),)))

    async def check() -> None:
        group = KeptGroup("echo", WorkerConfig(ServedModel("echo", "echo")), new_pool)
        await group.start(lambda _: None)
        os.kill((await group.pool()).pids[0], signal.SIGKILL)
        await wait_until(lambda: "echo is back" in caplog.text)
        await group.close()

    run(check())
    logged = [message for record in caplog.records if "does not restart" in (message := record.getMessage())]
    assert logged == [f"echo does not restart: {reason}" for reason in ("no room", "no file")]


@pytest.mark.parametrize("server_waits", [True, False], ids=["server waits", "server left"])
def test_hung_call_is_killed_even_if_its_server_left(server_waits: bool) -> None:
    async def check() -> None:
        async with kept_workers(num_ranks=2) as workers:
            async with workers.attached() as pool:
                pids = pool.pids
                call = asyncio.create_task(pool.call("sleep", 50, hang_seconds=0.5))
                await asyncio.sleep(0.1)
                if server_waits:
                    with pytest.raises(WorkerDied, match="it hung: sleep had no answer after 0 s, so it was killed"):
                        await call
            await asyncio.gather(call, return_exceptions=True)
            async with workers.attached(SECOND) as pool:
                assert not set(pids) & set(pool.pids)

    run(check())


def test_server_can_kill_its_ranks() -> None:
    async def check() -> None:
        async with kept_workers() as workers:
            async with workers.attached() as pool:
                pids = pool.pids
                assert "for a reason, so it was killed" in str(pool.kill("for a reason"))
            async with workers.attached() as pool:
                assert pool.pids != pids

    run(check())


def test_stopped_workers_say_so_and_cannot_be_reached() -> None:
    async def check() -> None:
        async with kept_workers() as workers:
            pool = workers.pool()
            await pool.start()
        assert "its workers were stopped" in str(await asyncio.wait_for(asyncio.shield(pool.death), 30))
        await pool.close()
        with pytest.raises(PlacementError, match=f"no workers are running at {workers.address}"):
            await workers.pool().start()

    run(check())


def test_daemon_describes_its_knobs_and_groups() -> None:
    async def check() -> None:
        async with kept_workers() as workers:
            description = await describe(KeptWorkersAddress(workers.address, SECRET, FIRST))
            assert (description.knobs, description.groups) == (KNOBS, ("echo",))
            with pytest.raises(PlacementError, match="other is not among them: they serve echo"):
                await workers.pool(group="other").start()

    run(check())


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        ({"parallel": ParallelSpec(tp=2)}, "parallel fsdp=2 instead of tp=2:"),
        (
            {"dtype": "bfloat16", "adapter_slots": 3},
            "dtype float32 instead of bfloat16 and adapter_slots 64 instead of 3:",
        ),
        (
            {"base_models": (ServedModel("tiny", "a"), ServedModel("other", "elsewhere"))},
            "base_models tiny=a, other=b instead of tiny=a, other=elsewhere:",
        ),
        ({"of_another_version": 1}, "of_another_version None instead of 1:"),
    ],
    ids=["layout", "dtype and slots", "another model of that name", "unknown"],
)
def test_server_with_outdated_knobs_is_refused_with_the_changes(before: dict[str, object], changes: str) -> None:
    """The workers were restarted, with as many ranks, while the server ran."""

    async def check() -> None:
        async with kept_workers() as workers:
            with pytest.raises(
                PlacementError, match=re.escape(f"they were restarted with {changes} restart this server")
            ):
                await workers.pool(knobs=KNOBS | before).start()
            async with workers.attached() as pool:
                assert await pool.call("rank") == [0]

    run(check())


def test_a_rank_that_hangs_while_a_server_attaches_is_replaced() -> None:
    async def check() -> None:
        async with kept_workers(num_ranks=2) as workers:
            async with workers.attached(FIRST) as pool:
                pids = pool.pids
            os.kill(pids[1], signal.SIGSTOP)
            with pytest.raises(WorkerDied, match="it hung: reset had no answer after 0 s, so it was killed"):
                async with workers.attached(FIRST, call_seconds=0.5):
                    pass
            async with workers.attached(SECOND) as pool:
                assert not set(pids) & set(pool.pids)
                assert await pool.call("rank") == [0, 1]
            await wait_until_gone(pids)

    run(check())


def test_group_start_times_out_on_a_hung_rank() -> None:
    async def check() -> None:
        async with kept_workers() as workers:
            async with workers.attached(FIRST) as pool:
                os.kill(pool.pids[0], signal.SIGSTOP)
            config = WorkerConfig(ServedModel("echo", "echo"), hang_seconds=0.1)
            group = RankGroup(config, lambda _: workers.pool(SECOND), PassLimits(8192, 8192), 50)
            with pytest.raises(ValueError, match="it hung: reset had no answer after 1 s, so it was killed"):
                await group.start(lambda _: None)
            await group.close()

    run(check())


def test_attaching_server_is_refused_while_earlier_calls_run() -> None:
    async def check() -> None:
        async with kept_workers(hang_seconds=0.2) as workers:
            async with workers.attached(FIRST) as pool:
                pids = pool.pids
                calls = [asyncio.create_task(pool.call(*call)) for call in (("sleep", 3), ("count", None))]
                await asyncio.sleep(0.1)
            await asyncio.gather(*calls, return_exceptions=True)
            with pytest.raises(
                PlacementError, match="echo waits for count, sleep, which was begun for a server that has disconnected"
            ):
                await workers.pool(SECOND).start()
            while True:
                with suppress(PlacementError):
                    async with workers.attached(SECOND) as pool:
                        assert pool.pids == pids and await pool.call("count", None) == [1]
                    break

    run(check())


FLOOD = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
host, port, num = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
silent = [socket.create_connection((host, port)) for _ in range(num)]
print("connected", flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def strangers(address: str, number: int) -> AsyncIterator[None]:
    """Holds connections of another process that send nothing."""
    command = [sys.executable, "-c", FLOOD, *address.split(":"), str(number)]
    flood = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert flood.stdin is not None and flood.stdout is not None
    try:
        assert await flood.stdout.readline() == b"connected\n"
        yield
    finally:
        flood.stdin.close()
        await flood.communicate()


def test_silent_connections_do_not_lock_out_servers() -> None:
    async def check() -> None:
        async with kept_workers() as workers:
            async with workers.attached() as pool, strangers(workers.address, 400):
                assert len(workers.keeper._strangers) <= 256
                for _ in range(3):
                    assert (await describe(KeptWorkersAddress(workers.address, SECRET, FIRST))).groups == ("echo",)
                assert num_open_files() < 400
                assert await pool.call("rank") == [0]
            await wait_until(lambda: not workers.keeper._strangers)

    run(check())


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_connections_beyond_the_open_file_limit_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with kept_workers() as workers:
            async with workers.attached() as pool:
                limits = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (num_open_files() + 30, limits[1]))
                try:
                    async with strangers(workers.address, 100):
                        await wait_until(lambda: "connections to the workers cannot be accepted for now" in caplog.text)
                        assert await pool.call("rank") == [0]
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                assert await pool.call("rank") == [0]
            async with workers.attached(SECOND) as pool:
                assert await pool.call("rank") == [0]

    run(check())


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# Compatibility of two versions

EDITS = {
    "nothing": ("workers/worker/worker.py", "", ""),
    "a method's body": ("workers/worker/worker.py", "self._snapshots.wait()", "self._snapshots.wait"),
    "a method's signature": ("workers/worker/worker.py", "directory: str, optimizer: bool)", "directory: str)"),
    "a method's name": ("workers/worker/worker.py", "def begin_snapshot(", "def start_snapshot("),
    "a message's fields": (
        "workers/pools/remote/protocol.py",
        "    method: str\n",
        "    method: str\n    patience: str\n",
    ),
    "a landmark": ("workers/protocol/shared_fs.py", "    contents: str\n", "    contents: bytes\n"),
    "an answer": ("workers/pools/base.py", "    value: object = None\n", "    result: object = None\n"),
    "an error's arguments": ("workers/pools/base.py", "remote_traceback: str)", "remote_traceback: str, rank: int)"),
    "a knob": ("workers/protocol/worker_config.py", "    adapter_slots: int", "    num_adapter_slots: int"),
    "a layout": ("workers/protocol/parallel_spec.py", "    fsdp: int", "    zero: int"),
}
ASK = """
import sys
for directory in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "trainhouse"]:
        del sys.modules[name]
    sys.path[0] = directory
    from trainhouse.workers.pools.remote.protocol import protocol_fingerprint
    print(protocol_fingerprint())
"""


def test_fingerprint_changes_only_with_incompatible_edits(tmp_path: Path) -> None:
    directories = [_edited(tmp_path / str(number), *edit) for number, edit in enumerate(EDITS.values())]
    command = [sys.executable, "-c", ASK, *map(str, directories)]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    own, unseen, *others = asked.stdout.split()
    assert own == unseen == protocol_fingerprint()
    assert len({own, *others}) == len(EDITS) - 1


def _edited(directory: Path, file: str, before: str, after: str) -> Path:
    package = directory / "trainhouse"
    for part in ("schemas", "workers"):
        shutil.copytree(ROOT / part, package / part, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").touch()
    text = (package / file).read_text()
    assert before in text
    (package / file).write_text(text.replace(before, after))
    return directory


# The secure channel


@asynccontextmanager
async def connected_ends() -> AsyncIterator[tuple[SecureConnection, SecureConnection, socket.socket, socket.socket]]:
    """Yields both ends of a channel, and their sockets."""
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        ends = await asyncio.gather(
            SecureConnection.connect_as_client(one, SECRET), SecureConnection.accept_as_server(other, SECRET)
        )
        yield (*ends, one, other)


@pytest.mark.parametrize("sizes", [[], [0], [1, 3], [100_000, 7, 70_000, 1], [1 << 22]])
def test_messages_arrive_unchanged(sizes: list[int]) -> None:
    async def check() -> None:
        pieces = [np.random.default_rng(size).bytes(size) for size in sizes]
        async with connected_ends() as (caller, called, _, _):
            for sender, receiver in ((caller, called), (called, caller), (caller, called)):
                _, message = await asyncio.gather(sender.send(pieces), receiver.receive())
                assert bytes(message) == b"".join(pieces)

    run(check())


@pytest.mark.parametrize("change", ["nothing", "a bit", "the size", "dropped", "repeated", "reflected"])
def test_tampering_with_a_connection_is_detected(change: str) -> None:
    async def check() -> None:
        async with connected_ends() as (caller, called, one, other):
            loop = asyncio.get_running_loop()
            written = []
            for words in (b"first", b"second"):
                await caller.send([words])
                written.append(bytearray(await loop.sock_recv(other, 1000)))
            if change == "a bit":
                written[1][-40] ^= 1
            elif change == "the size":
                written[0][0] ^= 1
            elif change == "dropped":
                del written[0]
            elif change == "repeated":
                written.insert(1, written[0])
            elif change == "reflected":
                await called.send([b"first"])
                written[0] = bytearray(await loop.sock_recv(one, 1000))
            await loop.sock_sendall(one, b"".join(written))
            if change == "nothing":
                assert [bytes(await called.receive()) for _ in range(2)] == [b"first", b"second"]
                return
            with pytest.raises(AuthenticationFailed):
                for _ in range(2):
                    await called.receive()

    run(check())


def test_short_or_missing_secret_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "secret"
    with pytest.raises(ValueError, match=r"cannot be read from .*: No such file"):
        read_secret(file)
    file.touch(0o600)
    file.write_text("geheim\n")
    with pytest.raises(ValueError, match="has 6 bytes, but needs at least 32") as refused:
        read_secret(file)
    assert "geheim" not in str(refused.value) + caplog.text
    file.write_text("geheim" * 6 + "\n")
    secret = read_secret(file)
    file.write_text("geheim" * 6)
    assert secret == read_secret(file) and b"geheim" not in secret
    assert "geheim" not in repr(KeptWorkersAddress("a:1", secret, FIRST)) and str(secret) not in repr(
        KeptWorkersAddress("a:1", secret, FIRST)
    )


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o666])
def test_secret_accessible_to_others_is_refused(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("geheim" * 6)
    for private in (0o400, 0o600):
        file.chmod(private)
        read_secret(file)
    file.chmod(mode)
    with pytest.raises(ValueError, match=rf"is accessible to others \(mode {mode:04o}\): `chmod 600 {file}`"):
        read_secret(file)


OTHER_USER = 4321
READ = f"""
import os, pathlib, sys
from trainhouse.workers.pools.remote.secure_channel import read_secret
os.setgroups([])
os.setgid({OTHER_USER})
os.setuid({OTHER_USER})
try:
    read_secret(pathlib.Path(sys.argv[1]))
    print("taken")
except ValueError as error:
    assert "is accessible to others" in str(error), error
    print("refused")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="creates files as root and changes the user")
@pytest.mark.parametrize(("mode", "is_taken"), [(0o440, True), (0o640, True), (0o444, False), (0o660, False)])
def test_secret_owned_by_root_may_be_group_readable(mode: int, is_taken: bool) -> None:
    """systemd and Kubernetes provide secrets this way."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        file = Path(directory, "secret")
        file.write_text("geheim" * 6)
        os.chown(file, 0, OTHER_USER)
        file.chmod(mode)
        asked = subprocess.run(
            [sys.executable, "-c", READ, str(file)], capture_output=True, text=True, timeout=60, check=True
        )
        assert asked.stdout == ("taken\n" if is_taken else "refused\n")
