"""Evaluates a model with the cookbook's own benchmark and with the likelihood of held-out conversations.

PYTHON evaluate.py MODEL FILE [CHECKPOINT]: FILE has a conversation a line; CHECKPOINT is the path of sampler weights,
without which the base model is evaluated. Prints JSON: the score of GSM8K, and nats per token and bits per byte.
"""

import asyncio
import json
import sys

import tinker
from tinker_cookbook import model_info, renderers
from tinker_cookbook.eval.benchmarks import BenchmarkConfig, run_benchmark
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.nll_evaluator import SamplerNLLEvaluator
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer


async def main(model: str, file: str, checkpoint: str | None = None) -> None:
    name, tokenizer = model_info.get_recommended_renderer_name(model), get_tokenizer(model)
    client = await tinker.ServiceClient().create_sampling_client_async(model_path=checkpoint, base_model=model)
    config = BenchmarkConfig(max_examples=8, max_tokens=24)
    solved = await run_benchmark("gsm8k", client, renderers.get_renderer(name, tokenizer), config)
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=name, max_length=None, batch_size=16
    )
    held_out, _ = FromConversationFileBuilder(common_config=common, file_path=file)()
    likelihood = await SamplerNLLEvaluator.from_dataset(held_out, tokenizer=tokenizer)(client)
    print(json.dumps({"score": solved.score, "num_errors": solved.num_errors} | likelihood))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
