"""A rank with the environment of the test, and not that of when its forkserver was started."""

import json
import os
from pathlib import Path

from trainhouse.workers.protocol.config import WorkerConfig
from trainhouse.workers.worker.worker import Worker

CREDENTIALED = "trainhouse.tests.workers.credentialed_worker:CredentialedWorker"


class CredentialedWorker(Worker):
    def __init__(self, config: WorkerConfig) -> None:
        os.environ.update(json.loads(environment_file(config).read_text()))
        super().__init__(config)


def leave_environment(config: WorkerConfig) -> None:
    """Of this process, for the ranks."""
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    environment_file(config).write_text(json.dumps(aws))


def environment_file(config: WorkerConfig) -> Path:
    assert config.model_cache is not None
    return Path(f"{config.model_cache}.json")
