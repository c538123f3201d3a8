"""A user's training script: pipelined steps through the official SDK, its weights sampled on the way.

python -m trainhouse.tests.acceptance.training_script URL SEED STEPS; says "step N" after each, in the end its result as
JSON.
"""

import json
import sys

import numpy as np
import tinker
from tinker import types

MODEL = "tiny/qwen3"
ADAM = types.AdamParams(learning_rate=1e-2)
ROW = 12
AHEAD = 2


def main(url: str, seed: int, num_steps: int) -> None:
    with tinker.ServiceClient(base_url=url, api_key=f"tml-tenant{seed}") as service:
        client = service.create_lora_training_client(MODEL, rank=4, seed=seed).result(120)
        losses, pending, sampler, early = [], [], None, []
        for step in range(num_steps):
            data = batch(1000 * seed + step)
            pending.append((client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)))
            if len(pending) > AHEAD:
                losses.append(loss_of(*pending.pop(0)))
            print(f"step {step}", flush=True)
            if step == num_steps // 3:
                sampler = client.save_weights_and_get_sampling_client().result(120)
                early = sample(sampler)
        losses += [loss_of(*each) for each in pending]
        assert sampler is not None
        path = client.save_state("end").result(120).path
        print(json.dumps({"losses": losses, "early": early, "late": sample(sampler), "path": path}), flush=True)


def batch(seed: int) -> list[types.Datum]:
    rows = np.random.default_rng(seed).integers(3, 500, (2, ROW + 1)).tolist()
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * ROW},  # pyright: ignore[reportArgumentType]
        )
        for row in rows
    ]


def loss_of(forward_backward, optim_step) -> float:
    loss = forward_backward.result(240).metrics["loss:sum"]
    optim_step.result(240)
    return loss


def sample(sampler: tinker.SamplingClient) -> list[float]:
    """Log-probabilities of two samples."""
    params = types.SamplingParams(max_tokens=8, seed=5, temperature=1.0)
    response = sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 2, params).result(240)
    return [logprob for sequence in response.sequences for logprob in sequence.logprobs or ()]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
