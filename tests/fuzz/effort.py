"""The number of inputs: a few fixed ones in a run of the tests, many new ones in the long run."""

import os

from hypothesis import HealthCheck, settings

MANY = int(os.environ.get("TRAINHOUSE_FUZZ_EXAMPLES", "100"))
"""Inputs for each route and decoder in the long run."""


def effort(num_examples: int) -> settings:
    return settings(
        max_examples=num_examples,
        derandomize=num_examples < MANY,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
