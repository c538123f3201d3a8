"""Distills a teacher's most likely tokens into a student with the cookbook's loop for it, which has no command line.

PYTHON soft_targets.py MODEL TEACHER FILE LOG: MODEL is the student's and the teacher's base model, TEACHER the path
of the teacher's sampler weights, FILE has a conversation a line, LOG is the folder of metrics and checkpoints.
"""

import asyncio
import sys

from tinker_cookbook import model_info
from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig


def main(model: str, teacher: str, file: str, log: str) -> None:
    renderer = model_info.get_recommended_renderer_name(model)
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=renderer, max_length=None, batch_size=4
    )
    data = train_off_policy.DatasetWithTeacher(
        dataset_builder=FromConversationFileBuilder(common_config=common, file_path=file),
        teacher_config=TeacherConfig(base_model=model, load_checkpoint_path=teacher),
    )
    config = train_off_policy.Config(
        model_name=model,
        recipe_name="soft_targets",
        log_path=log,
        dataset_configs=[data],
        learning_rate=1e-2,
        batch_size=4,
        n_teacher_targets=4,
    )
    asyncio.run(train_off_policy.main(config))


if __name__ == "__main__":
    main(*sys.argv[1:5])
