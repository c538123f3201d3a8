"""A program that prints what transformers makes of a tokenizer's files:
`python -m trainhouse.server.text.read_tokenizer SOURCE`.

Its classes decide that (some rebuild what tokenizer.json says, some mend it), and loading them loads torch, which the
server never does: so they run in a process of their own, once a model, and what they made comes over as JSON.
"""

import contextlib
import json
import sys
from dataclasses import asdict

from .tokenizer import TokenizerFacts


def read(source: str) -> TokenizerFacts:
    """source: a directory or a hub id. Raises OSError, ValueError: it has no tokenizer that can be used."""
    # Imported here, once `main` has seen to it that torch is not.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(source)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"its tokenizer {type(tokenizer).__name__} is not one of the tokenizers library")
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ValueError("the vocabulary of its tokenizer is empty")
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    templates = tokenizer.chat_template or {}
    return TokenizerFacts(
        backend=backend.to_str(),
        special_tokens=tokenizer.special_tokens_map,
        chat_templates={"default": templates} if isinstance(templates, str) else templates,
    )


def main() -> int:
    # Taken for not installed: loading it takes longer than all of the rest.
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            facts = read(sys.argv[1])
    except (OSError, ValueError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    json.dump(asdict(facts), sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
