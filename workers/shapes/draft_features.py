"""Sizes of captured features: what is stored of a token, by the form of the target's distribution. Imports no torch."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

CAPTURED = "captured"
_HASH_DIGITS = 16


@dataclass(frozen=True)
class FeatureColumn:
    """One tensor of captured features.

    width: numbers per token. dtype: None = the target's.
    """

    width: int
    dtype: Literal["int32", "float32"] | None = None


def target_columns(
    target_repr: str, hidden: int, vocab_size: int, draft_vocab_size: int, top_k: int | None
) -> dict[str, FeatureColumn]:
    """Returns what is stored of the target's output, by name.

    Args:
        target_repr: as in DraftConfig.
        hidden, vocab_size: of the target.
        top_k: with pruned_logits, how many logits of a token are stored; None = those of the draft's vocabulary.
    """
    one = {name: FeatureColumn(1, name) for name in ("int32", "float32")}
    if target_repr == "hidden_state":
        return {"hidden_state": FeatureColumn(hidden)}
    if target_repr == "logits":
        return {"logits": FeatureColumn(vocab_size)}
    if top_k is None:
        pruned = FeatureColumn(draft_vocab_size)
        return {"pruned_logits": pruned, "logsumexp": one["float32"], "top_token": one["int32"]}
    ids = FeatureColumn(top_k, "int32")
    return {"pruned_logits": FeatureColumn(top_k), "token_ids": ids, "rest_logsumexp": one["float32"]}


def feature_columns(num_layers: int, hidden: int, target: Mapping[str, FeatureColumn]) -> dict[str, FeatureColumn]:
    """Returns everything that is stored, given `target_columns`: also the outputs of the captured layers."""
    return {CAPTURED: FeatureColumn(num_layers * hidden), **target}


def token_bytes(columns: Mapping[str, FeatureColumn], number_bytes: int) -> int:
    """Returns the bytes of a token, where a number of the target has `number_bytes`."""
    return sum(each.width * (number_bytes if each.dtype is None else 4) for each in columns.values())


def vocabulary_hash(token_ids: bytes) -> str:
    """Returns the hash by which vocabularies of drafts are compared.

    Args:
        token_ids: ascending, as little-endian int64.
    """
    return hashlib.sha256(token_ids).hexdigest()[:_HASH_DIGITS]
