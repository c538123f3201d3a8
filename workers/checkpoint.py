"""An adapter in a directory and back: PEFT's files, which `peft` loads as they are, and ours beside them.

adapter_model.safetensors, adapter_config.json   PEFT's layout
trainhouse.json                                  format version, LoRA configuration, targets, base, steps taken
optimizer.safetensors                            AdamW's moments, where the optimizer was asked for
window.safetensors                               in snapshots: the gradients accumulated since the last step, if any
The weights are those of the last step. Saving disturbs no gradients, and but for snapshots saves none.
"""

import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..schemas.errors import OperationError
from ..schemas.models import LoraConfig
from .layout import Layout
from .learner import LEARNED, Window
from .lora import Adapter, Adapters
from .parallel.mesh import Mesh
from .programs import PROGRAMS, Program
from .programs.policy import POLICY

FORMAT = 1
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_FULL = (
    f"the weights were not saved, since the server's disk is full ({os.strerror(errno.ENOSPC)}): try again when there "
    "is room on it"
)
_WEIGHTS = "adapter_model.safetensors"
_PEFT_CONFIG = "adapter_config.json"
_DESCRIPTION = "trainhouse.json"
_OPTIMIZER = "optimizer.safetensors"
_WINDOW = "window.safetensors"


@dataclass(frozen=True, eq=False)
class Learned:
    """What an adapter has learned. vectors: float32 [P] by name, those that there are, whole where ranks have parts.

    Its own vectors, or others that stay as they are while it goes on. window: with the gradients since the last step,
    which are among the vectors then, where there are any.
    """

    adapter: Adapter
    vectors: Mapping[str, Tensor]
    num_steps: int
    window: Window | None = None

    @staticmethod
    def by(adapter: Adapter, mesh: Mesh) -> "Learned":
        """Of an adapter on the device, without its gradients. All ranks ask at once, here as in `with_window`."""
        live = adapter.live()
        return Learned(adapter, _whole(adapter, [name for name in LEARNED if name in live], mesh), adapter.num_steps)

    @staticmethod
    def with_window(adapter: Adapter, mesh: Mesh) -> "Learned":
        """Of an adapter on the device that is in no operation."""
        window = replace(adapter.window, losses=dict(adapter.window.losses))
        return Learned(adapter, _whole(adapter, adapter.live(), mesh), adapter.num_steps, window)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Learned":
        return replace(self, vectors={name: function(vector) for name, vector in self.vectors.items()})

    def moments(self) -> dict[str, Tensor]:
        """Before the first step an adapter has none: they are zeros, which it does not keep."""
        if "exp_avg" in self.vectors:
            return {name: self.vectors[name] for name in ("exp_avg", "exp_avg_sq")}
        return {name: torch.zeros_like(self.vectors["weights"]) for name in ("exp_avg", "exp_avg_sq")}


def save_adapter(learned: Learned, directory: Path, *, optimizer: bool, base_name: str) -> None:
    """Writes into an existing empty directory. optimizer: also what a resumed training needs.

    Raises OperationError (server) where there is no room for it.
    """
    try:
        _write_adapter(learned, directory, optimizer, base_name)
    except (OSError, SafetensorError) as error:
        if _is_for_want_of_room(error):
            raise OperationError(_FULL, "server") from None
        raise


def _is_for_want_of_room(error: OSError | SafetensorError) -> bool:
    """What safetensors raises has the number in its words alone."""
    number = error.errno if isinstance(error, OSError) else None
    return number in _NO_ROOM or any(f"(os error {one})" in str(error) for one in _NO_ROOM)


def _write_adapter(learned: Learned, directory: Path, optimizer: bool, base_name: str) -> None:
    adapter, layout = learned.adapter, learned.adapter.layout.whole
    _save_tensors(directory / _WEIGHTS, layout.named_views(learned.vectors["weights"]))
    if optimizer:
        _save_tensors(directory / _OPTIMIZER, _named_moments(layout, learned.moments()))
    if "accumulator" in learned.vectors:
        _save_tensors(directory / _WINDOW, layout.named_views(learned.vectors["accumulator"]))
    _save_json(directory / _PEFT_CONFIG, _peft_config(adapter, base_name))
    _save_json(directory / _DESCRIPTION, _describe(learned, base_name))


@dataclass(frozen=True, eq=False)
class Saved:
    """What was read of a checkpoint: tensors in host memory by matrix, moments by their kind. num_steps: None = without
    optimizer state."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Mapping[str, Tensor]]
    num_steps: int | None
    gradients: Mapping[str, Tensor]
    window: Window

    def put_into(self, adapter: Adapter) -> None:
        """Replaces weights, optimizer state (fresh where there is none) and accumulated gradients."""
        layout = adapter.layout
        layout.copy_parts(adapter.weights, self.weights)
        adapter.clear_window()
        adapter.clear_optimizer()
        if self.num_steps:
            layout.copy_parts(adapter.exp_avg, self.moments["exp_avg"])
            layout.copy_parts(adapter.exp_avg_sq, self.moments["exp_avg_sq"])
            adapter.num_steps = self.num_steps
        if self.gradients:
            layout.copy_parts(adapter.accumulator, self.gradients)
        adapter.window = self.window


def read_saved(adapter: Adapter, directory: Path, *, optimizer: bool) -> Saved:
    """A checkpoint for this adapter. Gradients are those of a snapshot, or none.

    Raises OperationError when it does not fit the adapter or is not whole.
    """
    description = _read_description(directory)
    _refuse_other_shape(adapter, description, directory)
    whole = adapter.layout.whole
    shapes = whole.named_views(torch.empty(whole.size, device="meta"))
    window = Window(**description.get("window", {}))
    return Saved(
        weights=_read_tensors(directory / _WEIGHTS, shapes),
        moments=_read_moments(shapes, directory) if optimizer else {},
        num_steps=description["num_steps"] if optimizer else None,
        gradients=_read_tensors(directory / _WINDOW, shapes) if window.num_operations else {},
        window=window,
    )


def read_new_adapter(adapters: Adapters, directory: Path, program: Program = POLICY) -> Adapter:
    """A checkpoint's weights as an adapter of their own, which has no id yet. program: which it is for.

    Raises as read_saved.
    """
    adapter = adapters.build(LoraConfig.model_validate(_read_description(directory)["lora"]), program)
    read_saved(adapter, directory, optimizer=False).put_into(adapter)
    return adapter


def _describe(learned: Learned, base_name: str) -> dict[str, Any]:
    window = {} if learned.window is None else {"window": asdict(learned.window)}
    return {
        "format": FORMAT,
        "base_model": base_name,
        "role": learned.adapter.program.role,
        "lora": learned.adapter.lora.model_dump(),
        "targets": [target.name for target in learned.adapter.targets],
        "num_steps": learned.num_steps,
        **window,
    }


def _peft_config(adapter: Adapter, base_name: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": adapter.program.peft_task,
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": adapter.lora.rank,
        "lora_alpha": adapter.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "target_modules": sorted({target.saved_kind for target in adapter.targets}),
        "modules_to_save": list(adapter.program.peft_modules) or None,
        **_dense_beside_experts(adapter),
    }


def _dense_beside_experts(adapter: Adapter) -> dict[str, Any]:
    """PEFT takes the kinds of layers that experts have for those of experts alone, unless others are named by weight.

    Its rank and scale of a pair are then those of the whole, as of experts.
    """
    of_experts = {target.saved_kind for target in adapter.targets if target.num_experts is not None}
    dense = {target.name for target in adapter.targets if target.num_experts is None and target.kind in of_experts}
    paths = {".".join(name.split(".")[-2:]) for name in dense}
    return {"target_parameters": sorted(f"{path}.weight" for path in paths)} if paths else {}


def _read_description(directory: Path) -> dict[str, Any]:
    path = directory / _DESCRIPTION
    try:
        description = json.loads(path.read_text())
    except FileNotFoundError:
        raise OperationError(f"{directory} is no checkpoint: it has no {_DESCRIPTION}") from None
    except ValueError as error:
        raise OperationError(f"{path} is damaged: {error}") from None
    if description.get("format") != FORMAT:
        raise OperationError(f"{path} has format {description.get('format')}; this server reads format {FORMAT}")
    return description


def _refuse_other_shape(adapter: Adapter, description: dict[str, Any], directory: Path) -> None:
    role = description.get("role", POLICY.role)
    if role not in PROGRAMS:
        raise OperationError(f"{directory} was saved by a {role}, of which this trainhouse knows nothing: upgrade it")
    ours, theirs = adapter.program, PROGRAMS[role]
    if ours.scores != theirs.scores:
        raise OperationError(
            f"{directory} was saved by a {theirs.role}, and the model is a {ours.role}: load it into a {theirs.role}"
        )
    saved = LoraConfig.model_validate(description["lora"])
    for name in ("rank", "alpha"):
        ours, theirs = getattr(adapter.lora, name), getattr(saved, name)
        if ours != theirs:
            raise OperationError(
                f"{directory} was saved with {name} {theirs}, the model has {name} {ours}:"
                f" create a model with {name} {theirs} and load into that"
            )
    ours, theirs = {target.name for target in adapter.targets}, set(description["targets"])
    if ours != theirs:
        raise OperationError(
            f"{directory} adapts other layers than the model: only the checkpoint has {_few(theirs - ours)}, only the"
            f" model has {_few(ours - theirs)}; use the train_attn, train_mlp and train_unembed it was saved with"
        )


def _whole(adapter: Adapter, names: Iterable[str], mesh: Mesh) -> dict[str, Tensor]:
    live = adapter.live()
    return {name: adapter.layout.whole_vector(live[name], mesh) for name in names}


def _named_moments(layout: Layout, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"{kind}.{name}": view for kind, vector in vectors.items() for name, view in layout.named_views(vector).items()
    }


def _read_moments(shapes: dict[str, Tensor], directory: Path) -> dict[str, dict[str, Tensor]]:
    if not (directory / _OPTIMIZER).exists():
        raise OperationError(
            f"{directory} was saved without optimizer state: load it without the optimizer (load_state), or train from"
            " a checkpoint written by save_state"
        )
    kinds = ("exp_avg", "exp_avg_sq")
    wanted = {f"{kind}.{name}": shape for kind in kinds for name, shape in shapes.items()}
    found = _read_tensors(directory / _OPTIMIZER, wanted)
    return {kind: {name: found[f"{kind}.{name}"] for name in shapes} for kind in kinds}


def _read_tensors(path: Path, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The file's tensors, which must be the wanted ones by name and shape."""
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a method of its own)
    except FileNotFoundError:
        raise OperationError(f"{path.parent} is incomplete: it has no {path.name}") from None
    except SafetensorError as error:
        raise OperationError(f"{path} is damaged: {error}") from None
    if found.keys() != wanted.keys():
        raise OperationError(
            f"{path} does not match the model: it lacks {_few(wanted.keys() - found.keys())} and has"
            f" {_few(found.keys() - wanted.keys())} beyond it"
        )
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            raise OperationError(
                f"{path}: {name} has shape {list(tensor.shape)}, the model needs {list(wanted[name].shape)}:"
                " the checkpoint is of another base model"
            )
    return found


def _save_tensors(path: Path, views: dict[str, Tensor]) -> None:
    save_file({name: view.cpu().contiguous() for name, view in views.items()}, path, metadata={"format": "pt"})


def _save_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _few(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if shown else "nothing"
