"""The sampler: SAMPLERS maps the name of an engine to its class."""

from .multi_model import MultiModelSampler

SAMPLERS = {"native": MultiModelSampler}
