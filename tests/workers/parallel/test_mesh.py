"""Ranks connect at a rendezvous, and listen only on the expected addresses."""

import socket
from pathlib import Path

import pytest
from trainhouse.workers.parallel.mesh import LOOPBACK, Rendezvous, interface_of, own_host
from trainhouse.workers.protocol.parallel_spec import ParallelSpec

from .listening import listening_addresses, summed
from .training import layout

SECONDS = 60.0

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
def test_ranks_listen_only_on_the_expected_host(is_local: bool, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    with layout(tiny_models["qwen3"], ParallelSpec(replicas=2), tmp_path, is_local=is_local) as where:
        assert where.probe(summed, 1.0) == [2.0, 2.0]
        by_rank = where.probe(listening_addresses)
    assert all(by_rank)
    assert {address for addresses in by_rank for address in addresses} == {LOOPBACK if is_local else own_host()}


def test_interface_is_found_by_its_address() -> None:
    assert interface_of(LOOPBACK) in ("lo", "lo0")
    assert interface_of("192.0.2.77") is None
