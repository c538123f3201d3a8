"""Layouts of drafts for any layout of the target."""

import pytest
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.shapes.draft_spec import check_draft_spec, default_draft_spec

HEADS, KV_HEADS = 12, 4


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("single", "single"),
        ("tp=4", "replicas=4"),
        ("fsdp=2", "replicas=2"),
        ("sp=2", "sp=2"),
        ("sp=2,tp=2", "replicas=2,sp=2"),
        ("replicas=2,fsdp=2,sp=3", "replicas=4,sp=3"),
        ("sp=8", "replicas=8"),
    ],
)
def test_default_splits_tokens_like_the_target_and_otherwise_sequences(target: str, draft: str) -> None:
    base = ParallelSpec.parse(target)
    found = default_draft_spec(base, HEADS)
    assert found == ParallelSpec.parse(draft)
    check_draft_spec(found, base, HEADS, KV_HEADS)


@pytest.mark.parametrize(
    ("target", "draft"),
    [("tp=2", "replicas=2"), ("fsdp=2", "tp=2"), ("tp=4", "sp=2,tp=2"), ("replicas=2,fsdp=4", "replicas=2,tp=4")],
)
def test_draft_may_factorise_the_ranks_differently(target: str, draft: str) -> None:
    check_draft_spec(ParallelSpec.parse(draft), ParallelSpec.parse(target), HEADS, KV_HEADS)


@pytest.mark.parametrize(
    ("target", "draft", "reason"),
    [
        ("tp=2", "fsdp=2", "--draft-parallel fsdp=2: drafts support the axes replicas, sp and tp"),
        ("tp=2", "tp=4", "--draft-parallel tp=4: this is 4 ranks, but the model has 2, by tp=2"),
        ("tp=8", "tp=8", "tp=8 does not divide 4 key/value heads of a draft"),
        ("sp=5", "sp=5", "sp=5 does not divide 12 heads of a draft"),
        (
            "tp=2,fsdp=3",
            "sp=3,replicas=2",
            "3 ranks share a sequence of a draft, and 2 share one of the model by fsdp=3,tp=2",
        ),
        ("replicas=2", "tp=2", "the model's replicas in replicas=2 run independently: use fsdp in place of replicas"),
    ],
)
def test_impossible_draft_layouts_are_refused_with_the_reason(target: str, draft: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_draft_spec(ParallelSpec.parse(draft), ParallelSpec.parse(target), HEADS, KV_HEADS)
