"""Tokenizes prompts and answers: a model's tokenizer together with its chat templates."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from .messages import REASONING, Chat, ChatError, Message

if TYPE_CHECKING:  # jinja2 is not among the client's dependencies
    from .template import ChatTemplates


@dataclass(frozen=True)
class Answer:
    """An answer of the assistant as the model samples it, through its end token, after the prompt for it."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    text: str
    """The text of prompt and answer."""


def _holds(written: str, content: str) -> bool:
    """Returns whether the content is written, perhaps with other white space around its reasoning."""
    return "".join(content.split()) in "".join(written.split())


def tokens_before(plain: Sequence[int], whole: Sequence[int], end_token_id: int | None) -> list[int]:
    """Returns the tokens that a tokenizer puts before a text.

    Args:
        plain: the tokens of the text alone.
        whole: its tokens with all that is put around it.
    """
    if not plain:  # the tokenizer has no token for the text
        return list(whole[:-1] if whole[-1:] == [end_token_id] else whole)
    starts = range(len(whole) - len(plain) + 1)
    return list(whole[: next((start for start in starts if whole[start : start + len(plain)] == plain), 0)])


class ChatTokenizer:
    """Tokenizes texts, chats and their answers."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        encode_whole: Callable[[str], list[int]],
        added_tokens: Mapping[str, int],
        end_token_id: int | None,
        templates: "ChatTemplates",
    ) -> None:
        """Takes the parts of a tokenizer.

        Args:
            encode: tokenizes a text without adding tokens.
            encode_whole: adds the tokens that the tokenizer puts around a text.
            added_tokens: text -> id of the tokens that are never split, such as special ones.
            end_token_id: the tokenizer's own.
        """
        self.encode = encode
        self.end_token_id = end_token_id
        self.templates = templates
        self._encode_whole = encode_whole
        self._added = {text: number for text, number in added_tokens.items() if text.strip()}

    @cached_property
    def first_tokens(self) -> list[int]:
        """The tokens that begin every text, such as BOS.

        Those that some tokenizers put behind it are left out: after an end token there is nothing to continue.
        """
        return tokens_before(self.encode("a"), self._encode_whole("a"), self.end_token_id)

    def encode_text(self, text: str) -> list[int]:
        return [*self.first_tokens, *self.encode(text)]

    def encode_next(self, text: str, before: str, tokens: Sequence[int]) -> list[int]:
        """Tokenizes a text that follows another.

        Args:
            before: the other text, and `tokens` its tokens. Where both texts together have tokens that cross the
                border, the second is tokenized apart, as a model that continues the first would have to write it.
        Raises:
            ValueError: the tokenizer gives the text other tokens wherever it stands.
        """
        # Behind a short text, so that nothing is added which tokenizers put in front of texts, such as a space.
        for first, its_tokens in ((before, tokens), *((one, self.encode(one)) for one in ("\n", "0"))):
            both = self.encode(first + text)
            if both[: len(its_tokens)] == list(its_tokens):
                return both[len(its_tokens) :]
        raise ValueError(f"the tokenizer cannot split a text before {text[:40]!r}: tokenize it yourself")

    def answer(self, chat: Chat, number: int) -> Answer:
        """Returns the answer in message `number`, which is the assistant's, and the prompt that asks for it.

        Raises:
            ChatError: the template does not write the answer after its own prompt for it, or not all of it.
        """
        place = f"messages.{number}"
        if not number:
            raise ChatError(f"{place} is an answer to nothing: leave it out, or set its weight to 0", place)
        self._check_is_written(chat.messages[number], chat, place)
        before = self.templates.render(replace(chat, messages=chat.messages[:number], add_generation_prompt=True))
        asked = replace(chat, messages=chat.messages[: number + 1], add_generation_prompt=False)
        written = self.templates.render(asked)
        if not written.startswith(before):
            raise ChatError(
                "the chat template's prompt for an answer is not how it writes the answer: give the message the "
                "reasoning that the prompt begins, or tokenize the chat yourself",
                place,
            )
        content = str(chat.messages[number]["content"])
        # The prompt may begin the reasoning that the content begins with.
        if not _holds(written[max(0, len(before) - len(content)) :], content):
            raise ChatError(
                f"the chat template leaves out a part of {place}.content, so it would not be learned", place
            )
        prompt, sampled = self.encode(before), self._sampled_part(written[len(before) :])
        return Answer(prompt, self.encode_next(sampled, before, prompt), before + sampled)

    @cached_property
    def chat_end(self) -> str | None:
        """The token that the chat template writes to end an answer, by its text; None if it writes none."""
        names = self._added_in(self.templates.after_every_answer) or self._added_in(self.templates.after_answer or "")
        own = next((name for name in names if self._added[name] == self.end_token_id), None)
        return own or (names[-1] if names else None)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a chat answer: the tokenizer's end token and the template's."""
        written = None if self.chat_end is None else self._added[self.chat_end]
        return tuple(dict.fromkeys(each for each in (self.end_token_id, written) if each is not None))

    def _check_is_written(self, message: Message, chat: Chat, place: str) -> None:
        template = self.templates.of(chat)
        for fields in (("tool_calls",), REASONING):
            given = next((field for field in fields if message.get(field)), None)
            if given is not None and not any(map(template.reads_field, fields)):
                raise ChatError(
                    f"the chat template ignores {place}.{given}, so the model would not learn it: write it into the "
                    "content, or leave it out",
                    f"{place}.{given}",
                )

    def _sampled_part(self, written: str) -> str:
        """Cuts what the template writes behind the end token of an answer: it is never sampled."""
        after = self.templates.after_answer
        if after is not None and self.chat_end is not None and written.endswith(after):
            rest = after[after.index(self.chat_end) + len(self.chat_end) :]
            return written.removesuffix(rest)
        # Answers of other kinds may have an end of their own, such as calls of tools.
        has_end = bool((after or "").strip()) or written.rstrip().endswith(tuple(self._added))
        return written.rstrip() if has_end else written

    def _added_in(self, text: str) -> list[str]:
        return self._pattern.findall(text)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._added, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
