"""Layouts that `auto` chooses, from a model's declaration and the link between devices."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from trainhouse.workers.planner.device_rates import ASSUMED_FLOPS, DEVICE_FLOPS, Rate, link_in, link_of, rate_of
from trainhouse.workers.planner.estimate import estimate
from trainhouse.workers.planner.layout_search import (
    layout_that_fits,
    layouts,
    loads_with_fewer_activations,
    recomputing_pays,
    smallest_sampler_layout,
    usable_bytes,
)
from trainhouse.workers.planner.micro_batches import rank_flops
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
    "Qwen3.6-35B-A3B": ("sp=4,tp=2", "ep=2,sp=2,tp=2", "tp=2"),
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
        fitting = [
            each
            for each in layouts(shape, choice.spec.num_ranks)
            if estimate(shape, each, choice.load).total <= usable_bytes(DEVICE_BYTES)
        ]
        assert choice.spec in fitting and choice.spec.fsdp == min(each.fsdp for each in fitting)
        assert load.samples or choice.spec.ep == min(each.ep for each in fitting if each.fsdp == choice.spec.fsdp)
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
    fast, slow = (layout_that_fits(shape, [LOAD], DEVICE_BYTES, 8, link) for link in ("nvlink", "pcie"))
    assert (str(fast.spec), str(slow.spec)) == ("tp=4", "sp=4")
    assert fast.memory == estimate(shape, fast.spec, LOAD)


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


@pytest.mark.parametrize(
    ("fewer", "kept", "num_devices", "pays"),
    [
        ("tp=2", "sp=4", None, False),
        ("tp=2", "sp=4", 8, False),
        ("tp=2", "sp=4", 6, True),  # three replicas use all six devices, one of the other layout four
        ("tp=8", "sp=2,tp=8", None, True),
        ("tp=8", "sp=2,tp=8", 16, True),
        ("tp=8", "sp=8", 64, False),
    ],
)
def test_layers_are_recomputed_within_a_node_or_for_more_replicas(
    fewer: str, kept: str, num_devices: int | None, pays: bool
) -> None:
    assert recomputing_pays(ParallelSpec.parse(fewer), ParallelSpec.parse(kept), num_devices) == pays


def test_recomputed_layouts_are_compared_with_replicas_on_all_devices() -> None:
    shape, load = public("Qwen3.6-35B-A3B"), replace(LOAD, longest=8192)
    loads = [load, *loads_with_fewer_activations(load)]
    kept = layout_that_fits(shape, [load], DEVICE_BYTES).spec.num_ranks
    odd = 2 * kept - 1
    assert layout_that_fits(shape, loads, DEVICE_BYTES, odd).load.activations == "recompute"
    for number, replicas in ((kept, True), (None, True), (odd, False)):
        choice = layout_that_fits(shape, loads, DEVICE_BYTES, number, with_replicas=replicas)
        assert choice.load.activations == "keep"


def test_nvidia_smi_reports_the_link() -> None:
    assert link_in(NVLINK_MATRIX) == "nvlink"
    assert link_in(NVLINK_MATRIX.replace("GPU0\t X \tNV18", "GPU0\t X \tPHB")) == "pcie"
    assert link_in("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n") is None and link_in("") is None


def test_the_link_is_named_or_found_or_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert link_of("pcie") == "pcie"
    assert link_of("auto", on_cpu=True) == "host"
    assert link_of("auto") == "nvlink"
    asked = tmp_path / "nvidia-smi"
    asked.write_text(f"#!/bin/sh\n[ \"$1\" = topo ] && echo '{NVLINK_MATRIX.replace('NV18', 'SYS')}'\n")
    asked.chmod(0o755)
    assert link_of("auto") == "pcie"


def smi(directory: Path, name: str) -> None:
    """Installs an nvidia-smi that reports devices of this name, and no links."""
    asked = directory / "nvidia-smi"
    asked.write_text(f"#!/bin/sh\n[ \"$1\" = --query-gpu=name ] && echo '{name}\n{name}'\n")
    asked.chmod(0o755)


def test_products_take_the_rate_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert rate_of("auto") == Rate(ASSUMED_FLOPS["nvlink"], "assumed")
    rates = {}
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB", "NVIDIA RTX A1000"):
        smi(tmp_path, name)
        rates[name] = rate_of("auto").flops_per_second / ASSUMED_FLOPS["nvlink"]
    assert list(rates.values()) == pytest.approx([0.45 * each / 400e12 for each in (989e12, 756e12, 312e12)] + [1])
    assert rate_of("nvlink", device="NVIDIA H200 NVL").flops_per_second == pytest.approx(0.45 * 835e12)
    assert rate_of("nvlink", device="NVIDIA GH200 480GB").flops_per_second == pytest.approx(0.45 * 989e12)
    # What a worker measures later is what counts then, for devices of the same name.
    assert measured_rate("NVIDIA H100 PCIe") is None
    keep_rate("NVIDIA H100 PCIe", 600e12)
    smi(tmp_path, "NVIDIA H100 PCIe")
    found = rate_of("auto")
    assert found.flops_per_second == pytest.approx(0.6 * 600e12)
    assert found.source == "measured on NVIDIA H100 PCIe"
    # Devices elsewhere are named, or assumed.
    assert rate_of("nvlink").flops_per_second == ASSUMED_FLOPS["nvlink"]
    assert rate_of("nvlink", device="B200").flops_per_second == pytest.approx(0.45 * DEVICE_FLOPS["B200"])
    with pytest.raises(ValueError, match=r"--device-name H10 is not one of A100, B200, GH200, H100, .*: leave it out"):
        rate_of("auto", device="H10")


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
