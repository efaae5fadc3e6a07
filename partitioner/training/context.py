"""A run: its folder, settings, plan and pictures."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mdp.formats.plan import Assignment, Plan
from partitioner.data.crops import View, load_views, single_view_of, view_of
from partitioner.data.datasets import Dataset, SplitName
from partitioner.data.memmaps import Views, load_weights
from partitioner.data.scenes import Places, places, single_pictures
from partitioner.data.variants import Variants
from partitioner.networks.members import build_member
from partitioner.networks.submodel import Member
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.run.settings import MemberSchedule, Schedule, Settings
from partitioner.training.distributed import all_exist, on_first
from partitioner.training.loop import TrainingStage, derive_seed
from partitioner.training.synchroniser import EveryStep, Synchroniser

#: The splits that nothing is trained on.
EVALUATED: tuple[SplitName, SplitName] = ("calibration", "test")


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """A run, the views of its pictures, and its networks."""

    run: RunFolder
    settings: Settings
    plan: Plan
    data: Dataset
    progress: Progress
    #: k of members that start from pretrained weights -> the file.
    weights: Mapping[int, Path] = field(default_factory=dict)
    #: Name of a network -> how this process trains it with others.
    sync_of: Callable[[str], Synchroniser] = lambda _: EveryStep()
    #: k of members that are exported already -> the model, and its difference from torch.
    exported: Mapping[int, tuple[Path, float]] = field(default_factory=dict)
    #: The pictures of scenes one by one, as the teacher sees them; `data` where there are none.
    singles: Dataset = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "singles", single_pictures(self.data))

    @property
    def variants(self) -> Variants:
        """The variants of the train split, the same for every network of this run."""
        settings = self.settings
        longest = max(settings.schedule.epochs, settings.teacher_schedule.epochs)
        return Variants(
            pictures=self.singles.train,
            num_classes=len(self.data.labels),
            augmentation=settings.augmentation,
            seed=settings.seed,
            count=min(settings.augmentation.variants, longest),
            teacher=self.teacher_view,
            members=tuple(dict.fromkeys(single_view_of(a) for a in self.plan.assignments)),
            cache=self.run.cache,
            progress=self.progress,
        )

    def schedule_of(self, k: int) -> MemberSchedule:
        """The schedule of sub-model `k`."""
        return self.settings.schedule.of(k, pretrained=k in self.weights)

    @property
    def teacher_view(self) -> View:
        """The teacher's view of a picture."""
        return View(self.plan.require_teacher().shape.image_size)

    def canvases(self) -> Views:
        """The train split `[N, S, S, 3]`, whole, at the finest view's resolution."""
        view = View(self.variants.image_size)
        what = f"train split, {view.image_size} px"
        return load_views(self.singles.train, [view], self.run.cache, self.progress, what)[0]

    def teacher_pixels(self, split: SplitName) -> Views:
        """A split `[N, S, S, 3]` as the teacher sees it, unchanged."""
        what = f"{split} split, {self.teacher_view.image_size} px for the teacher"
        pictures = self.singles.split(split)
        return load_views(pictures, [self.teacher_view], self.run.cache, self.progress, what)[0]

    def member_pixels(self, assignment: Assignment, split: SplitName) -> Views:
        """A split `[N, S, S, 3]` as one device sees it, unchanged."""
        views = [view_of(a) for a in self.plan.assignments]
        what = f"{split} split, for the sub-models"
        arrays = load_views(self.data.split(split), views, self.run.cache, self.progress, what)
        return arrays[assignment.k]

    @property
    def places(self) -> Places:
        """Cameras and scenes of the single training pictures."""
        return places(self.data.train, self.data.cameras)

    def training_rows(self, assignment: Assignment) -> slice:
        """The single training pictures of one sub-model: its camera's, or all of a shared one."""
        if self.settings.schedule.shared or assignment.camera is None:
            return slice(None)
        return self.places.of(assignment.camera)

    def first_pixels(self, split: SplitName) -> None:
        """Cut a split for the teacher and the first sub-model, or for live teaching."""
        if split == "train" and self.settings.teaching == "live":
            self.canvases()
            return
        self.teacher_pixels(split)
        if split != "train" or not self.data.cameras:
            self.member_pixels(self.plan.assignments[0], split)

    @property
    def is_trained(self) -> bool:
        """Tell whether the teacher and every sub-model are finished, the same on every process."""
        return all_exist(self.run.teacher, *(self.run.member(a.k) for a in self.plan.assignments))

    def picture_bytes(self) -> int:
        """Bytes of cut pictures that the run folder has at most, until the training is finished.

        Without what sub-models learn from predecessors.
        """
        variants, finest = self.variants, View(self.variants.image_size)
        # View of the train split -> the number of variants of it.
        counts: dict[View, int] = {}
        if self.settings.teaching == "live":
            counts[finest] = 1
            if self.settings.teacher_schedule.epochs:
                counts[self.teacher_view] = variants.count
        else:
            counts[self.teacher_view] = variants.count
            for a in self.plan.assignments:
                view, epochs = single_view_of(a), self.schedule_of(a.k).epochs
                counts[view] = max(counts.get(view, 1), min(variants.count, epochs))
        most = max(counts.values())
        if most > 1:
            # Every other variant is made of the plain canvas, and cut to views.
            counts[finest] = most
        train = len(self.singles.train)
        total = train * sum(count * _bytes_of([view]) for view, count in counts.items())
        own = {view_of(a) for a in self.plan.assignments}
        for split in EVALUATED:
            total += len(self.data.split(split)) * _bytes_of(own)
            total += len(self.singles.split(split)) * _bytes_of({self.teacher_view} - own)
        return total

    def remove_trained(self) -> None:
        """Remove what was cut and kept for a training that is finished, by the first process."""
        digests = (self.data.train.digest, self.singles.train.digest)
        on_first(lambda: self.run.remove_pictures(*digests))

    def stage(
        self, name: str, what: str, schedule: Schedule, patience: int = 0, rows: slice = slice(None)
    ) -> TrainingStage:
        """Training of the network `name` on training pictures; `what` is its name in messages."""
        return TrainingStage(
            name=what,
            pictures=len(range(len(self.singles.train))[rows]),
            schedule=schedule,
            seed=derive_seed(self.settings.seed, name),
            autocast=self.settings.autocast,
            checkpoint=self.run.checkpoint(name),
            patience=patience,
            sync=self.sync_of(name),
        )

    def new_member(self, assignment: Assignment, weights: Path | None = None) -> Member:
        """Member k before its training; a network with pretrained `weights`, if any."""
        boosting, num_classes = self.settings.schedule.boosting, len(self.data.labels)
        return build_member(assignment.spec, num_classes, boosting=boosting, weights=weights)

    def load_member(self, assignment: Assignment) -> Member:
        """The trained member k."""
        member = self.new_member(assignment)
        member.load_state_dict(load_weights(self.run.member(assignment.k)))
        return member.eval()


def _bytes_of(views: Iterable[View]) -> int:
    """Bytes of one picture in every one of some views."""
    return sum(3 * view.image_size**2 for view in views)
