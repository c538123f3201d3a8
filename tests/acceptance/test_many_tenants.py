"""Tenants share a server through the unmodified official SDK: their operations share passes, and nothing else."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import psutil
import pytest
import tinker
from safetensors.numpy import load
from tinker import types
from tinker.types import LossFnType

from ..live import DEPLOYMENTS, EACH_DEPLOYMENT, LiveServer, live_server
from ..official import official_service

# The SDK leaves connections to its interpreter's end.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

MODEL = "tiny/qwen3"
VOCAB = 512
STEPS = 3
PASS_TOKENS = 512


@pytest.fixture(scope="module", params=EACH_DEPLOYMENT)
def server(request: pytest.FixtureRequest, tiny_models: dict[str, Path], tmp_path_factory) -> Iterator[LiveServer]:
    """Passes are small, so that tenants share them and large operations are split; adapters take turns on the slots."""
    options = {"pass_tokens": PASS_TOKENS, "micro_batch_tokens": 256, "adapter_slots": 4} | DEPLOYMENTS[request.param]
    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path_factory.mktemp("state"), **options) as running:
        yield running


Connect = Callable[[str], tinker.ServiceClient]


@contextmanager
def connections(server: LiveServer) -> Iterator[Connect]:
    """Yields a function from a key to its tenant's service: any key is its own tenant if the server has issued none."""
    services: dict[str, tinker.ServiceClient] = {}
    with ExitStack() as stack:

        def connected(key: str) -> tinker.ServiceClient:
            if key not in services:
                services[key] = stack.enter_context(official_service(server.url, f"tml-{key}"))
            return services[key]

        yield connected


@pytest.fixture(scope="module")
def connect(server: LiveServer) -> Iterator[Connect]:
    with connections(server) as connected:
        yield connected


@dataclass(frozen=True)
class Job:
    """A job describes the training of a tenant."""

    name: str
    loss: LossFnType
    rank: int
    lengths: tuple[int, ...]
    learning_rate: float = 1e-3
    trains: tuple[str, ...] = ("attn", "mlp", "unembed")
    config: dict[str, float] = field(default_factory=dict)
    seed: int = 1

    def data(self) -> list[types.Datum]:
        random = np.random.default_rng(self.seed)
        return [self._datum(random.integers(3, VOCAB, length + 1), random) for length in self.lengths]

    def _datum(self, tokens: np.ndarray, random: np.random.Generator) -> types.Datum:
        length = len(tokens) - 1
        if self.loss == "cross_entropy":
            inputs = {"weights": random.uniform(0, 1, length)}
        else:
            inputs = {"logprobs": random.uniform(-7, -6, length), "advantages": random.uniform(-1, 1, length)}
        return datum(tokens.tolist(), **inputs)

    def create(self, service: tinker.ServiceClient) -> tinker.TrainingClient:
        return self.submit(service).result(60)

    def submit(self, service: tinker.ServiceClient) -> tinker.APIFuture[tinker.TrainingClient]:
        attn, mlp, unembed = (part in self.trains for part in ("attn", "mlp", "unembed"))
        return service.create_lora_training_client(
            MODEL, self.rank, self.seed, train_attn=attn, train_mlp=mlp, train_unembed=unembed
        )


JOBS = (
    Job("sentences", "cross_entropy", rank=8, lengths=(20, 31, 7, 12)),
    Job("pages", "cross_entropy", rank=16, lengths=(180, 90), trains=("attn",)),
    Job("words", "cross_entropy", rank=1, lengths=(3,) * 12, trains=("mlp",), learning_rate=3e-3),
    Job("head", "cross_entropy", rank=4, lengths=(33, 33), trains=("unembed",)),
    Job("book", "cross_entropy", rank=2, lengths=(700,), trains=("attn", "mlp")),
    Job("sampled", "importance_sampling", rank=8, lengths=(24, 24, 24), learning_rate=2e-3),
    Job("clipped", "ppo", rank=32, lengths=(16, 48), config={"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
    Job("soft", "cispo", rank=3, lengths=(40, 9), trains=("attn", "mlp")),
    Job("direct", "dro", rank=5, lengths=(11, 22, 33), config={"beta": 0.2}, trains=("mlp", "unembed")),
    Job("grouped", "gspo", rank=8, lengths=(30,) * 4, config={"clip_low_threshold": 0.1, "clip_high_threshold": 10.0}),
)


def datum(tokens: Sequence[int], **inputs: np.ndarray) -> types.Datum:
    arrays = {"target_tokens": np.asarray(tokens[1:], dtype=np.int64)}
    arrays |= {name: np.asarray(value, dtype=np.float32) for name, value in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in arrays.items()},
    )


@dataclass
class Training:
    """A job in progress: everything is sent before anything is awaited."""

    job: Job
    client: tinker.TrainingClient
    passes: list[tinker.APIFuture] = field(default_factory=list)
    steps: list[tinker.APIFuture] = field(default_factory=list)

    def send_step(self) -> None:
        self.passes.append(self.client.forward_backward(self.job.data(), self.job.loss, self.job.config))
        # Unless eps is larger, Adam turns a gradient near zero into a full step of its sign, which rounding decides.
        adam = types.AdamParams(learning_rate=self.job.learning_rate, eps=1e-4)
        self.steps.append(self.client.optim_step(adam))

    def outcome(self) -> "Outcome":
        outputs = [future.result(120) for future in self.passes]
        for future in self.steps:
            future.result(120)
        logprobs = [array["logprobs"].to_numpy() for output in outputs for array in output.loss_fn_outputs]
        losses = np.array([output.metrics["loss:sum"] for output in outputs])
        return Outcome(losses, np.concatenate(logprobs), weights_of(self.client))


@dataclass(frozen=True)
class Outcome:
    """losses, logprobs: of every step. weights: final ones, by name."""

    losses: np.ndarray
    logprobs: np.ndarray
    weights: dict[str, np.ndarray]

    def difference(self, other: "Outcome") -> float:
        """Returns the largest difference, relative where values exceed 1."""
        assert self.weights.keys() == other.weights.keys()
        pairs = [(self.losses, other.losses), (self.logprobs, other.logprobs)]
        pairs += [(self.weights[name], other.weights[name]) for name in self.weights]
        return max(float((np.abs(a - b) / np.maximum(1, np.abs(b))).max()) for a, b in pairs)


_names = (f"weights-{number}" for number in itertools.count())


def weights_of(client: tinker.TrainingClient) -> dict[str, np.ndarray]:
    path = client.save_weights_external(next(_names)).result(60).path
    rest = tinker.RestClient(base_url=client.holder._base_url, api_key=client.holder._api_key)
    urls = rest.get_external_weights_urls(path).result(60).urls
    with urlopen(urls["adapter_model.safetensors"], timeout=30) as response:
        return load(response.read())


def train_alone(job: Job, service: tinker.ServiceClient) -> Outcome:
    training = Training(job, job.create(service))
    for _ in range(STEPS):
        training.send_step()
    return training.outcome()


@pytest.fixture(scope="module")
def alone(connect: Connect) -> dict[str, Outcome]:
    """Runs each job on a quiet server, one after the other."""
    return {job.name: train_alone(job, connect(job.name)) for job in JOBS}


def train_together(connect: Connect, before_each: Callable[[], None] = lambda: None) -> dict[str, Outcome]:
    trainings = [Training(job, job.create(connect(job.name))) for job in JOBS]
    for _ in range(STEPS):
        for training in trainings:
            before_each()
            training.send_step()
    return {training.job.name: training.outcome() for training in trainings}


def test_ten_tenants_together_train_as_alone(connect: Connect, alone: dict[str, Outcome]) -> None:
    together = train_together(connect)
    differences = {name: together[name].difference(alone[name]) for name in alone}
    assert max(differences.values()) < 1e-4, differences


@pytest.mark.parametrize("job", [JOBS[0], JOBS[5]], ids=lambda job: job.name)
def test_tolerance_detects_another_learning_rate(connect: Connect, alone: dict[str, Outcome], job: Job) -> None:
    """The tolerance above must detect three steps of ten percent more."""
    other = train_alone(replace(job, learning_rate=1.1 * job.learning_rate), connect(job.name))
    assert other.difference(alone[job.name]) > 3e-4


class Poison:
    """A tenant that sends operations that must fail, between those of the others."""

    def __init__(self, service: tinker.ServiceClient) -> None:
        self._clients = [service.create_lora_training_client(MODEL, rank=8, seed=2).result(60) for _ in range(4)]
        self._sends = itertools.cycle([self._not_a_number, self._no_such_token, self._no_such_loss, self._diverge])
        self.futures: dict[str, list[tinker.APIFuture]] = {"NaN": [], "token": [], "loss": [], "diverged": []}

    def send(self) -> None:
        next(self._sends)()

    def _not_a_number(self) -> None:
        bad = datum([5, 6, 7], logprobs=np.zeros(2), advantages=np.array([1.0, np.nan]))
        self.futures["NaN"].append(self._clients[0].forward_backward([bad], "importance_sampling"))

    def _no_such_token(self) -> None:
        bad = datum([5, VOCAB + 88, 7], weights=np.ones(2))
        self.futures["token"].append(self._clients[1].forward_backward([bad, *JOBS[0].data()], "cross_entropy"))

    def _no_such_loss(self) -> None:
        loss: Any = "no_such_loss"
        self.futures["loss"].append(self._clients[2].forward_backward(JOBS[0].data(), loss))

    def _diverge(self) -> None:
        """The first step makes weights whose outputs overflow; from then on every pass is NaN."""
        self.futures["diverged"].append(self._clients[3].forward_backward(JOBS[0].data(), "cross_entropy"))
        self._clients[3].optim_step(types.AdamParams(learning_rate=1e30))


def test_only_the_poisoning_tenant_sees_errors(connect: Connect, alone: dict[str, Outcome]) -> None:
    poison = Poison(connect("poison"))
    together = train_together(connect, before_each=poison.send)
    differences = {name: together[name].difference(alone[name]) for name in alone}
    assert max(differences.values()) < 1e-4, differences
    errors = {kind: [error_of(future) for future in futures] for kind, futures in poison.futures.items()}
    assert min(map(len, errors.values())) >= 7
    assert errors["diverged"].pop(0) == "", "the pass before the large step succeeds"
    reasons = {"NaN": "advantages", "token": str(VOCAB + 88), "loss": "no_such_loss", "diverged": "NaN"}
    for kind, reason in reasons.items():
        assert all(reason in error for error in errors[kind]), errors[kind]


def error_of(future: tinker.APIFuture) -> str:
    """Returns "" if there was no error."""
    try:
        future.result(60)
    except tinker.RequestFailedError as error:
        return str(error)
    return ""


FULL_PASS = Job("full pass", "cross_entropy", rank=8, lengths=(64,) * (PASS_TOKENS // 64))


def answered_meanwhile(flood: tinker.ServiceClient, modest: tinker.ServiceClient) -> int:
    """Returns how many operations of a flood of ten runs are answered while one run of `modest` gets four."""
    data, loss = FULL_PASS.data(), FULL_PASS.loss
    flooding = [FULL_PASS.create(flood) for _ in range(10)]
    one = FULL_PASS.create(modest)
    floods = [client.forward_backward(data, loss) for _ in range(6) for client in flooding]
    one.forward(data, loss).result(60)  # during the flood
    before = sum(future.future().done() for future in floods)
    own = [one.forward_backward(data, loss) for _ in range(4)]
    for future in own:
        future.result(60)
    answered = sum(future.future().done() for future in floods) - before
    for future in floods:
        future.result(120)
    return answered


@pytest.mark.full
def test_tenant_with_ten_runs_gets_no_more_than_one_with_one(connect: Connect) -> None:
    fair = answered_meanwhile(connect("flood"), connect("modest"))
    one_tenants = answered_meanwhile(connect("both"), connect("both"))
    assert fair <= 12, "four of each, and those answered during a poll"
    assert one_tenants > 20, "runs of one tenant take turns: ten of the flood for one of this run"


@pytest.mark.full
def test_short_forwards_run_between_parts_of_a_large_batch(connect: Connect) -> None:
    """Forwards wait for passes, not for operations: several finish during one operation of 300 sequences."""
    large = replace(JOBS[0], lengths=(32,) * 300)
    short = replace(JOBS[0], lengths=(32,))
    streaming, calling = large.create(connect("streaming")), short.create(connect("calling"))
    batches = [streaming.forward_backward(large.data(), "cross_entropy").future() for _ in range(3)]
    batches[0].result(120)
    answered = 0
    while not batches[1].done():
        calling.forward(short.data(), "cross_entropy").result(60)
        answered += not batches[1].done()
    assert answered >= 3
    assert not batches[2].done(), "the batches ended too early to compare"
    batches[2].result(120)


@pytest.mark.full
def test_thousand_runs_on_sixteen_slots_train_as_if_unpaged(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """Ten tenants create a hundred runs each; the chosen ones are then reloaded from host memory or disk."""
    jobs = [replace(JOBS[0], name=f"tenant-{number % 10}", seed=number) for number in range(1000)]
    chosen = np.random.default_rng(0).choice(1000, 24, replace=False)
    models = {MODEL: tiny_models["qwen3"]}
    with (
        live_server(models, tmp_path / "1", adapter_slots=16, host_adapter_bytes=16 << 20) as paged,
        connections(paged) as connect,
    ):
        creating = [job.submit(connect(job.name)) for job in jobs]
        clients = [future.result(240) for future in creating]
        assert bytes_on_disk(paged) > 16 << 20
        trainings = [Training(jobs[number], clients[number]) for number in chosen]
        for _ in range(STEPS):
            for training in trainings:
                training.send_step()
        outcomes = [training.outcome() for training in trainings]
    with live_server(models, tmp_path / "2") as unpaged, connections(unpaged) as connect:
        expected = [train_alone(jobs[number], connect(jobs[number].name)) for number in chosen]
    differences = [ours.difference(theirs) for ours, theirs in zip(outcomes, expected, strict=True)]
    assert max(differences) < 1e-4, differences


def bytes_on_disk(server: LiveServer) -> int:
    """Sums the adapters' page files, which are unlinked but open in the worker."""
    pages = f"{server.state_dir / 'pages'}/"
    processes = psutil.Process(server.process.pid).children(recursive=True)
    files = [file for process in processes for file in Path(f"/proc/{process.pid}/fd").iterdir()]
    return sum(file.stat().st_size for file in files if os.readlink(file).startswith(pages))
