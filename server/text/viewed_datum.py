"""Shows a datum as it is trained on: the text, the weight and the other inputs of each token."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schemas.codec import JSON, MAX_DENSE_BYTES, decode_forward_backward
from ...schemas.training import Datum

SIGNIFICANT = ("advantages", "weights", "returns")
"""The input that colours the tokens: the first of these that a datum has."""


@dataclass(frozen=True)
class ViewedDatum:
    """A datum with the texts of its tokens.

    first: text of the first token, which is only read. texts: of the targets, [T]. columns: loss inputs, each [T].
    """

    tokens: Sequence[int]
    targets: Sequence[int]
    first: str
    texts: Sequence[str]
    columns: Mapping[str, Sequence[float]]

    @property
    def significance(self) -> Sequence[float]:
        """Returns how much each target counts: 0 if it is not trained on; relative to the largest."""
        values = next((self.columns[name] for name in SIGNIFICANT if name in self.columns), [1.0] * len(self.targets))
        most = max((abs(value) for value in values), default=0.0) or 1.0
        return [value / most for value in values]

    @property
    def summary(self) -> str:
        trained = sum(value != 0 for value in self.significance)
        sums = [f"sum of {name} {sum(values):.6g}" for name, values in self.columns.items() if name in SIGNIFICANT]
        return ", ".join((f"{len(self.tokens)} tokens", f"{trained} trained on", *sums))

    def as_json(self) -> dict[str, object]:
        rows = [
            {"token": token, "text": text, **{name: column[number] for name, column in self.columns.items()}}
            for number, (token, text) in enumerate(zip(self.targets, self.texts, strict=True))
        ]
        return {"first_token": self.tokens[0], "first_text": self.first, "targets": rows}


def view_datum(datum: Datum, text_of: Callable[[int], str]) -> ViewedDatum:
    """Raises ValueError if the targets have no shape of targets, or numbers are not finite."""
    targets = datum.loss_fn_inputs.get("target_tokens", datum.tokens[1:])
    if targets.ndim not in (1, 2) or targets.shape[1:] == (0,):
        raise ValueError(f"target_tokens have the shape {list(targets.shape)}: expected [T], or [T, K]")
    flat = targets if targets.ndim == 1 else targets[:, 0]  # the likeliest target stands for several
    columns = {
        name: values.tolist()
        for name, values in datum.loss_fn_inputs.items()
        if name != "target_tokens" and values.shape == flat.shape
    }
    for name, values in columns.items():
        if not np.isfinite(values).all():
            raise ValueError(f"{name} has numbers that are not finite")
    tokens, shown = datum.tokens.tolist(), np.asarray(flat).tolist()
    texts = [text_of(token) for token in (tokens[0], *shown)]
    return ViewedDatum(tokens, shown, texts[0], texts[1:], columns)


def data_of(value: Mapping[str, Any], max_dense_bytes: int = MAX_DENSE_BYTES) -> Sequence[Datum] | None:
    """Returns the data of a request of forward_backward, or of a datum as REST takes it; None for other objects.

    Args:
        max_dense_bytes: of sparse loss inputs, which are made dense.
    Raises:
        RequestError: they violate the protocol.
    """
    sent = value.get("forward_backward_input", value)
    data = sent.get("data") if isinstance(sent, Mapping) else None
    if "model_input" not in value and not data:
        return None
    body = {"model_id": "view", "seq_id": 1, "loss_fn": "cross_entropy", "data": data or [value]}
    return decode_forward_backward(json.dumps(body).encode(), JSON, max_dense_bytes).data
