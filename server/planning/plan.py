"""`trainhouse plan`: estimates the memory of each rank of a layout, from a model's config.json alone.

Loads neither weights nor torch nor the server, so that an impossible layout is reported at once.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from ...workers.planner.device_rates import Rate, link_of, rate_of
from ...workers.planner.drafts.draft_estimate import draft_memory
from ...workers.planner.drafts.draft_layouts import DraftLayout, draft_layout_that_fits, draft_spec_of
from ...workers.planner.drafts.draft_load import draft_load
from ...workers.planner.estimate import MemoryEstimate, estimate, kv_cache_tokens, num_learned
from ...workers.planner.layout_search import (
    PlannedLayout,
    Remedy,
    layout_that_fits,
    loads_with_fewer_activations,
    remedies,
    usable_bytes,
)
from ...workers.planner.micro_batches import BatchSizes, served_batch_sizes
from ...workers.planner.trainable_memory import bytes_per_number
from ...workers.planner.workload import Workload
from ...workers.protocol.parallel_spec import SINGLE, ParallelSpec
from ...workers.protocol.worker_config import DEFAULT_MICRO_BATCH_TOKENS
from ...workers.resources.machine import cuda_devices, gigabytes
from ...workers.shapes.layouts.checks import check_layout
from ...workers.shapes.layouts.parameters import num_parameters, parameters
from ...workers.shapes.model_shape import ModelDescription, ModelShape, describe_model, read_model
from ..cli.errors import FAILED, WRONGLY_USED
from ..cli.options import Status, new_app, with_options
from ..cli.output import aligned, print_json
from ..config.option_values import AUTO, NO_SHARD_OF_AUTO, ConfigError, is_url, parse_shard
from .auto_layout import auto_refusal, by_transformers
from .plan_drafts import PlannedDraft, parse_draft, room_words
from .plan_options import OF_GROUPS, OPTIONS, PlanOptions, flags

_LEAST_DEVICE_BYTES = 1 << 20


class NoEstimate(Exception):
    """The model can be served with this layout, but its memory cannot be estimated."""


@dataclass(frozen=True)
class MemoryPlan:
    """The estimate for one layout."""

    shape: ModelShape
    spec: ParallelSpec
    load: Workload
    memory: MemoryEstimate
    device_bytes: int | None
    """Memory of each device; None if the estimate is not compared with one."""
    num_devices: int | None
    smaller: PlannedLayout | None
    """Does not fit: smaller than the choice of `--parallel auto`."""
    rate: Rate | None
    """The device's rate; None for a CPU."""
    sizes: BatchSizes | None
    """Sizes of micro-batches and passes; None without a device."""
    notes: tuple[str, ...]
    """Remarks on the parts of the model that are left out, and on the count."""

    @property
    def fits(self) -> bool | None:
        return None if self.device_bytes is None else self.memory.total <= usable_bytes(self.device_bytes)

    @property
    def least_bytes(self) -> int:
        """Bytes in a rank's memory with one slot in use and no pass running."""
        return self.memory.base + estimate(self.shape, self.spec, self.load.with_slots(1)).trainable.total

    @property
    def with_replicas(self) -> ParallelSpec | None:
        """The layout with as many replicas as the devices allow, if that is more than one."""
        num_copies = (self.num_devices or 0) // self.spec.num_ranks
        return replace(self.spec, replicas=self.spec.replicas * num_copies) if num_copies > 1 else None

    @property
    def _state_bytes(self) -> int:
        """Bytes that a rank's cache holds of a sequence of any length."""
        return self.shape.cache_size(self.spec, self.load.number_bytes).bytes_per_sequence

    @property
    def remedies(self) -> list[Remedy]:
        if self.device_bytes is None or self.fits:
            return []
        return remedies(self.shape, self.spec, self.load, self.device_bytes, self.num_devices)

    def as_json(self) -> dict[str, object]:
        shape, spec, memory = self.shape, self.spec, self.memory
        groups = parameters(shape, spec)
        return {
            "model": {"name": shape.name, "type": shape.model_type, "parameters": num_parameters(shape)},
            "max_positions": shape.max_positions,
            "rope": str(shape.rope),
            "load": asdict(self.load),
            "parallel": spec.axes,
            "replicated": list(spec.replicated),
            "ranks": spec.num_ranks,
            "parameters": [asdict(group) | {"bytes": group.kept * self.load.number_bytes} for group in groups],
            "memory": {
                "base": memory.base,
                "learned": asdict(memory.trainable) | {"total": memory.trainable.total},
                "kv_cache": memory.kv_cache,
                "kv_cache_tokens": kv_cache_tokens(shape, spec, self.load),
                "state_bytes_per_sequence": self._state_bytes,
                "activations": asdict(memory.activations) | {"total": memory.activations.total},
                "dequantized": memory.dequantized,
                "gathered": memory.gathered,
                "arriving": memory.prefetched,
                "gathered_gradients": memory.gathered_gradients,
                "gathered_head": memory.gathered_head,
                "sampling": memory.sampling,
                "saving": memory.saving,
                "step": memory.step,
                "work": memory.work,
                "least": self.least_bytes,
                "total": memory.total,
            },
            "usable": None if self.device_bytes is None else usable_bytes(self.device_bytes),
            "fits": self.fits,
            "default_micro_batch_tokens": None if self.sizes is None else self.sizes.micro_batch_tokens,
            "default_pass_tokens": None if self.sizes is None else self.sizes.pass_tokens,
            "filling": None if self.with_replicas is None else str(self.with_replicas),
            "remedies": [remedy.flags for remedy in self.remedies],
            "products": None if self.rate is None else asdict(self.rate),
            "notes": list(self.notes),
        }

    def text(self) -> Iterator[str]:
        yield from self._head()
        yield ""
        rows = []
        for group in parameters(self.shape, self.spec):
            whole, own = (" x ".join(map(str, shape)) for shape in (group.shape, group.own_shape))
            kept = f"1/{group.fsdp}" if group.fsdp > 1 else "all"
            num_bytes = gigabytes(group.kept * self.load.number_bytes)
            rows.append((group.pattern, str(group.count), whole, group.style, own, kept, num_bytes))
        yield from aligned(("parameters", "count", "whole", "style", "on a rank", "kept of it", "bytes"), rows)
        yield ""
        yield from aligned(("memory of each rank", "bytes", ""), list(self._memory_rows()))
        yield ""
        yield from self._verdict()

    def _head(self) -> Iterator[str]:
        shape, load = self.shape, self.load
        experts = shape.experts
        of_mixers = " or ".join(dict.fromkeys(map(str, shape.mixers)))
        of_experts = "" if experts is None else f", {experts.num} experts of which a token takes {experts.per_token}"
        yield (
            f"{shape.name} ({shape.model_type}): {num_parameters(shape) / 1e9:.2f} billion parameters in {load.dtype}; "
            f"{shape.num_layers} layers, {of_mixers}{of_experts}"
        )
        yield f"context: {load.longest} tokens of the {shape.max_positions} that the model has ({shape.rope})"
        yield f"layout: {self.spec}, {self.spec.num_ranks} rank{'s' if self.spec.num_ranks > 1 else ''}"
        if load.activations != "keep":
            yield f"layers are recomputed in the backward pass: --activations {load.activations}"
        yield from self.notes
        found = cuda_devices()
        if self.num_devices is None and found is not None:
            devices = f"{found} CUDA device{'s' if found > 1 else ''}"
            yield f"this machine has {devices} (--num-devices compares with a number)"

    def _memory_rows(self) -> Iterator[tuple[str, ...]]:
        memory, load = self.memory, self.load
        learned, activations = memory.trainable, memory.activations
        yield "base parameters", gigabytes(memory.base), ""
        of_learned = f"weights {gigabytes(learned.weights)}, gradients {gigabytes(learned.gradients)}, "
        of_learned += f"optimizer {gigabytes(int(learned.optimizer))}, copies {gigabytes(learned.copies)}"
        yield self._learned(), gigabytes(learned.total), of_learned
        cached = f"{kv_cache_tokens(self.shape, self.spec, load)} tokens"
        if self._state_bytes:
            cached += f", less the states of each sequence, {gigabytes(self._state_bytes)}"
        yield "key/value cache", gigabytes(memory.kv_cache), cached if load.samples else "sampling happens elsewhere"
        of_pass = f"kept {gigabytes(activations.kept)}, the last layer {gigabytes(activations.working)}, "
        of_pass += f"logits {gigabytes(activations.head)}"
        yield f"activations of {-(-load.tokens // self.spec.sp)} tokens", gigabytes(activations.total), of_pass
        if activations.host:
            yield "host memory, in addition", gigabytes(activations.host), "inputs of layers (--activations offload)"
        if memory.dequantized:
            yield "the largest packed weight", gigabytes(memory.dequantized), "dequantized for a product"
        if memory.gathered:
            what, num_bytes = "a layer" if load.zero_stage == "3" else "all layers", memory.gathered + memory.prefetched
            yield f"{what} gathered along fsdp", gigabytes(num_bytes), "and the next one's weights"
        if memory.gathered_gradients:
            yield "its gradients", gigabytes(memory.gathered_gradients), "and another layer's, being reduced"
        if memory.gathered_head:
            when = "while it computes logits; no layer runs then"
            what = f"with its gradient, {when}" if load.training == "full" else when
            yield "the output head gathered", gigabytes(memory.gathered_head), what
        if memory.sampling:
            yield "the model gathered to sample", gigabytes(memory.sampling), "when no pass runs"
        if memory.saving:
            yield "a matrix gathered to save", gigabytes(memory.saving), "when no pass runs"
        if memory.step:
            yield "gradients summed", gigabytes(memory.step), "at a step, when no pass runs"
        yield "at least, between passes", gigabytes(self.least_bytes), "the base, and one model or adapter in training"
        yield "at most at a time", gigabytes(memory.total), ""

    def _learned(self) -> str:
        load = self.load
        plural = "s" if load.slots > 1 else ""
        if load.training == "lora":
            return f"{load.slots} adapter{plural} of rank {load.lora_rank}"
        billions = num_learned(self.shape, self.spec, load) / load.slots / 1e9
        return (
            f"{load.slots} model{plural} of {billions:.2f} billion weights, {bytes_per_number(load).total} bytes each"
        )

    def _verdict(self) -> Iterator[str]:
        if self.device_bytes is None:
            least, most = gigabytes(self.least_bytes), gigabytes(self.memory.total)
            yield f"from {least} to {most} on each rank; --device-memory compares the latter with a device"
            return
        usable, room = usable_bytes(self.device_bytes), room_words(self.device_bytes)
        if self.fits:
            spare = usable - self.memory.total
            more = spare // (self.memory.trainable.total // self.load.slots)
            further = f", enough for {more} more adapters of that rank" if self.load.training == "lora" else ""
            yield f"fits {room}: {gigabytes(spare)} to spare{further}"
            if self.smaller is not None:
                needed = gigabytes(self.smaller.memory.total)
                yield f"fewer ranks do not fit: {self.smaller.spec} would need {needed} on each"
        else:
            yield f"does not fit {room}: {gigabytes(self.memory.total - usable)} too much"
            yield from (f"it would with {remedy.flags}" for remedy in self.remedies)
        if self.sizes is not None:
            sizes, limit = self.sizes, self._limit(self.sizes)
            yield f"serve makes micro-batches of {sizes.micro_batch_tokens} tokens there, {limit},"
            yield f"and passes of {sizes.pass_tokens} tokens (--micro-batch-tokens, --pass-tokens)"
        if self.with_replicas is not None:
            yield f"with {self.with_replicas.num_ranks} of the {self.num_devices} devices: {self.with_replicas}"

    def _limit(self, sizes: BatchSizes) -> str:
        """Says why micro-batches are not longer."""
        if sizes.wanted is None:
            return "as set"
        if sizes.micro_batch_tokens < sizes.wanted:
            beside = "" if self.rate is None else ", or what slots and cache leave"
            return f"not {sizes.wanted}: they fill a third of what the base leaves free{beside}"
        if self.rate is None or sizes.wanted == DEFAULT_MICRO_BATCH_TOKENS:
            return "the least for speed"
        rate = float(f"{self.rate.flops_per_second / 1e12:.3g}")
        return f"what takes 0.1 s at {rate:g} TFLOP/s ({self.rate.source})"


app = new_app()


def plan(given: Mapping[str, Any]) -> Status:
    """Estimate the memory of each rank of a layout, from a model's config.json alone.

    The exit status is 1 if the layout is impossible or does not fit.
    """
    typed = {name: value for name, value in given.items() if name in OPTIONS and value}
    try:
        options = PlanOptions.read(typed, given["train_only"])
        if options.own.draft is not None:
            planned = plan_of_draft(options)
        elif options.ranks.draft_parallel is not None:
            raise ConfigError(
                "--draft-parallel has no effect without --draft: name the algorithm, as in --draft eagle3"
            )
        else:
            planned = plan_of_groups(options) if options.names_groups else plan_of(options)
    except NoEstimate as served:
        print(json.dumps({"fits": None, "note": str(served)}, indent=2) if given["json"] else served)
        return 0
    except ValueError as error:
        print(f"trainhouse plan: error: {error}", file=sys.stderr)
        if given["json"]:
            print_json({"fits": False, "error": str(error)})
        return WRONGLY_USED if isinstance(error, ConfigError) else FAILED
    print(json.dumps(planned.as_json(), indent=2) if given["json"] else "\n".join(planned.text()))
    return FAILED if planned.fits is False else 0


app.command()(with_options(plan, list(flags()), lambda given: given))


class Planned(Protocol):
    """A plan for one group of ranks or for several."""

    @property
    def fits(self) -> bool | None:
        """Returns None if it is not compared with a device."""
        ...

    def as_json(self) -> dict[str, object]: ...

    def text(self) -> Iterator[str]: ...


def plan_of(options: PlanOptions) -> MemoryPlan:
    """Returns the plan. Raises ConfigError if a value is malformed, ValueError if the layout is impossible, NoEstimate
    if the model's memory cannot be estimated."""
    device_bytes, num_devices = _device_bytes(options), options.own.num_devices
    is_auto = options.ranks.parallel is None
    if is_auto and options.ranks.shard:
        raise ConfigError(NO_SHARD_OF_AUTO)
    model, spec = _model_and_spec(options)
    load, smaller = _load(options, model), None
    if options.ranks.zero_stage == "2" and spec.fsdp == 1 and not is_auto:
        raise ConfigError(f"--zero-stage 2 has no effect without fsdp, and the layout is {spec}: leave it out")
    if is_auto:
        loads = [load] if "activations" in options.typed else [load, *loads_with_fewer_activations(load)]
        link = link_of(options.ranks.device_link, load.on_cpu)
        choice = layout_that_fits(model, loads, _needed_bytes(device_bytes), num_devices, link)
        spec, load, smaller = choice.spec, choice.load, choice.smaller
    rate = _rate(options, load)
    sizes = _sizes(options, model, spec, load, rate)
    load = load if sizes is None else replace(load, micro_batch_tokens=sizes.micro_batch_tokens)
    memory, notes = estimate(model, spec, load), _notes(options, model)
    return MemoryPlan(model, spec, load, memory, device_bytes, num_devices, smaller, rate, sizes, notes)


def plan_of_draft(options: PlanOptions) -> Planned:
    """Returns the plan of the ranks that train drafts of a model. Raises as `plan_of`."""
    options = _options_of_drafts(options)
    wanted_draft = parse_draft(options.own.draft or "")
    device_bytes, num_devices = _device_bytes(options), options.own.num_devices
    (model, spec), wanted = _model_and_spec(options), options.ranks.draft_parallel
    load = _load(options, model)
    draft = draft_load(model, wanted_draft.algorithm, wanted_draft.fields, load, target_repr=wanted_draft.target_repr)
    if options.ranks.parallel is None:
        loads = [load] if "activations" in options.typed else [load, replace(load, activations="recompute")]
        found = draft_layout_that_fits(model, loads, draft, _needed_bytes(device_bytes), num_devices, wanted)
    else:
        draft_spec = draft_spec_of(model, spec, draft, wanted)
        found = DraftLayout(spec, draft_spec, load, draft_memory(model, spec, load, draft, draft_spec))
    # Micro-batches of drafts have the size of those of adapters.
    sizes = _sizes(options, model, found.spec, replace(found.load, training="lora"), _rate(options, load))
    if sizes is not None:
        load = replace(found.load, micro_batch_tokens=sizes.micro_batch_tokens)
        found = replace(found, load=load, memory=draft_memory(model, found.spec, load, draft, found.draft_spec))
    return PlannedDraft(model, found, draft, device_bytes, _notes(options, model))


def _options_of_drafts(options: PlanOptions) -> PlanOptions:
    """Returns the options of the ranks that train drafts: a group with a --role-group, else those of --parallel."""
    for name in OF_GROUPS:
        if name != "role_groups" and name in options.typed:
            changes = f"for which {OPTIONS[name].flag} changes nothing"
            raise ConfigError(f"--draft plans the ranks that train drafts, {changes}: leave it out")
    groups = options.ranks.role_groups
    if not groups:
        return options
    if (group := next((group for group in groups if "draft" in group.roles), None)) is None:
        raise ConfigError(
            "--draft plans the ranks that train drafts, and no --role-group has them: add one, such as draft=tp=2, or "
            "leave --role-group out if those of --parallel train drafts"
        )
    if group.roles != ("draft",):
        raise ConfigError(
            f"--role-group {group}: --draft counts nothing of other roles: give drafts a group of their own, draft="
            f"{group.parallel.axes}"
        )
    # Such a group does not sample, and --shard is for the policies.
    ranks = replace(options.ranks, parallel=group.parallel, shard=(), role_groups=())
    return replace(options, ranks=ranks, train_only=True)


def plan_of_groups(options: PlanOptions) -> Planned:
    """Returns the plan of several rank groups. Raises as `plan_of`."""
    try:  # imported late: it needs the server's packages, and takes seconds
        from .plan_groups import planned_groups
    except ModuleNotFoundError as error:
        raise ValueError(
            f"groups are planned with the server's configuration, which needs the package {error.name}: pip install "
            "'trainhouse[server]'"
        ) from None
    model = _model(options)
    if not isinstance(model, ModelShape):
        raise _no_estimate(model)
    if options.train_only and "sampler_workers" in options.typed:
        raise ConfigError("--train-only says that sampling happens elsewhere: leave it or --sampler-workers out")
    return planned_groups(options.typed, model, _load(options, model), _device_bytes(options), options.own.num_devices)


def _device_bytes(options: PlanOptions) -> int | None:
    found = options.ranks.device_memory_bytes
    if found is not None and found < _LEAST_DEVICE_BYTES:
        raise ConfigError(f"--device-memory is {found} bytes: give a unit, such as 80GB")
    return found


def _no_estimate(model: ModelDescription) -> NoEstimate:
    return NoEstimate("\n".join(filter(None, (by_transformers(model), model.left_out))))


def _notes(options: PlanOptions, model: ModelDescription) -> tuple[str, ...]:
    dtype = "counted in bfloat16, which serve uses on a GPU; on a CPU it uses float32: add --dtype float32 for that"
    return tuple(filter(None, (model.left_out, dtype if options.models.dtype == "auto" else None)))


def _model_and_spec(options: PlanOptions) -> tuple[ModelShape, ParallelSpec]:
    """Returns the model and its layout, a single rank for auto."""
    model, models, ranks = _model(options), options.models, options.ranks
    spec = replace(ranks.parallel or SINGLE, replicated=parse_shard(ranks.shard))
    longest, dtype, number = models.max_context_length, models.dtype, options.own.num_devices
    check_layout(spec, model, number, longest, dtype, ranks.activations, models.base_quantization)
    if not isinstance(model, ModelShape):
        raise _no_estimate(model) if ranks.parallel is not None else ValueError(auto_refusal(model))
    if ranks.parallel is not None and "device_link" in options.typed:
        raise ConfigError("--device-link has no effect without --parallel auto: leave it out")
    if options.own.device_name and ranks.device_memory_bytes is None:
        raise ConfigError("--device-name has no effect without --device-memory: leave it out")
    return model, model.own_layout(spec)


def _model(options: PlanOptions) -> ModelDescription:
    if not options.models.base_models:
        raise ConfigError("--base-model is not given: expected NAME[=DIRECTORY, config.json or hub id]")
    served, *more = options.models.base_models
    if more:
        raise ConfigError("--base-model is given twice: one model is planned at a time")
    if not is_url(served.source):
        return read_model(served)
    try:  # imported late, as it is slow and rarely needed
        from ...workers.models.model_cache import read_config
    except ModuleNotFoundError as error:
        raise ValueError(f"{served.source} needs the package {error.name}: pip install fsspec") from None
    return describe_model(served.name, read_config(served.source))


def _needed_bytes(device_bytes: int | None) -> int:
    if device_bytes is None:
        raise ConfigError("--parallel auto needs the memory of a device: give --device-memory, such as 80GB")
    return device_bytes


def _sizes(
    options: PlanOptions, shape: ModelShape, spec: ParallelSpec, load: Workload, rate: Rate | None
) -> BatchSizes | None:
    """Returns the sizes of micro-batches and passes; None without a device."""
    if (device_bytes := _device_bytes(options)) is None:
        return None
    memory, flops_per_second = options.memory, None if rate is None else rate.flops_per_second
    given = memory.micro_batch_tokens or None
    return served_batch_sizes(shape, spec, load, device_bytes, flops_per_second, given, memory.kv_cache_bytes)


def _rate(options: PlanOptions, load: Workload) -> Rate | None:
    """Returns the rate of the device, None if it is a CPU or none is given."""
    if load.on_cpu or options.ranks.device_memory_bytes is None:
        return None
    try:
        return rate_of(options.ranks.device_link, options.own.device_name)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _load(options: PlanOptions, shape: ModelShape) -> Workload:
    length, dtype = options.models.max_context_length or shape.max_positions, options.models.dtype
    if length is None:
        raise ConfigError(f"the config.json of {shape.name} has no context length: give --max-context-length")
    link = options.ranks.device_link
    has_devices = dtype != "float32" or options.own.device_name is not None or bool(cuda_devices())
    return Workload(
        longest=length,
        dtype="bfloat16" if dtype == "auto" else dtype,
        on_cpu=link == "host" if link != AUTO else not has_devices,
        samples=not options.train_only,
        **options.of_workload,
    )
