"""Sampling engines of a base model. Loads neither torch nor ray: other processes do the work."""
