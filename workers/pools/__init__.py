"""The processes: pools start the ranks of a group, call methods on them, notice their death. Know no verb.

One promise, kept in several ways: LocalPool (processes of this machine), RayPool (an actor per rank), and RemotePool
(those that another process has started with one of these, and keeps).
"""

from .base import NoPlace, PerRank, Pool, PoolSpec, WorkerDied, WorkerError
from .kept import Claim, KeptAt
from .local import LocalPool
from .ray import RayPool
from .ray_cluster import RayCluster
from .remote import RemotePool

__all__ = [
    "Claim",
    "KeptAt",
    "LocalPool",
    "NoPlace",
    "PerRank",
    "Pool",
    "PoolSpec",
    "RayCluster",
    "RayPool",
    "RemotePool",
    "WorkerDied",
    "WorkerError",
]
