"""Ranks connect at a rendezvous, and listen only on the expected addresses."""

import asyncio
import socket

import pytest
from trainhouse.tests.workers.parallel.meeting_worker import MEETING, MeetingConfig
from trainhouse.workers.parallel.mesh import LOOPBACK, Rendezvous, interface_of, own_host
from trainhouse.workers.pools.base import PoolSpec
from trainhouse.workers.pools.local import LocalPool
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.scheduler.supervision.ranks import Ranks

SECONDS = 60.0
SPEC = ParallelSpec(replicas=2)

beyond_loopback = pytest.mark.skipif(own_host() == LOOPBACK, reason="this machine has no network")


@beyond_loopback
@pytest.mark.parametrize("host", [LOOPBACK, own_host()])
def test_rendezvous_listens_on_one_address_only(host: str) -> None:
    meeting = Rendezvous.open(host, SECONDS)
    port = int(meeting.address.rpartition(":")[2])
    assert meeting.address == f"{host}:{port}"
    with socket.create_connection((host, port), timeout=SECONDS):
        pass
    other = own_host() if host == LOOPBACK else LOOPBACK
    with pytest.raises(OSError), socket.create_connection((other, port)):
        pass
    Rendezvous.join(meeting.address, SECONDS).store.set("said", "so")
    assert meeting.store.get("said") == b"so"


@beyond_loopback
@pytest.mark.parametrize("is_local", [True, False])
def test_ranks_listen_only_on_the_expected_host(is_local: bool) -> None:
    configs = tuple(MeetingConfig(SPEC, rank, is_local) for rank in range(SPEC.num_ranks))
    asyncio.run(
        check_listening(Ranks(LocalPool(PoolSpec(MEETING, configs)), SPEC), LOOPBACK if is_local else own_host())
    )


async def check_listening(ranks: Ranks, host: str) -> None:
    await ranks.start(SECONDS)
    try:
        assert await ranks.call("summed", 1.0, hang_seconds=SECONDS) == 2.0
        by_rank = await ranks.call("listening", hang_seconds=SECONDS)
        assert all(by_rank) and {address for addresses in by_rank for address in addresses} == {host}
    finally:
        await ranks.close()


def test_interface_is_found_by_its_address() -> None:
    assert interface_of(LOOPBACK) in ("lo", "lo0")
    assert interface_of("192.0.2.77") is None
