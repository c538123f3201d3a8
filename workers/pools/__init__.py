"""The processes: pools start the ranks of a group, call methods on them, notice their death. Know no verb.

One promise, kept in several ways: LocalPool (processes of this machine) and RayPool (an actor per rank).
"""

from .base import NoPlace, PerRank, Pool, PoolSpec, WorkerDied, WorkerError
from .local import LocalPool
from .ray import RayPool
from .ray_cluster import RayCluster

__all__ = [
    "LocalPool",
    "NoPlace",
    "PerRank",
    "Pool",
    "PoolSpec",
    "RayCluster",
    "RayPool",
    "WorkerDied",
    "WorkerError",
]
