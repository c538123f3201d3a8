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

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...schemas.errors import OperationError
from ...schemas.models import LoraConfig
from ..lora import Adapter, LoraLayers
from ..lora.adapter import layout_of, pair_of
from ..lora.target import GATE_UP, Target, parts_of_layers
from ..protocol.calls import AdapterFile
from ..shapes.parts import RoutedExperts
from . import TrainedState, save
from .peft_format import LAYOUT_VERSION
from .trained_state import FlatTensors

_PREFIX = "base_model.model."
_OTHER_SIDE = str.maketrans("AB", "BA")
_OF_EXPERTS = re.compile(r"(?P<path>.+\.experts)\.(base_layer\.)?lora_(?P<side>[AB])\.weight")
"""The names under which peft saves the matrices of all experts of a layer together; those of the parameter that it
wrapped first are below base_layer."""
_VERSION = re.compile(
    r"(?P<major>\d{1,4})\.(?P<minor>\d{1,4})(\.(?P<patch>\d{1,4}))?(\.post\d+)?"
    r"(?P<unreleased>\.?(a|b|rc|dev)\d+)?([@+].*)?"
)
"""peft_version in adapter_config.json, of an installation from source such as 0.18.2.dev0@COMMIT."""
_STACKED = re.compile(r"(?P<path>.+\.experts)\.(?P<kind>w[123])\.lora_[AB]\.weight")
"""The names of tensors [experts, ...] in files of the Tinker protocol; a matrix that experts share is [1, ...]."""
_TINKER_HEAD = f"{_PREFIX}model.unembed_tokens."


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
    tensors = {
        name.replace(_TINKER_HEAD, f"{_PREFIX}{head.name}."): each for name, each in _read(Path(source.path)).items()
    }
    if shares_factors := _shares_factors(tensors):
        every = [*(each.with_shared_factor() for each in of_trunk), head]
    else:
        every = [*of_trunk, head]
        tensors = _unstacked(tensors, of_trunk)
    lora = lora.model_copy(update={"expert_factors": "shared" if shares_factors else "each"})
    tensors = _unfused(tensors, of_trunk, lora.rank)
    found = _by_expert(tensors, every, lora.rank, layers.declared_experts, source)
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
    tensors: Mapping[str, Tensor],
    every: Sequence[Target],
    rank: int,
    declared: RoutedExperts | None,
    source: AdapterFile,
) -> dict[str, Tensor]:
    """Returns the tensors with those of experts split into one per expert, under our names.

    Args:
        declared: the experts as transformers' modules have them, None if it is not known.
    """
    experts: dict[str, dict[str, Target]] = {}
    for target in every:
        if target.num_experts is not None:
            path, _, kind = target.name.rpartition(".")
            experts.setdefault(_PREFIX + path, {})[kind] = target
    found: dict[str, Tensor] = {}
    pairs: list[_PairOfExperts] = []
    for name, tensor in tensors.items():
        matched = _OF_EXPERTS.fullmatch(name)
        if matched is None or matched["path"] not in experts:
            found[name] = tensor
        elif (other := tensors.get(name.translate(_OTHER_SIDE))) is None:
            raise _incomplete(name)
        elif matched["side"] == "A":
            path, alternates = matched["path"], declared is not None and declared.alternates
            linears = _candidates(name, path, tensors, experts[path], source.parameters)
            pairs.append(_PairOfExperts(name, path, tensor, other, rank, linears, alternates))
    swaps_in_out = _swaps_in_out(pairs, declared, source.peft_version)
    for pair in pairs:
        found |= pair.of_each(swaps_in_out)
    return found


def _candidates(
    name: str, path: str, tensors: Mapping[str, Tensor], kinds: Mapping[str, Target], parameters: Collection[str]
) -> list[list[Target]]:
    """Returns the linear layers, gate and up or down, that a pair may adapt by its name; both if it may be either.

    Shapes alone do not: up in one layout has those of down in the other where there are no gates.
    """
    before, down = [kinds[kind] for kind in GATE_UP if kind in kinds], [kinds["down_proj"]]
    if name != f"{path}.lora_A.weight":
        return [before]
    if f"{path}.base_layer.lora_A.weight" in tensors:
        return [down]
    adapts_before, adapts_down = (
        any(f"{path}.{kind}".endswith(f".{each}") for kind in kinds_of_stack for each in parameters)
        for kinds_of_stack in (("gate_up_proj", "up_proj"), ("down_proj",))
    )
    if adapts_before != adapts_down:
        return [before] if adapts_before else [down]
    if len(before) == 1 and before[0].in_features == before[0].out_features:
        raise OperationError(
            f"{name} fits up_proj and down_proj of experts: name the one in target_parameters of adapter_config.json"
        )
    return [before, down]


@dataclass(frozen=True, eq=False)
class _PairOfExperts:
    """The matrices by which peft adapts a parameter of all experts of a layer.

    a, b: A [experts * rank, in] and B [out, rank * experts]; gate and up have one rank or one each.
    linears: what it may adapt. alternates: whether rows of gate and up take turns.
    """

    name: str
    path: str
    a: Tensor
    b: Tensor
    rank: int
    linears: Sequence[Sequence[Target]]
    alternates: bool

    def adapted(self, swaps_in_out: bool) -> Sequence[Target] | None:
        """Returns the linear layers of these shapes, None if none has them.

        Args:
            swaps_in_out: whether A maps outputs, and B inputs.
        """
        if self.a.dim() != 2 or self.b.dim() != 2:
            return None
        sizes = len(self.b), self.a.shape[1]
        of_out, of_in = sizes[::-1] if swaps_in_out else sizes
        for targets in self.linears:
            num = targets[0].num_experts or 1
            fits = (of_in, of_out) == (targets[0].in_features, sum(target.out_features for target in targets))
            has_rank = len(self.a) in (num * self.rank, num * self.rank * len(targets))
            if fits and has_rank and self.b.shape[1] == len(self.a):
                return targets
        return None

    def of_each(self, swaps_in_out: bool) -> dict[str, Tensor]:
        """Returns the pairs of each expert's linear layers, by the names in our files."""
        targets = self.adapted(swaps_in_out)
        assert targets is not None, "checked before"
        num, a, b = targets[0].num_experts or 1, self.a, self.b
        of_a, of_b = a.unflatten(0, (num, -1)), b.unflatten(1, (-1, num)).permute(2, 0, 1)
        if swaps_in_out:
            of_a, of_b = of_b.transpose(1, 2), of_a.transpose(1, 2)
        if self.alternates and len(targets) == 2:
            of_b = of_b.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        sizes = [target.out_features for target in targets]
        return {
            f"{self.path}.{number}.{target.saved_kind}.lora_{side}.weight": matrix
            for number, pair in enumerate(zip(of_a, of_b, strict=True))
            for target, own in zip(targets, _parts(self.name, *pair, sizes, self.rank), strict=True)
            for side, matrix in zip("AB", own, strict=True)
        }


def _swaps_in_out(pairs: Sequence[_PairOfExperts], experts: RoutedExperts | None, version: str | None) -> bool:
    """True if A of the pairs maps outputs, and B inputs: by their shapes, or where all fit both by peft's version.

    Raises:
        OperationError: the shapes fit neither, or both and the version does not decide.
    """
    fitting = [each for each in (False, True) if all(pair.adapted(each) is not None for pair in pairs)]
    if len(fitting) == 1 or not pairs:
        return bool(pairs) and fitting[0]
    if not fitting:
        raise _unfitting(next((p for p in pairs if p.adapted(False) is None and p.adapted(True) is None), pairs[0]))
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


def _unfitting(pair: _PairOfExperts) -> OperationError:
    num = pair.linears[0][0].num_experts
    return OperationError(
        f"{pair.name} has shape {list(pair.a.shape)} and its lora_B {list(pair.b.shape)}, which do not fit rank"
        f" {pair.rank} and the {num} experts of this base model: check the adapter's base model and rank"
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
