"""Bounds on the ratio that leave out 1 are refused where a request is decoded; those accepted earlier run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainhouse.schemas import codec
from trainhouse.schemas.codec.formats import Invalid
from trainhouse.schemas.codec.requests import check_clip_bounds
from trainhouse.schemas.errors import RequestError
from trainhouse.schemas.training import Datum, ForwardBackwardRequest
from trainhouse.workers.dispatch import WorkerDispatch

from ..real import ALICE, Run, running_server, server_config


def check(loss_fn: str, config: dict[str, float | str] | None = None, **inputs: list[float]) -> None:
    arrays = {name: np.array(values, np.float32) for name, values in inputs.items()}
    data = (Datum(np.arange(2, dtype=np.int32), arrays),)
    check_clip_bounds(ForwardBackwardRequest("run", 1, data, loss_fn, config or {}))


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
@pytest.mark.parametrize(
    ("config", "written"),
    [
        ({"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}, "clip_low_threshold 0.8 and clip_high_threshold 1.2"),
        ({"clip_low_threshold": 0.2, "clip_high_threshold": 0.28}, "0.8 and clip_high_threshold 1.28"),
        ({"clip_high_threshold": 0.3}, "clip_high_threshold 1.3"),
        ({"clip_low_threshold": -0.2, "clip_high_threshold": 0.2}, "0.8 and clip_high_threshold 1.2"),
        ({"clip_low_threshold": 1.5}, "must contain 1"),
    ],
)
def test_bounds_that_leave_out_1_are_refused(loss_fn: str, config: dict[str, float | str], written: str) -> None:
    with pytest.raises(Invalid, match=written):
        check(loss_fn, config)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0},
        {"clip_low_threshold": 0.2},
        {"clip_high_threshold": 4.0},
        {"clip_low_threshold": "word"},
    ],
)
def test_bounds_that_contain_1_are_taken(config: dict[str, float | str]) -> None:
    check("ppo", config)


def test_bounds_of_tokens_are_checked_where_they_count() -> None:
    with pytest.raises(Invalid, match=r"datum 0, position 1: ppo has .* 1.28"):
        check("ppo", advantages=[0, 1], clip_low_threshold=[0.2, 0.2], clip_high_threshold=[0.28, 0.28])
    check("ppo", advantages=[1, 0], clip_low_threshold=[0.8, 0.2], clip_high_threshold=[1.2, 0.2])
    check("ppo", advantages=[1, 1], clip_low_threshold=[0.8])  # of another shape: the workers say so


PAST = {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}


@contextmanager
def as_before() -> Iterator[None]:
    """An earlier version, which took any bounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainhouse.schemas.codec.requests.check_clip_bounds", lambda request: None)
        yield


def test_losses_without_bounds_leave_the_refusal_to_the_workers() -> None:
    datum = {"model_input": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}, "loss_fn_inputs": {}}
    given = {"data": [datum], "loss_fn": "importance_sampling", "loss_fn_config": PAST}
    body = json.dumps({"model_id": "run", "seq_id": 1, "forward_backward_input": given}).encode()
    assert codec.decode_forward_backward(body, codec.JSON).loss_fn_config == PAST
    with pytest.raises(RequestError, match="must contain 1"):
        codec.decode_forward_backward(body.replace(b"importance_sampling", b"ppo"), codec.JSON)


"""Bounds that earlier versions took."""


def ppo(**config: float) -> dict[str, Any]:
    inputs = {"target_tokens": [6, 7], "logprobs": [-6.0, -6.5], "advantages": [1.0, -1.0]}
    data = [{"model_input": [5, 6], "loss_fn_inputs": inputs}]
    return {"data": data, "loss_fn": "ppo", "loss_fn_config": config}


@pytest.mark.anyio
async def test_what_an_earlier_version_trained_with_such_bounds_is_rebuilt_as_it_ran(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path)
    async with running_server(config, dispatch) as server:
        run = await server.create_run()
        start = (await run.do("forward", **ppo()))["metrics"]["loss:sum"]
        with as_before():
            assert (await run.do("forward_backward", **ppo(**PAST)))["metrics"]["clip_fraction:mean"] == 1.0
            await run.do("forward_backward", **ppo())
            assert "error" not in await run.optim_step()
        trained = (await run.do("forward", **ppo()))["metrics"]["loss:sum"]
        assert trained != pytest.approx(start, rel=1e-3)
    async with running_server(config, dispatch) as server:
        again = Run(server, run.model_id, run.session_id)
        again.numbers = run.numbers
        assert (await again.do("forward", **ppo()))["metrics"]["loss:sum"] == pytest.approx(trained, rel=1e-4)
        for verb, more in (("forward_backward", {}), ("create_evaluation", {"evaluation": {"name": "a", "every": 1}})):
            body = {"model_id": run.model_id, **ppo(**PAST), **more}
            refused = await server.clients[ALICE].post(verb, json=body)
            assert refused.status_code == 400 and "must contain 1" in refused.json()["detail"]


@pytest.mark.anyio
async def test_what_an_earlier_version_left_unfinished_with_such_bounds_runs_as_it_would_have(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path)
    async with running_server(config, dispatch) as server:
        run = await server.create_run()
        with as_before():
            clipped = await run.submit("forward_backward", seq_id=2, **ppo(**PAST))  # behind a gap
        step = await run.submit("optim_step", seq_id=3)
    async with running_server(config, dispatch) as server:
        await Run(server, run.model_id, run.session_id).submit("forward", seq_id=1, **ppo())
        assert (await server.result(clipped["request_id"]))["metrics"]["clip_fraction:mean"] == 1.0
        assert "metrics" in await server.result(step["request_id"])


@pytest.mark.anyio
async def test_an_evaluation_of_an_earlier_version_with_such_bounds_goes_on(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path)
    async with running_server(config, dispatch) as server:
        run = await server.create_run()
        with as_before():
            created = await run.do("create_evaluation", **ppo(**PAST), evaluation={"name": "held", "every": 1})
            assert "error" not in created
    async with running_server(config, dispatch) as server:
        again = Run(server, run.model_id, run.session_id)
        again.numbers = run.numbers
        assert "metrics" in await again.do("forward_backward", **ppo())
        assert "evaluation/held/loss:mean" in (await again.optim_step())["metrics"]
