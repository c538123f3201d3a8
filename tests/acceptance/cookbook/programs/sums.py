"""A task for inspect-ai: sums whose answers the recipes teach."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."


@task
def sums() -> Task:
    samples = [
        Sample(input=f"What is {left} plus {3 - left}?{SUFFIX}", target=["\\boxed{3}", "\\boxed{4}"])
        for left in range(4)
    ]
    return Task(dataset=MemoryDataset(samples, name="sums"), solver=generate(), scorer=includes())
