"""Provides SamplingClient, which samples from one set of weights and scores prompts with it."""

import dataclasses
import itertools
import math

import numpy as np

from ..schemas.codec import decode_sample_response, tensor_to_json
from ..schemas.errors import readable_validation_errors
from ..schemas.sampling import ModelInput, SampleRequest, SampleResponse, SamplingParams
from .arguments import suggests
from .connection import ACCEPT_PROTOBUF, ServerConnection, to_json
from .data import Tokens, as_tokens
from .futures import APIFuture
from .tokenizer import PreTrainedTokenizer, load_tokenizer


class SamplingClient:
    """Samples from one set of weights.

    Created by ServiceClient.create_sampling_client or TrainingClient.save_weights_and_get_sampling_client.
    """

    def __init__(self, connection: ServerConnection, sampler_id: str, base_model: str) -> None:
        self.sampler_id = sampler_id
        self.base_model = base_model
        self._connection = connection
        self._seq_ids = itertools.count()

    @suggests(
        n="num_samples=",
        params="sampling_params=",
        **{name: f"sampling_params=SamplingParams({name}=...)" for name in SamplingParams.model_fields},
        max_new_tokens="sampling_params=SamplingParams(max_tokens=...)",
    )
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
        """Samples `num_samples` continuations, which share one prefill of the prompt.

        Args:
            prompt: token ids, [T], at least one.
            sampling_params: temperature, stops, max_tokens and so on; None for the defaults.
            include_prompt_logprobs: return `prompt_logprobs`, float32 [T], NaN at position 0.
            prompt_logprobs_last_n: score only the last n positions of the prompt.
            topk_prompt_logprobs: number of alternatives to return per prompt token.
            topk_sample_logprobs: number of alternatives to return per sampled token.
            target_prompt_logprobs: token ids to score, int64 [T - 1, K]; row i scores position i + 1, -1 is skipped.
            record_stability_info: store what the stable_reinforce loss needs about these samples.
            draft_path: checkpoint of the draft that speculates, instead of this client's; "" for none. See
                docs/drafts.md.
            num_draft_tokens: draft tokens per step; None for the server's default.
        Returns:
            The samples, each with int32 tokens [n] and float32 log-probabilities [n] at temperature 1; with a draft,
            `guesses` counts the draft tokens and the accepted ones.
        Raises:
            ValueError: an argument is invalid; other errors are raised by the future, see APIFuture.result.
        """
        targets = None if target_prompt_logprobs is None else tensor_to_json(target_prompt_logprobs)
        with readable_validation_errors():
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
        """Returns the log-probability of each prompt token given those before it, [T]; None for the first."""
        return self._connection.run(self._compute_logprobs(prompt))

    async def _compute_logprobs(self, prompt: Tokens) -> list[float | None]:
        response = await self.sample(prompt, 1, SamplingParams(max_tokens=1), include_prompt_logprobs=True)
        assert response.prompt_logprobs is not None
        return [None if math.isnan(value) else value for value in response.prompt_logprobs.tolist()]

    def get_tokenizer(self) -> PreTrainedTokenizer:
        """Downloads the base model's tokenizer. Raises TrainhouseError without transformers or tokenizers installed."""
        return self._connection.run(load_tokenizer(self._connection, self.base_model)).result()
