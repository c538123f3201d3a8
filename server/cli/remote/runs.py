"""`trainhouse runs`: lists training runs, and shows what a run has done while it does it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ....schemas.history import RunMetrics
from ...text.spreadsheet import cell_text
from ..options import new_app
from ..output import print_table, size
from .server import Server, through_server
from .watching import RunReader, watch_run

app = new_app("List training runs, and show what they do.")

Run = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run, as `trainhouse runs list` shows it.")]
Limit = Annotated[int, typer.Option(min=1, help="How many to list.")]
Offset = Annotated[int, typer.Option(min=0, help="How many to skip.")]


@app.command("list")
@through_server
def list_runs(
    server: Server,
    search: Annotated[
        str, typer.Option(metavar="TEXT", help="Only runs with it in id, base model, metadata or session name.")
    ] = "",
    limit: Limit = 20,
    offset: Offset = 0,
) -> None:
    """List your training runs, the last used first."""
    found = server.ask(lambda rest: rest.list_training_runs(limit, offset, search))
    rows = [
        (run.training_run_id, run.display_name or "", run.base_model, run.model_role, run.lora_rank,
         run.last_request_time, "corrupted" if run.corrupted else "")
        for run in found.training_runs
    ]  # fmt: skip
    server.print(found, lambda: print_table(("RUN", "NAME", "BASE MODEL", "ROLE", "RANK", "LAST USED", ""), rows))


@app.command()
@through_server
def show(server: Server, run: Run) -> None:
    """Show one training run: its model, its checkpoints and the steps that it has taken."""
    with server.client() as service:
        rest = service.create_rest_client()
        found = rest.get_training_run(run).result()
        saved = rest.list_checkpoints(run).result().checkpoints
        metrics = rest.get_metrics(run, limit=100_000, points=1).result() if not server.as_json else None

    def print_text() -> None:
        fields = found.model_dump(exclude={"last_checkpoint", "last_sampler_checkpoint", "schedules"})
        print_table(("", ""), [(name, value) for name, value in fields.items() if value not in (None, {})])
        if saved:
            print()
            rows = [(each.tinker_path, each.time, size(each.size_bytes)) for each in saved]
            print_table(("CHECKPOINT", "SAVED", "SIZE"), rows)
        if metrics is not None and metrics.training.steps:
            print(f"\nsteps: to {metrics.training.steps[-1]}; curves: trainhouse runs watch {run}")

    server.print(found, print_text)


@app.command()
@through_server
def metrics(
    server: Server,
    run: Run,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a CSV of all steps.")] = None,
) -> None:
    """Print the metrics of every optimizer step, and those that the client has logged."""
    with server.client() as service:
        found = RunReader(service.create_rest_client(), run).read()
    if csv is not None:
        csv.write_text("\n".join(_csv_lines(found)) + "\n")
    series = found.training
    shown = [name for name in ("loss:mean", "learning_rate", "unclipped_grad_l2:mean", "tokens", "tokens_per_second",
                               "step_seconds", "queued_seconds") if name in series.metrics]  # fmt: skip
    columns = [[None if value is None else f"{value:.6g}" for value in series.metrics[name]] for name in shown]
    server.print(found, lambda: print_table(("STEP", *shown), zip(series.steps, *columns, strict=True)))


def _csv_lines(found: RunMetrics) -> list[str]:
    lines = ["series,step,time,metric,value"]
    for series, of_series in (("training", found.training), ("logged", found.logged)):
        for name, values in of_series.metrics.items():
            quoted = json.dumps(cell_text(name)).replace('\\"', '""')
            lines += [
                f"{series},{step},{time!r},{quoted},{value!r}"
                for step, time, value in zip(of_series.steps, of_series.times, values, strict=True)
                if value is not None
            ]
    return lines


@app.command()
@through_server
def operations(server: Server, run: Run, limit: Limit = 20) -> None:
    """List the last operations of a run: how long each waited for others and ran, and why it failed."""
    found = server.ask(lambda rest: rest.list_operations(run, limit=limit))
    rows = [
        (each.seq_id, each.kind, each.step, each.ended_at, f"{each.queued_seconds:.3f}", f"{each.busy_seconds:.3f}",
         each.num_tokens, each.error or "")
        for each in found.operations
    ]  # fmt: skip
    head = ("SEQ", "OPERATION", "STEP", "ENDED", "WAITED s", "RAN s", "TOKENS", "ERROR")
    server.print(found, lambda: print_table(head, rows))


@app.command()
@through_server
def watch(
    server: Server,
    run: Run,
    metric: Annotated[
        list[str] | None, typer.Option(help="Metric to draw; repeatable (loss, rewards, gradient norm, speed).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="End after this step (Ctrl-C ends it, too).")] = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Draw what there is, and end.")] = False,
) -> None:
    """Draw a run's curves as it trains. Without a terminal, or with --json: a line for each new step."""
    with server.client() as service:
        reader = RunReader(service.create_rest_client(), run)
        watch_run(reader, metric or (), steps, interval, once, server.as_json)
