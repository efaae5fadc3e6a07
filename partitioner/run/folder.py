"""The folder in which a run keeps what it has done, so that the same command can go on."""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import msgspec

from mdp.errors import InputError
from mdp.files import read_json, read_toml, write_bytes, write_json, write_toml
from mdp.formats.bundle import sha256_of
from mdp.formats.plan import Plan
from partitioner.run.settings import DataFacts, MeasuredRun, Settings, TeacherFacts, differences

#: Cut pictures in the cache, of which most of it consists; they are made again where needed.
_VARIANTS = ("view-*.npy", "canvas-*.npy", "labels-*.npy")


class RunFolder:
    """The files of a run; one that exists is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings_file = path / "settings.json"
        #: In place of settings and plan, of a build by measurement.
        self.measured_file = path / "measured.json"
        self.plan_file = path / "plan.toml"
        self.teacher = path / "teacher.safetensors"
        self.teacher_onnx = path / "teacher.onnx"
        self.curves = path / "curves.json"
        self.curves_picture = path / "curves.svg"
        #: Views, variants, and the teacher's logits for them.
        self.cache = path / "cache"
        #: Outputs of trained sub-models that their successors learn from.
        self.predecessors = path / "predecessors"

    def member(self, k: int) -> Path:
        """Weights of sub-model `k`; exists once its training is finished."""
        return self.path / f"member-{k}.safetensors"

    def remove_pictures(self, *digests: str) -> None:
        """Remove cut pictures, their variants, and what sub-models learnt of their predecessors.

        With `digests` of splits their pictures and the variants alone.
        """
        views = [f"views-{digest[:16]}-*.npy" for digest in digests] or ["views-*.npy"]
        for pattern in (*views, *_VARIANTS):
            for path in self.cache.glob(pattern):
                path.unlink(missing_ok=True)
        if not digests:
            shutil.rmtree(self.predecessors, ignore_errors=True)

    def answers(self, to: str) -> Path:
        """The finished teacher's logits for pictures that are named by their digest."""
        return self.cache / f"teacher-{self.teacher_digest}-{to}.npy"

    @cached_property
    def teacher_digest(self) -> str:
        """Identifies the finished teacher."""
        return sha256_of(self.teacher)[:16]

    def checkpoint(self, stage: str) -> Path:
        """State of `teacher` or `member-<k>` after its last finished epoch."""
        return self.path / f"checkpoint-{stage}.pt"

    def settings(self) -> Settings:
        """The settings that the run was started with; raises InputError for no run folder."""
        if not self.settings_file.is_file():
            raise InputError(f"{self.path}: expected a run folder of mdp-partition train")
        return read_json(self.settings_file, Settings)

    def data_facts(self) -> DataFacts | None:
        """The pictures that the run is about; None for no run folder."""
        if self.measured_file.is_file():
            return read_json(self.measured_file, MeasuredRun).data
        return self.settings().data if self.settings_file.is_file() else None

    def plan(self) -> Plan:
        """The plan that the run follows."""
        return read_toml(self.plan_file, Plan)

    def start_or_continue(self, settings: Settings, plan: Plan) -> None:
        """Write settings and plan, or check that they are those of before; raises InputError.

        As long as nothing has been trained they may change.
        """
        if self.settings_file.exists() and self._has_begun():
            before = self.settings()
            changed = differences(_without_place(before), _without_place(settings))
            changed = changed or differences(self.plan(), plan)
            if changed:
                raise InputError(
                    f"{self.path}: made with other settings: {changed} "
                    "(give the same ones to go on, or another folder with --run)"
                )
            if before != settings:
                write_json(self.settings_file, settings)
            return
        self.check_new()
        shutil.rmtree(self.predecessors, ignore_errors=True)
        # The settings mark the folder as a run, so they come last.
        write_toml(self.plan_file, plan)
        write_json(self.settings_file, settings)

    def check_teacher(self, facts: TeacherFacts) -> None:
        """Raise InputError for a run trained with another teacher, and for no run folder."""
        if not (self.settings_file.exists() and self._has_begun()):
            self.check_new()
            return
        before = msgspec.structs.replace(self.settings().teacher, file=facts.file)
        changed = differences(before, facts)
        if changed:
            raise InputError(
                f"{self.path}: trained with another teacher: {changed} "
                "(give the same one to go on, or another folder with --run)"
            )

    def check_new(self) -> None:
        """Raise InputError if the folder has files that no untrained run has."""
        if self.measured_file.exists():
            raise InputError(
                f"{self.path}: expected a new, an empty or the run folder of a training, found "
                "that of a build by measurement: give another folder, or remove it"
            )
        own = {
            self.settings_file.name,
            self.plan_file.name,
            self.cache.name,
            self.predecessors.name,
        }
        found = {path.name for path in self.path.glob("[!.]*")}
        if found - own:
            raise InputError(f"{self.path}: expected a new, an empty or a run folder")

    def _has_begun(self) -> bool:
        """Tell whether any training has left something here."""
        return any(any(self.path.glob(trace)) for trace in ("*.safetensors", "checkpoint-*.pt"))

    def keep_curve(self, stage: str, curve: list[dict[str, float]]) -> None:
        """Add one network's mean losses per epoch to curves.json, and draw them all anew."""
        from partitioner.run.curves import draw_curves

        curves = self.read_curves()
        curves[stage] = curve
        write_json(self.curves, curves)
        write_bytes(self.curves_picture, draw_curves(curves))

    def read_curves(self) -> dict[str, list[dict[str, float]]]:
        """The content of curves.json."""
        if not self.curves.exists():
            return {}
        kind = dict[str, list[dict[str, float]]]
        return msgspec.json.decode(self.curves.read_bytes(), type=kind)

    def require_trained(self, plan: Plan) -> None:
        """Raise InputError unless the teacher and every sub-model of `plan` are finished."""
        wanted = [self.teacher, *(self.member(a.k) for a in plan.assignments)]
        missing = [path.name for path in wanted if not path.is_file()]
        if missing:
            raise InputError(
                f"{self.path}: not trained to the end ({', '.join(missing)} missing): "
                "run mdp-partition train again"
            )

    def digest(self, plan: Plan) -> str:
        """sha256 over plan and trained weights, from which a bundle is made."""
        weights = [self.teacher, *(self.member(a.k) for a in plan.assignments)]
        return digest_of([self.plan_file, *weights])

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder against other processes, and remove half-written files."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be made: {error.strerror}") from error
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(f"{self.path}: another mdp-partition is at work there") from error
            for left in (*self.path.glob(".*.partial"), *self.path.glob("*/.*.partial")):
                left.unlink()
            try:
                yield
            except InputError:
                self._remove_if_empty()
                raise

    def _remove_if_empty(self) -> None:
        """Remove the folder if the request was refused before anything was written."""
        if {entry.name for entry in self.path.iterdir()} == {".lock"}:
            shutil.rmtree(self.path)


def _without_place(settings: Settings) -> Settings:
    """Without paths: digests identify files that were moved."""
    data = msgspec.structs.replace(settings.data, source="")
    teacher = msgspec.structs.replace(settings.teacher, file=None)
    return msgspec.structs.replace(settings, data=data, teacher=teacher)


def digest_of(files: Sequence[Path]) -> str:
    """sha256 over the contents of `files`, in this order."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def default_run(bundle: Path) -> Path:
    """The run folder that belongs to a bundle unless another one is named."""
    return Path(f"{os.path.normpath(bundle)}.run")


def bundle_name(name: str | None, out: Path) -> str:
    """A given name if it is a valid one, else one made from the folder's."""
    if name is None:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", out.resolve().name).lstrip("._-")
        return plain[:64] or "bundle"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise InputError(f"--name: expected letters, digits, '.', '_' or '-', got {name!r}")
    return name
