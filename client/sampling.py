"""SamplingClient: draws from, and scores with, one set of weights."""

import dataclasses
import itertools
import math

import numpy as np

from ..schemas.codec import decode_sample_response, tensor_to_json
from ..schemas.sampling import ModelInput, SampleRequest, SampleResponse, SamplingParams
from .connection import ACCEPT_PROTOBUF, Connection, to_json
from .data import Tokens, as_tokens
from .futures import APIFuture
from .tokenizer import PreTrainedTokenizer, load_tokenizer
from .wrong_values import refused_in_words


class SamplingClient:
    """Made by ServiceClient.create_sampling_client or TrainingClient.save_weights_and_get_sampling_client."""

    def __init__(self, connection: Connection, sampler_id: str, base_model: str) -> None:
        self.sampler_id = sampler_id
        self.base_model = base_model
        self._connection = connection
        self._seq_ids = itertools.count()

    def sample(
        self,
        prompt: Tokens,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        prompt_logprobs_last_n: int | None = None,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: np.ndarray | None = None,
        record_stability_info: bool = False,
        draft_path: str | None = None,
        num_draft_tokens: int | None = None,
    ) -> APIFuture[SampleResponse]:
        """`num_samples` continuations, which share the work on the prompt.

        target_prompt_logprobs: int64 [len(prompt) - 1, K], row i scores position i + 1, -1 = nothing.
        record_stability_info: keeps what the stable_reinforce loss needs of these samples.
        draft_path: of a draft that guesses, num_draft_tokens at a time (None = as many as usual), in place of this
        client's; "" = none. How its guesses fared is in `guesses` of the answer. See docs/drafts.md.
        """
        targets = None if target_prompt_logprobs is None else tensor_to_json(target_prompt_logprobs)
        with refused_in_words():
            request = SampleRequest(
                sampling_session_id=self.sampler_id,
                seq_id=next(self._seq_ids),
                prompt=ModelInput.from_ints(as_tokens(prompt)),
                num_samples=num_samples,
                sampling_params=sampling_params or SamplingParams(),
                prompt_logprobs=include_prompt_logprobs,
                prompt_logprobs_last_n=prompt_logprobs_last_n,
                topk_prompt_logprobs=topk_prompt_logprobs,
                topk_sample_logprobs=topk_sample_logprobs,
                target_prompt_logprobs=targets,
                record_stability_info=record_stability_info,
                draft_path=draft_path,
                num_draft_tokens=num_draft_tokens,
            )
        return self._connection.run(self._sample(to_json(request)))

    async def _sample(self, body: bytes) -> SampleResponse:
        submitted = await self._connection.submit("asample", body)
        response = await self._connection.result(submitted, decode_sample_response, ACCEPT_PROTOBUF)
        names = submitted.sample_sequence_ids or [None] * len(response.sequences)
        named = map(lambda sequence, name: dataclasses.replace(sequence, sequence_id=name), response.sequences, names)
        return dataclasses.replace(response, sequences=tuple(named))

    def compute_logprobs(self, prompt: Tokens) -> APIFuture[list[float | None]]:
        """The log-probability of each token after those before it; None for the first."""
        return self._connection.run(self._compute_logprobs(prompt))

    async def _compute_logprobs(self, prompt: Tokens) -> list[float | None]:
        response = await self.sample(prompt, 1, SamplingParams(max_tokens=1), include_prompt_logprobs=True)
        assert response.prompt_logprobs is not None
        return [None if math.isnan(value) else value for value in response.prompt_logprobs.tolist()]

    def get_tokenizer(self) -> PreTrainedTokenizer:
        return self._connection.run(load_tokenizer(self._connection, self.base_model)).result()
