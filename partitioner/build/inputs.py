"""The inputs of a build or of a training alone, each read once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import msgspec

from mdp.errors import InputError
from mdp.formats.bundle import sha256_of
from mdp.formats.plan import Plan, TeacherSpec
from mdp.formats.profile import DeviceProfile, read_profiles
from partitioner.assembly.class_rows import rows_by_network
from partitioner.assembly.members import read_map
from partitioner.build.teacher import TeacherSource
from partitioner.config import MINUTES, BuildConfig, check_measured, check_one_label, measures
from partitioner.data.datasets import Dataset, open_dataset
from partitioner.data.scenes import are_cameras
from partitioner.fusion.several_fit import check_members as check_devices
from partitioner.networks.at_hand import find_weights, weights_at_hand
from partitioner.networks.teacher import teacher_spec
from partitioner.pilot.candidates import DeviceLatency
from partitioner.pilot.measure import plain_shapes
from partitioner.run.folder import RunFolder
from partitioner.run.plan_settings import PlanSettings, check_cameras
from partitioner.run.settings import RunOptions, TrainingConfig
from partitioner.run.weights import weights_in

#: How many names a message shows.
_SHOWN = 5


@dataclass(frozen=True)
class PretrainedWeights:
    """Pretrained weights at hand, and which of their classes are the data's."""

    options: RunOptions
    #: The data's classes.
    labels: tuple[str, ...]
    #: Files by timm's name.
    files: Mapping[str, Path]
    _rows: dict[str, list[int] | None] = field(default_factory=dict, repr=False)

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """The files' sha256, by timm's name."""
        return {name: sha256_of(path) for name, path in self.files.items()}

    def of(self, names: Iterable[str]) -> dict[str, Path]:
        """The files of these networks, none without a folder; raises InputError for a missing."""
        folder, names = self.options.weights_folder, dict.fromkeys(names)
        if folder is None:
            return {}
        for name in names:
            if name not in self.files:
                there = ", ".join(list(self.files)[:_SHOWN]) or "none"
                raise InputError(
                    f"--weights {folder}: expected weights of {name} in {name}.safetensors, .pth, "
                    f".pt or .bin, found none (there are: {there})"
                )
        return {name: self.files[name] for name in names}

    def class_rows(self, names: Iterable[str]) -> dict[str, list[int]]:
        """The row of each class of the data in the classifiers of these networks, by name.

        The names of their classes are labels.txt in the folder of weights, else the teacher's
        labels where the number of classes agrees, else ImageNet's for 1,000 classes. Networks with
        other class names are left out. Raises InputError for labels that are not as many as a
        classifier has rows.
        """
        found = {name: self._rows_of(name) for name in names}
        return {name: rows for name, rows in found.items() if rows is not None}

    def _rows_of(self, name: str) -> list[int] | None:
        options = self.options
        if name not in self._rows:
            rows = rows_by_network(
                {name: self.files[name]},
                self.labels,
                options.weights_folder,
                Path(options.teacher_labels) if options.teacher_labels else None,
                read_map(Path(options.teacher_map)) if options.teacher_map else {},
            )
            self._rows[name] = rows.get(name)
        return self._rows[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInputs:
    """Settings and pictures of a training, its teacher, and pretrained weights."""

    config: TrainingConfig
    data: Dataset
    #: None where networks are chosen by measurement, which need none.
    teacher: TeacherSource | None
    pretrained: PretrainedWeights

    @classmethod
    def of(
        cls,
        config: TrainingConfig,
        data: Dataset,
        teacher: TeacherSpec | None,
        weights: Mapping[str, Path] | None = None,
    ) -> "TrainingInputs":
        """The inputs of a training on these pictures; raises InputError.

        `weights` are files by timm's name, by default those of the configured folder.
        """
        source = None if teacher is None else TeacherSource(teacher, config, data.labels)
        files = _weights_in(config.options) if weights is None else weights
        pretrained = PretrainedWeights(config.options, data.labels, files)
        return TrainingInputs(config=config, data=data, teacher=source, pretrained=pretrained)

    @classmethod
    def of_plan(cls, config: TrainingConfig, plan: Plan) -> "TrainingInputs":
        """The inputs of a training of `plan`, with its cameras' pictures; raises InputError."""
        check_one_label(config.options.labels)
        data = open_pictures(config.options, plan.cameras)
        return TrainingInputs.of(config, data, plan.teacher)

    def require_teacher(self) -> TeacherSource:
        """The teacher, of a training that has one."""
        assert self.teacher is not None
        return self.teacher

    def check_run(self, run: RunFolder) -> None:
        """Raise InputError where `run` was trained with a teacher of other given weights."""
        if self.teacher is not None and self.config.has_teacher_weights:
            run.check_teacher(self.teacher.facts)


# Without slots, which leave no place for what is computed once.
@dataclass(frozen=True, kw_only=True)
class BuildInputs(TrainingInputs):
    """The inputs of a training, and the devices that are planned for."""

    config: BuildConfig
    #: By name.
    profiles: Mapping[str, DeviceProfile]

    @classmethod
    def read(cls, config: BuildConfig) -> "BuildInputs":
        """Read what `config` names; raises InputError, also for settings of another kind of build.

        The pictures are those of every camera that is named. Where none is, and `data` has scenes
        of cameras called as the devices, each device sees its own.
        """
        settings, options = config.plan, config.options
        profiles = {profile.name: profile for profile in read_profiles(settings.profiles)}
        check_cameras(settings, list(profiles))
        if measures(config):
            check_measured(config, list(profiles))
            files, teacher = _measurable(config), None
        else:
            check_one_label(options.labels)
            files, teacher = _weights_in(options), settings.require_teacher()
        if options.labels == "several":
            check_devices(len(profiles))
        data = open_pictures(options, list(settings.cameras.values()))
        if cameras := own_cameras(settings, list(profiles), data):
            plan = msgspec.structs.replace(settings, cameras=cameras)
            config = msgspec.structs.replace(config, plan=plan)
            data = data.for_cameras(list(cameras.values()))
        source = None
        if teacher is not None:
            spec = teacher_spec(teacher, settings.teacher_args)
            source = TeacherSource(spec, config, data.labels)
        return cls(
            config=config,
            data=data,
            teacher=source,
            pretrained=PretrainedWeights(options, data.labels, files),
            profiles=profiles,
        )

    @property
    def weights(self) -> Mapping[str, Path]:
        """Files of pretrained weights by timm's name."""
        return self.pretrained.files

    @property
    def digests(self) -> Mapping[str, str]:
        """Their sha256."""
        return self.pretrained.digests

    @property
    def class_rows(self) -> Mapping[str, Sequence[int]]:
        """The row of each class in the own classifiers of networks that know the classes.

        None know labels that do not exclude each other.
        """
        if self.data.sets is not None:
            return {}
        return self.pretrained.class_rows(self.weights)

    @property
    def cameras(self) -> Mapping[str, str]:
        """By device, where the data has scenes."""
        return self.config.plan.cameras

    @property
    def target_ms(self) -> float:
        """The target of a build by measurement."""
        assert self.config.plan.latency_ms is not None
        return self.config.plan.latency_ms

    @property
    def minutes(self) -> float:
        """Minutes that a build by measurement may take."""
        minutes = self.config.options.minutes
        return MINUTES if minutes is None else minutes

    @property
    def seed(self) -> int:
        """The seed of weights, variants and order of pictures."""
        return self.config.options.seed

    @property
    def threads(self) -> int:
        """Threads to train with; 0: one per core."""
        return self.config.options.threads

    @cached_property
    def devices(self) -> list[DeviceLatency]:
        """Predictors of the milliseconds of networks on each device; raises InputError."""
        return [
            DeviceLatency.of(profile, len(self.data.labels), sees=bool(self.cameras))
            for profile in self.profiles.values()
        ]

    def for_cameras(self, cameras: Sequence[str]) -> "BuildInputs":
        """The same inputs with the scenes of `cameras` alone, of which nothing is read again."""
        return replace(self, data=self.data.for_cameras(cameras))


def open_pictures(options: RunOptions, cameras: Sequence[str] = ()) -> Dataset:
    """The configured pictures, or with `cameras` scenes; raises InputError."""
    return open_dataset(
        options.data,
        limit_train=options.limit_train,
        limit_test=options.limit_test,
        cameras=cameras,
        several=options.labels == "several",
    )


def own_cameras(settings: PlanSettings, devices: Sequence[str], data: Dataset) -> dict[str, str]:
    """Each device's own camera, as `mdp record` names them; none where they are not so."""
    if settings.cameras or len(devices) < 2 or not are_cameras(devices, data):
        return {}
    return {device: device for device in devices}


def _weights_in(options: RunOptions) -> dict[str, Path]:
    return {} if options.weights_folder is None else weights_in(options.weights_folder)


def _measurable(config: BuildConfig) -> dict[str, Path]:
    """The weights that a build by measurement chooses from; raises InputError.

    With a teacher no other vision transformer is among them.
    """
    options, teacher = config.options, config.plan.teacher
    if teacher is None:
        return weights_at_hand(options.weights_folder)
    wanted = [teacher] if options.pretrained and options.teacher_checkpoint is None else []
    at_hand = find_weights(options.weights_folder, wanted)
    weights = {name: one.path for name, one in at_hand.items()}
    plain = plain_shapes(list(weights))
    found = {name: path for name, path in weights.items() if name not in plain or name == teacher}
    if options.teacher_checkpoint is not None:
        found[teacher] = Path(options.teacher_checkpoint)
    if teacher not in found:
        raise InputError(
            f"plan.teacher: a build by measurement needs weights of {teacher}: expected "
            f"{teacher}.safetensors in --weights, --teacher-checkpoint or --pretrained"
        )
    if not plain_shapes([teacher]):
        raise InputError(f"plan.teacher: {teacher} is no plain vision transformer, has no cuts")
    return found
