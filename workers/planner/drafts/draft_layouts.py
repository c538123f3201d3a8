"""Finds the smallest pair of layouts, the target's and the draft's, that fits a device. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...protocol.parallel_spec import ParallelSpec
from ...resources.machine import gigabytes
from ...shapes.draft_spec import check_drafts, default_draft_spec
from ...shapes.layouts.checks import divisors
from ...shapes.model_shape import ModelShape
from ..layout_search import MAX_RANKS, layouts, numbers_of_ranks, recomputing_pays, usable_bytes
from ..workload import Workload
from .draft_estimate import DraftMemory, draft_memory
from .draft_load import DraftLoad


@dataclass(frozen=True)
class DraftLayout:
    """Layouts of the ranks that train a draft, and what each rank needs. spec: of the target on these ranks."""

    spec: ParallelSpec
    draft_spec: ParallelSpec
    load: Workload
    memory: DraftMemory


def draft_layout_that_fits(
    shape: ModelShape,
    loads: Sequence[Workload],
    draft: DraftLoad,
    device_bytes: int,
    num_devices: int | None = None,
    draft_spec: ParallelSpec | None = None,
) -> DraftLayout:
    """Returns the layouts for one of the loads, which differ in the activations that they keep, see
    `recomputing_pays`. Raises ValueError if none fits.

    For each load these are the layouts with the fewest ranks that fit, and of these the ones whose ranks need least.

    Args:
        draft_spec: the draft's, None for any.
    """
    found: DraftLayout | None = None
    least: DraftLayout | None = None
    for load in loads:
        for num_ranks in numbers_of_ranks(num_devices or MAX_RANKS):
            every = list(_pairs(shape, load, draft, num_ranks, draft_spec))
            best = min(every, key=_need, default=None)
            if best is not None and _need(best) <= usable_bytes(device_bytes):
                found = best if found is None or recomputing_pays(best.spec, found.spec, num_devices) else found
                break
            least = min((each for each in (least, best) if each is not None), key=_need, default=None)
    if found is not None:
        return found
    where = f" on {num_devices} devices" if num_devices else ""
    if least is None:
        raise ValueError(f"no layout of a draft of {shape.name} is possible{where}: change --draft-parallel")
    raise ValueError(
        f"no layout of a draft of {shape.name} fits{where}: {least.spec} with --draft-parallel {least.draft_spec.axes} "
        f"and --activations {least.load.activations} needs least, {gigabytes(_need(least))} on each rank, "
        f"{heaviest(least.memory)}: use larger devices, or more"
    )


def heaviest(memory: DraftMemory) -> str:
    """Returns the largest part of the peak, in words."""
    parts = {
        "of the target's weights": memory.target + memory.policy,
        "of the key/value cache": memory.kv_cache,
        "of the draft's weights, gradients and moments": memory.vectors.kept + memory.vectors.scratch,
        "of the target's pass": max(memory.target_pass, memory.exchange),
        "of the draft's pass": memory.draft_pass + memory.head,
    }
    name = max(parts, key=parts.__getitem__)
    return f"{gigabytes(parts[name])} {name}"


def _pairs(
    shape: ModelShape, load: Workload, draft: DraftLoad, num_ranks: int, wanted: ParallelSpec | None
) -> Iterator[DraftLayout]:
    for spec in layouts(shape, num_ranks):
        for draft_spec in [wanted] if wanted else _draft_specs(num_ranks):
            try:
                check_drafts(draft_spec, spec, shape)
            except ValueError:
                continue
            yield DraftLayout(spec, draft_spec, load, draft_memory(shape, spec, load, draft, draft_spec))


def _draft_specs(num_ranks: int) -> Iterator[ParallelSpec]:
    for sp in divisors(num_ranks):
        for tp in divisors(num_ranks // sp):
            yield ParallelSpec(replicas=num_ranks // sp // tp, sp=sp, tp=tp)


def _need(layout: DraftLayout) -> int:
    return layout.memory.total


def draft_spec_of(shape: ModelShape, spec: ParallelSpec, draft: DraftLoad, wanted: ParallelSpec | None) -> ParallelSpec:
    """Returns the draft's layout on the target's ranks: the wanted one, or the default. Raises ValueError if it is
    impossible."""
    found = wanted or default_draft_spec(spec, draft.sizes.heads)
    check_drafts(found, spec, shape)
    return found
