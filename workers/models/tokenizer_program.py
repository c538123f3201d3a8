"""Recognizes tokenizers that are programs in a model's repository. Imports no torch."""

from pathlib import Path

from ...schemas.bounds import load_json


def refuse_tokenizer_program(source: str) -> None:
    """Raises ValueError if only a program in the model's directory gives its tokens, as for Kimi-K2.

    Such programs are never run, and what transformers makes of their vocabulary splits texts at other places.
    """
    directory = Path(source)
    if (directory / "tokenizer.json").exists() or not (file := directory / "tokenizer_config.json").exists():
        return
    if program := (load_json(file.read_text()).get("auto_map") or {}).get("AutoTokenizer"):
        name = program if isinstance(program, str) else next((each for each in program if each), "unknown")
        raise ValueError(
            f"its tokenizer is a program ({name}), which is not run here: put a tokenizer.json of the tokenizers"
            " library next to it"
        )
