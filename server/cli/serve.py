"""`trainhouse serve`: its flags, its help, and what is refused before anything is loaded."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Annotated

import typer

from ...workers.resources.machine import cuda_devices
from ...workers.scheduler.supervision.pool_factory import check_layouts
from ...workers.shapes.model_shape import check_weight_files
from ..config.load import load_config
from ..config.option_values import ConfigError
from ..config.server_config import OPTIONS, ServerConfig
from ..files.state_lock import check_database_kind
from ..logs.setup import configure_logging
from ..telemetry.open_tracing import wants_traces
from .options import new_app, server_flag
from .output import spinner
from .server_flags import CONFIG_ROW, Sources, nearest_flag, reads_options, row, rows_by_section, table

_USAGE = "trainhouse serve --base-model NAME[=PATH_OR_HUB_ID] [FLAGS]"


app = new_app()


def serve_help() -> str:
    """Returns the common options' help, which fits one screen of 24 lines and 80 columns."""
    rows = [*(row(each) for each in OPTIONS.values() if each.common), CONFIG_ROW, ("--help-all", "every option")]
    return f"""\
usage: {_USAGE}

{table(rows)}

A flag overrides TRAINHOUSE_<KEY> in the environment, which overrides --config.
Example: trainhouse serve --base-model Qwen/Qwen3-0.6B=/models/Qwen3-0.6B"""


def serve_help_all() -> str:
    return f"""\
usage: {_USAGE}

{table(rows_by_section())}

Every option is a flag, a key of the file with _ for - (base_models: a list), and an environment variable
TRAINHOUSE_<KEY> (base models separated by commas). A flag overrides the environment, which overrides the file.
The file may group its keys in tables named like the sections. Sizes in bytes may be written as 256MiB."""


def _prints(text: Callable[[], str]) -> Callable[[bool], None]:
    def print_text(is_given: bool) -> None:
        if is_given:
            typer.echo(text())
            raise typer.Exit

    return print_text


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@reads_options(map(server_flag, OPTIONS.values()))
def serve(
    sources: Sources,
    context: typer.Context,
    help: Annotated[bool, typer.Option("--help", "-h", callback=_prints(serve_help), is_eager=True)] = False,
    help_all: Annotated[bool, typer.Option("--help-all", callback=_prints(serve_help_all), is_eager=True)] = False,
) -> None:
    if context.args:
        raise ConfigError(f"unknown argument {context.args[0]}{nearest_flag(context.args[0])}")
    config = load_config(*sources)
    _refuse_impossible_models(config)
    from ..serving.server_process import serve  # imports the whole application, which takes seconds

    configure_logging(config.process.log_level, config.process.log_format)
    wants_traces(os.environ)  # raises what is wrong before anything is loaded
    check_database_kind(config.store)
    with ExitStack() as loading:
        loading.enter_context(_spinner())
        serve(config, loading.close)


@contextmanager
def _spinner() -> Iterator[None]:
    """Shows on a terminal that models are loaded; what is printed and logged meanwhile appears above it."""
    with spinner("loading"), ExitStack() as streams:
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and (before := handler.setStream(sys.stderr)):
                streams.callback(handler.setStream, before)
        yield


def _refuse_impossible_models(config: ServerConfig) -> None:
    """Raises ValueError for what is known to fail before anything is loaded."""
    ranks = config.dispatch_config()
    if config.ranks.parallel is None:  # chosen later, and drafts depend on it
        ranks = replace(ranks, models=tuple(replace(model, draft_parallel=None) for model in ranks.models))
    check_layouts(ranks, cuda_devices())
    for model in config.models.base_models:
        check_weight_files(model.source)
