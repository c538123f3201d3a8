"""The cost of seeing what a server does: metrics, history, log and traces, with and without them."""

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import httpx
import numpy as np
from trainhouse.schemas.codec import PROTOBUF, encode_forward_backward_request

from .harness import (
    Line,
    Section,
    Setup,
    batches,
    child,
    create_run,
    in_turn,
    median_ratio,
    num_tokens,
    request,
    rest,
    timed,
)
from .processes.clients import EMPTY_ROW
from .training import cpu_seconds

BATCH = "16x128"
STEPS, OPERATIONS, WARM_UPS = 20, 400, 20
"""Measured in a round of the benchmark, and before the first."""
BLOCKS, PER_BLOCK = 4, 100
"""Empty operations of one side in a row, in a round, for so long that what is recorded later falls into them, too."""

SERVER_OFF = "trainhouse.tests.benchmarks.processes.unobserved"
WAIT = {"Accept": PROTOBUF, "Prefer": "wait=30"}


def observability(setup: Setup) -> Section:
    with ExitStack() as stack:
        collector = stack.enter_context(child("collector"))
        with _environment("OTEL_EXPORTER_OTLP_ENDPOINT", collector.receive()):
            servers = {"on": stack.enter_context(setup.server("observed"))}
        servers["off"] = stack.enter_context(setup.server("unobserved", module=SERVER_OFF))
        clients = {side: stack.enter_context(rest(server.url)) for side, server in servers.items()}
        spent = {side: cpu_seconds(server)[0] for side, server in servers.items()}
        operate = {side: _operation(http) for side, http in clients.items()}
        operations = _in_turn(operate, setup.rounds * OPERATIONS)
        per_operation = {side: cpu_seconds(server)[0] - spent[side] for side, server in servers.items()}
        blocks = _in_turn({side: partial(_block, each) for side, each in operate.items()}, setup.rounds * BLOCKS, 1)
        steps = _in_turn({side: _step(http) for side, http in clients.items()}, setup.rounds * STEPS)
        num_spans = collector.ask(None)
        assert num_spans > len(operations["on"]), f"only {num_spans} spans were exported"
        assert [_counts(http) for http in clients.values()] == [True, False], "the two sides do not differ"
    num_operations = len(operations["on"]) + WARM_UPS
    table = [
        {
            "side": side,
            "empty operation, ms": statistics.median(operations[side]),
            f"mean in blocks of {PER_BLOCK}, ms": statistics.mean(blocks[side]) / PER_BLOCK,
            "of the server's processor, ms": 1000 * per_operation[side] / num_operations,
            f"step of {BATCH}, ms": statistics.median(steps[side]),
            "tokens/s": 1000 * num_tokens(batches()[BATCH]) / statistics.median(steps[side]),
        }
        for side in servers
    ]
    more = _longer(operations["on"], operations["off"])
    lines = [
        Line("an empty operation takes longer by, ms", more, "at most", 0.2),
        Line(f"tokens/s of {BATCH} with, of that without", median_ratio(steps["off"], steps["on"]), "at least", 0.99),
    ]
    notes = [
        "on: as configured, with traces of everything to a collector on this "
        f"machine, which competes for its cores ({num_spans} spans). off: nothing of it. An operation is a forward of "
        "8 tokens with its result, in one exchange over HTTP; single operations, blocks and steps take turns. What is "
        "recorded a quarter of a second after an operation is in the mean of blocks, but not in the median of single "
        "operations."
    ]
    return Section("Metrics, history, log and traces", table, lines, notes)


def _longer(on: Sequence[float], off: Sequence[float]) -> float:
    """Returns the median of by how much `on` takes longer, over two rounds each.

    The second side of a round is slower, so single differences have two peaks, with their median in the gap.
    """
    more = np.array(on) - np.array(off)
    return float(np.median(more[: len(more) // 2 * 2].reshape(-1, 2).mean(1)))


def _in_turn(
    sides: Mapping[str, Callable[[], object]], number: int, warm_ups: int = WARM_UPS
) -> dict[str, list[float]]:
    """Returns the milliseconds of each call."""
    timers = {side: partial(timed, work) for side, work in sides.items()}
    return {side: [1000 * each for each in found] for side, found in in_turn(timers, number, warm_ups).items()}


def _operation(http: httpx.Client) -> Callable[[], object]:
    content = encode_forward_backward_request(request(create_run(http), [EMPTY_ROW], 0, forward_only=True))
    headers = WAIT | {"Content-Type": PROTOBUF}
    return lambda: http.post("forward_backward", content=content, headers=headers).raise_for_status()


def _block(operate: Callable[[], object]) -> None:
    for _ in range(PER_BLOCK):
        operate()


def _step(http: httpx.Client) -> Callable[[], object]:
    run_id = create_run(http)
    content = encode_forward_backward_request(request(run_id, batches()[BATCH], 0))
    body = {"model_id": run_id, "seq_id": 0, "adam_params": {"learning_rate": 1e-4}}

    def step() -> None:
        http.post("forward_backward", content=content, headers={"Content-Type": PROTOBUF}).raise_for_status()
        http.post("optim_step", json=body, headers=WAIT).raise_for_status()

    return step


def _counts(http: httpx.Client) -> bool:
    return "trainhouse_operation_busy_seconds_count" in http.get(str(http.base_url.join("/metrics"))).text


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
