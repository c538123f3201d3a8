"""`trainhouse serve`: its flags, its help, and what is refused before anything is loaded."""

import argparse
from dataclasses import replace

from ...workers.planner.checks import cuda_devices
from ...workers.scheduler.supervision.pool_factory import check_layouts
from ...workers.shapes.model_shape import refuse_missing_weights
from ..config.load import load_config
from ..config.server_config import KNOBS, ServerConfig
from ..logs.setup import configure_logging
from ..replication.state_lock import check_database_kind
from .knob_flags import CONFIG_ROW, Commands, PrintText, add_knobs, given, row, rows_by_section, table

_USAGE = "trainhouse serve --base-model NAME[=PATH_OR_HUB_ID] [FLAGS]"


def add_serve(commands: Commands) -> None:
    parser = commands.add_parser("serve", usage=_USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action=PrintText, text=serve_help, help=argparse.SUPPRESS)
    parser.add_argument("--help-all", action=PrintText, text=serve_help_all, help=argparse.SUPPRESS)
    add_knobs(parser, KNOBS.values())
    parser.set_defaults(run=_serve)


def serve_help() -> str:
    """Returns the common knobs' help, which fits one screen of 24 lines and 80 columns."""
    rows = [*(row(knob) for knob in KNOBS.values() if knob.common), CONFIG_ROW, ("--help-all", "every knob")]
    return f"""\
usage: {_USAGE}

{table(rows)}

A flag overrides TRAINHOUSE_<KNOB> in the environment, which overrides --config.
Example: trainhouse serve --base-model Qwen/Qwen3-0.6B=/models/Qwen3-0.6B"""


def serve_help_all() -> str:
    return f"""\
usage: {_USAGE}

{table(rows_by_section(KNOBS.values()))}

Every knob is a flag, a key of the file with _ for - (base_models: a list), and an environment variable
TRAINHOUSE_<KEY> (base models separated by commas). A flag overrides the environment, which overrides the file.
The file may group its keys in tables named like the sections. Sizes in bytes may be written as 256MiB."""


def _serve(options: argparse.Namespace) -> int:
    config = load_config(*given(options))
    _refuse_impossible_models(config)
    from ..serving.server_process import serve  # imports the whole application, which takes seconds

    configure_logging(config.process.log_level, config.process.log_format)
    check_database_kind(config.store_config())
    serve(config)
    return 0


def _refuse_impossible_models(config: ServerConfig) -> None:
    """Raises ValueError for what is known to fail before anything is loaded."""
    ranks = config.dispatch_config()
    if config.ranks.parallel is None:  # chosen later, and drafts depend on it
        ranks = replace(ranks, models=tuple(replace(model, draft_parallel=None) for model in ranks.models))
    check_layouts(ranks, cuda_devices())
    for model in config.models.base_models:
        refuse_missing_weights(model.source)
