"""The configuration of a build in one record, from run.toml and options, which override it."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from mdp.errors import InputError
from mdp.files import Record, read_toml
from mdp.formats.plan import TeacherArgument
from partitioner.run.plan_settings import PlanSettings, check_argument
from partitioner.run.settings import RunOptions, TrainingConfig

R = TypeVar("R", bound=Record)
#: Minutes that a build by measurement may take where the user names none.
MINUTES = 10.0


class BuildConfig(TrainingConfig, frozen=True, kw_only=True):
    """A whole build: each field is a table of run.toml, `options` the table `[run]`."""

    plan: PlanSettings


class _PlanOnly(Record, frozen=True):
    plan: PlanSettings


#: The tables of run.toml: name -> record.
_TABLES = {"plan": PlanSettings} | {
    table.encode_name: table.type for table in msgspec.structs.fields(BuildConfig)
}
#: Prefixes of the options of a table's keys.
_PREFIXES = {"teacher_schedule": "teacher-"}
#: The option or key that a message begins with.
_SUBJECT = re.compile(rf"--[a-z-]+|(?:{'|'.join(_TABLES)})\.\w+")


def option_of(key: str) -> str:
    """`--teacher-epochs` for `teacher_schedule.epochs`."""
    table, _, name = key.partition(".")
    name = {"teacher_args": "teacher_arg", "cameras": "camera"}.get(name, name)
    return f"--{_PREFIXES.get(table, '')}{name.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class Given:
    """The tables of a configuration file, overridden by options."""

    path: Path | None = None
    #: Key, such as `schedule.epochs` -> value of its option.
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    tables: dict[str, dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        """Read the file; raises ConfigError, and InputError for an unknown table or key."""
        read = {} if self.path is None else read_toml(self.path, dict[str, Any])
        for name, table in read.items():
            if name not in _TABLES:
                hint = _hint(name, _TABLES)
                raise InputError(f"{self.path}: expected only known tables, got `{name}`{hint}")
            if not isinstance(table, dict):
                raise InputError(f"{self.path}: key `{name}`: expected a table, got {table!r}")
        content = {name: dict(read.get(name, {})) for name in _TABLES}
        for key, value in self.options.items():
            table, _, name = key.partition(".")
            content[table][name] = value
        object.__setattr__(self, "tables", content)
        for key in (f"{table}.{name}" for table, keys in content.items() for name in keys):
            if key not in _keys():
                raise InputError(f"{self._name_of(key)}: unknown key{_hint(key, _keys())}")

    def build(self) -> BuildConfig:
        """The configuration of a build; raises InputError naming option, or file and key."""
        return self._record(BuildConfig)

    def training(self) -> TrainingConfig:
        """The configuration of a training, without a plan; raises InputError."""
        return self._record(TrainingConfig)

    def planning(self) -> PlanSettings:
        """The configuration of a plan, without a training; raises InputError."""
        return self._record(_PlanOnly).plan

    def value(self, key: str) -> Any:
        """The value of one key, None where it is not given; raises InputError."""
        table, _, name = key.partition(".")
        if name not in self.tables[table]:
            return None
        try:
            return msgspec.convert(self.tables[table][name], field_of(key)[0])
        except msgspec.ValidationError as error:
            raise InputError(self._explain(str(error), key)) from error

    def naming(self) -> AbstractContextManager[None]:
        """Name what the user wrote in InputErrors about an option or a key."""
        return naming(self._name_of)

    def _record(self, kind: type[R]) -> R:
        names = {found.encode_name for found in msgspec.structs.fields(kind)}
        content = {name: table for name, table in self.tables.items() if name in names}
        try:
            with self.naming():
                return msgspec.convert(content, kind)
        except msgspec.ValidationError as error:
            what, _, place = str(error).partition(" - at `$.")
            raise InputError(self._explain(what, place.removesuffix("`"))) from error

    def _explain(self, what: str, place: str) -> str:
        """A message of msgspec about a `place` such as `schedule.epochs`, with its value."""
        table, name, *_ = *re.findall(r"\w+", place), ""
        missing = re.search(r"missing required field `(\w+)`", what)
        if missing is None:
            key = f"{table}.{name}"
            if what.startswith("Invalid enum value"):
                what = f"expected one of {', '.join(map(repr, _choices(field_of(key)[0])))}"
            got = "" if ", got" in what else f", got {self.tables[table].get(name)!r}"
            return f"{self._name_of(key)}: {what[0].lower()}{what[1:]}{got}"
        key = f"{table}.{missing[1]}"
        if self.path is None:
            return f"{option_of(key)}: expected it, or `{key}` in the file of --config"
        return f"{self._name_of(key)}: expected it, or the option {option_of(key)}"

    def _name_of(self, subject: str) -> str:
        """The option or the key of the file that the user wrote."""
        key = key_of(subject)
        if key in self.options:
            return option_of(key)
        if self.path is None or key.startswith("--"):
            return subject
        return f"{self.path}: key `{key}`"


def measures(config: BuildConfig) -> bool:
    """Tell whether a build chooses by measurement, and not by the law of accuracy."""
    return config.plan.teacher is None or config.options.minutes is not None


def check_one_label(labels: str | None) -> None:
    """Raise InputError for several labels an item, of a plan or training with a teacher."""
    if labels == "several":
        raise InputError(
            "run.labels: several labels an item are of a build by measurement: expected no teacher"
        )


#: Settings that a build by measurement does not have, by table.
_TAUGHT = {
    "plan": (
        *("min_accuracy", "percentile", "precision", "any_precision", "runs", "families"),
        *("max_energy_j", "teacher_accuracy", "teacher_args", "client_mbit", "anyway"),
    ),
    "run": ("teacher_labels", "teacher_map", "autocast", "teaching", "answers_keep"),
}


def check_measured(config: BuildConfig, devices: Sequence[str]) -> None:
    """Raise InputError for settings that a build by measurement for `devices` lacks or has not."""
    settings, options = config.plan, config.options
    plain = BuildConfig(
        plan=PlanSettings(profiles=settings.profiles, latency_ms=1.0),
        options=RunOptions(data=options.data),
    )
    for table, record, default in (("plan", settings, plain.plan), ("run", options, plain.options)):
        for key in _TAUGHT[table]:
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
    without = [device for device in devices if device not in settings.cameras]
    if settings.cameras and without:
        raise InputError(f"plan.cameras: expected one for every device, got none: {without[0]}")
    if settings.latency_ms is None:
        raise InputError("plan.latency_ms: expected it for a build by measurement, got none")
    if options.pretrained and settings.teacher is None:
        raise InputError("run.pretrained: expected --teacher NAME beside it: what is to be fetched")
    if options.teacher_checkpoint is not None and settings.teacher is None:
        raise InputError(
            "run.teacher_checkpoint: expected --teacher NAME beside it: whose weights these are"
        )


@contextmanager
def naming(name: Callable[[str], str]) -> Iterator[None]:
    """Replace the option or key that an InputError begins with by `name` of it."""
    try:
        yield
    except InputError as error:
        text = str(error)
        subject = _SUBJECT.match(text)
        if subject is None or name(subject[0]) == subject[0]:
            raise
        raise InputError(name(subject[0]) + text[subject.end() :]) from error


def key_of(subject: str) -> str:
    """The key of an option, `schedule.epochs` for `--epochs`; anything else as it is."""
    return next((key for key in _keys() if option_of(key) == subject), subject)


def _hint(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
    return f"; close to it: `{close[0]}`" if close else ""


def _choices(kind: Any) -> list[Any]:
    """The values of the Literal in an annotation."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [choice for part in get_args(kind) for choice in _choices(part)]


def _keys() -> list[str]:
    """Every key of run.toml, as `schedule.epochs`."""
    return [
        f"{table}.{key}" for table, record in _TABLES.items() for key in record.__struct_fields__
    ]


def check_config(config: BuildConfig) -> BuildConfig:
    """`config`, checked as a file is; raises InputError naming the key."""
    given = Given()
    given.tables.update(msgspec.to_builtins(config))
    return given.build()


def check_plan(settings: PlanSettings) -> PlanSettings:
    """The same for the plan alone."""
    given = Given()
    given.tables["plan"] = msgspec.to_builtins(settings)
    return given.planning()


def field_of(key: str) -> tuple[Any, Any]:
    """Annotation and default of a key such as `schedule.epochs`."""
    table, _, name = key.partition(".")
    kind = _TABLES[table]
    default = next(f.default for f in msgspec.structs.fields(kind) if f.name == name)
    return get_type_hints(kind, include_extras=True)[name], default


def read_config(
    path: str | Path, settings: Mapping[str, Any] = MappingProxyType({})
) -> BuildConfig:
    """The configuration of a build from a file; raises ConfigError or InputError.

    `settings` override the file's by key: `{"run.data": "digits", "plan.profiles": ["n100"]}`.
    """
    return Given(Path(path), settings).build()


def parse_cameras(pairs: Sequence[str]) -> dict[str, str]:
    """`["n100=front"]` -> camera by device; raises InputError."""
    parsed: dict[str, str] = {}
    for pair in pairs:
        device, _, camera = pair.partition("=")
        if not (device and camera):
            raise InputError(f"--camera: expected device=camera, got {pair!r}")
        if device in parsed:
            raise InputError(f"--camera: {device!r} is given twice")
        parsed[device] = camera
    return parsed


def parse_arguments(pairs: Sequence[str]) -> dict[str, TeacherArgument]:
    """`["img_size=24", "qkv_bias=false"]` -> typed constructor arguments; raises InputError."""
    parsed: dict[str, TeacherArgument] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (equals and key.isidentifier() and text):
            raise InputError(f"--teacher-arg: expected key=value, got {pair!r}")
        check_argument(key)
        if key in parsed:
            raise InputError(f"--teacher-arg: {key!r} is given twice")
        parsed[key] = _value(text)
    return parsed


def _value(text: str) -> TeacherArgument:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
