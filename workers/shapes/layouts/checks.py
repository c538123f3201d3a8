"""Refuses layouts that cannot work, with the offending value, the reason and the valid choices, before anything is
loaded. Imports no torch."""

from collections.abc import Collection
from math import gcd

from ...protocol.parallel_spec import AXES, ParallelSpec, ShardedUnit
from ..model_shape import ModelDescription, ModelShape
from ..styles import PATTERNS

DTYPES = ("auto", "float32", "bfloat16")

# The axes that do not depend on a model's layers.
_OF_ANY_MODEL = ("replicas",)


def check_layout(
    spec: ParallelSpec,
    model: ModelDescription,
    num_devices: int | None = None,
    max_context_length: int | None = None,
    dtype: str = "auto",
    activations: str = "keep",
    quantization: str = "none",
) -> None:
    """Raises ValueError if the model cannot run with this layout and these settings.

    Args:
        num_devices: available devices, one for each rank; None = unknown.
    """
    if model.refusal is not None:
        raise ValueError(f"{model.name}: {model.refusal}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype} is not supported: choose one of {', '.join(DTYPES)}")
    if max_context_length is not None:
        model.check_context(max_context_length)
    _check_family(spec, model)
    _check_activations(activations, model)
    check_quantization(quantization, spec, model)
    if isinstance(model, ModelShape):
        _check_replicated(spec, model)
        spec = model.own_layout(spec)
        _check_tensor(spec, model)
        _check_sequence(spec, model)
        _check_experts(spec, model)
    _check_devices(spec, num_devices)


def check_quantization(quantization: str, spec: ParallelSpec, model: ModelDescription) -> None:
    """Raises ValueError if the model's weights cannot be held like this with this layout."""
    if quantization != "none" and spec.fsdp > 1:
        raise ValueError(
            f"fsdp={spec.fsdp}: fsdp cannot gather the weights of --base-quantization {quantization}: use tp or ep "
            "instead, or leave the base model unquantized"
        )
    if quantization == "released" and not model.released.formats:
        raise ValueError(
            f"--base-quantization released: {model.name} has no weights that can be held as released, because "
            f"{model.released.reason}: leave it out, by which they are dequantized, or hold them in 4 bits with "
            "--base-quantization nf4"
        )


def activations_refusal(name: str, model_type: str, activations: str) -> str:
    """Returns the message for a model whose passes can only keep all activations."""
    return (
        f"activations {activations}: {model_type} models such as {name} run with transformers' own forward, which "
        f"keeps all activations: leave out --activations {activations}"
    )


def valid_tp(shape: ModelShape, replicated: Collection[ShardedUnit] = ()) -> list[int]:
    """Returns the valid degrees in ascending order. Units in `replicated` are whole on all ranks, so any degree suits
    them, and those that tp need not divide."""
    sizes = [things.number for things in shape.divisible() if things.unit not in replicated and not things.or_whole]
    return divisors(gcd(*sizes)) if sizes else [1]


def valid_ep(shape: ModelShape) -> list[int]:
    return divisors(shape.experts.num) if shape.experts else [1]


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _check_family(spec: ParallelSpec, model: ModelDescription) -> None:
    """Raises ValueError if an axis needs our own forward pass, and this model does not run with it."""
    wanted = [f"{axis}={getattr(spec, axis)}" for axis in AXES if axis not in _OF_ANY_MODEL and getattr(spec, axis) > 1]
    if not wanted:
        return
    any_model = " and ".join(_OF_ANY_MODEL)
    if not isinstance(model, ModelShape):
        raise ValueError(
            f"{wanted[0]}: {model.model_type} models such as {model.name} support only {any_model}; docs/models.md "
            "lists the types of model that support all axes"
        )
    if not model.runs_own_layers:
        raise ValueError(f"{wanted[0]}: {model.name} has {model.family.unlike}; such models support only {any_model}")


def _check_activations(activations: str, model: ModelDescription) -> None:
    is_own = isinstance(model, ModelShape) and model.runs_own_layers
    if activations != "keep" and not is_own:
        raise ValueError(activations_refusal(model.name, model.model_type, activations))


def _check_replicated(spec: ParallelSpec, shape: ModelShape) -> None:
    """Raises ValueError if --shard replicates nothing that this model has and the layout splits.

    A pattern may also match weights that the model does not have.
    """
    units: set[ShardedUnit] = {things.unit for things in shape.divisible()}
    replicated: list[ShardedUnit] = [unit for unit in spec.replicated if unit in units]
    if spec.replicated and not replicated:
        there = ", ".join(sorted(PATTERNS[each] for each in units))
        raise ValueError(f"{PATTERNS[spec.replicated[0]]}=replicate: {shape.name} has no such weights; it has {there}")
    if replicated and spec.tp == 1 and not ("experts" in replicated and spec.ep > 1):
        raise ValueError(
            f"{PATTERNS[replicated[0]]}=replicate: neither tp nor ep of {spec.axes} splits them: leave --shard out"
        )


def _check_tensor(spec: ParallelSpec, shape: ModelShape) -> None:
    for things in shape.divisible():
        if things.number % spec.tp_size_of(things.unit):
            choices = ", ".join(map(str, valid_tp(shape, spec.replicated)))
            others: set[ShardedUnit] = {*spec.replicated, things.unit}
            if spec.tp in valid_tp(shape, others):
                shard = f"--shard '{PATTERNS[things.unit]}=replicate'"
                choices += f"; with --parallel and {shard} (each rank has them whole): {spec.tp}"
            what = f"{things.number} {things.what} of {shape.name}"
            raise ValueError(f"tp={spec.tp} does not divide {what}; valid tp: {choices}")


def _check_sequence(spec: ParallelSpec, shape: ModelShape) -> None:
    for things in shape.divisible():
        if not things.suits_sp(spec):
            own = things.number // spec.tp_size_of(things.unit)
            each = "" if own == things.number else f" that each rank along tp={spec.tp} has"
            choices = ", ".join(map(str, divisors(own)))
            raise ValueError(
                f"sp={spec.sp} does not divide {own} {things.what} of {shape.name}{each}; valid sp: {choices}"
            )


def _check_experts(spec: ParallelSpec, shape: ModelShape) -> None:
    if spec.ep > 1 and shape.experts is None:
        raise ValueError(f"ep={spec.ep}: {shape.name} has no experts to share out; valid ep: 1")
    if shape.experts and shape.experts.num % spec.ep_size_of("experts"):
        choices = ", ".join(map(str, valid_ep(shape)))
        raise ValueError(
            f"ep={spec.ep} does not divide {shape.experts.num} experts of {shape.name}; valid ep: {choices}"
        )


def _check_devices(spec: ParallelSpec, num_devices: int | None) -> None:
    if num_devices is not None and spec.num_ranks > num_devices:
        sizes = " x ".join(f"{axis}={getattr(spec, axis)}" for axis in AXES if getattr(spec, axis) > 1)
        raise ValueError(
            f"{sizes} is {spec.num_ranks} ranks, but there {'is' if num_devices == 1 else 'are'} {num_devices} "
            f"device{'' if num_devices == 1 else 's'}, and each rank needs one: use at most {num_devices} ranks"
        )
