"""Adapters of Mamba-2: they adapt gates and x, the first outputs of a projection whose others stay as they are."""

from pathlib import Path

import torch
from trainhouse.workers.lora import Segment
from trainhouse.workers.planner.trainable_memory import adapter_size
from trainhouse.workers.protocol.parallel_spec import SINGLE
from trainhouse.workers.shapes.model_shape import ModelShape

from ...tiny import tiny_model
from ..adapted import Adapted, relative_error, sequences

KINDS = {"gate_proj": 128, "x_proj": 128, "out_proj": 64}


def test_adapters_are_a_change_of_the_first_outputs(tmp_path: Path) -> None:
    bench = Adapted(tiny_model("granite4", tmp_path))
    adapter, tokens = bench.create("a", train_mlp=False), sequences()
    mixer = "model.layers.0.mamba"
    pairs = {kind: adapter.pairs[f"{mixer}.{kind}"] for kind in KINDS}
    assert {kind: len(pair.b) for kind, pair in pairs.items()} == KINDS
    whole = [Segment(0, sum(map(len, tokens)), adapter)]
    with torch.no_grad():
        found = bench.hidden(tokens, whole)
        weights = dict(bench.base.model.named_parameters())
        changes = {kind: pair.scale * pair.b @ pair.a for kind, pair in pairs.items()}
        weights[f"{mixer}.in_proj.weight"][:256] += torch.cat([changes["gate_proj"], changes["x_proj"]])
        weights[f"{mixer}.out_proj.weight"] += changes["out_proj"]
        for kind in KINDS:
            pairs[kind].b.zero_()
        wanted = bench.hidden(tokens, whole)
        weights[f"{mixer}.in_proj.weight"][256:] *= 1.1
        other = bench.hidden(tokens, whole)
    assert relative_error(found, wanted) < 1e-6
    assert relative_error(other, wanted) > 1e-4


def test_the_plan_counts_the_matrices_of_an_adapter(tmp_path: Path) -> None:
    bench = Adapted(tiny_model("nemotron_h", tmp_path))
    adapter, shape = bench.create("a", rank=16, train_unembed=False), bench.base.shape
    assert isinstance(shape, ModelShape)
    assert adapter_size(shape, SINGLE, 16) == adapter.weights.numel()
