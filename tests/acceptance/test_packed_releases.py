"""The official SDK trains and samples releases of GPTQ and bitsandbytes; PEFT loads the adapters onto their numbers."""

from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from ..live import live_server
from ..official import official_service
from ..tiny import tiny_model
from ..workers.formats.releases import RELEASES
from .test_official_sdk import batch, datum, download, logprobs_of, token_logprobs, train

# The SDK leaves connections to its interpreter's end, and peft calls what transformers renamed.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]

SERVED = {"tiny/gptq": "GPTQ in the order of activations", "tiny/bnb-4bit": "bitsandbytes NF4"}
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


def test_releases_are_trained_sampled_and_exported(tmp_path: Path) -> None:
    for name, release in SERVED.items():
        model = tiny_model("qwen3", tmp_path / name / "model", **SHAPE)
        RELEASES[release].write(model, tmp_path / name / "packed", tmp_path / name / "plain")
    models = {name: tmp_path / name / "packed" for name in SERVED}
    key = "tml-releases"
    with live_server(models, tmp_path / "state") as server, official_service(server.url, key) as service:
        rest = tinker.RestClient(base_url=server.url, api_key=key)
        for name in SERVED:
            client = service.create_lora_training_client(name, rank=4, seed=1).result(60)
            first, second = train(client, batch(), 2)
            assert second < first
            check_samples(client)
            path = client.save_weights_external("export").result(60).path
            (tmp_path / name / "adapter").mkdir()
            download(rest, path, tmp_path / name / "adapter")
            check_adapter(client, tmp_path / name)
        rest.holder.close()


def check_samples(client: tinker.TrainingClient) -> None:
    """The log-probabilities of samples are those of the trained model."""
    path = client.save_weights_for_sampler("sampler").result(60).path
    sampling = client.create_sampling_client(path).result(60)
    prompt, params = tinker.ModelInput.from_ints([5, 6, 7]), tinker.SamplingParams(max_tokens=6, temperature=1.0)
    (sequence,) = sampling.sample(prompt, 1, params).result(60).sequences
    output = client.forward([datum([5, 6, 7, *sequence.tokens])], "cross_entropy").result(60)
    np.testing.assert_allclose(sequence.logprobs, logprobs_of(output)[2:], atol=1e-4)


def check_adapter(client: tinker.TrainingClient, directory: Path) -> None:
    """PEFT gives our log-probabilities with the release's numbers, and others without the adapter."""
    tokens = torch.tensor([5, 6, 7, 8, 9, 10])
    model = AutoModelForCausalLM.from_pretrained(directory / "plain", dtype=torch.float32)
    expected = logprobs_of(client.forward([datum(tokens.tolist())], "cross_entropy").result(60))
    bare = token_logprobs(model, tokens)
    adapted = token_logprobs(PeftModel.from_pretrained(model, directory / "adapter"), tokens)
    np.testing.assert_allclose(adapted, expected, atol=1e-4)
    assert np.abs(bare - expected).max() > 1e-2
