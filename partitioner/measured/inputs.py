"""Everything that a build by measurement reads, each once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mdp.errors import InputError
from mdp.formats.bundle import sha256_of
from mdp.formats.profile import DeviceProfile, read_profiles
from partitioner.assembly.class_rows import rows_by_network
from partitioner.config import BuildConfig
from partitioner.data.datasets import Dataset, open_dataset
from partitioner.networks.at_hand import weights_at_hand
from partitioner.pilot.candidates import DeviceLatency
from partitioner.run.plan_settings import check_cameras

#: Minutes that a build may take where the user names none.
MINUTES = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInputs:
    """Pictures, networks with weights, devices, and what is asked of them."""

    data: Dataset
    #: Files by timm's name.
    weights: Mapping[str, Path]
    #: The row of each class in the own classifiers of networks that know the classes by name.
    class_rows: Mapping[str, Sequence[int]]
    #: Their sha256.
    digests: Mapping[str, str]
    profiles: Mapping[str, DeviceProfile]
    #: By device, where the data has scenes; every device has one, or none has.
    cameras: Mapping[str, str]
    target_ms: float
    minutes: float
    seed: int
    #: 0: one per core.
    threads: int

    @classmethod
    def read(cls, config: BuildConfig) -> "BuildInputs":
        """Read what `config` names; raises InputError for settings of another kind of build."""
        settings, options = config.plan, config.options
        _check_kind(config)
        profiles = {profile.name: profile for profile in read_profiles(settings.profiles)}
        check_cameras(settings, list(profiles))
        without = [device for device in profiles if device not in settings.cameras]
        if settings.cameras and without:
            raise InputError(f"plan.cameras: expected one for every device, got none: {without[0]}")
        if settings.latency_ms is None:
            raise InputError("plan.latency_ms: expected it for a build by measurement, got none")
        weights = weights_at_hand(options.weights_folder)
        if settings.teacher is not None:
            weights = _with_teacher(settings.teacher, weights, options.teacher_checkpoint)
        data = open_dataset(
            options.data,
            limit_train=options.limit_train,
            limit_test=options.limit_test,
            cameras=list(dict.fromkeys(settings.cameras.values())),
        )
        return cls(
            data=data,
            weights=weights,
            class_rows=rows_by_network(weights, data.labels, options.weights_folder),
            digests={name: sha256_of(path) for name, path in weights.items()},
            profiles=profiles,
            cameras=settings.cameras,
            target_ms=settings.latency_ms,
            minutes=MINUTES if options.minutes is None else options.minutes,
            seed=options.seed,
            threads=options.threads,
        )

    def devices(self) -> list[DeviceLatency]:
        """What predicts the milliseconds of networks on each device; raises InputError."""
        return [
            DeviceLatency.of(profile, len(self.data.labels), sees=bool(self.cameras))
            for profile in self.profiles.values()
        ]


def _with_teacher(
    teacher: str, weights: Mapping[str, Path], checkpoint: str | None
) -> dict[str, Path]:
    """The weights without vision transformers other than the teacher, and with its own."""
    from partitioner.pilot.measure import plain_shapes

    plain = plain_shapes(list(weights))
    found = {name: path for name, path in weights.items() if name not in plain or name == teacher}
    if checkpoint is not None:
        found[teacher] = Path(checkpoint)
    if teacher not in found:
        raise InputError(
            f"plan.teacher: a build by measurement needs weights of {teacher}: expected "
            f"{teacher}.safetensors in --weights, or --teacher-checkpoint"
        )
    if not plain_shapes([teacher]):
        raise InputError(f"plan.teacher: {teacher} is no plain vision transformer, has no cuts")
    return found


#: Settings that a build by measurement does not have, by table.
_OTHERS = {
    "plan": (
        *("min_accuracy", "percentile", "precision", "any_precision", "runs", "families"),
        *("max_energy_j", "teacher_accuracy", "teacher_args", "client_mbit", "anyway"),
    ),
    "run": ("pretrained", "teacher_labels", "teacher_map"),
}


def _check_kind(config: BuildConfig) -> None:
    """Raise InputError for a setting that only builds with a trained teacher have."""
    plain = BuildConfig(
        plan=type(config.plan)(profiles=config.plan.profiles, latency_ms=1.0),
        options=type(config.options)(data=config.options.data),
    )
    for table, record, default in (
        ("plan", config.plan, plain.plan),
        ("run", config.options, plain.options),
    ):
        for key in _OTHERS[table]:
            if getattr(record, key) != getattr(default, key):
                raise InputError(
                    f"{table}.{key}: not of a build by measurement: expected --teacher with "
                    "--teacher-epochs or given weights beside it, and no --minutes"
                )
    for table, schedule, default_schedule in (
        ("teacher_schedule", config.teacher_schedule, plain.teacher_schedule),
        ("schedule", config.schedule, plain.schedule),
        ("augmentation", config.augmentation, plain.augmentation),
    ):
        if schedule != default_schedule:
            raise InputError(
                f"{table}: not of a build by measurement, which trains as long as --minutes says: "
                "expected --teacher beside it"
            )
