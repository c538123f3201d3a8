"""Writes a downloaded checkpoint as other programs read it, and says how they load it."""

import json
import logging
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..schemas.adapters.adapter_files import Reader, refusal_by_peft, vllm_form_of, write_for
from ..schemas.adapters.merged_model import merge_into_base, packing_of
from ..schemas.adapters.model_files import model_directory
from ..schemas.adapters.peft import CONFIG, DESCRIPTION, WEIGHTS
from ..schemas.adapters.tensor_file import TensorFile
from ..schemas.adapters.vllm_form import FORMS, room_for
from ..schemas.bounds import load_json

_TEXT_PART = ".language_model."

log = logging.getLogger("trainhouse.export")


@dataclass(frozen=True)
class ExportedCheckpoint:
    files: list[Path]
    note: str
    """The way to load it, and the reason if an adapter was merged without being asked for."""

    @staticmethod
    def of(directory: Path, note: str) -> "ExportedCheckpoint":
        return ExportedCheckpoint(sorted(each for each in directory.rglob("*") if each.is_file()), note)


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Creates a directory, and yields one inside of it, which is removed in the end.

    After an error the directory is removed, too, if it is new and empty. Raises ValueError if it already holds files.
    """
    if directory.is_dir() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty: name a new directory")
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            yield Path(scratch)
    except BaseException:
        if is_new:
            with suppress(OSError):  # what was written before stays
                directory.rmdir()
        raise


def write_merged(downloaded: Path, base: Path, directory: Path) -> str:
    """Writes the base model with the downloaded adapter added; returns how to load it. Raises as `merge_into_base`."""
    if not (downloaded / CONFIG).exists():
        raise ValueError("the checkpoint is not an adapter that can be read here: export it without --merge-into")
    write_for("peft", downloaded)
    merge_into_base(downloaded, base, directory)
    return f"load {directory} with: {with_transformers(directory.resolve())}"


def write_merged_unasked(downloaded: Path, served: Path | None, directory: Path) -> str:
    """Merges an adapter that peft refuses into its base model; returns why, and how to load it.

    Args:
        served: the directory that a server on this machine has loaded as the base model.
    Raises:
        ValueError: the base model's files on this machine do not allow it. The message says why it would be merged and
            what else can be done.
    """
    refused = refusal_by_peft(description_in(downloaded))
    try:
        note = write_merged(downloaded, _base_of(downloaded, served), directory)
    except ValueError as error:
        raise ValueError(
            f"{refused}, so the adapter would be exported merged, and that failed: {error}. Name a directory with the"
            " base model in 16 or 32 bits by --merge-into BASE_DIRECTORY (merge_into), or export the adapter alone with"
            " --for vllm or --for peft (reader)"
        ) from None
    return f"merged into the base model: {refused}; {note}"


def write_adapter(downloaded: Path, served: Path | None, directory: Path, reader: Reader) -> str:
    """Writes an adapter as the reader reads it, or a full model; returns how to load it. Raises as `write_for`.

    Args:
        served: see `write_merged_unasked`.
    """
    write_for(reader, downloaded)
    for file in sorted(each for each in downloaded.rglob("*") if each.is_file()):
        place = directory / file.relative_to(downloaded)
        place.parent.mkdir(parents=True, exist_ok=True)
        file.rename(place)
    if not (description := description_in(directory)):
        return f"{directory} holds encrypted files: decrypt each with `age --decrypt --identity KEY FILE`"
    return f"load {directory} with: {loaded_by(description, directory, reader, served)}"


def _base_of(downloaded: Path, served: Path | None) -> Path:
    """Returns the directory of the base model. Raises ValueError if what has its name on this machine is not it."""
    description = description_in(downloaded)
    name, architecture = description["base_model"], description.get("architecture")
    found = served or model_directory(name)
    if found is None:
        raise ValueError(f"{name} is not on this machine")
    config = load_json(file.read_text()) if (file := found / "config.json").exists() else {}
    if architecture not in (config.get("architectures") or ()):
        raise ValueError(f"{found.resolve()} is not the base model: its config.json names no {architecture}")
    return found


def loaded_by(description: dict[str, Any], directory: Path, reader: Reader = "peft", served: Path | None = None) -> str:
    """Returns how to load the exported checkpoint.

    Args:
        description: content of its trainhouse.json.
        served: see `write_merged_unasked`.
    """
    name, place = description["base_model"], directory.resolve()
    found = served or (Path(name) if Path(name).is_dir() else None)
    base = name if found is None else str(found.resolve())
    unless = "" if found or model_directory(name) else f"; if {name} is no hub id, give the base model's directory"
    if description.get("training") == "draft":
        block_size = description.get("block_size")
        tokens = 3 if block_size is None else block_size - 1
        draft = {"method": description["algorithm"], "model": str(place), "num_speculative_tokens": tokens}
        return f"vllm serve {shlex.join([base, '--speculative-config', json.dumps(draft)])}{unless}"
    if description.get("training") == "full":
        return with_transformers(place)
    if reader == "vllm":
        architecture = description.get("architecture")
        compare = f"; adapters of {architecture} were not compared in vLLM, so compare log-probabilities first"
        return _with_vllm(base, place) + unless + ("" if architecture in FORMS else compare)
    refused = refusal_by_peft(description)
    if refused is not None and description.get("role") == "critic":
        return f"a program of yours: {refused}"
    if refused is not None:
        return (
            "a program of yours, or vLLM if you export it with --for vllm, or export it with --merge-into"
            f" BASE_DIRECTORY: {refused}"
        )
    # Adapters of a text part that is inside of a larger model name its tensors.
    is_inside = any(_TEXT_PART in name for name in TensorFile(directory / WEIGHTS))
    whole = f'{_auto_class(is_inside)}.from_pretrained("{base}")'
    packing = None if found is None else packing_of(found)
    packed = f"; its weights are packed by {packing}: if transformers does not read them, give a dequantized copy"
    return f'PeftModel.from_pretrained({whole}, "{place}") of peft and transformers{packed if packing else unless}'


def description_in(directory: Path) -> dict[str, Any]:
    """Returns the content of the exported checkpoint's trainhouse.json, {} if its files are encrypted."""
    return load_json(file.read_text()) if (file := directory / DESCRIPTION).exists() else {}


def with_transformers(place: Path) -> str:
    architectures = load_json((place / "config.json").read_text()).get("architectures") or ()
    is_multimodal = any(name.endswith("ForConditionalGeneration") for name in architectures)
    return f'{_auto_class(is_multimodal)}.from_pretrained("{place}") of transformers'


def _auto_class(is_multimodal: bool) -> str:
    return "AutoModelForImageTextToText" if is_multimodal else "AutoModelForCausalLM"


def _with_vllm(base: str, place: Path) -> str:
    config = load_json((place / CONFIG).read_text())
    max_rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    adapter: dict[str, object] = {"name": place.name, "path": str(place)}
    options = ["--enable-lora", "--max-lora-rank", str(room_for(max_rank))]
    if vllm_form_of(place).experts == "mixed":
        options.append("--enable-mixed-moe-lora-format")
        adapter["is_3d_lora_weight"] = True
    options += ["--lora-modules", json.dumps(adapter)]
    return f"vllm serve {shlex.join([base, *options])}"
