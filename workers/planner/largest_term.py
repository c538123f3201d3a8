"""Names the largest term of a rank's memory and its usual remedy. Imports no torch."""

from dataclasses import asdict

from ..resources.machine import gigabytes
from .group_memory import RankBytes
from .workload import Workload

_SHORTER = "lower --max-context-length and --micro-batch-tokens"
_REMEDIES = {
    "weights": "divide them among more ranks (tp), or pack them (--base-quantization nf4)",
    "kv_cache": "lower --kv-cache-bytes",
    "activations": _SHORTER,
    "buffers": "use tp in place of fsdp",
}


def largest_term(memory: RankBytes, load: Workload) -> str:
    """Returns a sentence such as "most of it is key/value cache, 8.6 GB: lower --kv-cache-bytes"."""
    name = _largest(memory)
    return f"most of it is {term_words(name)}, {gigabytes(getattr(memory, name))}: {remedy_of(memory, load)}"


def remedy_of(memory: RankBytes, load: Workload) -> str:
    name = _largest(memory)
    if name == "activations" and load.activations == "keep":
        return f"use --activations recompute, or {_SHORTER}"
    return _REMEDIES.get(name) or (f"lower {load.slots_flag}" if load.slots > 1 else "use larger devices")


def term_words(name: str) -> str:
    return name.replace("kv_cache", "key/value cache").replace("_", " ")


def _largest(memory: RankBytes) -> str:
    terms = asdict(memory)
    return max(terms, key=terms.__getitem__)
