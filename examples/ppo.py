"""Runs PPO with a policy, a critic and a reference on one server. The toy reward is the share of even token ids.

.venv/bin/python examples/ppo.py --base-url http://127.0.0.1:8000 --model NAME

Each iteration samples episodes, scores them with reference and critic, and trains on them for `--epochs` epochs of
mini-batches, the last of which may be smaller. Each mini-batch is one optimizer step of policy and critic.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import trainhouse
from trainhouse import AdamParams, Datum, SampledSequence, SamplingParams, TrainingClient

PROMPTS = [[10, 11, 12], [20, 21], [30, 31, 32, 33], [40, 41, 42]]


@dataclass
class Episode:
    """A prompt and its completion. logprobs, mask: [T], of the targets; mask is 1 for sampled tokens."""

    tokens: list[int]
    logprobs: np.ndarray
    mask: np.ndarray
    score: float

    @property
    def inputs(self) -> list[int]:
        return self.tokens[:-1]

    @property
    def targets(self) -> list[int]:
        return self.tokens[1:]


@dataclass
class EpisodeBatch:
    """Episodes with the inputs of the losses, [T] for each episode."""

    episodes: list[Episode]
    values: list[np.ndarray]
    advantages: list[np.ndarray]
    returns: list[np.ndarray]
    kl: float


def main() -> None:
    options = parse_options()
    with trainhouse.ServiceClient(options.base_url, options.api_key) as service:
        policy = service.create_lora_training_client(options.model, rank=8, seed=options.seed)
        critic = service.create_lora_training_client(options.model, rank=8, seed=options.seed, model_role="critic")
        reference = service.create_reference_client(base_model=options.model)
        num_steps = 0
        for iteration in range(options.iterations):
            episodes = sampled(policy, options, options.seed + iteration)
            batch = with_advantages(episodes, reference, critic, options)
            shuffled = np.random.default_rng(options.seed + iteration)
            for _ in range(options.epochs):
                order = shuffled.permutation(len(episodes))
                for chosen in (order[i : i + options.mini_batch] for i in range(0, len(order), options.mini_batch)):
                    train(policy, critic, batch, chosen, options)
                    num_steps += 1
            score = np.mean([episode.score for episode in episodes])
            print(f"iteration {iteration + 1:3d}  reward {score:.3f}  kl {batch.kl:7.4f}  optimizer steps {num_steps}")
            if options.move_reference_every and (iteration + 1) % options.move_reference_every == 0:
                reference.load_state(
                    policy.save_state(f"reference-{iteration + 1}", ttl_seconds=3600).result().path
                ).result()


def sampled(policy: TrainingClient, options: argparse.Namespace, seed: int) -> list[Episode]:
    params = SamplingParams(max_tokens=options.tokens, stop=[], seed=seed)
    sampler = policy.save_weights_and_get_sampling_client()
    futures = [sampler.sample(prompt, options.samples, params) for prompt in PROMPTS]
    groups = [future.result().sequences for future in futures]
    return [episode(prompt, one) for prompt, group in zip(PROMPTS, groups, strict=True) for one in group]


def episode(prompt: Sequence[int], sample: SampledSequence) -> Episode:
    before = np.zeros(len(prompt) - 1)
    mask = np.concatenate([before, np.ones(len(sample.tokens))])
    score = float(np.mean(sample.tokens % 2 == 0))
    return Episode([*prompt, *sample.tokens.tolist()], np.concatenate([before, sample.logprobs]), mask, score)


def with_advantages(
    episodes: list[Episode], reference: TrainingClient, critic: TrainingClient, options: argparse.Namespace
) -> EpisodeBatch:
    """Computes advantages and returns. A token's reward is minus `--kl` times its log-ratio to the reference; the last
    token's reward also has the score."""
    scored = reference.forward(
        [Datum(each.inputs, {"target_tokens": each.targets}) for each in episodes], "cross_entropy"
    )
    valued = critic.forward(
        [Datum(each.inputs, {"returns": np.zeros(len(each.inputs))}) for each in episodes], "value_mse"
    )
    values = [output["values"] for output in valued.result().loss_fn_outputs]
    advantages, ratios = [], []
    for each, output, value in zip(episodes, scored.result().loss_fn_outputs, values, strict=True):
        log_ratio = (each.logprobs - output["logprobs"]) * each.mask
        rewards = -options.kl * log_ratio
        rewards[-1] += each.score
        advantages.append(generalized_advantages(rewards, value, each.mask, options.discount, options.trace))
        ratios.append(log_ratio.sum())
    returns = [
        advantage + value * each.mask for advantage, value, each in zip(advantages, values, episodes, strict=True)
    ]
    num_tokens = sum(each.mask.sum() for each in episodes)
    return EpisodeBatch(
        episodes, values, list(whitened(advantages, episodes)), returns, float(sum(ratios) / num_tokens)
    )


def generalized_advantages(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, discount: float, trace: float
) -> np.ndarray:
    """Returns generalized advantages: Schulman et al., https://arxiv.org/abs/1506.02438."""
    found, following, next_value = np.zeros_like(rewards), 0.0, 0.0
    for i in reversed(range(len(rewards))):
        if mask[i]:
            error = rewards[i] + discount * next_value - values[i]
            found[i] = following = error + discount * trace * following
            next_value = values[i]
    return found


def whitened(advantages: list[np.ndarray], episodes: list[Episode]) -> Iterator[np.ndarray]:
    """Yields the advantages scaled to mean 0 and variance 1 over all sampled tokens."""
    counted = np.concatenate([one[each.mask > 0] for one, each in zip(advantages, episodes, strict=True)])
    for one, each in zip(advantages, episodes, strict=True):
        yield (one - counted.mean()) / (counted.std() + 1e-6) * each.mask


def train(
    policy: TrainingClient, critic: TrainingClient, batch: EpisodeBatch, chosen: np.ndarray, options: argparse.Namespace
) -> None:
    """Takes one optimizer step of policy and critic on the chosen episodes."""
    of_policy, of_critic = [], []
    for i in chosen:
        each = batch.episodes[i]
        inputs = {"target_tokens": each.targets, "logprobs": each.logprobs, "advantages": batch.advantages[i]}
        of_policy.append(Datum(each.inputs, inputs))
        values = {"returns": batch.returns[i], "old_values": batch.values[i], "weights": each.mask}
        of_critic.append(Datum(each.inputs, values))
    passes = [policy.forward_backward(of_policy, "ppo"), critic.forward_backward(of_critic, "value_mse")]
    rates = ((policy, options.learning_rate), (critic, options.critic_learning_rate))
    steps = [client.optim_step(AdamParams(learning_rate=rate), gradient_scale="mean") for client, rate in rates]
    for future in (*passes, *steps):
        future.result()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url")
    parser.add_argument("--api-key")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--mini-batch", type=int, default=24, help="episodes per optimizer step")
    parser.add_argument("--samples", type=int, default=16, help="per prompt")
    parser.add_argument("--tokens", type=int, default=8, help="per sample")
    parser.add_argument("--kl", type=float, default=0.01, help="weight of the log-ratio to the reference in rewards")
    parser.add_argument("--discount", type=float, default=1.0)
    parser.add_argument("--trace", type=float, default=0.95, help="lambda of generalized advantages")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--critic-learning-rate", type=float, default=1e-2)
    parser.add_argument("--move-reference-every", type=int, default=0, help="iterations; 0: keep the base model")
    parser.add_argument("--seed", type=int, default=0, help="of adapters, samples and mini-batches")
    return parser.parse_args()


if __name__ == "__main__":
    main()
