"""Ray actors without Ray: whom a rank answers, and which workers belong to a state directory."""

from dataclasses import replace
from pathlib import Path

import pytest
from trainhouse.tests.workers.echo_worker import ECHO, EchoConfig
from trainhouse.workers.pools.base import PoolSpec, WorkerError, decode_answer
from trainhouse.workers.pools.ray.actors import RankActor, RanksTakenOver
from trainhouse.workers.protocol.messages import encode
from trainhouse.workers.protocol.worker_config import KeptWorkers


def test_rank_answers_only_the_server_that_it_obeys() -> None:
    actor, call = RankActor(PoolSpec(ECHO, (EchoConfig(),)), 0, None), b"".join(encode(("rank", ())))
    actor.obey("first")
    answer = decode_answer(memoryview(bytearray(actor.answer_frame("first", call))))
    assert isinstance(answer.error, WorkerError), "no worker is built"
    actor.obey("second")
    with pytest.raises(RanksTakenOver):
        actor.answer_frame("first", call)
    assert actor.answer_frame("second", call)


def test_each_state_directory_has_its_own_workers(tmp_path: Path) -> None:
    one = KeptWorkers(str(tmp_path / "a"), "id", 1.0, "server")
    assert replace(one, server="other", seconds=2.0, epoch=3).namespace == one.namespace
    assert replace(one, id_file=str(tmp_path / "copy")).namespace != one.namespace
    assert replace(one, state_id="other").namespace != one.namespace
