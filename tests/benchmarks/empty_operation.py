"""Where the time of an empty operation (a `forward` of one 8-token sequence) goes, layer by layer."""

import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import tinker
from trainhouse.schemas.codec import PROTOBUF, encode_forward_backward_request
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.training import Datum, ForwardBackwardRequest
from trainhouse.workers.config import ServedModel, WorkerConfig
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.verbs import Part, Pass, RunSpec
from trainhouse.workers.worker import Worker

_ROUNDS, _WARMUP = 100, 20
_LORA = LoraConfig(rank=8, seed=0, train_unembed=False)


def layers(
    model: Path, name: str, url: str, client: tinker.TrainingClient, sdk_datum: tinker.Datum
) -> dict[str, float]:
    """Layer -> median milliseconds of the whole operation as called at that layer."""
    config = WorkerConfig(ServedModel(name, str(model)), threads=1)
    return {
        "worker": _in_process(config),
        "dispatch": asyncio.run(_through_the_dispatch(config)),
        "http": _over_http(url, name),
        "sdk": _median(lambda: client.forward([sdk_datum], "cross_entropy").result(60)),
    }


def _request(run_id: str, seq_id: int) -> ForwardBackwardRequest:
    tokens = np.arange(3, 11, dtype=np.int32)
    inputs = {"target_tokens": tokens.astype(np.int64) + 1, "weights": np.ones(8, np.float32)}
    return ForwardBackwardRequest(run_id, seq_id, (Datum(tokens, inputs),), "cross_entropy", forward_only=True)


def _median(call: Callable[[], object]) -> float:
    def timed() -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return round(1e3 * statistics.median([timed() for _ in range(_WARMUP + _ROUNDS)][_WARMUP:]), 2)


def _in_process(config: WorkerConfig) -> float:
    worker = Worker(config)
    worker.create_run(RunSpec("run", _LORA))
    return _median(lambda: worker.run_pass(Pass((Part(0, _request("run", 1)),))))


async def _through_the_dispatch(config: WorkerConfig) -> float:
    dispatch = WorkerDispatch(DispatchConfig(models=(config,), pool="local"))
    await dispatch.start(lambda message: None)
    try:
        await dispatch.create_run(config.model.name, RunSpec("run", _LORA), "tenant")
        times = []
        for seq_id in range(_WARMUP + _ROUNDS):
            started = time.perf_counter()
            await dispatch.forward_backward(_request("run", seq_id))
            times.append(time.perf_counter() - started)
        return round(1e3 * statistics.median(times[_WARMUP:]), 2)
    finally:
        await dispatch.close()


def _over_http(url: str, base_model: str) -> float:
    """Submit and result in one exchange (`Prefer: wait`), protobuf both ways, on one connection."""
    with httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": "tml-bench", "Prefer": "wait=30"}) as http:

        def post(path: str, body: dict) -> dict:
            return http.post(path, json=body).raise_for_status().json()

        session = post("create_session", {"sdk_version": "0.38.0"})["session_id"]
        lora = _LORA.model_dump()
        body = {"session_id": session, "model_seq_id": 0, "base_model": base_model, "lora_config": lora}
        run_id = post("create_model", body)["model_id"]
        content = encode_forward_backward_request(_request(run_id, 0))
        headers = {"Content-Type": PROTOBUF, "Accept": PROTOBUF}
        return _median(lambda: http.post("forward_backward", content=content, headers=headers).raise_for_status())
