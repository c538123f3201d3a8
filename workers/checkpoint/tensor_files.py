"""Reads and writes the safetensors files of a model, which one or several ranks write."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...schemas.adapters.peft import stacked_places
from ...schemas.errors import OperationError
from .description import few

Place = int | tuple[slice, ...]
"""The place of a tensor in one of a file: along its first dimension, or a range along each."""


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: each.cpu().contiguous() for name, each in tensors.items()}, path, metadata={"format": "pt"})


def file_name(stem: str, part: int, num_parts: int) -> str:
    """Returns a file name of the form that Hugging Face uses."""
    return f"{stem}.safetensors" if num_parts == 1 else f"{stem}-{part + 1:05}-of-{num_parts:05}.safetensors"


def has_tensors(directory: Path, stem: str) -> bool:
    return bool(_files(directory, stem))


class SavedTensors(Mapping[str, Tensor]):
    """The tensors in the files of a stem. Names and shapes are checked at once; a tensor is read on access.

    The matrices of experts are also found where the file has one tensor for all experts of a layer, and those of the
    parts of a linear layer where it has one pair for the whole layer.
    """

    def __init__(
        self,
        directory: Path,
        stem: str,
        wanted: Mapping[str, Tensor],
        older_name: Callable[[str], str] = lambda name: name,
        joined: Mapping[str, Mapping[str, Place]] | None = None,
    ) -> None:
        """Opens the files.

        Args:
            wanted: the names and shapes that the files must have, no more and no less.
            older_name: returns another name that a tensor may have instead.
            joined: the places of tensors in one that the files may have instead, by the name of that.
        Raises:
            OperationError: a file is missing, damaged or has other tensors.
        """
        self._files: dict[str, Path] = {}
        # Name in the file, and place in that tensor if it has others too.
        self._places: dict[str, tuple[str, Place | None]] = {}
        newer = {older: name for name in wanted if (older := older_name(name)) != name}
        several: dict[str, Mapping[str, Place]] = {**stacked_places(wanted)}
        several |= {older_name(name): places for name, places in several.items()} | dict(joined or {})
        self._opened: dict[Path, Any] = {}
        shapes: dict[str, list[int]] = {}
        paths = _files(directory, stem)
        if not paths:
            raise OperationError(f"the checkpoint is incomplete: it has no {stem}.safetensors")
        for path in paths:
            try:
                file = self._opened[path] = safe_open(path, framework="pt")
                for found in file.keys():  # noqa: SIM118 (the file cannot be iterated)
                    shape = file.get_slice(found).get_shape()
                    places = {} if found in wanted else several.get(found, {})
                    parts = {
                        name: place
                        for name, place in places.items()
                        if not (isinstance(place, int) and place >= shape[0])
                    }
                    for name, place in parts.items() or [(newer.get(found) or found, None)]:
                        if name in self._files:
                            raise OperationError(
                                f"{path.name} and {self._files[name].name} both have {name}: remove one"
                            )
                        self._files[name], self._places[name] = path, (found, place)
                        shapes[name] = _shape_at(place, shape)
            except SafetensorError as error:
                raise OperationError(f"{path.name} is damaged: {error}") from None
        _check_tensors(f"{stem}.safetensors", shapes, wanted)

    def __getitem__(self, name: str) -> Tensor:
        """Reads a tensor. Raises OperationError if it cannot be read."""
        path, (found, place) = self._files[name], self._places[name]
        try:
            if place is not None:
                return self._opened[path].get_slice(found)[place]
            return self._opened[path].get_tensor(found)
        except (OSError, SafetensorError) as error:
            raise OperationError(f"{path.name} cannot be read: {error}", "server") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def read(self) -> dict[str, Tensor]:
        return {name: self[name] for name in self}


def _shape_at(place: Place | None, shape: list[int]) -> list[int]:
    if isinstance(place, tuple):
        ranges = zip(place, shape, strict=False)
        return [len(range(*of_dimension.indices(size))) for of_dimension, size in ranges]
    return shape if place is None else shape[1:]


def _files(directory: Path, stem: str) -> list[Path]:
    return sorted([*directory.glob(f"{stem}.safetensors"), *directory.glob(f"{stem}-*-of-*.safetensors")])


def _check_tensors(file: str, shapes: Mapping[str, list[int]], wanted: Mapping[str, Tensor]) -> None:
    if shapes.keys() != wanted.keys():
        raise OperationError(
            f"{file} does not match the model: it lacks {few(wanted.keys() - shapes.keys())} and has"
            f" {few(shapes.keys() - wanted.keys())} in addition"
        )
    for name, shape in shapes.items():
        if shape != list(wanted[name].shape):
            raise OperationError(
                f"{file}: {name} has shape {shape}, the model needs {list(wanted[name].shape)}:"
                " the checkpoint belongs to another base model"
            )
