"""Refuses some wrong uses of `trainhouse serve` before the server's packages are imported, which takes seconds.

Checks for impossible layouts, activations that a model cannot recompute or offload, and directories without weights.
Only flags, and models on this machine, are checked; everything else is checked when the models are loaded.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from ...workers.planner.checks import check_layout
from ...workers.protocol.parallel_spec import SINGLE, ParallelSpec
from ...workers.protocol.worker_config import ServedModel, WorkerConfig
from ...workers.shapes.draft_spec import check_drafts
from ...workers.shapes.model_shape import model_directory, read_model, refuse_missing_weights
from ..config.knob_values import AUTO, ENVIRONMENT_PREFIX, ConfigError, parse_layout, parse_served_model

FAILED = 1
WRONGLY_USED = 2


def check_arguments(arguments: Sequence[str]) -> int:
    """Prints the reason if the arguments are refused; returns the exit status, 0 if no problem was found."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--parallel", default=str(SINGLE))
    parser.add_argument("--shard", action="append", default=[])
    parser.add_argument("--config")
    parser.add_argument("--workers")
    parser.add_argument("--sampler-parallel", default=str(SINGLE))
    parser.add_argument("--draft-parallel")
    parser.add_argument("--role-group", action="append", default=[])
    parser.add_argument("--activations", default=WorkerConfig.activations)
    parser.add_argument("--base-model", action="append", default=[])
    try:
        options, _ = parser.parse_known_args(arguments)
        models = [parse_served_model(model) for model in options.base_model]
        spec = SINGLE if _may_be_set_elsewhere(options) else _spec(options.parallel, options.shard)
        _check_layout(spec, options.activations, models)
        _check_samplers(_spec(options.sampler_parallel, (), "--sampler-parallel"), models)
        if options.draft_parallel is not None:
            wanted = parse_layout(options.draft_parallel, (), "--draft-parallel")
            _check_drafts(wanted, spec, () if _drafts_may_differ(options) else models)
        for model in models:
            refuse_missing_weights(model.source)
    except argparse.ArgumentError:
        return 0
    except ValueError as error:
        print(f"trainhouse serve: error: {error}", file=sys.stderr)
        return WRONGLY_USED if isinstance(error, ConfigError) else FAILED
    return 0


def _may_be_set_elsewhere(options: argparse.Namespace) -> bool:
    """True if a part of the layout may be set in a file, in the environment or at the workers."""
    in_environment = any(f"{ENVIRONMENT_PREFIX}{name}" in os.environ for name in ("PARALLEL", "SHARD"))
    return in_environment or options.config is not None or options.workers is not None


def _drafts_may_differ(options: argparse.Namespace) -> bool:
    """True if drafts may run on ranks with a layout other than --parallel, or one not chosen yet."""
    in_environment = f"{ENVIRONMENT_PREFIX}ROLE_GROUPS" in os.environ
    is_open = options.parallel == AUTO or _may_be_set_elsewhere(options)
    return is_open or in_environment or bool(options.role_group)


def _check_layout(spec: ParallelSpec, activations: str, models: Sequence[ServedModel]) -> None:
    for model in models:
        if model_directory(model.source) is not None:
            check_layout(spec, read_model(model), activations=activations)


def _check_samplers(spec: ParallelSpec, models: Sequence[ServedModel]) -> None:
    try:
        _check_layout(spec, WorkerConfig.activations, models)
    except ValueError as error:
        raise ValueError(f"--sampler-parallel: {error}") from None


def _check_drafts(wanted: ParallelSpec, spec: ParallelSpec, models: Sequence[ServedModel]) -> None:
    for model in models:
        if model_directory(model.source) is not None:
            check_drafts(wanted, spec, read_model(model))


def _spec(layout: str, shard: Sequence[str], flag: str = "--parallel") -> ParallelSpec:
    """Returns the parsed layout, or SINGLE for auto, which is chosen later."""
    return SINGLE if layout == AUTO else parse_layout(layout, shard, flag)
