"""Reference models: policies that are never trained, with whose log-probabilities others are compared."""

from ..losses import LOSSES
from ..state.program import Program

REFERENCE = Program("reference", "logprobs", LOSSES, trains=False, samples=False)
