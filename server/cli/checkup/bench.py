"""`trainhouse bench`: measures how fast a server trains and samples a model, next to the peak of its own devices."""

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from ....client.data import Datum
from ....client.errors import PermissionDeniedError
from ....client.sampling import SamplingClient
from ....client.service import ServiceClient
from ....client.training import TrainingClient
from ....schemas.sampling import SamplingParams
from ....schemas.training import AdamParams
from ..options import new_app
from ..output import print_json, print_table, spinner
from ..remote.server import Server, through_server

app = new_app()

_TOKENS = range(3, 200)
"""Ids that every vocabulary has. The time of a pass does not depend on them."""
_WARM_STEPS = 2
_SMALL_STEPS = 20
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Load:
    """The work to measure."""

    sequences: int = 4
    """Sequences of a batch, and samples drawn at a time."""
    length: int = 256
    """Tokens of each sequence."""
    steps: int = 5
    rank: int = 16


@dataclass(frozen=True)
class BenchResult:
    """The measured speeds; medians over the steps. Shares are those of `peak_flops`."""

    step_seconds: float
    training_tokens_per_second: float
    training_share: float | None
    small_step_seconds: float
    """A step with one sequence of eight tokens, from the client's call to its answer."""
    sampling_tokens_per_second: float
    sampling_share: float | None
    peak_flops: float | None
    """A product of large matrices, measured when the server loaded the model; None if the model runs by transformers'
    modules, or the key may not see the workers."""


@app.command()
@through_server
def bench(
    server: Server,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Served name of a base model.")],
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of a batch.")] = Load.sequences,
    length: Annotated[int, typer.Option(min=8, help="Tokens of each.")] = Load.length,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = Load.steps,
    rank: Annotated[int, typer.Option(min=1, help="LoRA rank.")] = Load.rank,
) -> None:
    """Measure a server's speed on random tokens: steps of an adapter, and samples. Other work slows it down."""
    with spinner(f"training and sampling {model}"), server.client() as service:
        speeds = measure(service, model, Load(sequences, length, steps, rank))
    if server.as_json:
        print_json({"model": model, **asdict(speeds)})
    else:
        print_table(("", ""), rows_of(speeds))


def rows_of(speeds: BenchResult) -> list[tuple[str, str]]:
    peak = "" if speeds.peak_flops is None else f" of {speeds.peak_flops / 1e12:.3g} TFLOP/s"
    return [
        ("training", f"{speeds.training_tokens_per_second:,.0f} tokens/s{_share(speeds.training_share)}{peak}"),
        ("a step of them", f"{speeds.step_seconds * 1e3:,.1f} ms"),
        ("a step of 8 tokens", f"{speeds.small_step_seconds * 1e3:,.1f} ms"),
        ("sampling", f"{speeds.sampling_tokens_per_second:,.0f} tokens/s{_share(speeds.sampling_share)}{peak}"),
    ]


def _share(share: float | None) -> str:
    return "" if share is None else f", {share:.1%}"


def measure(service: ServiceClient, model: str, load: Load) -> BenchResult:
    """Trains a new adapter and samples it. Raises TrainhouseError."""
    client = service.create_lora_training_client(model, rank=load.rank, seed=0)
    batch = [_datum(load.length, start) for start in range(load.sequences)]
    timed = [_step(client, batch) for _ in range(_WARM_STEPS + load.steps)][_WARM_STEPS:]
    small = [_step(client, [_datum(8, 0)])[0] for _ in range(_WARM_STEPS + _SMALL_STEPS)][_WARM_STEPS:]
    seconds = statistics.median(seconds for seconds, _ in timed)
    shares = [share for _, share in timed if share is not None]
    sampler = client.save_weights_and_get_sampling_client()
    sampled = [_sampling_rate(sampler, load) for _ in range(2)][-1]
    try:
        utilization = service.get_workers().utilization.get(model)
    except PermissionDeniedError:  # only operators see the workers
        utilization = None
    return BenchResult(
        step_seconds=seconds,
        training_tokens_per_second=load.sequences * load.length / seconds,
        training_share=statistics.median(shares) if shares else None,
        small_step_seconds=statistics.median(small),
        sampling_tokens_per_second=sampled,
        sampling_share=utilization.sampling if utilization else None,
        peak_flops=utilization.peak_flops if utilization else None,
    )


def _step(client: TrainingClient, batch: list[Datum]) -> tuple[float, float | None]:
    """Returns the seconds of a step, and the share of the peak that its pass reached."""
    began = time.perf_counter()
    passed = client.forward_backward(batch, "cross_entropy")
    client.optim_step(AdamParams(learning_rate=1e-5)).result(_TIMEOUT_SECONDS)
    return time.perf_counter() - began, passed.result().metrics.get("mfu:mean")


def _datum(length: int, start: int) -> Datum:
    tokens = [_TOKENS[(start + 7 * position) % len(_TOKENS)] for position in range(length + 1)]
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": [1.0] * length})


def _sampling_rate(sampler: SamplingClient, load: Load) -> float:
    params = SamplingParams(max_tokens=load.length, min_tokens=load.length - 1, seed=0)
    began = time.perf_counter()
    answer = sampler.sample(_datum(8, 0).tokens, load.sequences, params).result(_TIMEOUT_SECONDS)
    return sum(len(sequence.tokens) for sequence in answer.sequences) / (time.perf_counter() - began)
