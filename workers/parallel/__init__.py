"""Parallelism over the ranks of one base model: rank groups, collectives and the division of tokens."""
