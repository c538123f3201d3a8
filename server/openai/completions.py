"""Implements /v1/completions: continues prompts given as text or as token ids."""

import math
from collections.abc import Iterator, Sequence

from ...schemas.chats.openai import CompletionChoice, CompletionLogprobs, CompletionRequest, OpenAiError
from ...workers.protocol.calls import ModelInfo
from ..sampling.sampling_job import MAX_SAMPLES
from ..text.tokenizer import Tokenizer
from .choices import ChoiceDelta, TokenScores
from .prompts import Prompt
from .response_writer import CompletionKind, PromptOutput, ResponseWriter, top_logprobs_of


def check(request: CompletionRequest) -> None:
    if not request.num_prompts:
        raise OpenAiError("prompt is an empty list: send at least one prompt", param="prompt")
    if (num_choices := request.num_prompts * request.n) > MAX_SAMPLES:
        raise OpenAiError(
            f"{request.num_prompts} prompts with n {request.n} make {num_choices} choices, more than the maximum of "
            f"{MAX_SAMPLES}: split them into several requests",
            param="prompt",
        )
    if request.wants_prompt_only and not request.echo:
        raise OpenAiError("max_tokens 0 without echo returns nothing: raise it, or set echo", param="max_tokens")
    if request.stream and request.echo and request.logprobs is not None:
        raise OpenAiError("echo with logprobs cannot be streamed: leave out stream, echo or logprobs", param="stream")


def tokenize_prompts(request: CompletionRequest, tokenizer: Tokenizer, most_tokens: int) -> list[Prompt]:
    return [
        Prompt(tokenizer.encode(one, most_tokens), one) if isinstance(one, str) else Prompt(one)
        for one in request.prompts
    ]


def ends(tokenizer: Tokenizer, model: ModelInfo) -> Sequence[int]:
    """Returns the end tokens of the model, and the tokenizer's, with which rows of texts end in training."""
    own = tokenizer.chats.end_token_id
    return model.eos_token_ids if own is None else (*model.eos_token_ids, own)


class CompletionResponseWriter(ResponseWriter):
    kind = "text_completion"
    chunk_kind = kind
    id_prefix = "cmpl"

    def choices(self, output: PromptOutput) -> Iterator[CompletionChoice]:
        echoed = self._logprobs(output.echo.scored)
        for delta in output.deltas:
            logprobs = _joined(echoed, self._logprobs(delta.scored))
            yield self._choice(delta, output.echo.text + delta.text, logprobs)

    def chunk_choice(self, delta: ChoiceDelta) -> CompletionChoice:
        return self._choice(delta, delta.text, self._logprobs(delta.scored))

    def _choice(self, delta: ChoiceDelta, text: str, logprobs: CompletionLogprobs | None) -> CompletionChoice:
        choice: CompletionChoice = {
            "index": delta.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if delta.first:
                choice["prompt_token_ids"] = list(self.prompts[delta.index // self.request.n].token_ids)
        return choice

    def _logprobs(self, scored: TokenScores | None) -> CompletionLogprobs | None:
        if scored is None:
            return None
        logprobs = [None if math.isnan(logprob) else logprob for logprob in scored.logprobs.tolist()]
        tops = zip(scored.token_ids, logprobs, top_logprobs_of(scored), strict=True)
        return {
            "tokens": [self.tokenizer.name_of(token_id) for token_id in scored.token_ids],
            "token_logprobs": logprobs,
            "top_logprobs": [
                None if logprob is None else self._likeliest(top | {token_id: logprob})
                for token_id, logprob, top in tops
            ],
            "text_offset": list(scored.offsets),
        }

    def _likeliest(self, logprobs: dict[int, float]) -> dict[str, float]:
        """Returns log-probabilities by token text; where two tokens have the same text, the likelier one counts."""
        by_text: dict[str, float] = {}
        for token_id, logprob in logprobs.items():
            by_text.setdefault(self.tokenizer.name_of(token_id), logprob)
        return by_text


def _joined(first: CompletionLogprobs | None, second: CompletionLogprobs | None) -> CompletionLogprobs | None:
    if first is None or second is None:
        return first or second
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }


COMPLETIONS = CompletionKind(CompletionRequest, check, tokenize_prompts, ends, CompletionResponseWriter)
