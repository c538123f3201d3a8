"""A program for the official SDK of any version, run with that SDK alone on its path: trains, samples, saves, resumes,
lists and downloads. Prints what it saw as JSON."""

import asyncio
import io
import json
import logging
import sys
import tarfile
import urllib.request
from typing import Any

import tinker
from tinker import types

MODEL, VOCAB_TOKENS = "tiny/qwen3", [5, 6, 7, 8, 9, 10, 11, 12]


def done(value: Any) -> Any:
    """Older SDKs return some results directly, of which newer ones return futures."""
    return value.result() if hasattr(value, "result") else value


def losses_of(client: Any, num_steps: int) -> list[float]:
    tokens, targets = VOCAB_TOKENS[:-1], VOCAB_TOKENS[1:]
    inputs = {
        "target_tokens": types.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
        "weights": types.TensorData(data=[1.0] * len(targets), dtype="float32", shape=[len(targets)]),
    }
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    losses = []
    for _ in range(num_steps):
        passed = client.forward_backward([datum], "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=1e-2))
        output = passed.result()
        losses.append(output.metrics["loss:sum"])
        assert len(output.loss_fn_outputs[0]["logprobs"].data) == len(targets)
        stepped.result()
    return losses


def sampled(client: Any) -> list[int]:
    prompt = types.ModelInput.from_ints(VOCAB_TOKENS[:3])
    params = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
    answer = client.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
    assert len(answer.sequences[0].logprobs) == 4
    scores = client.compute_logprobs(prompt).result()
    assert scores[0] is None and scores[1] < 0
    return list(answer.sequences[0].tokens)


def downloaded(rest: Any, path: str) -> list[str] | None:
    """Returns the names in the archive of a checkpoint; None from an SDK that downloads otherwise."""
    if not hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        return None
    answer = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
    assert answer.expires is not None
    with urllib.request.urlopen(answer.url, timeout=60) as response:
        content = response.read()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return archive.getnames()


def unloaded(client: Any, model_id: str) -> Any:
    """Ends a model as a user of the SDK's resources does; None from an SDK that cannot."""
    from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
    from tinker.types import UnloadModelRequest, UnloadModelResponse

    async def unload() -> Any:
        with client.holder.aclient(ClientConnectionPoolType.TRAIN) as http:
            if not hasattr(http.models, "unload"):
                return None
            future = await http.models.unload(request=UnloadModelRequest(model_id=model_id))
            # Not by the resource of futures, which parses no answer in 0.25.
            body = {"request_id": future.request_id}
            return await http.post("/api/v1/retrieve_future", body=body, cast_to=UnloadModelResponse)

    answer = asyncio.run_coroutine_threadsafe(unload(), client.holder.get_loop()).result(60)
    return answer and {"model_id": answer.model_id, "type": answer.type}


def main() -> None:
    said: list[str] = []
    keep = logging.Handler()
    keep.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("tinker").addHandler(keep)
    logging.getLogger("tinker").setLevel(logging.INFO)
    url, key = sys.argv[1:3]
    service = tinker.ServiceClient(base_url=url, api_key=key)
    names = [one.model_name for one in done(service.get_server_capabilities()).supported_models]
    client = done(service.create_lora_training_client(base_model=MODEL, rank=8, seed=1))
    model_id = client.model_id
    losses = losses_of(client, 4)
    info = done(client.get_info())
    path = client.save_state("whole").result().path
    sampler_path = client.save_weights_for_sampler("alone").result().path
    live = sampled(done(client.save_weights_and_get_sampling_client(name="live")))
    saved = sampled(done(service.create_sampling_client(model_path=sampler_path)))
    next_loss = losses_of(client, 1)[0]
    resumed = done(service.create_training_client_from_state_with_optimizer(path))
    rest = done(service.create_rest_client())
    runs = rest.list_training_runs().result().training_runs
    own = rest.list_checkpoints(model_id).result().checkpoints
    of_user = rest.list_user_checkpoints().result().checkpoints
    seen = {
        "version": tinker.__version__,
        "file": tinker.__file__,
        "models": names,
        "losses": losses,
        "lora_rank": info.lora_rank,
        "live": live,
        "saved": saved,
        "next_loss": next_loss,
        "resumed_loss": losses_of(resumed, 1)[0],
        "runs": [run.training_run_id for run in runs],
        "model_id": model_id,
        "own": [one.checkpoint_id for one in own],
        "of_user": {one.checkpoint_id: one.checkpoint_type for one in of_user},
        "archive": downloaded(rest, sampler_path),
        "unloaded": unloaded(client, model_id),
        "said": said,
    }
    print("SEEN " + json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
