"""A run that a client of ours trains while pages show it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trainhouse
from trainhouse import AdamParams, Datum
from trainhouse.client.training import TrainingClient

KEY = "tml-console"
NAME = "<img src=x onerror=document.title='broken'>"
"""Metadata, which pages must show as text."""
METRIC = '"><script>document.title="broken"</script>'


@dataclass
class TrainedRun:
    service: trainhouse.ServiceClient
    client: TrainingClient
    learning_rate: float
    num_steps: int = 0

    @property
    def run_id(self) -> str:
        return self.client.model_id

    def step(self, num_steps: int) -> None:
        tokens = list(range(3, 40))
        datum = Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)})
        for _ in range(num_steps):
            self.client.forward_backward([datum], "cross_entropy").result()
            self.client.optim_step(AdamParams(learning_rate=self.learning_rate)).result()
            self.num_steps += 1
            self.client.log({"reward": self.num_steps / 10, "kl": 0.5**self.num_steps, METRIC: 1.0}).result()


@contextmanager
def train(url: str, key: str = KEY, learning_rate: float = 1e-2) -> Iterator[TrainedRun]:
    """Yields a run with steps, a failed operation and checkpoints."""
    with trainhouse.ServiceClient(url, key, user_metadata={"purpose": NAME}) as service:
        client = service.create_lora_training_client("tiny/chat", rank=4, user_metadata={"note": NAME, "seed": "1"})
        run = TrainedRun(service, client, learning_rate)
        run.step(8)
        yield run
