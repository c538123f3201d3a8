"""deploy/ray-cluster.yaml against the schema with which `ray up` checks it."""

import copy

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from .tools import DEPLOY


@pytest.mark.slow
def test_ray_up_accepts_the_cluster_file() -> None:
    config = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())
    validate_config(prepare_config(copy.deepcopy(config)))
    with pytest.raises(Exception, match="head_start_command"):
        validate_config(prepare_config(config | {"head_start_command": ["ray stop"]}))
