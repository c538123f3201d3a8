"""Converts the user's data into arrays."""

from collections.abc import Mapping, Sequence
from reprlib import repr as shortened
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from ..schemas import training
from ..schemas.drafts import CaptureResponse
from ..schemas.sampling import ModelInput, refuse_mapping
from ..schemas.training import ProvenanceSpan
from .arguments import suggests
from .tokenizer import Message, PreTrainedTokenizer, TrainOn, WeightedTokens, weigh_chat, weigh_row

Tokens = ModelInput | Sequence[int] | np.ndarray


class Datum(training.Datum):
    """One training sequence, such as Datum(model_input=tokens, loss_fn_inputs={"target_tokens": ..., "weights": ...}).

    `target_tokens[i]` is predicted from `model_input[: i + 1]`, so the targets must already be shifted. Inputs can be
    lists, numpy arrays or CPU torch tensors.

    Args:
        model_input: token ids, [T]; converted to int32.
        loss_fn_inputs: name -> numbers, one row per position, [T] or [T, ...]; `target_tokens` is converted to int64,
            all others to float32.
        model_input_spans: positions of `model_input` that repeat tokens of an earlier sample.
        loss_fn_input_spans: positions of `loss_fn_inputs` that repeat tokens of an earlier sample.
        feature_ref: refers to captured features, see TrainingClient.capture.
    Raises:
        TypeError: `loss_fn_inputs` is not a mapping.
        ValueError: a value is not a number, or a token id is not an integer of its type.
    """

    @suggests(
        tokens="model_input=",
        input_ids="model_input=",
        labels='loss_fn_inputs={"target_tokens": ..., "weights": ...}, shifted by one',
        target_tokens='loss_fn_inputs={"target_tokens": ...}',
        weights='loss_fn_inputs={"weights": ...}',
        messages="Datum.from_chat(messages, tokenizer)",
    )
    def __init__(
        self,
        model_input: Tokens,
        loss_fn_inputs: Mapping[str, ArrayLike],
        model_input_spans: Sequence[ProvenanceSpan] = (),
        loss_fn_input_spans: Sequence[ProvenanceSpan] = (),
        feature_ref: str | None = None,
    ) -> None:
        if not isinstance(loss_fn_inputs, Mapping):
            kind = type(loss_fn_inputs).__name__
            raise TypeError(f"loss_fn_inputs is a {kind}: pass a dict of arrays, such as {{'target_tokens': [...]}}")
        super().__init__(
            tokens=_as_array(as_tokens(model_input), "model_input", np.int32),
            loss_fn_inputs={
                name: _as_array(value, name, np.int64 if name == "target_tokens" else np.float32)
                for name, value in loss_fn_inputs.items()
            },
            model_input_spans=tuple(model_input_spans),
            loss_fn_input_spans=tuple(loss_fn_input_spans),
            feature_ref=feature_ref,
        )

    @classmethod
    def from_chat(
        cls,
        messages: Sequence[Message],
        tokenizer: PreTrainedTokenizer,
        train_on: TrainOn = "assistant",
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Self:
        """Returns a chat as a datum for cross_entropy, written by the model's chat template.

        The tokens before an answer are those of the prompt that /v1/chat/completions makes of the messages before it.

        Args:
            messages: as /v1/chat/completions takes them: dicts with role and content, and what else the template reads.
                A message with `weight` 0 is not trained on.
            tokenizer: of the model: `get_tokenizer()`.
            train_on: the answers of the assistant, the last of them, or all tokens. An answer is what the model would
                sample: from after the template's prompt for it, through the token that ends it.
            tools, chat_template_kwargs: as /v1/chat/completions takes them.
        Raises:
            ValueError: there is no such answer or no template, or the template rewrites earlier turns or ignores a
                part of the chat.
            TypeError: a message is no dict.
        """
        return cls._of(weigh_chat(messages, tokenizer, train_on, tools, chat_template_kwargs))

    @classmethod
    def from_row(cls, row: Mapping[str, Any], tokenizer: PreTrainedTokenizer, train_on: TrainOn = "assistant") -> Self:
        """Returns a row of a dataset as a datum for cross_entropy.

        Args:
            row: has `messages` or `conversations` (a chat); `prompt` and `completion` (texts, of which the second is
                trained on, or messages); `instruction`, perhaps `input`, and `output`, or `question` and `answer` (a
                chat of two messages); or `text` (trained on whole). Next to a chat, `system`, `tools` and
                `chat_template_kwargs` are read.
            tokenizer, train_on: as of `from_chat`.
        Raises:
            ValueError: the row has none of these, or another column of text that is not known metadata; or as
                `from_chat`.
        """
        return cls._of(weigh_row(row, tokenizer, train_on))

    @classmethod
    def _of(cls, text: WeightedTokens) -> Self:
        datum = text.datum
        return cls(datum.tokens, datum.loss_fn_inputs)


def as_number(value: object, name: str) -> float:
    """Raises ValueError if the value is no number."""
    try:
        return float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {shortened(value)}: it should be a number") from None


class CapturedData(list[Datum]):
    """The result of TrainingClient.capture is this list: the data, each with its `feature_ref`.

    num_bytes: size of the stored features; equal content within one request counts once. expires_at: when the first of
    them is deleted, in seconds since 1970.
    """

    def __init__(self, data: Sequence[training.Datum], answers: Sequence[CaptureResponse]) -> None:
        refs = [ref for answer in answers for ref in answer.feature_refs]
        super().__init__(_with_feature_ref(datum, ref) for datum, ref in zip(data, refs, strict=True))
        self.num_bytes = sum(answer.num_bytes for answer in answers)
        self.expires_at = min(answer.expires_at for answer in answers)


def _with_feature_ref(datum: training.Datum, feature_ref: str) -> Datum:
    spans = datum.model_input_spans, datum.loss_fn_input_spans
    return Datum(datum.tokens, datum.loss_fn_inputs, *spans, feature_ref)


def as_tokens(prompt: Tokens) -> list[int]:
    """Returns the token ids. Raises ValueError for a string, and for values that are not token ids."""
    if isinstance(prompt, str):
        shown = prompt if len(prompt) <= 40 else f"{prompt[:37]}..."
        raise ValueError(f"{shown!r} is a string: pass its token ids, get_tokenizer().encode(text)")
    if isinstance(prompt, ModelInput):
        return prompt.to_ints()
    tokens = _as_array(prompt, "tokens", np.int64)
    if tokens.ndim != 1:
        raise ValueError(f"tokens have the shape {list(tokens.shape)}: pass one sequence, a flat list")
    return tokens.tolist()


def _as_array(value: ArrayLike, name: str, dtype: type[np.int32 | np.int64 | np.float32]) -> np.ndarray:
    """Converts the value. Raises ValueError if it is not numeric, or has fractions or overflows in an integer type."""
    refuse_mapping(value, name)
    if value is None:
        raise ValueError(f"{name} is None: pass a list or an array of numbers")
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of several lengths
        raise ValueError(f"{name} is not an array of numbers: {error}") from None
    if array.dtype.kind not in "biuf":
        wrong = next((each for each in array.flat if not isinstance(each, int | float)), array.flat[0])
        raise ValueError(f"{name} has {str(wrong)[:40]!r}, which is not a number of at most 64 bits")
    if issubclass(dtype, np.integer) and array.size:
        most = np.iinfo(dtype).max
        if (fractions := array[array != np.trunc(array)]).size:
            raise ValueError(f"{name} has {fractions[0]}: token ids are integers")
        if not -most <= array.min() <= array.max() <= most:
            raise ValueError(f"{name} has {max(array.min(), array.max(), key=abs)}: a token id is at most {most}")
    return array.astype(dtype)
