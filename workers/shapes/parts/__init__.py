"""The parts of a layer as a model's family declares them: sequence mixers and feed-forward parts.

A part says what weights it has, how ranks divide them, which linear layers adapters adapt, what the sampler caches, and
what a pass keeps and computes. Plans, checks, sharding, adapters, caches and utilization are derived from that. Imports
no torch.
"""

from .dense import Dense
from .gated_delta import GatedDelta
from .latent_attention import Indexer, LatentAttention
from .layer import PARTS, FeedForward, Layer, Mixer, Norms
from .mamba import Mamba
from .part import FLOAT32, CacheEntries, Divisible, Flops, IndexFlops, Part, Placement, Share, View, Weight
from .query_growth import QueryGrowth
from .routed_experts import ExpertNorms, RoutedExperts
from .softmax_attention import OutputGate, SoftmaxAttention

__all__ = [
    "FLOAT32",
    "PARTS",
    "CacheEntries",
    "Dense",
    "Divisible",
    "ExpertNorms",
    "FeedForward",
    "Flops",
    "GatedDelta",
    "IndexFlops",
    "Indexer",
    "LatentAttention",
    "Layer",
    "Mamba",
    "Mixer",
    "Norms",
    "OutputGate",
    "Part",
    "Placement",
    "QueryGrowth",
    "RoutedExperts",
    "Share",
    "SoftmaxAttention",
    "View",
    "Weight",
]
