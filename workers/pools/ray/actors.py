"""Ranks as Ray actors, and the actor that keeps them while servers are replaced.

Kept ranks belong to a detached actor, their keeper: Ray ends them, even unresponsive ones, when it is gone. A keeper is
found by its name, and ends with any of its ranks, so it never has a part of a group.
"""

import math
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...protocol.timeouts import RAY_KEEPER_SECONDS
from ...protocol.worker_config import KeptWorkers
from ..base import PlacementError, PoolSpec
from ..worker_host import WorkerHost

_LOOK_SECONDS = 1.0
_ID_LOOK_SECONDS = 5.0
_MAX_TRIES = 50
_MAX_CALLERS = 16
_BETTER_SECONDS = 5.0
"""The time to wait for a better placement before a less good one is requested."""


@dataclass(frozen=True)
class KeptGroup:
    """The ranks of one group of kept workers.

    contents: a hash of all that they are made of; others of the same state directory are ended.
    takeover_seconds: how long ranks may take to finish what a former server began; then they are replaced.
    replaces: whether ranks that exist are replaced in any case.
    """

    workers: KeptWorkers
    name: str
    contents: str
    takeover_seconds: float
    replaces: bool = False

    @property
    def namespace(self) -> str:
        return f"{self.workers.namespace}-{self.contents}"


class RanksTakenOver(Exception):
    """The ranks obey another server now."""


class RankActor(WorkerHost):
    """A rank that answers one server at a time."""

    def __init__(self, spec: PoolSpec, rank: int, kept: KeptWorkers | None) -> None:
        super().__init__(spec, rank)
        self._server = ""
        if kept is not None:
            threading.Thread(target=_exit_without_state, args=(kept,), daemon=True).start()

    def obey(self, server: str) -> None:
        """Answers only this server from now on; the calls before this one are finished."""
        self._server = server

    def answer_frame(self, server: str, frame: bytes) -> bytes:
        if server != self._server:
            raise RanksTakenOver
        # Ray's memory is shared and read-only; workers write to the arrays that they receive.
        return b"".join(self.answer(memoryview(bytearray(frame))))

    def wait_forever(self) -> None:
        threading.Event().wait()


def _exit_without_state(kept: KeptWorkers) -> None:
    """Ends the process when its state directory, once seen, is gone or another one."""
    was_seen = False
    while True:
        is_there = _is_in(kept)
        if was_seen and not is_there:
            os._exit(0)
        was_seen = was_seen or is_there
        time.sleep(_ID_LOOK_SECONDS)


def _is_in(kept: KeptWorkers) -> bool:
    try:
        return Path(kept.id_file).read_text() == kept.state_id
    except FileNotFoundError:
        return False
    except OSError:  # the file system is away for now
        return True


def start_ranks(spec: PoolSpec, placement_timeout_seconds: float, kept: KeptWorkers | None = None) -> list[Any]:
    """Returns one actor per rank, all owned by this process. Raises PlacementError."""
    # A second thread, in which `wait_forever` stays for as long as the process lives.
    actor_class = _remote(RankActor, concurrency_groups={"watch": 1})
    return [
        actor_class.options(num_cpus=spec.cpus_per_rank, num_gpus=spec.gpus_per_rank, scheduling_strategy=place).remote(
            spec, rank, kept
        )
        for rank, place in enumerate(_place_ranks(spec, placement_timeout_seconds))
    ]


def _place_ranks(spec: PoolSpec, timeout_seconds: float) -> list[Any]:
    """Returns a Ray scheduling strategy for each rank, all of one placement group. Raises PlacementError."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    num_ranks, blocks = len(spec.configs), _blocks(spec)
    for size in blocks:
        bundle, is_last = _needed(spec, size), size == blocks[-1]
        strategy = "SPREAD" if size == spec.blocks[0] else "PACK"
        group = placement_group([bundle] * (num_ranks // size), strategy=strategy)
        if group.wait(timeout_seconds if is_last else _BETTER_SECONDS):
            order = _bundles_by_node(group)
            return [PlacementGroupSchedulingStrategy(group, order[rank // size]) for rank in range(num_ranks)]
        remove_placement_group(group)
    raise PlacementError(
        f"the Ray cluster has no room for {num_ranks} ranks of {_needed(spec, 1)} each "
        f"(waited {timeout_seconds:.0f} s; free: {ray.available_resources()}): add nodes or request less"
    )


def _blocks(spec: PoolSpec) -> list[int]:
    """Returns the block sizes that fit on nodes, largest first; sizes that could never fit are left out."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = [size for size in spec.blocks if _num_fitting(nodes, _needed(spec, size)) >= len(spec.configs) // size]
    return fitting or [1]


def _num_fitting(nodes: list[dict[str, float]], needed: dict[str, float]) -> int:
    """Returns how many such bundles the nodes could hold if they were empty."""
    return sum(int(min(node.get(name, 0) // amount for name, amount in needed.items())) for node in nodes)


def _needed(spec: PoolSpec, size: int) -> dict[str, float]:
    needed = {"CPU": size * spec.cpus_per_rank or 0.001}  # Ray refuses an empty bundle
    return needed | {"GPU": size * spec.gpus_per_rank} if spec.gpus_per_rank else needed


def _bundles_by_node(group: Any) -> list[int]:
    """Returns the bundles ordered by node, because Ray fills nodes in any order."""
    from ray.util.placement_group import placement_group_table

    node_of = placement_group_table(group)["bundles_to_node_id"]
    return sorted(node_of, key=lambda bundle: (node_of[bundle], bundle))


def watches_of(actors: list[Any]) -> list[Any]:
    """Returns references of which the first is ready when an actor dies."""
    return [actor.wait_forever.options(concurrency_group="watch").remote() for actor in actors]


class RankKeeper:
    """Owns the ranks of a group, which one server uses at a time.

    It ends, and its ranks with it, when a rank has died or no server has used them for some time.
    """

    def __init__(self, spec: PoolSpec, group: KeptGroup, placement_timeout_seconds: float) -> None:
        self._spec = spec
        self._group = group
        self._placement_timeout_seconds = placement_timeout_seconds
        self._attaching = threading.Lock()
        self._ranks: list[Any] = []
        self._server = ""
        self._newest_epoch = -1
        self._used_at = time.monotonic()
        threading.Thread(target=self._exit_unused, daemon=True).start()

    def attach(self, server: str, epoch: int | None, replaces: bool) -> list[Any]:
        """Gives the ranks to the server, as soon as they have finished what a former one began.

        Raises:
            PlacementError: a newer server has used them, or there is no room for them.
        """
        with self._attaching:
            self._check_epoch(epoch)
            if replaces and self._ranks:
                os._exit(0)
            self._server, self._used_at = server, math.inf
            try:
                seconds = self._group.takeover_seconds if self._ranks else self._placement_timeout_seconds
                self._start_ranks()
                self._wait_until_done([rank.obey.remote(server) for rank in self._ranks], seconds)
            finally:
                self._used_at = time.monotonic()
            return self._ranks

    def still_uses(self, server: str) -> str | None:
        """Records that the server uses the ranks. Returns the reason if it may not any more."""
        if server != self._server:
            lease = f"a server with lease epoch {self._newest_epoch}" if self._newest_epoch >= 0 else "another server"
            return f"{lease} has taken over the workers"
        self._used_at = max(self._used_at, time.monotonic())
        return None

    def _check_epoch(self, epoch: int | None) -> None:
        if epoch is None:
            return
        if epoch < self._newest_epoch:
            raise PlacementError(
                f"a server with lease epoch {self._newest_epoch} has used the workers, and this server's lease has "
                f"epoch {epoch}: if the database was restored or replaced, delete {self._group.workers.id_file}, which "
                "ends them"
            )
        self._newest_epoch = epoch

    def _start_ranks(self) -> None:
        if not self._ranks:
            self._ranks = start_ranks(self._spec, self._placement_timeout_seconds, self._group.workers)
            threading.Thread(target=_exit_with, args=(watches_of(self._ranks),), daemon=True).start()

    def _wait_until_done(self, calls: list[Any], seconds: float) -> None:
        import ray

        if len(ray.wait(calls, num_returns=len(calls), timeout=seconds)[0]) < len(calls):
            os._exit(1)

    def _exit_unused(self) -> None:
        while time.monotonic() - self._used_at < self._group.workers.seconds:
            time.sleep(_LOOK_SECONDS)
        os._exit(0)


def _exit_with(watches: list[Any]) -> None:
    import ray

    ray.wait(watches)
    os._exit(1)


@dataclass(frozen=True)
class Attachment:
    """A server's use of kept ranks."""

    keeper: Any
    ranks: list[Any]
    server: str

    def lost_reason(self) -> str | None:
        """Reports to the keeper that the server lives. Returns the reason if another one has the ranks now."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        try:
            return ray.get(self.keeper.still_uses.remote(self.server), timeout=RAY_KEEPER_SECONDS)
        except (GetTimeoutError, RayActorError):  # without it the ranks die, which is noticed
            return None


def attach(spec: PoolSpec, group: KeptGroup, placement_timeout_seconds: float) -> Attachment:
    """Attaches to the ranks of the group; starts them if there are none, or none that can be used.

    Raises PlacementError.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

    _end_outdated(group)
    workers, reason = group.workers, ""
    for _ in range(_MAX_TRIES):
        keeper = _keeper(spec, group, placement_timeout_seconds)
        attaching = keeper.attach.remote(workers.server, workers.epoch, group.replaces)
        try:
            seconds = 2 * placement_timeout_seconds + group.takeover_seconds + RAY_KEEPER_SECONDS
            return Attachment(keeper, ray.get(attaching, timeout=seconds), workers.server)
        except RayTaskError as error:
            raise error.cause from None
        except GetTimeoutError:
            ray.kill(keeper)
        except RayActorError as error:  # it ends, and the next one starts new ranks
            reason = str(error)
            time.sleep(_LOOK_SECONDS / 4)
    raise PlacementError(f"the workers of {group.name} end again and again: {reason}")


def _keeper(spec: PoolSpec, group: KeptGroup, placement_timeout_seconds: float) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    found_or_new = {"name": group.name, "namespace": group.namespace, "lifetime": "detached", "get_if_exists": True}
    keeper_class = _remote(RankKeeper, max_concurrency=_MAX_CALLERS, num_cpus=0)
    place = NodeAffinitySchedulingStrategy(_largest_node(), soft=True)
    return keeper_class.options(**found_or_new, scheduling_strategy=place).remote(
        spec, group, placement_timeout_seconds
    )


def _largest_node() -> str:
    """Returns a node that has ranks, most likely: a keeper is then lost with them, not with the server."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    return max(nodes, key=lambda node: [node["Resources"].get(name, 0) for name in ("GPU", "CPU")])["NodeID"]


def _end_outdated(group: KeptGroup) -> None:
    """Ends what the state directory's servers had with other options or of another version."""
    import ray
    from ray.util import list_named_actors

    named: Any = list_named_actors(all_namespaces=True)
    for found in named:
        if found["namespace"].startswith(group.workers.namespace) and found["namespace"] != group.namespace:
            with suppress(ValueError):  # it has just ended
                ray.kill(ray.get_actor(found["name"], found["namespace"]))


def _remote(actor_class: type, **options: object) -> Any:
    import ray

    decorate: Any = ray.remote
    return decorate(**options)(actor_class)
