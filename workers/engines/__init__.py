"""Engines: where sampling of a base model happens. Loads neither torch nor ray: the work is done by other processes."""

from .copies import AdapterCopies
from .engine import Engine
from .sampler_groups import SamplerGroups
from .training_workers import TrainingWorkers
from .vllm import Vllm
from .vllm_process import VllmProcess
from .vllm_server import VllmAt

__all__ = ["AdapterCopies", "Engine", "SamplerGroups", "TrainingWorkers", "Vllm", "VllmAt", "VllmProcess"]
