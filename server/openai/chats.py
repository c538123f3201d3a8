"""Implements /v1/chat/completions: renders chats with the model's template and writes the assistant's messages."""

import json
import reprlib
from collections.abc import Iterator

from pydantic import JsonValue

from ...schemas.openai import ChatCompletionRequest, ChatMessage, OpenAiError
from ...schemas.openai_responses import AnswerMessage, ChatChoice, ChatLogprobs, TokenLogprob
from ..text.tokenizer import Chat, Tokenizer, ToolsNotSupported
from .choices import ChoiceDelta, TokenScores
from .completion_kind import CompletionKind
from .prompts import Prompt
from .response_writer import PromptOutput, ResponseWriter, top_logprobs_of


def check(request: ChatCompletionRequest) -> None:
    if request.top_logprobs and not request.logprobs:
        raise OpenAiError(f"top_logprobs {request.top_logprobs} needs logprobs: true", param="top_logprobs")
    wanted = reprlib.repr(request.tool_choice)
    if request.tool_choice not in ("auto", "none"):
        raise OpenAiError(f"tool_choice {wanted} is not supported: send auto or none", param="tool_choice")


def render_prompts(request: ChatCompletionRequest, tokenizer: Tokenizer, most_tokens: int) -> list[Prompt]:
    chat = Chat(
        messages=[_template_message(number, message) for number, message in enumerate(request.messages)],
        tools=request.tools if request.tools and request.tool_choice != "none" else None,
        add_generation_prompt=request.add_generation_prompt,
        variables=request.chat_template_kwargs,
    )
    try:
        return [Prompt(tokenizer.encode_chat(chat, most_tokens))]
    except ToolsNotSupported:
        raise OpenAiError(
            f"the chat template of {request.model} ignores tools, so the model would never see them: leave them out "
            "and describe them in a message, or use a model that was trained to call tools",
            param="tools",
            code="unsupported_parameter",
        ) from None


def _template_message(number: int, message: ChatMessage) -> dict[str, JsonValue]:
    """Returns the message as chat templates expect it.

    Text parts are joined by line breaks. An assistant message without content gets an empty string, because many
    templates concatenate it.
    """
    fields = message.model_dump()
    if message.role == "assistant" and message.content is None:
        fields["content"] = ""
    if isinstance(message.content, list):
        if wrong := next((part for part in message.content if part.type != "text"), None):
            raise OpenAiError(
                f"messages.{number}.content has a part of type {wrong.type!r}, which is not supported: send text",
                param=f"messages.{number}.content",
            )
        fields["content"] = "\n".join(part.text for part in message.content)
    if message.tool_calls is not None:
        fields["tool_calls"] = [_template_call(number, call) for call in message.tool_calls]
    return fields


def _template_call(number: int, call: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Parses the arguments of a tool call: clients send them as a JSON string, templates expect the object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        # The order of the arguments is kept, because templates may print them.
        return {**call, "function": {**function, "arguments": json.loads(text or "{}")}}
    except ValueError as error:
        place = f"messages.{number}.tool_calls"
        raise OpenAiError(f"{place} has arguments that are not valid JSON: {error}", param=place) from None


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


CHATS = CompletionKind(ChatCompletionRequest, check, render_prompts, ChatResponseWriter)
