"""Implements /v1/chat/completions: renders chats with the model's template and writes the assistant's messages."""

import reprlib
from collections.abc import Iterator, Sequence

from pydantic import JsonValue

from ...schemas.chats.messages import Chat, ChatError, ToolsNotSupported, template_message
from ...schemas.chats.openai import (
    AnswerMessage,
    ChatChoice,
    ChatCompletionRequest,
    ChatLogprobs,
    OpenAiError,
    TokenLogprob,
)
from ...workers.protocol.calls import ModelInfo
from ..text.tokenizer import Tokenizer
from .choices import ChoiceDelta, TokenScores
from .prompts import Prompt
from .response_writer import CompletionKind, PromptOutput, ResponseWriter, top_logprobs_of


def check(request: ChatCompletionRequest) -> None:
    if request.top_logprobs and not request.logprobs:
        raise OpenAiError(f"top_logprobs {request.top_logprobs} needs logprobs: true", param="top_logprobs")
    wanted = reprlib.repr(request.tool_choice)
    if request.tool_choice not in ("auto", "none"):
        raise OpenAiError(f"tool_choice {wanted} is not supported: send auto or none", param="tool_choice")


def render_prompts(request: ChatCompletionRequest, tokenizer: Tokenizer, most_tokens: int) -> list[Prompt]:
    # Each message takes a token. Templates take seconds over as many messages as a body may have.
    if (num_messages := len(request.messages)) > most_tokens:
        raise OpenAiError(
            f"the chat has {num_messages} messages, more than the model's context of {most_tokens} tokens holds: send "
            "fewer",
            param="messages",
        )
    try:
        chat = Chat(
            messages=[template_message(f"messages.{number}", each) for number, each in enumerate(request.messages)],
            tools=request.tools if request.tools and request.tool_choice != "none" else None,
            add_generation_prompt=request.add_generation_prompt,
            variables=request.chat_template_kwargs,
        )
        return [Prompt(tokenizer.encode_chat(chat, most_tokens))]
    except ToolsNotSupported as error:
        raise OpenAiError(f"{request.model}: {error}", param="tools", code="unsupported_parameter") from None
    except ChatError as error:
        raise OpenAiError(str(error), param=error.place) from None


def ends(tokenizer: Tokenizer, model: ModelInfo) -> Sequence[int]:
    """Returns all tokens that may end an answer: those that config.json, generation_config.json and the tokenizer name,
    and the one that the chat template writes."""
    return (*model.eos_token_ids, *model.config_eos_token_ids, *tokenizer.chats.end_token_ids)


class ChatResponseWriter(ResponseWriter):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def choices(self, output: PromptOutput) -> Iterator[ChatChoice]:
        for delta in output.deltas:
            choice = self._choice(delta)
            choice["message"] = _message(delta)
            yield choice

    def chunk_choice(self, delta: ChoiceDelta) -> ChatChoice:
        choice = self._choice(delta)
        choice["delta"] = _message(delta)
        return choice

    def extra_fields(self, first: bool) -> dict[str, JsonValue]:
        return {"prompt_token_ids": list(self.prompts[0].token_ids)} if first and self.request.return_token_ids else {}

    def _choice(self, delta: ChoiceDelta) -> ChatChoice:
        choice: ChatChoice = {
            "index": delta.index,
            "logprobs": None if delta.scored is None else self._logprobs(delta.scored),
            "finish_reason": delta.finish_reason,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _logprobs(self, scored: TokenScores) -> ChatLogprobs:
        columns = zip(scored.token_ids, scored.logprobs.tolist(), top_logprobs_of(scored), strict=True)
        return {
            "content": [
                {
                    **self._token(token_id, logprob),
                    "top_logprobs": [self._token(*likely) for likely in top.items()],
                }
                for token_id, logprob, top in columns
            ]
        }

    def _token(self, token_id: int, logprob: float) -> TokenLogprob:
        spelled = list(self.tokenizer.token_bytes(token_id))
        return {"token": self.tokenizer.name_of(token_id), "logprob": logprob, "bytes": spelled}


def _message(delta: ChoiceDelta) -> AnswerMessage:
    return {"role": "assistant", "content": delta.text} if delta.first else {"content": delta.text}


CHATS = CompletionKind(ChatCompletionRequest, check, render_prompts, ends, ChatResponseWriter)
