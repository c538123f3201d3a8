"""Converts an adapter saved by peft, or in the form of the Tinker protocol, to a checkpoint of ours that computes the
same function.

Our adapters cover whole groups of layers: attention, the feed-forward part, the head. If the file adapts a part of a
group, the other layers of the group get the matrices of a new adapter: a random A, and B of zeros.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...schemas.errors import OperationError
from ...schemas.models import LoraConfig
from ..lora import Adapter, LoraLayers
from ..lora.adapter import layout_of, pair_of
from ..lora.target import GATE_UP, Target, parts_of_layers
from ..shapes.parts import RoutedExperts
from . import TrainedState, save
from .trained_state import FlatTensors

_PREFIX = "base_model.model."
_OTHER_SIDE = str.maketrans("AB", "BA")
_OF_EXPERTS = re.compile(r"(?P<path>.+\.experts)\.(base_layer\.)?lora_(?P<side>[AB])\.weight")
"""The names under which peft saves the matrices of all experts of a layer together; those of the parameter that it
wrapped first are below base_layer."""
_STACKED = re.compile(r"(?P<path>.+\.experts)\.(?P<kind>w[123])\.lora_[AB]\.weight")
"""The names of tensors [experts, ...] in files of the Tinker protocol; a matrix that experts share is [1, ...]."""
_TINKER_HEAD = f"{_PREFIX}model.unembed_tokens."


def import_adapter(layers: LoraLayers, lora: LoraConfig, source: Path, target: Path, base_name: str) -> LoraConfig:
    """Writes the adapter of `source`, an adapter_model.safetensors, into an existing empty directory, without optimizer
    state.

    Args:
        lora: the adapter's rank and alpha.
    Returns:
        Its configuration, with the groups of layers that it adapts.
    Raises:
        OperationError: the file does not fit; the message names the matrix and the reason.
    """
    layers.check_rank(lora)
    *of_trunk, head = [each.unsharded() for each in layers.all_targets]
    tensors = {name.replace(_TINKER_HEAD, f"{_PREFIX}{head.name}."): each for name, each in _read(source).items()}
    if shares_factors := _shares_factors(tensors):
        every = [*(each.with_shared_factor() for each in of_trunk), head]
    else:
        every = [*of_trunk, head]
        tensors = _unstacked(tensors, of_trunk)
    lora = lora.model_copy(update={"expert_factors": "shared" if shares_factors else "each"})
    tensors = _unfused(tensors, of_trunk, lora.rank)
    found = _by_expert(tensors, every, lora.rank, layers.stacked_experts)
    wanted = layers.with_groups_of(lora, _adapted(found, every, lora.rank))
    adapter = layers.build(wanted)
    state = TrainedState(
        adapter, {"weights": FlatTensors(adapter.layout.unsharded, _filled(adapter, found))}, 0, has_optimizer=False
    )
    save(state, target, base_name=base_name)
    return wanted


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file cannot be iterated)
        # The hosted service writes empty ones for the gates of experts that have none.
        tensors = {name: each for name, each in tensors.items() if each.numel()}
    except SafetensorError as error:
        raise OperationError(
            f"adapter_model.safetensors cannot be read ({error}): send the file as peft saved it"
        ) from None
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise OperationError(f"{name} has dtype {tensor.dtype}: matrices of an adapter must be floating point")
        tensors[name] = tensor.float()
        if not tensors[name].isfinite().all():
            raise OperationError(
                f"{name} has numbers that are not finite in float32: send an adapter without NaN and infinite values"
            )
    if not tensors:
        raise OperationError("adapter_model.safetensors has no tensors: send the file as peft saved it")
    return tensors


def _shares_factors(tensors: Mapping[str, Tensor]) -> bool:
    """True if the experts of some layer share a matrix."""
    return any(_STACKED.fullmatch(name) and tensor.dim() == 3 and len(tensor) == 1 for name, tensor in tensors.items())


def _unstacked(tensors: Mapping[str, Tensor], every: Sequence[Target]) -> dict[str, Tensor]:
    """Returns the tensors with stacked ones split into one per expert, under the names of peft."""
    linears = {each.stacked_as: each.saved_kind for each in every if each.num_experts is not None}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        matched = _STACKED.fullmatch(name)
        if matched is None or tensor.dim() != 3 or matched["kind"] not in linears:
            found[name] = tensor
            continue
        path, kind = matched["path"], matched["kind"]
        side = name.removeprefix(f"{path}.{kind}")
        found |= {f"{path}.{number}.{linears[kind]}{side}": each for number, each in enumerate(tensor)}
    return found


def _unfused(tensors: Mapping[str, Tensor], every: Sequence[Target], rank: int) -> dict[str, Tensor]:
    """Returns the tensors with pairs of linear layers split into those of their parts that adapters adapt."""
    found = dict(tensors)
    for path, parts in parts_of_layers(every).items():
        of_a, of_b = (f"{_PREFIX}{path}.lora_{side}.weight" for side in "AB")
        if of_a not in found or of_b not in found:
            continue
        sizes = [part.out_features for part in parts]
        for part, pair in zip(parts, _parts(of_b, found.pop(of_a), found.pop(of_b), sizes, rank), strict=True):
            found |= {f"{_PREFIX}{part.name}.lora_{side}.weight": each for side, each in zip("AB", pair, strict=True)}
    return found


def _by_expert(
    tensors: Mapping[str, Tensor], every: Sequence[Target], rank: int, stacked: RoutedExperts | None
) -> dict[str, Tensor]:
    """Returns the tensors with those of experts split into one per expert, under our names.

    Args:
        stacked: the experts if the model's files have those of a layer in one tensor.
    """
    experts: dict[str, dict[str, Target]] = {}
    for target in every:
        if target.num_experts is not None:
            path, _, kind = target.name.rpartition(".")
            experts.setdefault(_PREFIX + path, {})[kind] = target
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        matched = _OF_EXPERTS.fullmatch(name)
        if matched is None or matched["path"] not in experts:
            found[name] = tensor
        elif (other := tensors.get(name.translate(_OTHER_SIDE))) is None:
            raise _incomplete(name)
        elif matched["side"] == "A":
            kinds = experts[matched["path"]]
            pair = (tensor, other) if stacked is None else _gates_first(tensor, other, stacked, kinds)
            found |= _of_each(name, matched["path"], *pair, kinds, rank)
    return found


def _gates_first(a: Tensor, b: Tensor, experts: RoutedExperts, kinds: Mapping[str, Target]) -> tuple[Tensor, Tensor]:
    """Returns A [experts * rank, in] and B [out, rank * experts], whose rows are those of gates first."""
    if experts.is_misread and len(a) % experts.num == 0 == b.shape[1] % experts.num:
        of_a, of_b = a.unflatten(0, (experts.num, -1)), b.unflatten(1, (-1, experts.num))
        a, b = of_b.permute(2, 1, 0).flatten(0, 1), of_a.permute(2, 1, 0).flatten(1)
    is_mixed = experts.alternates and len(b) == 2 * kinds["gate_proj"].out_features
    return a, b.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) if is_mixed else b


def _of_each(name: str, path: str, a: Tensor, b: Tensor, kinds: Mapping[str, Target], rank: int) -> dict[str, Tensor]:
    """Splits the matrices of all experts of a layer, of down or of gate and up.

    peft stores A as [experts * rank, in] and B as [out, rank * experts]; gate and up have one rank or one each.
    """
    before, down = [kinds[kind] for kind in GATE_UP if kind in kinds], kinds["down_proj"]
    num = down.num_experts or 1
    for targets in (before, [down]):
        out = sum(sizes := [target.out_features for target in targets])
        num_rows, fits = len(a) // num, a.shape[1] == targets[0].in_features and len(b) == out
        if fits and num_rows in (rank, rank * len(targets)) and b.shape[1] == len(a) == num_rows * num:
            of_each = zip(a.view(num, num_rows, -1), b.view(out, num_rows, num).permute(2, 0, 1), strict=True)
            return {
                f"{path}.{number}.{target.saved_kind}.lora_{side}.weight": matrix
                for number, pair in enumerate(of_each)
                for target, own in zip(targets, _parts(name, *pair, sizes, rank), strict=True)
                for side, matrix in zip("AB", own, strict=True)
            }
    raise OperationError(
        f"{name} has shape {list(a.shape)} and its lora_B {list(b.shape)}, which do not fit rank {rank} and the {num}"
        " experts of this base model: check the adapter's base model and rank"
    )


def _parts(name: str, a: Tensor, b: Tensor, sizes: Sequence[int], rank: int) -> list[tuple[Tensor, Tensor]]:
    """Splits a pair into those of parts with so many outputs, the first ones, which have one A, or each some rows of
    it."""
    if len(a) not in (rank, rank * len(sizes)) or b.shape[1] != len(a) or len(b) < sum(sizes):
        raise OperationError(f"{name} has shape {list(b.shape)}, which does not fit rank {rank} and outputs {[*sizes]}")
    of_b = b.split([*sizes, len(b) - sum(sizes)])[: len(sizes)]
    is_one = len(a) == rank
    own = of_b if is_one else [each[:, i * rank : (i + 1) * rank] for i, each in enumerate(of_b)]
    if sum(each.count_nonzero() for each in own) != b.count_nonzero():
        raise OperationError(
            f"{name} has {len(a)} ranks for several parts of a layer that all use them, or adapts other outputs too:"
            f" adapters here have {rank} for each part, and {len(sizes)} parts"
        )
    return list(zip([a] * len(sizes) if is_one else a.chunk(len(sizes)), own, strict=True))


def _adapted(found: Mapping[str, Tensor], every: Sequence[Target], rank: int) -> set[str]:
    """Returns the names of the layers that the matrices belong to. Raises OperationError if adapters have no matrix of
    this name and shape."""
    owners = {name: (target.name, view.shape) for target in every for name, view in _shapes([target], rank).items()}
    for name, tensor in found.items():
        if name not in owners:
            raise _foreign(name, every)
        if tensor.shape != owners[name][1]:
            raise OperationError(
                f"{name} has shape {list(tensor.shape)}, and this base model needs {list(owners[name][1])} at rank "
                f"{rank}: the adapter belongs to another base model or has another rank"
            )
        if name.translate(_OTHER_SIDE) not in found:
            raise _incomplete(name)
    return {owners[name][0] for name in found}


def _filled(adapter: Adapter, found: Mapping[str, Tensor]) -> Tensor:
    """Returns the weights of the whole adapter, float32 [P]."""
    layout = adapter.layout.unsharded
    vector, generator = torch.zeros(layout.size), torch.Generator().manual_seed(adapter.lora.seed or 0)
    for target in adapter.targets:
        a, _ = pair_of(layout, vector, target)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
    for name, view in layout.named_views(vector).items():
        if name in found:
            view.copy_(found[name])
    return vector


def _shapes(targets: Sequence[Target], rank: int) -> dict[str, Tensor]:
    layout = layout_of(targets, rank)
    return layout.named_views(torch.empty(layout.size, device="meta"))


def _foreign(name: str, every: Sequence[Target]) -> OperationError:
    kinds = ", ".join(sorted({target.saved_kind for target in every}))
    if ".lora_" not in name:
        return OperationError(f"{name} is not a matrix of an adapter: save it with save_embedding_layers=False")
    return OperationError(f"{name} is of a layer that cannot be adapted here: train with target_modules of {kinds}")


def _incomplete(name: str) -> OperationError:
    return OperationError(f"{name} has no matching {name.translate(_OTHER_SIDE)[-13:-7]}: send both")
