"""Namespaces: numbers for the weights that keys and values were made with."""

from itertools import count
from weakref import WeakKeyDictionary

from ..lora import Adapter, Adapters
from .jobs import Job


class Namespaces:
    """An adapter whose weights change gets another number, that no weights have had before.

    The base model has one for each owner of jobs: what prompts others have sent shows in the time of an answer and in
    its prompt_cache_hit_tokens. An adapter is one owner's alone.
    """

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._of_base: dict[str, int] = {}
        self._of_adapters: WeakKeyDictionary[Adapter, tuple[int, int]] = WeakKeyDictionary()
        self._numbers = count()

    def of(self, job: Job) -> int:
        if job.adapter_id is None:
            owner = job.request.owner
            if owner not in self._of_base:
                self._of_base[owner] = next(self._numbers)
            return self._of_base[owner]
        adapter = self._adapters.get(job.adapter_id)
        num_changes, number = self._of_adapters.get(adapter, (-1, -1))
        if num_changes != adapter.num_changes:
            number = next(self._numbers)
            self._of_adapters[adapter] = adapter.num_changes, number
        return number
