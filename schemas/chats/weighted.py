"""Turns chats and rows of datasets into tokens, each with its weight in training.

Each answer stands behind the very tokens of the prompt that the chat endpoint makes for it, or there is an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..training import Datum
from .messages import Chat, ChatError
from .rows import PromptCompletion, Row, WeightedChat, read_row
from .tokenizer import ChatTokenizer

TrainOn = Literal["assistant", "last", "all"]


@dataclass(frozen=True)
class WeightedTokens:
    """Token ids of a text, and how much the model is to predict each: 0 if it only reads it."""

    tokens: Sequence[int]
    weights: Sequence[float]

    @property
    def datum(self) -> Datum:
        """The datum for cross_entropy, without the tokens behind the last one to predict, which have no effect.

        Raises ValueError if there is none to predict.
        """
        last = max((number for number, weight in enumerate(self.weights) if weight != 0), default=0)
        if last == 0:
            raise ValueError("there is no token to predict: the text to train on is empty")
        targets = np.asarray(self.tokens[1 : last + 1], np.int64)
        weights = np.asarray(self.weights[1 : last + 1], np.float32)
        return Datum(np.asarray(self.tokens[:last], np.int32), {"target_tokens": targets, "weights": weights})


def weighted_row(row: Row, tokenizer: ChatTokenizer, train_on: TrainOn) -> WeightedTokens:
    """Tokenizes a row of a dataset, with the weight of each token. See Datum.from_row for the errors."""
    content = read_row(row, prompt_is_trained=train_on == "all")
    if isinstance(content, PromptCompletion):
        return _weighted_completion(content, tokenizer)
    return weighted_chat(content, tokenizer, train_on)


def weighted_chat(given: WeightedChat, tokenizer: ChatTokenizer, train_on: TrainOn) -> WeightedTokens:
    """Tokenizes a chat, with the weight of each token. See Datum.from_chat for the errors."""
    chat, weights = given.chat, given.weights
    answers = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if train_on == "all":
        return _weighted_whole(given, tokenizer, [number for number in answers if number])  # the first answers nothing
    if not (answers := [number for number in answers if weights[number]]):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in chat.messages))
        raise ChatError(f'no message of the role "assistant" is trained on: the chat has {roles}')
    return _weighted_answers(given, tokenizer, answers[-1:] if train_on == "last" else answers)[0]


def _weighted_answers(
    given: WeightedChat, tokenizer: ChatTokenizer, answers: Sequence[int]
) -> tuple[WeightedTokens, str]:
    """Returns the chat through the last of these answers, each behind the prompt for it, and its text."""
    found, text = WeightedTokens((), ()), ""
    for number in answers:
        answer, done = tokenizer.answer(given.chat, number), len(found.tokens)
        if list(answer.prompt[:done]) != list(found.tokens):
            raise _rewritten(number, len(given.chat.messages))
        read = [0.0] * (len(answer.prompt) - done)
        sampled = [given.weights[number]] * len(answer.tokens)
        found = WeightedTokens([*answer.prompt, *answer.tokens], [*found.weights, *read, *sampled])
        text = answer.text
    return found, text


def _weighted_whole(given: WeightedChat, tokenizer: ChatTokenizer, answers: Sequence[int]) -> WeightedTokens:
    answered, text = _weighted_answers(given, tokenizer, answers)
    chat = replace(given.chat, add_generation_prompt=False)
    whole = tokenizer.templates.render(chat)
    if not whole.startswith(text):
        raise _rewritten(answers[-1] + 1, len(chat.messages))
    tokens = [*answered.tokens, *tokenizer.encode_next(whole[len(text) :], text, answered.tokens)]
    weights = [1.0] * len(tokens)
    for number, weight in enumerate(given.weights):
        if weight != 1:
            start, end = (_length(chat, num, tokenizer, tokens) for num in (number, number + 1))
            weights[start:end] = [weight] * (end - start)
    return WeightedTokens(tokens, weights)


def _length(chat: Chat, num: int, tokenizer: ChatTokenizer, tokens: Sequence[int]) -> int:
    """Returns the number of tokens of the first messages. Raises ChatError if the chat does not begin with them."""
    if num == len(chat.messages):
        return len(tokens)
    first = tokenizer.encode(tokenizer.templates.render(replace(chat, messages=chat.messages[:num]))) if num else []
    if tokens[: len(first)] != first:
        raise _rewritten(num, len(chat.messages))
    return len(first)


def _rewritten(num: int, num_messages: int) -> ChatError:
    return ChatError(
        f"the first {num} of {num_messages} messages are written or tokenized in another way when more follow (as by "
        "templates that leave out earlier reasoning): make a datum of each turn, with "
        'Datum.from_chat(messages[: n + 1], tokenizer, train_on="last") for each n of an assistant\'s message'
    )


def _weighted_completion(given: PromptCompletion, tokenizer: ChatTokenizer) -> WeightedTokens:
    """Returns a prompt and the text that follows it, with the end token."""
    before = tokenizer.encode_text(given.prompt)
    num_first = len(tokenizer.first_tokens)
    after = tokenizer.encode_next(given.completion, given.prompt, before[num_first:])
    if tokenizer.end_token_id is not None and after[-1:] != [tokenizer.end_token_id]:
        after.append(tokenizer.end_token_id)
    weights = [float(given.prompt_is_trained)] * len(before) + [1.0] * len(after)
    return WeightedTokens([*before, *after], weights)
