"""`trainhouse export`: a checkpoint from a running server, as a directory that other programs load."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import TrainhouseError
from .service import ServiceClient

RETRY_SECONDS = 1.0  # somebody is waiting, and can ask again
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = _parser().parse_args(arguments)
    directory: Path = options.directory
    try:
        if directory.is_dir() and any(directory.iterdir()):
            raise ValueError(f"{directory} has files already: name a new directory")
        with ServiceClient(options.base_url, options.api_key, retry_seconds=RETRY_SECONDS) as service:
            files = service.create_rest_client().export_checkpoint(options.path, directory).result()
        if all(file.suffix == ".age" for file in files):
            print(f"{directory} holds encrypted files: decrypt each with `age --decrypt --identity KEY FILE`")
            return 0
        description = json.loads((directory / "trainhouse.json").read_text())
    except (TrainhouseError, ValueError, OSError) as error:
        print(f"trainhouse export: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("trainhouse export: interrupted", file=sys.stderr)
        return INTERRUPTED
    print(f"{directory} is loaded by: {loaded_by(description, directory)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("trainhouse export", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "path", metavar="CHECKPOINT", help="its path, tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME"
    )
    parser.add_argument("directory", metavar="DIRECTORY", type=Path, help="a new one")
    parser.add_argument("--base-url", help="of the server (TRAINHOUSE_BASE_URL, http://127.0.0.1:8000)")
    parser.add_argument("--api-key", help="better in TRAINHOUSE_API_KEY")
    return parser


def loaded_by(description: dict[str, Any], directory: Path) -> str:
    """description: of trainhouse.json."""
    base, place = description["base_model"], directory.resolve()
    if description.get("training") == "draft":
        return _with_draft(base, place, description["algorithm"], description.get("block_size"))
    if description.get("training") == "full":
        return f'AutoModel.from_pretrained("{place}") of transformers, or the class that config.json names'
    return f'PeftModel.from_pretrained(base, "{place}") of peft, with {base}'


def _with_draft(base: str, place: Path, algorithm: str, block_size: int | None) -> str:
    tokens = 3 if block_size is None else block_size - 1
    config = {"method": algorithm, "model": str(place), "num_speculative_tokens": tokens}
    options = shlex.quote(json.dumps(config))
    return f"vllm serve MODEL --speculative-config {options}, MODEL being where {base} comes from"


if __name__ == "__main__":
    raise SystemExit(main())
