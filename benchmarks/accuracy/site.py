"""The work folder of the accuracy benchmark: teacher, one cache per seed, one folder per run."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.accuracy.methods import METHODS, joint_epochs
from benchmarks.accuracy.results import Choice, TeacherResult, locked
from benchmarks.accuracy.shapes import Shapes, plan_of
from benchmarks.harness.timed import TimedProgress
from benchmarks.rivals.ground import Ground
from mdp.errors import InputError
from mdp.formats.bundle import sha256_of
from mdp.formats.plan import Plan, SubModelSpec, TeacherSpec
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import Dataset
from partitioner.data.memmaps import load
from partitioner.run.folder import RunFolder
from partitioner.run.settings import (
    Asked,
    Augmentation,
    JointSchedule,
    MemberSchedule,
    RunOptions,
    Settings,
    TeacherSchedule,
    differences,
)
from partitioner.run_setup import open_asked, settings_for
from partitioner.training.context import Work
from partitioner.training.teacher import accuracy, ensure_targets, ensure_teacher

#: Everything about training that all methods share.
BATCH_SIZE, TEACHER_BATCH_SIZE, TEACHER_RATE, VARIANTS = 64, 128, 5e-4, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    shapes: Shapes
    teacher: TeacherSpec
    data: Dataset
    options: RunOptions
    epochs: int
    teacher_epochs: int
    folder: Path

    def settings(self, seed: int, *, of_teacher: bool = False) -> Settings:
        teacher = None if of_teacher else str(self.teacher_run.teacher)
        asked = Asked(
            options=msgspec.structs.replace(self.options, seed=seed, teacher_checkpoint=teacher),
            teacher_schedule=TeacherSchedule(
                epochs=self.teacher_epochs if of_teacher else 0,
                batch_size=TEACHER_BATCH_SIZE,
                learning_rate=TEACHER_RATE,
            ),
            schedule=MemberSchedule(epochs=self.epochs, batch_size=BATCH_SIZE),
            joint_schedule=JointSchedule(epochs=0, batch_size=BATCH_SIZE),
            augmentation=Augmentation(variants=VARIANTS),
        )
        return settings_for(asked, self.data, self.teacher)

    @property
    def teacher_run(self) -> RunFolder:
        """Where the teacher is trained; its variants are seed 0's."""
        run = RunFolder(self.folder / "teacher")
        run.cache = self.cache(0)
        return run

    def seed_folder(self, seed: int) -> Path:
        return self.folder / f"seed-{seed}"

    def cache(self, seed: int) -> Path:
        """Views, variants and teacher's answers of one seed, shared by all methods."""
        return self.seed_folder(seed) / "cache"

    def lock(self, name: str) -> Path:
        return self.folder / f".{name}.lock"

    def configuration(self) -> dict[str, Any]:
        """What all runs of one results file share; names no place on this machine."""
        settings = self.settings_of_teacher()
        shared = ("batch_size", "weight_decay", "label_smoothing", "temperature")
        schedule = msgspec.to_builtins(settings.schedule)
        value = {
            "data": _without_place(settings),
            "teacher": {"name": self.shapes.teacher_name, "args": self.shapes.teacher_args},
            "teacher_schedule": settings.teacher_schedule,
            "members": list(self.shapes.members),
            "singles": list(self.shapes.singles),
            "epochs": self.epochs,
            "schedule": {key: schedule[key] for key in shared},
            "augmentation": settings.augmentation,
            "autocast": settings.autocast,
        }
        plain: dict[str, Any] = msgspec.to_builtins(value)
        return plain

    def settings_of_teacher(self) -> Settings:
        return self.settings(0, of_teacher=True)


def open_site(
    shapes: Shapes, options: RunOptions, epochs: int, teacher_epochs: int, folder: Path
) -> Site:
    """Read the data's names; raises InputError."""
    asked = Asked(
        options=options,
        teacher_schedule=TeacherSchedule(),
        schedule=MemberSchedule(),
        joint_schedule=JointSchedule(),
        augmentation=Augmentation(),
    )
    return Site(
        shapes=shapes,
        teacher=shapes.teacher(),
        data=open_asked(asked),
        options=options,
        epochs=epochs,
        teacher_epochs=teacher_epochs,
        folder=folder,
    )


def make_teacher(site: Site) -> None:
    """Train the teacher once, by the product's own steps; another process's is waited for."""
    run, settings = site.teacher_run, site.settings_of_teacher()
    plan = plan_of(site.teacher, [site.teacher.shape])
    with locked(site.lock("teacher")):
        if run.teacher.is_file():
            changed = differences(_taught(run.settings()), _taught(settings))
            if changed:
                raise InputError(
                    f"{run.path}: another teacher than asked for: {changed} (give another --work)"
                )
            return
        with locked(site.lock("seed-0")):
            run.start_or_continue(settings, plan)
            progress = TimedProgress(run.path / "tasks.json")
            ensure_teacher(Work(run, settings, plan, site.data, progress), None)


def _taught(settings: Settings) -> dict[str, Any]:
    """What a teacher depends on."""
    kept = ("seed", "autocast", "teacher", "teacher_schedule", "augmentation")
    return {"data": _without_place(settings)} | {key: getattr(settings, key) for key in kept}


def _without_place(settings: Settings) -> Any:
    """Which pictures, wherever they lie."""
    return msgspec.structs.replace(settings.data, source=Path(settings.data.source).name)


def prepare(site: Site, seed: int) -> TeacherResult:
    """Fill the seed's cache, so that methods only read it; returns what the teacher is worth."""
    run = RunFolder(site.seed_folder(seed))
    run.teacher = site.teacher_run.teacher
    settings = _with_features(site.settings(seed))
    members = site.shapes.members
    plan = plan_of(site.teacher, members)
    with locked(site.lock(f"seed-{seed}")):
        run.path.mkdir(parents=True, exist_ok=True)
        progress = TimedProgress(run.path / "tasks.json")
        work = Work(run, settings, plan, site.data, progress)
        ensure_targets(work, ensure_teacher(work, None))
        sizes = dict.fromkeys(s.image_size for s in (*members, *site.shapes.singles))
        for variant in range(work.variants.count):
            work.variants.labels(variant)
            for size in sizes:
                work.variants.view(View(size), variant)
        for size in sizes:
            for split in ("calibration", "test"):
                _ensure_split(work, size, site.data.split(split))
    return _teacher_result(site, work)


def _ensure_split(work: Work, image_size: int, pictures: Any) -> None:
    views = [View(a.vit.image_size) for a in work.plan.assignments]
    if View(image_size) not in views:
        views = [View(image_size)]
    load_views(pictures, views, work.run.cache, work.progress, f"{image_size} px")


def _teacher_result(site: Site, work: Work) -> TeacherResult:
    def right(split: Any) -> float:
        logits = load(work.run.answers(site.data.split(split).digest[:16]))
        return accuracy(logits, site.data.split(split).targets)

    run = site.teacher_run
    return TeacherResult(
        accuracy=right("test"),
        calibration=right("calibration"),
        sha256=sha256_of(run.teacher),
        tasks=TimedProgress(run.path / "tasks.json").tasks,
    )


def _with_features(settings: Settings) -> Settings:
    """So that the teacher's features are kept and loaded: some methods imitate them."""
    schedule = msgspec.structs.replace(settings.schedule, imitate="teacher")
    return msgspec.structs.replace(settings, schedule=schedule)


def _of_rival(settings: Settings, **own: Any) -> Settings:
    """What is about our members alone, pinned: new defaults of ours are no new rivals.

    `own` is what this rival has of its own.
    """
    pinned = {
        "boost_weight": 0.0,
        "stack_weight": 0.0,
        "bag_weight": 1.0,
        "boost_target": "logits",
        "shrinkage": 1.0,
        "start": "scratch",
        "trunks": 1,
        "patience": 0,
        "later_share": 1.0,
    }
    schedule = msgspec.structs.replace(settings.schedule, **{**pinned, **own})
    return msgspec.structs.replace(settings, schedule=schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One run: everything that its outcome depends on."""

    method: str
    seed: int
    choice: Choice
    settings: Settings
    plan: Plan
    shapes: list[SubModelSpec]

    @property
    def made_of(self) -> str:
        """Digest of it all but the method's name: two variations of ours may be the same."""
        data = _without_place(self.settings)
        settings = msgspec.structs.replace(self.settings, data=data)
        content = msgspec.json.encode([settings, self.plan, self.shapes], order="sorted")
        return hashlib.sha256(content).hexdigest()[:12]

    @property
    def name(self) -> str:
        """The run's folder and lock: runs that differ in anything have different ones."""
        return f"{self.method}-{self.made_of}"


def request_for(site: Site, name: str, seed: int, choice: Choice) -> Request:
    """The run of a method with a choice; raises InputError where the epochs do not suffice."""
    method, settings = METHODS[name], site.settings(seed)
    joint = joint_epochs(method, site.epochs)
    epochs = round(method.longer * site.epochs) - joint
    changes = {"learning_rate": choice.learning_rate, "epochs": epochs}
    settings = msgspec.structs.replace(
        settings,
        schedule=msgspec.structs.replace(settings.schedule, **changes, **method.schedule),
        joint_schedule=msgspec.structs.replace(settings.joint_schedule, epochs=joint),
    )
    shapes = list(method.shapes(site.shapes, choice))
    if not method.plans:
        settings = _with_features(_of_rival(settings, **method.schedule))
    plan = plan_of(site.teacher, shapes if method.plans else site.shapes.members)
    return Request(
        method=name, seed=seed, choice=choice, settings=settings, plan=plan, shapes=shapes
    )


def ground_for(site: Site, request: Request) -> Ground:
    """What the run stands on; the seed has to be prepared."""
    run = RunFolder(site.seed_folder(request.seed) / request.name)
    run.path.mkdir(parents=True, exist_ok=True)
    run.cache, run.teacher = site.cache(request.seed), site.teacher_run.teacher
    progress = TimedProgress(_times(run))
    work = Work(run, request.settings, request.plan, site.data, progress)
    teacher = ensure_teacher(work, None)
    return Ground(work, teacher, ensure_targets(work, teacher), request.shapes)


def _times(run: RunFolder) -> Path:
    # Hidden: a run folder that holds anything else before its settings is refused.
    return run.path / ".tasks.json"
