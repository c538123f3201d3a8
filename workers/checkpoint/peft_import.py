"""Converts an adapter saved by peft, or in the form of the Tinker protocol, to a checkpoint of ours that computes the
same function.

Our adapters cover whole groups of layers: attention, the feed-forward part, the head. If the file adapts a part of a
group, the other layers of the group get the matrices of a new adapter: a random A, and B of zeros.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...schemas.adapters.peft import (
    FIRST_OF_EXPERTS,
    LAYOUT_VERSION,
    MATRIX,
    OF_ALL_EXPERTS,
    PREFIX,
    STACKED,
    Pair,
    matrix_names,
    split_experts,
)
from ...schemas.errors import OperationError
from ...schemas.models import LoraConfig
from ..lora import Adapter, LoraLayers
from ..lora.adapter import layout_of, pair_of
from ..lora.target import GATE_UP, Target, parts_of_layers
from ..protocol.calls import AdapterFile
from ..shapes.parts import RoutedExperts
from . import TrainedState, save
from .trained_state import FlatTensors

_VERSION = re.compile(
    r"(?P<major>\d{1,4})\.(?P<minor>\d{1,4})(\.(?P<patch>\d{1,4}))?(\.post\d+)?"
    r"(?P<unreleased>\.?(a|b|rc|dev)\d+)?([@+].*)?"
)
"""peft_version in adapter_config.json, of an installation from source such as 0.18.2.dev0@COMMIT."""
_TINKER_HEAD = "model.unembed_tokens"


def import_adapter(
    layers: LoraLayers, lora: LoraConfig, source: AdapterFile, target: Path, base_name: str
) -> LoraConfig:
    """Writes the adapter of `source` into an existing empty directory, without optimizer state.

    Args:
        lora: the adapter's rank and alpha.
    Returns:
        Its configuration, with the groups of layers that it adapts.
    Raises:
        OperationError: the file does not fit; the message names the matrix and the reason.
    """
    layers.check_rank(lora)
    *of_trunk, head = [each.unsharded() for each in layers.all_targets]
    pairs = _pairs(_read(Path(source.path)), [*of_trunk, head])
    if shares_factors := _shares_factors(pairs):
        every = [*(each.with_shared_factor() for each in of_trunk), head]
    else:
        every = [*of_trunk, head]
        pairs = _unstacked(pairs, of_trunk)
    lora = lora.model_copy(update={"expert_factors": "shared" if shares_factors else "each"})
    pairs = _by_part(pairs, of_trunk, lora.rank)
    pairs = _by_expert(pairs, every, lora.rank, layers.declared_experts, source)
    found = {name: each for path, pair in pairs.items() for name, each in zip(matrix_names(path), pair, strict=True)}
    wanted = layers.with_groups_of(lora, _adapted(found, every, lora.rank))
    adapter = layers.build(wanted)
    state = TrainedState(
        adapter, {"weights": FlatTensors(adapter.layout.unsharded, _filled(adapter, found))}, 0, has_optimizer=False
    )
    save(state, target, base_name=base_name)
    return wanted


def _read(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of the file as float32."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file cannot be iterated)
    except SafetensorError as error:
        raise OperationError(
            f"adapter_model.safetensors cannot be read ({error}): send the file as peft saved it"
        ) from None
    # The hosted service writes empty ones for the gates of experts that have none.
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    if not tensors:
        raise OperationError("adapter_model.safetensors has no tensors: send the file as peft saved it")
    found: dict[str, np.ndarray] = {}
    for name in list(tensors):
        tensor = tensors.pop(name)  # its memory is free once it is float32
        if not tensor.is_floating_point():
            raise OperationError(f"{name} has dtype {tensor.dtype}: matrices of an adapter must be floating point")
        found[name] = tensor.float().numpy()
        if not np.isfinite(found[name]).all():
            raise OperationError(
                f"{name} has numbers that are not finite in float32: send an adapter without NaN and infinite values"
            )
    return found


def _pairs(tensors: Mapping[str, np.ndarray], every: Sequence[Target]) -> dict[str, Pair]:
    """Returns the pairs of matrices by the path of what they adapt, of which the output head is the last."""
    kinds = {kind for target in every for kind in (target.kind, target.saved_kind, target.stacked_as, target.part_of)}
    pairs: dict[str, Pair] = {}
    for name in tensors:
        match = MATRIX.fullmatch(name)
        if match is None or not name.startswith(PREFIX):
            raise _foreign(name, every)
        path = match["path"].removeprefix(PREFIX)
        of_a, of_b = matrix_names(path)
        if of_a not in tensors or of_b not in tensors:
            is_adapted = path == _TINKER_HEAD or OF_ALL_EXPERTS.fullmatch(path) or path.rpartition(".")[2] in kinds
            raise _incomplete(path, match["side"]) if is_adapted else _foreign(name, every)
        pairs[every[-1].name if path == _TINKER_HEAD else path] = tensors[of_a], tensors[of_b]
    return pairs


def _shares_factors(pairs: Mapping[str, Pair]) -> bool:
    """True if the experts of some layer share a matrix."""
    stacked = (matrix for path, pair in pairs.items() if STACKED.fullmatch(path) for matrix in pair)
    return any(matrix.ndim == 3 and len(matrix) == 1 for matrix in stacked)


def _unstacked(pairs: Mapping[str, Pair], every: Sequence[Target]) -> dict[str, Pair]:
    """Returns the pairs with stacked ones split into one per expert, under the names of peft."""
    linears = {target.stacked_as: target.saved_kind for target in every if target.num_experts is not None}
    found: dict[str, Pair] = {}
    for path, (a, b) in pairs.items():
        matched = STACKED.fullmatch(path)
        if matched is None or matched["linear"] not in linears or a.ndim != 3 or b.ndim != 3:
            found[path] = a, b
            continue
        paths = [f"{matched['experts']}.{number}.{linears[matched['linear']]}" for number in range(max(len(a), len(b)))]
        if len(a) != len(b):
            raise _incomplete(paths[min(len(a), len(b))], "A" if len(a) > len(b) else "B")
        found |= dict(zip(paths, zip(a, b, strict=True), strict=True))
    return found


def _by_part(pairs: Mapping[str, Pair], every: Sequence[Target], rank: int) -> dict[str, Pair]:
    """Returns the pairs with those of linear layers split into those of their parts that adapters adapt."""
    found = dict(pairs)
    for path, parts in parts_of_layers(every).items():
        if path in found:
            name, sizes = matrix_names(path)[1], [part.out_features for part in parts]
            found |= zip((part.name for part in parts), _parts(name, found.pop(path), sizes, rank), strict=True)
    return found


def _by_expert(
    pairs: Mapping[str, Pair],
    every: Sequence[Target],
    rank: int,
    declared: RoutedExperts | None,
    source: AdapterFile,
) -> dict[str, Pair]:
    """Returns the pairs with those of experts split into one per expert, under our names.

    Args:
        declared: the experts as transformers' modules have them, None if it is not known.
    """
    experts: dict[str, dict[str, Target]] = {}
    for target in every:
        if target.num_experts is not None:
            path, _, kind = target.name.rpartition(".")
            experts.setdefault(path, {})[kind] = target
    alternates = declared is not None and declared.alternates
    found: dict[str, Pair] = {}
    joint: list[_PairOfExperts] = []
    for path, pair in pairs.items():
        matched = OF_ALL_EXPERTS.fullmatch(path)
        if matched is None or matched["experts"] not in experts:
            found[path] = pair
        else:
            linears = _candidates(path, matched["experts"], pairs, experts[matched["experts"]], source.parameters)
            joint.append(_PairOfExperts(matched["experts"], matrix_names(path)[0], pair, rank, linears, alternates))
    swaps_in_out = _swaps_in_out(joint, declared, source.peft_version)
    for pair in joint:
        found |= pair.of_each(swaps_in_out)
    return found


def _candidates(
    path: str, experts: str, pairs: Mapping[str, Pair], kinds: Mapping[str, Target], parameters: Collection[str]
) -> list[list[Target]]:
    """Returns the linear layers, gate and up or down, that a pair may adapt by its name; both if it may be either.

    Shapes alone do not: up in one layout has those of down in the other where there are no gates.
    """
    before, down = [kinds[kind] for kind in GATE_UP if kind in kinds], [kinds["down_proj"]]
    if path != experts:
        return [before]
    if f"{experts}.{FIRST_OF_EXPERTS}" in pairs:
        return [down]
    adapts_before, adapts_down = (
        any(f"{experts}.{kind}".endswith(f".{name}") for kind in kinds_of_stack for name in parameters)
        for kinds_of_stack in (("gate_up_proj", "up_proj"), ("down_proj",))
    )
    if adapts_before != adapts_down:
        return [before] if adapts_before else [down]
    if len(before) == 1 and before[0].in_features == before[0].out_features:
        name = matrix_names(path)[0]
        raise OperationError(
            f"{name} fits up_proj and down_proj of experts: name the one in target_parameters of adapter_config.json"
        )
    return [before, down]


@dataclass(frozen=True, eq=False)
class _PairOfExperts:
    """The pair by which peft adapts a parameter of all experts of a layer."""

    experts: str
    name: str
    """The name of A."""
    pair: Pair
    """A [experts * rank, in] and B [out, rank * experts]; gate and up have one rank or one each."""
    rank: int
    linears: Sequence[Sequence[Target]]
    """Layers that it may adapt."""
    alternates: bool
    """Rows of gate and up take turns."""

    def adapted(self, swaps_in_out: bool) -> Sequence[Target] | None:
        """Returns the linear layers of these shapes, None if none has them.

        Args:
            swaps_in_out: whether A maps outputs, and B inputs.
        """
        a, b = self.pair
        if a.ndim != 2 or b.ndim != 2:
            return None
        sizes = len(b), a.shape[1]
        of_out, of_in = sizes[::-1] if swaps_in_out else sizes
        for targets in self.linears:
            num = targets[0].num_experts or 1
            fits = (of_in, of_out) == (targets[0].in_features, sum(target.out_features for target in targets))
            has_rank = len(a) in (num * self.rank, num * self.rank * len(targets))
            if fits and has_rank and b.shape[1] == len(a):
                return targets
        return None

    def of_each(self, swaps_in_out: bool) -> dict[str, Pair]:
        """Returns the pairs of each expert's linear layers, by their paths in our files."""
        targets = self.adapted(swaps_in_out)
        assert targets is not None, "checked before"
        sizes = [target.out_features for target in targets]
        found: dict[str, Pair] = {}
        for number, (a, b) in enumerate(split_experts(self.pair, targets[0].num_experts or 1)):
            if swaps_in_out:
                a, b = b.T, a.T
            if self.alternates and len(targets) == 2:
                b = b.reshape(-1, 2, b.shape[1]).swapaxes(0, 1).reshape(b.shape)
            for target, own in zip(targets, _parts(self.name, (a, b), sizes, self.rank), strict=True):
                found[f"{self.experts}.{number}.{target.saved_kind}"] = own
        return found


def _swaps_in_out(pairs: Sequence[_PairOfExperts], experts: RoutedExperts | None, version: str | None) -> bool:
    """True if A of the pairs maps outputs, and B inputs: by their shapes, or where all fit both by peft's version.

    Raises:
        OperationError: the shapes fit neither, or both and the version does not decide.
    """
    fitting = [each for each in (False, True) if all(pair.adapted(each) is not None for pair in pairs)]
    if len(fitting) == 1 or not pairs:
        return bool(pairs) and fitting[0]
    if not fitting:
        wrong = next((p for p in pairs if p.adapted(False) is None and p.adapted(True) is None), pairs[0])
        a, b = wrong.pair
        raise OperationError(
            f"{wrong.name} has shape {list(a.shape)} and its lora_B {list(b.shape)}, which do not fit rank {wrong.rank}"
            f" and the {wrong.linears[0][0].num_experts} experts of this base model: check the adapter's base model and"
            " rank"
        )
    if (by_version := _swaps_in_out_by(version, experts)) is None:
        raise OperationError(
            f"the shapes of {pairs[0].name} and its lora_B fit the layout of PEFT before 0.19.1 and the one since, and"
            f" adapter_config.json says {f'peft_version {version!r}' if version else 'no peft_version'}: set it to the"
            f' release that saved the adapter ("{LAYOUT_VERSION}" for an export of trainhouse)'
        )
    return by_version


def _swaps_in_out_by(version: str | None, experts: RoutedExperts | None) -> bool | None:
    """Returns whether this version of peft takes the outputs of experts for inputs, None if it is unknown.

    Of each expert's matrix, releases before 0.19.0 take the first dimension for the inputs; 0.19.0 the second if its
    class says `is_transposed`, later ones if it does not.
    """
    matched = _VERSION.fullmatch(version or "")
    if matched is None:
        return None
    release = tuple(int(each or 0) for each in matched.group("major", "minor", "patch"))
    if matched["unreleased"] and (0, 18, 0) <= release <= (0, 19, 1):
        return None
    is_transposed = experts is not None and experts.is_transposed
    is_marked = experts is not None and experts.is_transposed and experts.marks_transposed
    takes_second = release >= (0, 19, 0) and is_marked == (release == (0, 19, 0))
    return takes_second == is_transposed


def _parts(name: str, pair: Pair, sizes: Sequence[int], rank: int) -> list[Pair]:
    """Splits a pair into those of parts with so many outputs, the first ones, which have one A, or each some rows of
    it."""
    a, b = pair
    if len(a) not in (rank, rank * len(sizes)) or b.shape[1] != len(a) or len(b) < sum(sizes):
        raise OperationError(f"{name} has shape {list(b.shape)}, which does not fit rank {rank} and outputs {[*sizes]}")
    of_a, of_b = [a] * len(sizes), np.split(b, np.cumsum(sizes))[: len(sizes)]
    if len(a) != rank:
        of_a = np.split(a, len(sizes))
        of_b = [part[:, i * rank : (i + 1) * rank] for i, part in enumerate(of_b)]
    if sum(np.count_nonzero(part) for part in of_b) != np.count_nonzero(b):
        raise OperationError(
            f"{name} has {len(a)} ranks for several parts of a layer that all use them, or adapts other outputs too:"
            f" adapters here have {rank} for each part, and {len(sizes)} parts"
        )
    return list(zip(of_a, of_b, strict=True))


def _adapted(found: Mapping[str, np.ndarray], every: Sequence[Target], rank: int) -> set[str]:
    """Returns the names of the layers that the matrices belong to. Raises OperationError if adapters have no matrix of
    this name and shape."""
    owners: dict[str, tuple[Target, torch.Size]] = {}
    for target in every:
        layout = layout_of([target], rank)
        views = layout.named_views(torch.empty(layout.size, device="meta"))
        owners |= {name: (target, view.shape) for name, view in views.items()}
    for name, matrix in found.items():
        if name not in owners:
            raise _foreign(name, every)
        if matrix.shape != owners[name][1]:
            raise OperationError(
                f"{name} has shape {list(matrix.shape)}, and this base model needs {list(owners[name][1])} at rank "
                f"{rank}: the adapter belongs to another base model or has another rank"
            )
    return {owners[name][0].name for name in found}


def _filled(adapter: Adapter, found: Mapping[str, np.ndarray]) -> Tensor:
    """Returns the weights of the whole adapter, float32 [P]."""
    layout = adapter.layout.unsharded
    vector, generator = torch.zeros(layout.size), torch.Generator().manual_seed(adapter.lora.seed or 0)
    for target in adapter.targets:
        a, _ = pair_of(layout, vector, target)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
    for name, view in layout.named_views(vector).items():
        if name in found:
            view.copy_(torch.from_numpy(found[name]))
    return vector


def _foreign(name: str, every: Sequence[Target]) -> OperationError:
    kinds = ", ".join(sorted({target.saved_kind for target in every}))
    if ".lora_" not in name:
        return OperationError(f"{name} is not a matrix of an adapter: save it with save_embedding_layers=False")
    return OperationError(f"{name} is of a layer that cannot be adapted here: train with target_modules of {kinds}")


def _incomplete(path: str, side: str) -> OperationError:
    name, other = matrix_names(path)["AB".index(side)], "B" if side == "A" else "A"
    return OperationError(f"{name} has no matching lora_{other}: send both")
