"""Turns chats and rows of datasets into tokens and weights, with a model's own chat template.

The tokens of a turn are found by tokenizing the conversation up to it, so the weights are exact or there is an error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .tokenizer import PreTrainedTokenizer

Message = Mapping[str, Any]
TrainOn = Literal["assistant", "last", "all"]

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Roles of the ShareGPT format, in which turns have `from` and `value`."""


@dataclass(frozen=True)
class WeightedTokens:
    """Token ids of a text, and for each whether the model is to predict it (1) or only reads it (0)."""

    tokens: Sequence[int]
    weights: Sequence[float]


def weighted_chat(messages: Sequence[Message], tokenizer: PreTrainedTokenizer, train_on: TrainOn) -> WeightedTokens:
    """Returns the chat as the model reads it. See Datum.from_chat for its arguments and errors."""
    messages = [_checked(message, number) for number, message in enumerate(messages)]
    trained = [number for number, message in enumerate(messages) if _is_trained(message)]
    if not trained and train_on != "all":
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise ValueError(f'no message of the role "assistant" is trained on: the chat has {roles or "no messages"}')
    tokens = _render(tokenizer, messages, False)
    if train_on == "all":
        return WeightedTokens(tokens, [1.0] * len(tokens))
    weights = [0.0] * len(tokens)
    for number in trained[-1:] if train_on == "last" else trained:
        start = len(_prefix(tokenizer, messages, number, True, tokens))
        end = len(_prefix(tokenizer, messages, number + 1, False, tokens))
        end = _end_of_turn(tokens, start, end, tokenizer.all_special_ids)
        weights[start:end] = [float(messages[number].get("weight", 1.0))] * (end - start)
    return WeightedTokens(tokens, weights)


def _checked(message: object, number: int) -> Message:
    """Returns the message. Raises TypeError or ValueError if it has no role, also one in the form of ShareGPT."""
    if not isinstance(message, Mapping):
        raise TypeError(f"message {number} is of type {type(message).__name__}: pass dicts with role and content")
    if "from" in message and "value" in message:
        role = str(message["from"])
        return {"role": _ROLES.get(role, role), "content": message["value"]}
    if "role" not in message:
        raise ValueError(f"message {number} has no role, only {', '.join(map(str, message))}: name who speaks")
    return message


def _is_trained(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("weight", 1) != 0


def _render(tokenizer: PreTrainedTokenizer, messages: Sequence[Message], is_prompt: bool) -> list[int]:
    """Returns the tokens of a chat; is_prompt: with the beginning of the answer that follows."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the tokenizer has no chat template: use that of an instruction-tuned model, with transformers installed "
            "(pip install transformers), or set tokenizer.chat_template"
        )
    sent = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
    text = tokenizer.apply_chat_template(sent, tokenize=False, add_generation_prompt=is_prompt)
    assert isinstance(text, str)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _prefix(
    tokenizer: PreTrainedTokenizer, messages: Sequence[Message], num: int, is_prompt: bool, tokens: Sequence[int]
) -> list[int]:
    """Returns the tokens of the first messages. Raises ValueError if those of the whole chat do not begin with them."""
    prefix = _render(tokenizer, messages[:num], is_prompt)
    if tokens[: len(prefix)] == prefix:
        return prefix
    if num < len(messages) - is_prompt:
        raise ValueError(
            f"the chat template writes the first {num} of {len(messages)} messages in another way when more follow (as "
            "templates do that leave out earlier thoughts): make a datum of each turn, with "
            'Datum.from_chat(messages[: n + 1], tokenizer, train_on="last") for each n of an assistant\'s message'
        )
    raise ValueError(
        "the chat template's prompt for an answer is not how it writes the answer: give the message the thoughts that "
        "the prompt begins, or tokenize the chat yourself"
    )


def _end_of_turn(tokens: Sequence[int], start: int, end: int, special: Sequence[int]) -> int:
    """Returns the position after the token that ends the turn: what the template writes after it is never sampled."""
    return next((n + 1 for n in range(end - 1, start - 1, -1) if tokens[n] in special), end)


def weighted_text(parts: Sequence[tuple[str, float]], tokenizer: PreTrainedTokenizer) -> WeightedTokens:
    """Returns texts that follow each other, each with its weight, and the end of the last.

    The texts are tokenized apart, since a prompt is at sampling, too.
    """
    tokens: list[int] = []
    weights: list[float] = []
    for number, (text, weight) in enumerate(parts):
        of_part = list(tokenizer(text, add_special_tokens=number == 0)["input_ids"])
        tokens += of_part
        weights += [weight] * len(of_part)
    eos = tokenizer.eos_token_id
    if isinstance(eos, int) and tokens[-1:] != [eos]:
        tokens.append(eos)
        weights.append(1.0)
    return WeightedTokens(tokens, weights)


def weighted_row(row: Mapping[str, Any], tokenizer: PreTrainedTokenizer, train_on: TrainOn) -> WeightedTokens:
    """Returns a row of a dataset as the model reads it. See Datum.from_row."""
    for columns, read in _FORMS:
        if all(row.get(column) is not None for column in columns):
            found = read(row)
            if isinstance(found[0], tuple):
                return weighted_text(found, tokenizer)
            return weighted_chat(found, tokenizer, train_on)
    forms = "; ".join(" and ".join(columns) for columns, _ in _FORMS)
    raise ValueError(f"the row has the columns {', '.join(map(str, row)) or '(none)'}: expected {forms}")


def _pair(row: Mapping[str, Any]) -> list[Any]:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [(prompt, 0.0), (completion, 1.0)]
    return [*_messages(prompt, "user"), *_messages(completion, "assistant")]


def _messages(given: str | Sequence[Message], role: str) -> list[Message]:
    return [{"role": role, "content": given}] if isinstance(given, str) else list(given)


def _instruction(row: Mapping[str, Any]) -> list[Message]:
    asked = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
    return _dialogue(asked, row["output"])


def _dialogue(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


_FORMS: Sequence[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], list[Any]]]] = (
    (("messages",), lambda row: list(row["messages"])),
    (("conversations",), lambda row: list(row["conversations"])),
    (("prompt", "completion"), _pair),
    (("instruction", "output"), _instruction),
    (("question", "answer"), lambda row: _dialogue(row["question"], row["answer"])),
    (("text",), lambda row: [(row["text"], 1.0)]),
)
"""Columns of the usual datasets, and how they are read: as messages, or as texts with weights."""
