"""Layouts that `auto` chooses, from a model's declaration and the link between devices."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from trainhouse.workers.planner.estimate import estimate
from trainhouse.workers.planner.exchanges import rank_flops, sampling_cost, training_cost
from trainhouse.workers.planner.layout_search import (
    layout_that_fits,
    loads_with_fewer_activations,
    smallest_sampler_layout,
    usable_bytes,
)
from trainhouse.workers.planner.speeds import DEVICE_FLOPS, HOST, NVLINK, PCIE, Link, link_in, speeds_of
from trainhouse.workers.planner.workload import Workload
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec
from trainhouse.workers.resources.machine import keep_rate, measured_rate
from trainhouse.workers.shapes.model_shape import ModelShape, describe_model

from ..lineup import LINEUP

CONFIGS = Path(__file__).parents[1] / "configs"
DOCUMENT = Path(__file__).parents[3] / "docs" / "parallel.md"
WHOLE_ROW = next(row for row in DOCUMENT.read_text().splitlines() if row.startswith("| latent vectors of keys"))
DEVICE_BYTES = 80 * 10**9
LOAD = Workload(longest=16384)

# By model: the layouts to train, to train and sample on the same ranks, and to sample, on up to 16 devices with NVLink.
CHOICES = {
    "Llama-3.1-8B": ("sp=2", "tp=2", "single"),
    "Llama-3.1-70B": ("tp=4 recompute", "tp=4 recompute", "tp=4"),
    "Qwen3-30B-A3B": ("sp=2,tp=2", "tp=4", "single"),
    "Qwen3.5-9B": ("sp=4", "tp=4", "single"),
    "Qwen3.6-35B-A3B": ("sp=4,tp=2", "tp=2 recompute", "tp=2"),
    "gpt-oss-20b": ("sp=2", "tp=2", "single"),
    "gpt-oss-120b": ("tp=8", "tp=8", "tp=4"),
    "Nemotron-3-Nano-30B-A3B": ("sp=2,tp=2", "ep=2,tp=2", "single"),
    "Nemotron-3-Super-120B-A12B": ("ep=4,tp=2 recompute", "ep=4,tp=2 recompute", "ep=4,tp=2"),
    "gemma-4-26B-A4B": ("sp=2,tp=2", "sp=2,tp=2", "single"),
}

NVLINK_MATRIX = """
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tPIX\t0-51\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t52-103\t1\t\tN/A
NIC0\tPIX\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def public(name: str) -> ModelShape:
    config = LINEUP[name] if name in LINEUP else json.loads((CONFIGS / f"{name}.json").read_text())
    shape = describe_model(name, config)
    assert isinstance(shape, ModelShape)
    return shape


@pytest.mark.parametrize("name", CHOICES)
def test_training_divides_tokens_and_experts_and_sampling_heads_and_experts(name: str) -> None:
    shape, found = public(name), []
    for load in (replace(LOAD, samples=False), LOAD):
        loads = [load, *loads_with_fewer_activations(load)]
        choice = layout_that_fits(shape, loads, DEVICE_BYTES, 16)
        assert choice == layout_that_fits(shape, loads, DEVICE_BYTES, 16)
        costs = [each.cost.seconds for each in choice.candidates if each.cost is not None]
        assert choice.candidates[0].spec == choice.spec and costs == sorted(costs)
        assert choice.ways[0].activations == choice.load.activations and "offload" not in str(choice.ways[1:])
        assert [each.cost.seconds for each in choice.ways] == sorted(each.cost.seconds for each in choice.ways)
        for each in choice.candidates:
            fits = estimate(shape, each.spec, choice.load).total <= usable_bytes(DEVICE_BYTES)
            assert fits == (each.cost is not None)
        found.append(str(choice.spec) if choice.load.activations == "keep" else f"{choice.spec} recompute")
    sampler = smallest_sampler_layout(shape, LOAD, 4096, DEVICE_BYTES, 16)
    assert sampler.spec.num_ranks == sampler.spec.tp * sampler.spec.ep
    found.append(str(sampler.spec))
    assert tuple(found) == CHOICES[name]
    cells = (re.sub(r"^\S+", r"`\g<0>`", each) for each in found)
    assert f"| `{name}` | {' | '.join(cells)} |" in DOCUMENT.read_text()


def test_a_slower_link_changes_the_choice() -> None:
    """Sums over tp for every sampled token take longer there than reading weights."""
    shape = public("Qwen3.5-9B")
    fast, slow = (layout_that_fits(shape, [LOAD], DEVICE_BYTES, 8, speeds) for speeds in (NVLINK, PCIE))
    assert (str(fast.spec), str(slow.spec)) == ("tp=4", "sp=2,tp=2")
    assert fast.memory == estimate(shape, fast.spec, LOAD)


def test_bytes_of_a_pass_are_those_of_its_exchanges() -> None:
    """Llama-3.1-8B has 32 layers, hidden size 4096, and 8 key heads of 128."""
    load = replace(LOAD, samples=False)

    def sent(name: str, spec: str, load: Workload = load) -> float:
        return training_cost(public(name), ParallelSpec.parse(spec), load, NVLINK).sent

    # Two parts of a layer: gathered and summed, forward and backward; of which each rank sends half.
    assert sent("Llama-3.1-8B", "tp=2") == 32 * 2 * 4 * 4096 * 2 / 2
    # Queries, keys, values and the output of half of the tokens, of which a rank sends half.
    by_heads = 32 * 2 * (2 * 4096 + 2 * 1024) * 2 / 2 / 2
    assert sent("Llama-3.1-8B", "sp=2") == by_heads
    again = replace(load, activations="recompute")
    assert sent("Llama-3.1-8B", "sp=2", again) == 1.5 * by_heads
    # Eight experts of a token of half of the sequences: there and back twice, and there again.
    assert sent("Qwen3-30B-A3B", "ep=2") == 48 * 8 * 5 * 2048 * 2 / 2 / 2
    assert sent("Llama-3.1-8B", "replicas=2") == 0
    # Half of all weights of layers forward and backward, for the 8,192 tokens of a pass.
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    ends = 128256 * 4096
    assert sent("Llama-3.1-8B", "fsdp=2") == pytest.approx((2 * weights + 2 * ends) * 2 / 2 / 8192)


def test_products_of_a_pass_are_those_of_its_sizes() -> None:
    """Llama-3.1-8B has 32 layers of 4096 features, 32 and 8 heads of 128, and 14336 in between."""
    shape, load = public("Llama-3.1-8B"), replace(LOAD, samples=False)
    weights, head = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336), 128256 * 4096
    scores = 32 * 2 * 4096 * 16385 // 2  # a token sees half of the others

    def adapters(tp: int) -> int:
        within = 2 * (4096 + 4096 // tp) + 2 * (4096 + 1024 // tp) + 3 * (4096 + 14336 // tp)
        return 32 * 32 * within

    for tp in (1, 2):
        frozen, trained = (weights + head) // tp, adapters(tp)
        forward, backward = frozen + scores // tp + trained, frozen + 2 * scores // tp + 2 * trained
        found = rank_flops(shape, ParallelSpec(tp=tp, sp=2), load)
        assert found == 2 * (forward + backward)
        again = rank_flops(shape, ParallelSpec(tp=tp, sp=2), replace(load, activations="recompute"))
        assert again - found == 2 * (forward - head // tp)
    full = rank_flops(shape, SINGLE, replace(load, training="full"))
    assert full == 2 * 3 * (weights + head + scores)
    # A device computes the tokens of its own sequences, or its own part of these.
    for spec in ("replicas=4", "replicas=2,sp=2", "fsdp=4"):
        cost = training_cost(shape, ParallelSpec.parse(spec), load, NVLINK)
        assert cost.compute_seconds == rank_flops(shape, SINGLE, load) / 400e12 / 4
    by_tp = training_cost(shape, ParallelSpec(tp=2), load, NVLINK).compute_seconds
    assert by_tp == rank_flops(shape, ParallelSpec(tp=2), load) / 400e12


def test_ranks_along_tp_compute_latent_vectors_and_routers_each() -> None:
    """DeepSeek-V3.1 has 61 layers of 7168 features, latent vectors of 1536 and 576, and from the fourth layer on a
    router of 256 experts."""
    shape, load = public("DeepSeek-V3.1"), replace(LOAD, samples=False, training="full")
    whole = 61 * 7168 * (1536 + 576) + 58 * 7168 * 256
    one, eight = (rank_flops(shape, ParallelSpec(tp=tp), load) for tp in (1, 8))
    assert eight == pytest.approx(one / 8 + 7 / 8 * 2 * 3 * whole, rel=1e-9)
    assert eight > 1.1 * one / 8
    dense = public("Llama-3.1-8B")
    one, eight = (rank_flops(dense, ParallelSpec(tp=tp), load) for tp in (1, 8))
    assert eight == one / 8
    for name in ("Llama-3.1-8B", "DeepSeek-V3.1", "DeepSeek-V3.2"):
        for longest in (4096, 16384):
            adapters = Workload(longest, samples=False)
            one, eight = (rank_flops(public(name), ParallelSpec(tp=tp), adapters) for tp in (1, 8))
            assert f" {100 * (8 * eight / one - 1):.0f} %" in WHOLE_ROW
    # Indexers score all earlier tokens, with no gradient.
    chosen = public("DeepSeek-V3.2")
    index = 64 * 129 * 16385 / 2 + 64 * 128 * 1536 + 128 * 7168 + 64 * 7168
    one, eight = (rank_flops(chosen, ParallelSpec(tp=tp), load) for tp in (1, 8))
    assert eight == pytest.approx(one / 8 + 7 / 8 * 2 * (3 * whole + 61 * index), rel=1e-9)


def test_layers_are_recomputed_where_that_takes_less_time_than_a_wider_layout() -> None:
    """Layouts that keep activations need all of these devices, and gather all weights for each pass."""
    shape, load = public("DeepSeek-V3.1"), replace(LOAD, samples=False)
    loads, device = [load, *loads_with_fewer_activations(load)], 141 * 10**9
    choice = layout_that_fits(shape, loads, device, 64)
    assert (str(choice.spec), choice.load.activations) == ("ep=4,tp=4", "recompute")
    assert [(each.activations, str(each.spec)) for each in choice.ways] == [
        ("recompute", "replicas=4,ep=4,tp=4"),
        ("keep", "fsdp=2,ep=2,sp=4,tp=4"),
    ]
    again, kept = (each.cost for each in choice.ways)
    # The same 64 devices share the products, of which recomputing has more, and sends less.
    assert again.compute_seconds == rank_flops(shape, ParallelSpec(tp=4), choice.load) / 400e12 / 16
    assert kept.compute_seconds == rank_flops(shape, ParallelSpec(tp=4), load) / 400e12 / 16
    assert again.compute_seconds > kept.compute_seconds and again.pass_seconds < kept.pass_seconds / 8
    # The control: on links that cost nothing, products decide.
    free = Link("free", 1e18, 0.0)
    keeping = layout_that_fits(shape, loads, device, 64, replace(NVLINK, link=free, network=free))
    assert (keeping.spec.num_ranks, keeping.load.activations) == (64, "keep")
    slow = layout_that_fits(shape, loads, device, 64, replace(NVLINK, link=free, network=free, flops_per_second=1e9))
    assert slow.load.activations == "keep"
    # Without replicas a wider layout has more devices.
    alone = layout_that_fits(shape, loads, device, 64, with_replicas=False)
    assert [str(each.spec) for each in alone.ways] == ["ep=4,tp=4", "fsdp=2,ep=2,sp=4,tp=4"]
    assert alone.ways[0].cost.compute_seconds == 4 * again.compute_seconds


@pytest.mark.parametrize(
    ("name", "longest", "num_devices", "expected"),
    [
        ("gpt-oss-120b", 32768, 24, "replicas=3,tp=8"),
        ("gpt-oss-120b", 32768, 40, "replicas=5,tp=8"),
        ("Qwen3.6-35B-A3B", 8192, 6, "replicas=3,tp=2"),
        ("Qwen3.6-35B-A3B", 16384, 40, "replicas=20,tp=2"),
    ],
)
def test_ways_to_keep_activations_are_compared_with_replicas_on_all_devices(
    name: str, longest: int, num_devices: int, expected: str
) -> None:
    shape, load = public(name), Workload(longest=longest)
    loads = [load, *loads_with_fewer_activations(load)]
    choice = layout_that_fits(shape, loads, DEVICE_BYTES, num_devices)
    again, kept = choice.ways
    assert (again.activations, str(again.spec), kept.activations) == ("recompute", expected, "keep")
    assert choice.load.activations == "recompute" and again.spec == replace(choice.spec, replicas=again.spec.replicas)
    for each in choice.ways:
        of_replica = each.spec.num_ranks // each.spec.replicas
        assert each.spec.replicas == num_devices // of_replica
    # The control: keeping takes less time on as many devices as its own layout has.
    of_kept = kept.spec.num_ranks // kept.spec.replicas
    assert layout_that_fits(shape, loads, DEVICE_BYTES, of_kept).load.activations == "keep"
    assert layout_that_fits(shape, loads, DEVICE_BYTES).load.activations == "keep"


def test_teams_across_nodes_use_the_network() -> None:
    shape, load = public("Qwen3-30B-A3B"), replace(LOAD, samples=False)
    within, across = (training_cost(shape, ParallelSpec(ep=2, tp=tp), load, NVLINK) for tp in (4, 8))
    slow = replace(NVLINK, network=replace(NVLINK.network, bytes_per_second=1e9))
    assert training_cost(shape, ParallelSpec(ep=2, tp=4), load, slow) == within
    assert training_cost(shape, ParallelSpec(ep=2, tp=8), load, slow).pass_seconds > 2 * across.pass_seconds


def test_ranks_that_sample_together_read_fewer_weights() -> None:
    shape = public("Qwen3-30B-A3B")
    single, by_tp, by_ep, apart = (
        sampling_cost(shape, ParallelSpec.parse(spec), LOAD, NVLINK).decode_seconds
        for spec in ("single", "tp=2", "ep=2", "sp=2")
    )
    assert by_tp < by_ep < apart < single, "ep has all keys on each rank; with sp each rank reads all weights"


def test_nvidia_smi_reports_the_link() -> None:
    assert link_in(NVLINK_MATRIX) == "nvlink"
    assert link_in(NVLINK_MATRIX.replace("GPU0\t X \tNV18", "GPU0\t X \tPHB")) == "pcie"
    assert link_in("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n") is None and link_in("") is None


def test_the_link_is_named_or_found_or_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert speeds_of("pcie") == replace(PCIE, source="--device-link")
    assert speeds_of("auto", on_cpu=True) == replace(HOST, source="ranks on CPUs")
    assert speeds_of("auto") == NVLINK and NVLINK.source == "assumed"
    asked = tmp_path / "nvidia-smi"
    asked.write_text(f"#!/bin/sh\n[ \"$1\" = topo ] && echo '{NVLINK_MATRIX.replace('NV18', 'SYS')}'\n")
    asked.chmod(0o755)
    assert speeds_of("auto") == replace(PCIE, source="nvidia-smi")


def smi(directory: Path, name: str) -> None:
    """Installs an nvidia-smi that reports devices of this name, and no links."""
    asked = directory / "nvidia-smi"
    asked.write_text(f"#!/bin/sh\n[ \"$1\" = --query-gpu=name ] && echo '{name}\n{name}'\n")
    asked.chmod(0o755)


def test_products_take_the_rate_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert speeds_of("auto").rate_source == "assumed"
    rates = {}
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB", "NVIDIA RTX A1000"):
        smi(tmp_path, name)
        rates[name] = speeds_of("auto").flops_per_second / NVLINK.flops_per_second
    assert list(rates.values()) == pytest.approx([0.45 * each / 400e12 for each in (989e12, 756e12, 312e12)] + [1])
    assert speeds_of("nvlink", device="NVIDIA H200 NVL").flops_per_second == pytest.approx(0.45 * 835e12)
    assert speeds_of("nvlink", device="NVIDIA GH200 480GB").flops_per_second == pytest.approx(0.45 * 989e12)
    # What a worker measures later is what counts then, for devices of the same name.
    assert measured_rate("NVIDIA H100 PCIe") is None
    keep_rate("NVIDIA H100 PCIe", 600e12)
    smi(tmp_path, "NVIDIA H100 PCIe")
    found = speeds_of("auto")
    assert found.flops_per_second == pytest.approx(0.6 * 600e12)
    assert found.rate_source == "measured on NVIDIA H100 PCIe" and found.link == NVLINK.link
    # Devices elsewhere are named, or assumed.
    assert speeds_of("nvlink").flops_per_second == NVLINK.flops_per_second
    assert speeds_of("nvlink", device="B200").flops_per_second == pytest.approx(0.45 * DEVICE_FLOPS["B200"])
    with pytest.raises(ValueError, match=r"--device-name H10 is not one of A100, B200, GH200, H100, .*: leave it out"):
        speeds_of("auto", device="H10")


def test_a_rate_that_cannot_be_kept_or_read_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_rate("H100", 1e12)
    assert measured_rate("H100") is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_rate("H100", 1e12)
    (kept,) = (tmp_path / "trainhouse" / "product-rates").iterdir()
    for text in ("", "nan", "-1", "inf"):
        kept.write_text(text)
        assert measured_rate("H100") is None
