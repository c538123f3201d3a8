"""Numbers the versions of weights, so that keys and values are reused only with the weights that computed them."""

from itertools import count
from weakref import WeakKeyDictionary

from ...registry.model_registry import ModelRegistry
from ...state.trainable import Trainable
from ..requests.jobs import Job


class WeightVersions:
    """Gives weights that change a new version, a number that no other weights had before.

    The base model has one version per owner of jobs, so that response times and prompt_cache_hit_tokens do not reveal
    other tenants' prompts. An adapter has only one owner.
    """

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models
        self._of_base: dict[str, int] = {}
        self._of_models: WeakKeyDictionary[Trainable, tuple[int, int]] = WeakKeyDictionary()
        self._numbers = count()

    def of(self, job: Job) -> int:
        """Returns the current version of the weights that the job samples."""
        if job.adapter_id is None:
            owner = job.spec.tenant_id
            if owner not in self._of_base:
                self._of_base[owner] = next(self._numbers)
            return self._of_base[owner]
        model = self._models.get(job.adapter_id)
        num_changes, version = self._of_models.get(model, (-1, -1))
        if num_changes != model.vectors.num_changes:
            version = next(self._numbers)
            self._of_models[model] = model.vectors.num_changes, version
        return version
