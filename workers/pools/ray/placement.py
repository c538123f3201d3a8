"""Where the ranks of a group go on a Ray cluster: neighbours on one node where they fit, replicas on several."""

from typing import Any

from ..base import NoPlace, PoolSpec

_BETTER_SECONDS = 5.0
"""How long the cluster may take to make a better place, before one that is less good is asked for."""


def places_of(spec: PoolSpec, timeout_seconds: float) -> list[Any]:
    """A scheduling strategy of Ray for each rank, all of one placement group. Raises NoPlace."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    num_ranks, blocks = len(spec.configs), _blocks(spec)
    for size in blocks:
        bundle, is_last = _needed(spec, size), size == blocks[-1]
        strategy = "SPREAD" if size == spec.blocks[0] else "PACK"
        group = placement_group([bundle] * (num_ranks // size), strategy=strategy)
        if group.wait(timeout_seconds if is_last else _BETTER_SECONDS):
            order = _by_node(group)
            return [PlacementGroupSchedulingStrategy(group, order[rank // size]) for rank in range(num_ranks)]
        remove_placement_group(group)
    raise NoPlace(
        f"the Ray cluster has no room for {num_ranks} ranks of {_needed(spec, 1)} each "
        f"(waited {timeout_seconds:.0f} s; free: {ray.available_resources()}): add nodes or ask for less"
    )


def _blocks(spec: PoolSpec) -> list[int]:
    """Numbers of neighbours that may be on one node each, the most first; those of which there is no hope left out."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = [size for size in spec.blocks if _num_fitting(nodes, _needed(spec, size)) >= len(spec.configs) // size]
    return fitting or [1]


def _num_fitting(nodes: list[dict[str, float]], needed: dict[str, float]) -> int:
    """How many of those the nodes would have room for, if nothing else were on them."""
    return sum(int(min(node.get(name, 0) // amount for name, amount in needed.items())) for node in nodes)


def _needed(spec: PoolSpec, size: int) -> dict[str, float]:
    """By so many ranks together."""
    needed = {"CPU": size * spec.cpus_per_rank or 0.001}  # Ray takes no empty bundle
    return needed | {"GPU": size * spec.gpus_per_rank} if spec.gpus_per_rank else needed


def _by_node(group: Any) -> list[int]:
    """The bundles, those of a node behind each other: Ray fills nodes in any order."""
    from ray.util.placement_group import placement_group_table

    node_of = placement_group_table(group)["bundles_to_node_id"]
    return sorted(node_of, key=lambda bundle: (node_of[bundle], bundle))
