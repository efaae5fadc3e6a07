"""Trainings of tiny plans."""

from mdp.formats.plan import Plan
from partitioner.build.inputs import TrainingInputs
from partitioner.build.train import train_plan
from partitioner.data.datasets import Dataset
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.run.settings import TrainingConfig
from partitioner.training.context import TrainingContext
from tests.support.models.runs import QUIET


def train(
    run: RunFolder, plan: Plan, data: Dataset, config: TrainingConfig, progress: Progress = QUIET
) -> TrainingContext:
    """Train `plan` on pictures that are open."""
    return train_plan(TrainingInputs.of(config, data, plan.teacher), plan, run, progress)
