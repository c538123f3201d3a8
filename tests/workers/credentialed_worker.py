"""A rank with the test's environment instead of the one that its forkserver started with."""

import json
import os
from pathlib import Path

from trainhouse.workers.protocol.worker_config import WorkerConfig
from trainhouse.workers.worker.worker import Worker

CREDENTIALED = "trainhouse.tests.workers.credentialed_worker:CredentialedWorker"


class CredentialedWorker(Worker):
    def __init__(self, config: WorkerConfig) -> None:
        os.environ.update(json.loads(environment_file(config).read_text()))
        super().__init__(config)


def save_environment(config: WorkerConfig) -> None:
    """Saves this process's AWS variables for the ranks."""
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    environment_file(config).write_text(json.dumps(aws))


def environment_file(config: WorkerConfig) -> Path:
    assert config.model_cache is not None
    return Path(f"{config.model_cache}.json")
