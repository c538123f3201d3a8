"""Critics and references through our client, against a live server."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from trainhouse import AdamParams, Datum, ServiceClient, TrainhouseError, TrainingClient
from trainhouse.schemas.training import ForwardBackwardOutput

from ..live import LiveServer

MODEL = "tiny/chat"
ADAM = AdamParams(learning_rate=2e-2)
TOKENS = np.random.default_rng(1).integers(3, 250, (3, 9)).tolist()


@pytest.fixture(scope="module")
def service(shared_server: LiveServer) -> Iterator[ServiceClient]:
    with ServiceClient(shared_server.url, "tml-role-tests") as client:
        yield client


def value_datum(tokens: Sequence[int]) -> Datum:
    returns = [0.5 if token % 2 else -1.0 for token in tokens]
    return Datum(tokens, {"returns": returns, "weights": [1.0] * len(tokens)})


def policy_datum(tokens: Sequence[int]) -> Datum:
    return Datum(tokens[:-1], {"target_tokens": tokens[1:]})


def logprobs(client: TrainingClient) -> np.ndarray:
    return np.concatenate([each["logprobs"] for each in forward(client).loss_fn_outputs])


def forward(client: TrainingClient) -> ForwardBackwardOutput:
    return client.forward([policy_datum(tokens) for tokens in TOKENS], "cross_entropy").result(60)


def step(client: TrainingClient, data: Sequence[Datum], loss_fn: str) -> float:
    loss = client.forward_backward(data, loss_fn).result(60).metrics["loss:sum"]
    client.optim_step(ADAM).result(60)
    return loss


@pytest.mark.slow
def test_a_critic_learns_returns_and_resumes_from_its_checkpoint(service: ServiceClient) -> None:
    critic = service.create_lora_training_client(MODEL, rank=4, seed=3, model_role="critic")
    assert critic.get_info().model_role == "critic"
    data = [value_datum(tokens) for tokens in TOKENS]
    losses = [step(critic, data, "value_mse") for _ in range(25)]
    assert losses[-1] < losses[0] / 4
    output = critic.forward(data, "value_mse").result(60)
    assert [each["values"].shape for each in output.loss_fn_outputs] == [(9,)] * 3
    errors = [
        each["values"] - datum.loss_fn_inputs["returns"]
        for each, datum in zip(output.loss_fn_outputs, data, strict=True)
    ]
    assert output.metrics["loss:sum"] == pytest.approx(sum(float((error**2).sum()) / 2 for error in errors), rel=1e-4)
    saved = critic.save_state("values").result(60).path
    again = service.create_training_client_from_state_with_optimizer(saved)
    assert again.get_info().model_role == "critic"
    assert step(again, data, "value_mse") == pytest.approx(step(critic, data, "value_mse"), rel=1e-5)


def test_a_reference_keeps_its_weights_until_it_loads_others(service: ServiceClient) -> None:
    policy = service.create_lora_training_client(MODEL, rank=4, seed=3)
    reference = service.create_reference_client(base_model=MODEL)
    assert reference.get_info().model_role == "reference"
    at_first = logprobs(policy)
    np.testing.assert_allclose(logprobs(reference), at_first, atol=1e-5)
    for _ in range(3):
        step(policy, [policy_datum(tokens) for tokens in TOKENS], "cross_entropy")
    trained = logprobs(policy)
    np.testing.assert_allclose(logprobs(reference), at_first, atol=1e-5)
    assert abs(trained - at_first).max() > 0.1
    path = policy.save_state("moved").result(60).path
    reference.load_state(path).result(60)
    np.testing.assert_allclose(logprobs(reference), trained, atol=1e-5)
    other = service.create_reference_client(path=path)
    assert other.get_info().model_role == "reference"
    np.testing.assert_allclose(logprobs(other), trained, atol=1e-5)


def test_operations_that_a_role_cannot_do_are_refused(service: ServiceClient) -> None:
    critic = service.create_lora_training_client(MODEL, rank=4, seed=3, model_role="critic")
    policy = service.create_lora_training_client(MODEL, rank=4, seed=3)
    reference = service.create_reference_client(base_model=MODEL)
    with pytest.raises(TrainhouseError, match="a reference is not trained: use forward"):
        reference.forward_backward([policy_datum(TOKENS[0])], "cross_entropy").result(60)
    with pytest.raises(TrainhouseError, match="'cross_entropy' is for another kind of model: this one takes value_mse"):
        critic.forward_backward([policy_datum(TOKENS[0])], "cross_entropy").result(60)
    with pytest.raises(TrainhouseError, match="'value_mse' is for another kind of model: this one takes cross_entropy"):
        policy.forward_backward([value_datum(TOKENS[0])], "value_mse").result(60)
    for client in (critic, reference):
        with pytest.raises(TrainhouseError, match="cannot be sampled: sample from a policy"):
            client.save_weights_for_sampler("none").result(60)
    saved, of_policy = critic.save_state("critic").result(60).path, policy.save_state("policy").result(60).path
    with pytest.raises(TrainhouseError, match=r"was saved by a critic, and run .* is a policy: load it into a critic"):
        policy.load_state(saved).result(60)
    with pytest.raises(TrainhouseError, match=r"was saved by a policy, and run .* is a critic: load it into a policy"):
        critic.load_state(of_policy).result(60)
    with pytest.raises(TrainhouseError, match="was saved by a critic: no reference can be created from it"):
        service.create_reference_client(path=saved)
    with pytest.raises(TrainhouseError, match="was saved by a critic, which cannot sample"):
        service.create_sampling_client(model_path=saved)
    with pytest.raises(TrainhouseError, match="a reference is not trained: load_weights moves it"):
        reference.optim_step(ADAM).result(60)
    with pytest.raises(TrainhouseError, match="a reference takes none: use forward for its losses"):
        reference.create_evaluation("never", 1, [policy_datum(TOKENS[0])]).result(60)
    assert policy.create_evaluation("due", 1, [policy_datum(TOKENS[0])]).result(60).metrics
    with pytest.raises(TrainhouseError, match="a reference cannot be saved"):
        reference.save_state("nothing").result(60)
    with pytest.raises(ValueError, match="a critic has no log-probabilities"):
        critic.forward_backward_custom([value_datum(TOKENS[0])], lambda data, logprobs: (0.0, logprobs))
    with pytest.raises(ValueError, match="give either base_model or path"):
        service.create_reference_client()
