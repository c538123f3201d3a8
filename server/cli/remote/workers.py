"""`trainhouse workers`: what a server's workers hold, and how much of their devices' speed they use."""

import typer

from ...config.option_values import ConfigError
from ..options import new_app
from ..output import print_table
from .server import Server, through_server

app = new_app()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@through_server
def workers(server: Server, context: typer.Context) -> None:
    """Show what each group of workers holds in memory; the key needs the scope operator."""
    if context.args:
        from ...config.load import WORKERS_ARE_ON_RAY  # imported late, as it needs the server's packages

        raise ConfigError(f"unknown argument {context.args[0]}: {WORKERS_ARE_ON_RAY}")
    with server.client() as service:
        found = service.get_workers()

    def print_text() -> None:
        rows = [(name, purpose, number) for name, held in found.groups.items() for purpose, number in held.items()]
        print_table(("GROUP", "", ""), rows)
        used = []
        for name, one in found.utilization.items():
            shares = ("" if share is None else f"{share:.1%}" for share in (one.training, one.sampling))
            used.append((name, f"{one.peak_flops:.3g}", *shares))
        if used:
            print()
            print_table(("GROUP", "PEAK FLOP/S", "TRAINING", "SAMPLING"), used)

    server.print(found, print_text)
