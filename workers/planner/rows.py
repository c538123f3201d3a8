"""The planner's rows in the tables of a rank. Imports no torch."""

from .micro_batches import tokens_that_fit

MICRO_BATCH_RULES = {"default": tokens_that_fit}
