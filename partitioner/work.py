"""What every step of a run needs to know."""

from dataclasses import dataclass

from mdp.plan import Plan
from partitioner.augment import Geometry, geometry
from partitioner.data import Dataset
from partitioner.loop import Stage, derived_seed
from partitioner.progress import Progress
from partitioner.run_folder import RunFolder
from partitioner.settings import Schedule, Settings


@dataclass(frozen=True, slots=True)
class Work:
    """A run: where it is kept, how it was asked for, and on which pictures."""

    run: RunFolder
    settings: Settings
    plan: Plan
    data: Dataset
    progress: Progress

    def stage(self, name: str, what: str, schedule: Schedule) -> Stage:
        """Training of the network `name`, called `what`, on the train split."""
        return Stage(
            name=what,
            pictures=len(self.data.train),
            schedule=schedule,
            seed=derived_seed(self.settings.seed, name),
            autocast=self.settings.autocast,
            checkpoint=self.run.checkpoint(name),
        )

    def shapes(self, variant: int) -> Geometry:
        """Geometry `[N, 4]` of the train split in `variant`."""
        return geometry(
            self.settings.augmentation,
            seed=self.settings.seed,
            variant=variant,
            count=len(self.data.train),
        )

    @property
    def variants(self) -> int:
        """How many variants the training of the sub-models gets to see."""
        return min(self.settings.augmentation.variants, self.settings.schedule.epochs)
