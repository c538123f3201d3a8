"""Policies: causal language models, trained by losses on the log-probabilities of tokens."""

from ..losses import LOSSES
from ..state.program import Program

POLICY = Program("policy", "logprobs", LOSSES)
