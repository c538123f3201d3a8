"""The parts of a layer as a model's family declares them: sequence mixers and feed-forward parts.

A part says what weights it has, how ranks divide them, which linear layers adapters adapt, what the sampler caches, and
what a pass keeps and computes. Plans, checks, sharding, adapters, caches and utilization are derived from that. Imports
no torch.
"""

from .dense import Dense
from .gated_delta import GatedDelta
from .indexer import Indexer
from .latent_attention import LatentAttention
from .layer import PARTS, FeedForward, Layer, Norms
from .mamba import Mamba
from .mixer import Attention, Mixer, QueryGrowth
from .part import FLOAT32, CacheEntries, Divisible, Flops, IndexFlops, Part, Placement, Share, View, Weight
from .routed_experts import ExpertNorms, RoutedExperts
from .softmax_attention import OutputGate, SoftmaxAttention

__all__ = [
    "FLOAT32",
    "PARTS",
    "Attention",
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
