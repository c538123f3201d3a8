"""`trainhouse export` downloads a checkpoint from a running server into a directory that other programs can load."""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from ..schemas.adapters.adapter_files import CONFIG, DESCRIPTION, WEIGHTS, Reader, max_rank, vllm_form_of
from ..schemas.adapters.tensor_file import TensorFile
from ..schemas.adapters.vllm_form import room_for
from .errors import TrainhouseError
from .merged_model import merge_into_base
from .service import ServiceClient

_TEXT_PART = ".language_model."

RETRY_SECONDS = 1.0  # short, because a user is waiting and can retry
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = _parser().parse_args(arguments)
    directory: Path = options.directory
    is_new = not directory.exists()
    try:
        if directory.is_dir() and any(directory.iterdir()):
            raise ValueError(f"{directory} is not empty: name a new directory")
        with ServiceClient(options.base_url, options.api_key, retry_seconds=RETRY_SECONDS) as service:
            if options.merge_into is not None:
                _export_merged(service, options.path, options.merge_into, directory)
                print(f"load {directory} with: {_with_transformers(directory.resolve())}")
                return 0
            exporting = service.create_rest_client().export_checkpoint(options.path, directory, options.reader)
            files = exporting.result()
        if all(file.suffix == ".age" for file in files):
            print(f"{directory} holds encrypted files: decrypt each with `age --decrypt --identity KEY FILE`")
            return 0
        description = json.loads((directory / DESCRIPTION).read_text())
    except (TrainhouseError, ValueError, OSError) as error:
        print(f"trainhouse export: error: {error}", file=sys.stderr)
        if is_new:
            with suppress(OSError):  # what was written before stays
                directory.rmdir()
        return 1
    except KeyboardInterrupt:
        print("trainhouse export: interrupted", file=sys.stderr)
        return INTERRUPTED
    print(f"load {directory} with: {loaded_by(description, directory, options.reader)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("trainhouse export", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "path", metavar="CHECKPOINT", help="tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME"
    )
    parser.add_argument("directory", metavar="DIRECTORY", type=Path, help="new or empty directory to write")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--for",
        dest="reader",
        choices=get_args(Reader),
        default="peft",
        help="the program that is to load an adapter (default: %(default)s)",
    )
    form.add_argument(
        "--merge-into",
        metavar="BASE_DIRECTORY",
        type=Path,
        help="write the base model of this directory with the adapter added to its weights, instead of the adapter",
    )
    parser.add_argument(
        "--base-url", help="URL of the server (default: TRAINHOUSE_BASE_URL, TINKER_BASE_URL or http://127.0.0.1:8000)"
    )
    parser.add_argument("--api-key", help="API key; the environment variable TRAINHOUSE_API_KEY is safer")
    return parser


def _export_merged(service: ServiceClient, path: str, base: Path, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        adapter = Path(scratch)
        service.create_rest_client().export_checkpoint(path, adapter).result()
        if not (adapter / CONFIG).exists():
            raise ValueError(f"{path} is not an adapter that can be read here: export it without --merge-into")
        merge_into_base(adapter, base, directory)


def loaded_by(description: dict[str, Any], directory: Path, reader: Reader = "peft") -> str:
    """Returns how to load the exported checkpoint. description: content of its trainhouse.json."""
    base, place = description["base_model"], directory.resolve()
    if description.get("training") == "draft":
        return _with_draft(base, place, description["algorithm"], description.get("block_size"))
    if description.get("training") == "full":
        return _with_transformers(place)
    if reader == "vllm":
        return _with_vllm(base, place)
    if (refused := description.get("refused_by_peft")) is not None:
        return (
            "vLLM if you export it with --for vllm, or export it with --merge-into BASE_DIRECTORY: peft refuses"
            f" adapters of {refused} in {base}"
        )
    # Adapters of a text part that is inside of a larger model name its tensors.
    is_inside = any(_TEXT_PART in name for name in TensorFile(directory / WEIGHTS))
    whole = f"{_auto_class(is_inside)}.from_pretrained of {base}"
    return f'PeftModel.from_pretrained(base, "{place}") of peft, where base is {whole}'


def _with_transformers(place: Path) -> str:
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


if __name__ == "__main__":
    raise SystemExit(main())
