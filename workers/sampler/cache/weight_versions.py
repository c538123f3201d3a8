"""Namespaces: numbers for the weights that keys and values were made with."""

from itertools import count
from weakref import WeakKeyDictionary

from ...registry.models import Models
from ...state.trainable import Learner
from ..requests.jobs import Job


class Namespaces:
    """An adapter whose weights change gets another number, that no weights have had before.

    The base model has one for each owner of jobs: what prompts others have sent shows in the time of an answer and in
    its prompt_cache_hit_tokens. An adapter is one owner's alone.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._of_base: dict[str, int] = {}
        self._of_models: WeakKeyDictionary[Learner, tuple[int, int]] = WeakKeyDictionary()
        self._numbers = count()

    def of(self, job: Job) -> int:
        if job.adapter_id is None:
            owner = job.request.owner
            if owner not in self._of_base:
                self._of_base[owner] = next(self._numbers)
            return self._of_base[owner]
        model = self._models.get(job.adapter_id)
        num_changes, number = self._of_models.get(model, (-1, -1))
        if num_changes != model.num_changes:
            number = next(self._numbers)
            self._of_models[model] = model.num_changes, number
        return number
