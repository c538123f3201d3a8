"""Runs a remote RL loop: sample, reward, policy-gradient step. The toy reward is the share of even token ids.

.venv/bin/python examples/rl_loop.py --base-url http://127.0.0.1:8000 --model NAME [--loss ppo]
"""

import argparse
from collections.abc import Iterator, Sequence

import numpy as np
import trainhouse
from trainhouse import AdamParams, Datum, SampledSequence, SamplingParams

PROMPTS = [[10, 11, 12], [20, 21], [30, 31, 32, 33], [40, 41, 42]]


def main() -> None:
    options = parse_options()
    with trainhouse.ServiceClient(options.base_url, options.api_key) as service:
        client = service.create_lora_training_client(options.model, rank=8, seed=options.seed)
        for step in range(options.steps):
            params = SamplingParams(max_tokens=options.tokens, stop=[], seed=options.seed + step)
            sampler = client.save_weights_and_get_sampling_client()
            futures = [sampler.sample(prompt, options.samples, params) for prompt in PROMPTS]
            groups = [future.result().sequences for future in futures]
            data = [one for prompt, group in zip(PROMPTS, groups, strict=True) for one in group_data(prompt, group)]
            passed = client.forward_backward(data, options.loss)
            client.optim_step(AdamParams(learning_rate=options.learning_rate)).result()
            mean_reward = np.mean([reward(sequence.tokens) for group in groups for sequence in group])
            loss = passed.result().metrics["loss:sum"]
            print(f"step {step + 1:3d}  reward {mean_reward:.3f}  loss {loss:8.3f}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url")
    parser.add_argument("--api-key")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--loss", default="importance_sampling", choices=["importance_sampling", "ppo", "cispo"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=16, help="per prompt")
    parser.add_argument("--tokens", type=int, default=8, help="per sample")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the adapter and of sampling")
    return parser.parse_args()


def reward(tokens: np.ndarray) -> float:
    return float(np.mean(tokens % 2 == 0))


def group_data(prompt: Sequence[int], group: Sequence[SampledSequence]) -> Iterator[Datum]:
    """Yields one datum per sample. The advantage is its reward relative to the other samples of the prompt, 0 at the
    prompt's positions."""
    rewards = np.asarray([reward(sequence.tokens) for sequence in group])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    for sequence, advantage in zip(group, advantages, strict=True):
        tokens = [*prompt, *sequence.tokens.tolist()]
        before = np.zeros(len(prompt) - 1)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": np.concatenate([before, sequence.logprobs]),
            "advantages": np.concatenate([before, np.full(len(sequence.tokens), advantage)]),
        }
        yield Datum(tokens[:-1], inputs)


if __name__ == "__main__":
    main()
