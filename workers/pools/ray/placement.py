"""Places the ranks of a group on a Ray cluster: neighbours on one node if they fit, replicas on different nodes."""

from typing import Any

from ..base import PlacementError, PoolSpec

_BETTER_SECONDS = 5.0
"""The time to wait for a better placement before a less good one is requested."""


def place_ranks(spec: PoolSpec, timeout_seconds: float) -> list[Any]:
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
