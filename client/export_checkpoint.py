"""Says how other programs load an exported checkpoint."""

import json
import logging
import shlex
from pathlib import Path
from typing import Any

from ..schemas.adapters.adapter_files import DESCRIPTION, WEIGHTS, Reader, max_rank, vllm_form_of
from ..schemas.adapters.tensor_file import TensorFile
from ..schemas.adapters.vllm_form import room_for

_TEXT_PART = ".language_model."
_INSTEAD_OF_PEFT = ": export it for vllm, or merged with `trainhouse export --merge-into BASE_DIRECTORY`"

log = logging.getLogger("trainhouse.export")


def loaded_by(description: dict[str, Any], directory: Path, reader: Reader = "peft") -> str:
    """Returns how to load the exported checkpoint. description: content of its trainhouse.json."""
    base, place = description["base_model"], directory.resolve()
    if description.get("training") == "draft":
        return _with_draft(base, place, description["algorithm"], description.get("block_size"))
    if description.get("training") == "full":
        return with_transformers(place)
    if reader == "vllm":
        return _with_vllm(base, place)
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
    whole = f"{_auto_class(is_inside)}.from_pretrained of {base}"
    return f'PeftModel.from_pretrained(base, "{place}") of peft, where base is {whole}'


def refusal_by_peft(description: dict[str, Any]) -> str | None:
    """Returns what peft lacks for the exported adapter, None if it takes it. description: see `loaded_by`."""
    if (kind := description.get("refused_by_peft")) is None:
        return None
    refused = f"peft refuses adapters of {kind} in {description['base_model']}"
    if description.get("role") != "critic":
        return refused
    return f"{refused}, and vLLM samples no critics: one that peft is to load must be trained with train_attn=False"


def description_in(directory: Path) -> dict[str, Any]:
    """Returns the content of the exported checkpoint's trainhouse.json, {} if its files are encrypted."""
    return json.loads(file.read_text()) if (file := directory / DESCRIPTION).exists() else {}


def warn_if_refused(path: str, directory: Path) -> None:
    """Logs that peft refuses the checkpoint that was exported for it, and what to do."""
    description = description_in(directory)
    if (refused := refusal_by_peft(description)) is not None:
        remedy = "" if description.get("role") == "critic" else _INSTEAD_OF_PEFT
        log.warning("%s: %s%s", path, refused, remedy)


def with_transformers(place: Path) -> str:
    architectures = json.loads((place / "config.json").read_text()).get("architectures") or ()
    is_multimodal = any(name.endswith("ForConditionalGeneration") for name in architectures)
    return f'{_auto_class(is_multimodal)}.from_pretrained("{place}") of transformers'


def _auto_class(is_multimodal: bool) -> str:
    return "AutoModelForImageTextToText" if is_multimodal else "AutoModelForCausalLM"


def _with_vllm(base: str, place: Path) -> str:
    adapter: dict[str, object] = {"name": place.name, "path": str(place)}
    options = ["--enable-lora", "--max-lora-rank", str(room_for(max_rank(place)))]
    if vllm_form_of(place).experts == "mixed":
        options.append("--enable-mixed-moe-lora-format")
        adapter["is_3d_lora_weight"] = True
    options += ["--lora-modules", json.dumps(adapter)]
    return f"vllm serve MODEL {shlex.join(options)}, where MODEL is the path or hub id of {base}"


def _with_draft(base: str, place: Path, algorithm: str, block_size: int | None) -> str:
    tokens = 3 if block_size is None else block_size - 1
    config = {"method": algorithm, "model": str(place), "num_speculative_tokens": tokens}
    options = shlex.quote(json.dumps(config))
    return f"vllm serve MODEL --speculative-config {options}, where MODEL is the path or hub id of {base}"
