"""The steps around a training: check, export, evaluate, quantise and reopen."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from mdp.errors import AgentError, InputError, MDPError
from mdp.formats.bundle import MANIFEST, Bundle
from mdp.formats.plan import Plan
from mdp.formats.profile import DeviceProfile
from mdp.runtimes.base import Execution
from mdp.runtimes.select import check_execution
from partitioner.data.datasets import DIGITS, Dataset, open_dataset
from partitioner.export.evaluate import Report, evaluate, write_report
from partitioner.export.inspect_bundle import InspectRequest, inspect_bundle
from partitioner.export.quantize import check_calibration
from partitioner.export.quantize_bundle import quantize_bundle
from partitioner.export.sessions import on_processor
from partitioner.export.try_precision import MAX_LOSS, QuantizeRequest, pictures_needed
from partitioner.export.write import export_bundle, unknown_digest
from partitioner.run.folder import RunFolder, default_run
from partitioner.run.progress import Progress
from partitioner.run.target import check_target
from partitioner.training.context import TrainingContext


def reopen(run: RunFolder, progress: Progress) -> TrainingContext:
    """The run of a folder; raises InputError if its pictures have changed."""
    settings, plan = run.settings(), run.plan()
    facts = settings.data
    data = open_dataset(
        facts.source,
        limit_train=facts.limit_train,
        limit_test=facts.limit_test,
        cameras=plan.cameras,
    )
    for name in ("train", "calibration", "test"):
        if not data.split(name).digest.startswith(getattr(facts, name)):
            raise InputError(f"{facts.source}: the {name} split changed since {run.path} was made")
    return TrainingContext(run, settings, plan, data, progress)


def check_members(plan: Plan, data: Dataset) -> None:
    """Raise InputError for members that cannot be exported or measured on this machine."""
    for assignment in plan.assignments:
        precision = assignment.spec.precision
        try:
            check_execution(on_processor(Execution.of(assignment)))
            if precision == "int8-static":
                check_calibration(len(data.calibration))
        except (InputError, AgentError) as error:
            raise InputError(
                f"sub-model {assignment.k} for {assignment.device} could not be measured here: "
                f"{error}"
            ) from error


def export_step(work: TrainingContext, out: Path, name: str) -> dict[int, float] | None:
    """Write the bundle; None if `out` is a whole bundle of this very run already."""
    check_target(out)
    if (out / MANIFEST).is_file():
        bundle = _whole_bundle(out)
        if (
            bundle is not None
            # Heads are fitted anew, to models without any.
            and not bundle.manifest.inspection
            and bundle.manifest.name == name
            and bundle.manifest.provenance.get("run_digest") == work.run.digest(work.plan)
            # Pictures of no class choose the score of novelty.
            and bundle.manifest.provenance.get("unknown_digest", "") == unknown_digest(work.data)
        ):
            return None
    return export_bundle(work, out, name)


def _whole_bundle(path: Path) -> Bundle | None:
    """The bundle at `path` if every file is what the manifest says."""
    try:
        bundle = Bundle.open(path)
        for name in bundle.manifest.files:
            bundle.verified(name)
    except MDPError:
        return None
    return bundle


class EvaluationInputs(NamedTuple):
    """Pictures for a step on a finished bundle, and its run."""

    data: Dataset
    #: The run that made the bundle, where it is known; it has the teacher.
    run: RunFolder | None
    #: Keeps the pictures' views.
    cache: Path


@contextmanager
def inputs_of(
    bundle: Bundle,
    run: Path | None,
    source: str | None,
    *,
    limit_train: int | None = None,
    limit_test: int | None = None,
) -> Iterator[EvaluationInputs]:
    """The inputs named by options, else the run folder beside `bundle` and that run's pictures.

    Without either, the digits where the bundle is of them. Raises InputError if there are none, for
    a `run` that is no run folder, and for a run whose pictures have changed.
    """
    folder = RunFolder(default_run(bundle.path) if run is None else run)
    facts = folder.data_facts()
    if facts is None and run is not None:
        raise InputError(f"{run}: expected a run folder of mdp-partition train or build")
    known = None if facts is None else folder
    cameras, several = bundle.manifest.plan.cameras, bundle.manifest.several
    if source is not None:
        data = open_dataset(
            source, limit_train=limit_train, limit_test=limit_test, cameras=cameras, several=several
        )
    elif facts is not None:
        if facts.source != DIGITS and not Path(facts.source).exists():
            raise InputError(
                f"{facts.source}: not there any more, and {folder.path} was made of it; name the "
                "pictures with --data"
            )
        limit_test = facts.limit_test if limit_test is None else limit_test
        data = open_dataset(
            facts.source,
            limit_train=facts.limit_train,
            limit_test=limit_test,
            cameras=cameras,
            several=several,
        )
        if not data.train.digest.startswith(facts.train):
            raise InputError(
                f"{facts.source}: the train split changed since {folder.path} was made, so that "
                "pictures that were trained on may be among the test's; name others with --data"
            )
    elif bundle.manifest.provenance.get("data") == DIGITS:
        data = open_dataset(DIGITS, limit_test=limit_test)
    else:
        raise InputError(f"{bundle.path}: give --data, or --run with the folder it was trained in")
    if known is not None:
        before = set(known.cache.glob("views-*.npy"))
        yield EvaluationInputs(data, known, known.cache)
        # What was cut for this alone is cut again for another time.
        for path in set(known.cache.glob("views-*.npy")) - before:
            path.unlink(missing_ok=True)
        return
    with TemporaryDirectory(prefix="mdp-views-") as cache:
        yield EvaluationInputs(data, None, Path(cache))


def evaluate_step(
    out: Path, data: Dataset, run: RunFolder, progress: Progress, *, teacher: bool = True
) -> tuple[Bundle, Report]:
    """The bundle `out` with its evaluation, of the run's `teacher` too if it has one."""
    bundle = Bundle.open(out)
    report = evaluate(bundle, data, run if teacher else None, run.cache, progress)
    return write_report(bundle, report), report


def quantize_step(
    bundle: Bundle,
    data: Dataset,
    run: RunFolder,
    profiles: Sequence[DeviceProfile],
    progress: Progress,
) -> Report | None:
    """Serve networks of an fp32 bundle in static int8 where the profiles show a speed-up.

    Decided as by `mdp-partition quantize`; plain ViTs stay as planned. Returns the new evaluation,
    or None where nothing was accepted.
    """
    plan, needed = bundle.manifest.plan, pictures_needed(MAX_LOSS)
    networks = [a.k for a in plan.assignments if a.network is not None]
    planned = {a.spec.precision for a in plan.assignments}
    if not networks or planned != {"fp32"} or bundle.manifest.quantisation is not None:
        return None
    if len(data.calibration) < needed:
        progress.note(
            f"int8 not tried: {len(data.calibration)} calibration pictures, expected {needed}"
        )
        return None
    devices = {a.device for a in plan.assignments} | {r.device for r in plan.replicas}
    request = QuantizeRequest(
        max_loss=MAX_LOSS,
        profiles=[profile for profile in profiles if profile.name in devices],
        ways=[("int8-static", "onnxruntime")],
        members=networks,
    )
    report = quantize_bundle(bundle, data, run, request, bundle.path, run.cache, progress)
    record = Bundle.open(bundle.path).manifest.quantisation
    for member in [] if record is None else record.members:
        for tried in member.tried:
            kept = "kept" if tried.kept else "not kept"
            progress.note(f"sub-model {member.k} in {tried.precision}: {kept}: {tried.reason}")
    return report


def inspect_step(out: Path, request: InspectRequest, progress: Progress) -> None:
    """Give the models of the finished bundle `out` anomaly heads; raises InputError.

    The bundle stays as it is where its good scenes are refused.
    """
    with TemporaryDirectory(prefix="mdp-views-") as cache:
        try:
            inspect_bundle(Bundle.open(out), out, request, Path(cache), progress)
        except InputError as error:
            raise InputError(f"{error}; {out} is whole, without anomaly heads") from error
