"""An empty operation from the official SDK to the worker and back, layer by layer, alone and beside waiting futures."""

import os
from pathlib import Path

import tinker

from ..live import live_server
from .empty_operation import layers
from .report import Line, Section
from .workload import MODEL, RANK, datum


def latency(model: Path, scratch: Path, pool: str, rounds: int) -> Section:
    with (
        live_server({MODEL: model}, scratch / "latency", pool=pool, threads=os.cpu_count() or 1) as server,
        tinker.ServiceClient(base_url=server.url, api_key="tml-bench") as service,
    ):
        client = service.create_lora_training_client(MODEL, rank=RANK, seed=0, train_unembed=False).result(60)
        medians = layers(model, MODEL, server.url, client, datum(list(range(3, 12))))
    table = [{"up to": layer, "median ms": median} for layer, median in medians.items()]
    above = Line("median above the model's own time, ms", medians["sdk"] - medians["worker"], "at most", 4)
    return Section("An empty operation: forward of one 8-token sequence", table, [above])
