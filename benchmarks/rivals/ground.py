"""What every method of one seed stands on, and how pictures are got from there."""

from collections.abc import Sequence
from dataclasses import dataclass

from mdp.formats.plan import SubModelSpec
from partitioner.data.crops import View, load_views, view_of
from partitioner.data.datasets import SplitName
from partitioner.data.memmaps import Views
from partitioner.networks.teacher import Teacher
from partitioner.training.context import Work
from partitioner.training.teacher import Targets


@dataclass(frozen=True, slots=True)
class Ground:
    """One method's folder and settings, on the pictures and teacher's answers that all share."""

    #: Its run folder is the method's own, with the seed's shared cache; its plan names the views.
    work: Work
    teacher: Teacher
    targets: Targets
    #: What the method trains: one shape per member, or the only one.
    shapes: Sequence[SubModelSpec]

    @property
    def variants(self) -> int:
        """How many variants of every picture there are; epoch e sees variant e modulo this."""
        return self.work.variants.count

    @property
    def num_classes(self) -> int:
        return len(self.work.data.labels)

    def train_pixels(self, spec: SubModelSpec) -> list[Views]:
        """The train split `[N, S, S, 3]` as `spec` sees it, per variant."""
        variants = self.work.variants
        return [variants.view(View(spec.image_size), v) for v in range(variants.count)]

    def pixels(self, spec: SubModelSpec, split: SplitName) -> Views:
        """An unchanged split `[N, S, S, 3]` as `spec` sees it."""
        view = View(spec.image_size)
        views = [view_of(a) for a in self.work.plan.assignments]
        together = views if view in views else [view]
        what = f"{split} split, {spec.image_size} px"
        work = self.work
        arrays = load_views(work.data.split(split), together, work.run.cache, work.progress, what)
        return arrays[together.index(view)]
