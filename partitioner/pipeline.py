"""The steps of a build, each of which skips what is done, and all of them in a row."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from mdp.errors import AgentError, ConfigError, InputError, MDPError, PlanRefused
from mdp.files import read_json
from mdp.formats.bundle import MANIFEST, Bundle, Manifest
from mdp.formats.plan import Plan
from mdp.formats.profile import DeviceProfile, read_profiles
from mdp.runtimes.base import Execution
from mdp.runtimes.select import check_execution
from partitioner.config import BuildConfig
from partitioner.crew.desk import Together
from partitioner.crew.folder import CrewFolder
from partitioner.data.datasets import DIGITS, Dataset, open_dataset
from partitioner.data.scenes import remark_on, single_pictures
from partitioner.estimates.accuracy_law import Training
from partitioner.export.evaluate import Report, evaluate, write_report
from partitioner.export.quantize import check_calibration
from partitioner.export.quantize_bundle import quantize_bundle
from partitioner.export.sessions import on_processor
from partitioner.export.try_precision import MAX_LOSS, QuantizeRequest, needed_pictures
from partitioner.export.write import export_bundle
from partitioner.networks.members import check_member
from partitioner.networks.teacher import teacher_spec
from partitioner.networks.weight_init import check_source
from partitioner.planner.make_plan import Planned, make_planned
from partitioner.run.folder import RunFolder, bundle_name, default_run
from partitioner.run.plan_settings import PlanSettings, check_cameras
from partitioner.run.progress import Progress
from partitioner.run.settings import MemberSchedule, Settings, Teaching, TrainingConfig, differences
from partitioner.run.weights import weights_of
from partitioner.run_setup import (
    check_scenes,
    checkpoint_of,
    cut_views,
    given_teacher,
    open_pictures,
    settings_for,
    teacher_accuracy,
    teacher_facts,
    teaching_of,
    with_rows,
)
from partitioner.training.context import Work
from partitioner.training.distributed import first_then_others, is_first, on_first, together
from partitioner.training.members import train_members
from partitioner.training.teacher import ensure_targets, ensure_teacher


def build_bundle(
    config: BuildConfig,
    out: Path,
    progress: Progress,
    *,
    run: Path | None = None,
    name: str | None = None,
    crew: Path | None = None,
    on_plan: Callable[[Planned], object] = lambda _: None,
) -> Report | None:
    """Plan, train, export and evaluate in a row; `on_plan` gets the plan, refused or not.

    `crew` is the folder of a crew that trains, with this process as its desk.

    Of torchrun's processes all but the first return None. Raises InputError and PlanRefused.
    """
    from partitioner.networks.teacher import teacher_spec

    folder, asked, settings = RunFolder(run or default_run(out)), config.options, config.plan
    with together():
        named = bundle_name(name, out)
        check_target(out)
        check_cameras(settings, [profile.name for profile in read_profiles(settings.profiles)])
        pictures = open_pictures(config, list(settings.cameras.values()))
        spec = teacher_spec(settings.require_teacher(), settings.teacher_args)
        facts = teacher_facts(config, pictures, spec) if config.given_teacher else None
        singles = single_pictures(pictures)
    given = None if facts is None else given_teacher(folder, spec, facts, singles, config, progress)
    if given is not None and settings.teacher_accuracy is None:
        with owned(folder):
            share = teacher_accuracy(given, config, progress)
        settings = msgspec.structs.replace(settings, teacher_accuracy=share)
    with together():
        training = Training(
            pictures=len(pictures.train),
            epochs=config.schedule.epochs,
            start="scratch" if config.schedule.start == "scratch" else "cut",
        )
        planned = planned_for(
            settings,
            len(pictures.labels),
            training=training,
            rows=with_rows(config, pictures, facts),
            weights=asked.weights_folder,
        )
        if not planned.plan.refused:
            if len(planned.plan.cameras) < len(pictures.cameras):
                pictures = open_pictures(config, planned.plan.cameras)
            check_ways(planned.plan, pictures)
    with together():
        if is_first():
            on_plan(planned)
        planned.check()
    with owned(folder):
        work = train_step(folder, planned.plan, pictures, config, progress, crew=crew, bundle=named)
        if not is_first():
            return None
        export_step(work, out, named)
        report = evaluate(Bundle.open(out), pictures, folder, folder.cache, progress)
        evaluated = write_report(Bundle.open(out), report)
        measured = [device.profile for device in planned.problem.devices]
        report = quantize_step(evaluated, pictures, folder, measured, progress) or report
        folder.remove_pictures()
        return report


def planned_for(
    settings: PlanSettings,
    num_classes: int,
    *,
    training: Training | None = None,
    rows: Collection[str] = (),
    weights: Path | None = None,
    explained: bool = False,
    front: bool = False,
) -> Planned:
    """The plan of `settings`; see `make_planned`."""
    return make_planned(
        teacher_spec(settings.require_teacher(), settings.teacher_args),
        settings,
        num_classes,
        training=training,
        rows=rows,
        weights=weights,
        explained=explained,
        front=front,
    )


@contextmanager
def owned(folder: RunFolder) -> Iterator[None]:
    """Lock the run folder, by the first process for all."""
    with ExitStack() as held:
        with together():
            if is_first():
                held.enter_context(folder.locked())
        yield


def train_step(
    run: RunFolder,
    plan: Plan,
    data: Dataset,
    asked: TrainingConfig,
    progress: Progress,
    *,
    crew: Path | None = None,
    bundle: str = "",
) -> Work:
    """Finish the training in the run folder; raises InputError.

    `crew` is the folder of a crew, whose desk this process is. It evaluates the sub-models of a
    `bundle` of this name, too.
    """
    together_with = None if crew is None else Together.of(CrewFolder(crew), plan, asked, data)
    asked = asked if together_with is None else together_with.asked
    named = {a.k: a.network.name for a in plan.assignments if a.network is not None}
    with together():
        check_scenes(plan, asked)
        weights = weights_of(asked.options.weights_folder, dict.fromkeys(named.values()))
        teaching = teaching_of(asked, plan, data, progress)
    crew_digest = together_with.digest if together_with else ""
    settings = _settled(run, plan, data, asked, weights, teaching, crew_digest)
    starts = {k: weights[name] for k, name in named.items() if name in weights}
    work = Work(run, settings, plan, data, progress, starts)
    if remark := remark_on(data):
        progress.note(remark)
    if not work.trained:
        progress.note(
            f"{run.path}: takes up to {work.picture_bytes() / 1e6:,.0f} MB of cut pictures, which "
            "are removed when they are no longer needed"
        )
        # Report unreadable pictures before hours of training.
        with first_then_others():
            cut_views(work.first_pixels, progress)
    if together_with is not None:
        return together_with.train(work, checkpoint_of(asked), bundle)
    teacher = ensure_teacher(work, checkpoint_of(asked))
    with first_then_others():
        targets = ensure_targets(work, teacher)
    if work.teacher_view not in work.variants.members:
        on_first(lambda: work.variants.remove_views(work.teacher_view))
    train_members(work, teacher, targets)
    work.remove_trained()
    return work


def _settled(
    run: RunFolder,
    plan: Plan,
    data: Dataset,
    asked: TrainingConfig,
    weights: Mapping[str, Path],
    teaching: Teaching,
    crew: str = "",
) -> Settings:
    """The first process's settings, written to the run folder; raises InputError."""
    with together():
        _check_plan(plan, asked.schedule)
        _check_calibration(data)
        mine = msgspec.structs.replace(
            settings_for(asked, data, plan.require_teacher(), weights), teaching=teaching, crew=crew
        )
        if is_first():
            run.start_or_continue(mine, plan)
    with together():
        kept = run.settings()
        # The first process decides the arithmetic; pictures have to be equal.
        changed = differences(
            kept.data, msgspec.structs.replace(mine.data, source=kept.data.source)
        )
        if changed:
            raise InputError(f"{data.source}: not what the first process trains on: {changed}")
        changed = differences(run.plan(), plan)
        if changed:
            raise InputError(f"plan: not the first process's: {changed}")
    return kept


def _check_calibration(data: Dataset) -> None:
    """Raise InputError unless every class has a picture to fit the stacking weights on."""
    known = set(data.calibration.targets.tolist())
    missing = [label for target, label in enumerate(data.labels) if target not in known]
    if missing:
        raise InputError(
            f"--data {data.source}: expected pictures of every class in the calibration split, "
            f"found none of {', '.join(missing[:5])}"
        )


def _check_plan(plan: Plan, schedule: MemberSchedule) -> None:
    """Raise unless the plan can be built and its teacher has the planned shape."""
    from partitioner.networks.teacher import teacher_spec

    if plan.refused:
        raise PlanRefused(f"plan refused: {plan.reason}")
    built = teacher_spec(plan.require_teacher().name, plan.require_teacher().args)
    changed = differences(plan.require_teacher(), built)
    if changed:
        raise ConfigError(f"plan, key `teacher`: not the shape of {built.name!r}: {changed}")
    for assignment in plan.assignments:
        check_member(assignment.spec)
    if schedule.start == "teacher":
        vits = [a.submodel for a in plan.assignments if a.submodel is not None]
        check_source(plan.require_teacher(), vits)


def reopen(run: RunFolder, progress: Progress) -> Work:
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
    return Work(run, settings, plan, data, progress)


def check_target(out: Path) -> None:
    """Raise InputError if something other than a bundle or an empty folder stands at `out`."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MANIFEST).is_file():
        raise InputError(f"{out}: expected a new folder or a bundle to replace, found neither")
    read_json(out / MANIFEST, Manifest)


def check_ways(plan: Plan, data: Dataset) -> None:
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


def export_step(work: Work, out: Path, name: str) -> dict[int, float] | None:
    """Write the bundle; None if `out` is a whole bundle of this very run already."""
    check_target(out)
    if (out / MANIFEST).is_file():
        bundle = _whole_bundle(out)
        if (
            bundle is not None
            and bundle.manifest.name == name
            and bundle.manifest.provenance.get("run_digest") == work.run.digest(work.plan)
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


class Inputs(NamedTuple):
    """What a step on a finished bundle reads beside it."""

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
) -> Iterator[Inputs]:
    """The inputs named by options, else the run folder beside `bundle` and that run's pictures.

    Without either, the digits where the bundle is of them. Raises InputError if there are none, for
    a `run` that is no run folder, and for a run whose pictures have changed.
    """
    folder = RunFolder(default_run(bundle.path) if run is None else run)
    known = folder if run is not None or folder.settings_file.is_file() else None
    facts = None if known is None else known.settings().data
    cameras = bundle.manifest.plan.cameras
    if source is not None:
        data = open_dataset(source, limit_train=limit_train, limit_test=limit_test, cameras=cameras)
    elif facts is not None:
        limit_test = facts.limit_test if limit_test is None else limit_test
        data = open_dataset(
            facts.source, limit_train=facts.limit_train, limit_test=limit_test, cameras=cameras
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
        yield Inputs(data, known, known.cache)
        # What was cut for this alone is cut again for another time.
        for path in set(known.cache.glob("views-*.npy")) - before:
            path.unlink(missing_ok=True)
        return
    with TemporaryDirectory(prefix="mdp-views-") as cache:
        yield Inputs(data, None, Path(cache))


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
    plan, needed = bundle.manifest.plan, needed_pictures(MAX_LOSS)
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
