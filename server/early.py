"""What `trainhouse serve` refuses before the server's packages are loaded, which takes seconds: impossible layouts.

Only what flags say is looked at, and models that are on this machine; anything else is found when they are loaded.
"""

import argparse
import sys
from collections.abc import Sequence

from ..workers.parallel.checks import check_layout
from ..workers.parallel.shape import model_directory, read_model
from ..workers.parallel.spec import SINGLE, ParallelSpec
from .values import AUTO, ConfigError, parse_served_model

FAILED = 1
WRONGLY_USED = 2


def refused(arguments: Sequence[str]) -> int:
    """The exit status, once the reason is said; 0 = nothing is known against them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--parallel", default=str(SINGLE))
    parser.add_argument("--base-model", action="append", default=[])
    try:
        options, _ = parser.parse_known_args(arguments)
        _check(options.parallel, options.base_model)
    except argparse.ArgumentError:
        return 0
    except ValueError as error:
        print(f"trainhouse serve: error: {error}", file=sys.stderr)
        return WRONGLY_USED if isinstance(error, ConfigError) else FAILED
    return 0


def _check(layout: str, base_models: Sequence[str]) -> None:
    if layout == AUTO:
        return
    try:
        spec = ParallelSpec.parse(layout)
    except ValueError as error:
        raise ConfigError(f"--parallel: {error}") from None
    if spec == SINGLE:
        return
    for model in map(parse_served_model, base_models):
        if model_directory(model.source) is not None:
            check_layout(spec, read_model(model))
