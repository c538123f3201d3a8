"""References: a policy that stays as it was loaded, whose log-probabilities others are compared with."""

from ..losses import LOSSES
from ..state.program import Program

REFERENCE = Program("reference", "logprobs", LOSSES, trains=False, samples=False)
