"""Prints a tokenizer's files as transformers reads them: `python -m trainhouse.server.text.read_tokenizer SOURCE`.

Some tokenizer classes of transformers rebuild or repair tokenizer.json, and would load torch, which the server never
does. So this runs in a separate process that hides torch, once per model, and passes the result as JSON.
"""

import contextlib
import json
import sys
from dataclasses import asdict

from ...schemas.adapters.model_files import refuse_tokenizer_program
from .tokenizer import TokenizerFacts


def read(source: str) -> TokenizerFacts:
    """Returns the tokenizer of a directory or hub id.

    Raises:
        OSError, ValueError: it has no usable tokenizer.
    """
    refuse_tokenizer_program(source)
    # Imported here, after `main` has hidden torch.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(source)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"its tokenizer {type(tokenizer).__name__} is not a fast one (of the tokenizers library)")
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
    # Hide torch: loading it takes longer than everything else.
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
