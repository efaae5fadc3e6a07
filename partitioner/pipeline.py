"""The four steps of a build, each of which finds out what is done already."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import msgspec

from mdp.errors import ConfigError, InputError, MDPError, PlanRefused
from mdp.files import read_json
from mdp.formats.bundle import MANIFEST, Bundle, Manifest, sha256_of
from mdp.formats.plan import Plan, TeacherSpec
from mdp.formats.profile import DeviceProfile
from partitioner.assembly.members import read_map, read_names, rows_of
from partitioner.data.datasets import DIGITS, SPLITS, Dataset, SplitName, open_dataset
from partitioner.export.evaluate import Report, evaluate, write_report
from partitioner.run.folder import RunFolder, default_run
from partitioner.run.progress import Progress
from partitioner.run.settings import (
    Asked,
    DataFacts,
    MemberSchedule,
    Settings,
    TeacherFacts,
    differences,
)
from partitioner.run.weights import weights_of
from partitioner.training.context import Work
from partitioner.training.distributed import first_then_others, is_first, together


def settings_for(
    asked: Asked,
    data: Dataset,
    teacher: TeacherSpec,
    weights: Mapping[str, Path] = MappingProxyType({}),
) -> Settings:
    """What this run's settings.json has to say; `weights` are those of the plan's networks."""
    from partitioner.data.augment import check_policy
    from partitioner.training.compute import quicker_autocast

    options, flip = asked.options, asked.augmentation.flip
    facts = teacher_facts(asked, data, teacher)
    check_policy(asked.augmentation.rand_augment)
    if asked.schedule.shrinkage < 1 and asked.schedule.boost_target != "logits":
        raise InputError("--shrinkage: expected 1 unless --boost-target is logits")
    return Settings(
        seed=options.seed,
        autocast=quicker_autocast() if options.autocast == "auto" else options.autocast,
        data=DataFacts(
            source=data.source if data.source == DIGITS else str(Path(data.source).resolve()),
            classes=len(data.labels),
            limit_train=options.limit_train,
            limit_test=options.limit_test,
            train=data.train.digest[:32],
            calibration=data.calibration.digest[:32],
            test=data.test.digest[:32],
        ),
        teacher=facts,
        teacher_schedule=asked.teacher_schedule.settled(from_scratch=not asked.given_teacher),
        schedule=asked.schedule,
        joint_schedule=asked.joint_schedule,
        # Mirrored digits are other signs; mirrored photographs are still photographs.
        augmentation=msgspec.structs.replace(
            asked.augmentation, flip=data.source != DIGITS if flip is None else flip
        ),
        weights={name: sha256_of(path) for name, path in weights.items()},
    )


def teacher_facts(asked: Asked, data: Dataset, teacher: TeacherSpec) -> TeacherFacts:
    """Where the teacher's weights come from, and how their classes become the data's.

    Raises InputError where the weights do not fit the teacher or the names not the classes.
    """
    from partitioner.networks.teacher_weights import known_classes

    options, labels = asked.options, asked.options.teacher_labels
    if options.pretrained and options.teacher_checkpoint is not None:
        raise InputError("--pretrained and --teacher-checkpoint: expected one of the two, got both")
    if labels is not None and not asked.given_teacher:
        raise InputError(
            "--teacher-labels: expected --teacher-checkpoint or --pretrained beside it"
        )
    if options.teacher_map is not None and labels is None:
        raise InputError("--teacher-map: expected --teacher-labels beside it")
    if not asked.given_teacher and not asked.teacher_schedule.epochs:
        raise InputError(
            f"--teacher: {teacher.name!r} does not know these {len(data.labels)} classes: give "
            "--teacher-epochs N to train it, --teacher-checkpoint FILE or --pretrained"
        )
    checkpoint = _checkpoint(asked)
    facts = TeacherFacts(
        name=teacher.name,
        pretrained=options.pretrained,
        checkpoint=sha256_of(checkpoint) if checkpoint else None,
        args=teacher.args,
        file=checkpoint.name if checkpoint else None,
    )
    if not asked.given_teacher:
        return facts
    known = known_classes(teacher, checkpoint)
    if labels is None:
        kept = known == len(data.labels)
        return msgspec.structs.replace(facts, classes="kept" if kept else "probe")
    names = read_names(Path(labels))
    if len(names) != known:
        raise InputError(
            f"{labels}: names {len(names)} classes, expected {known}: as many as the classifier of "
            f"{checkpoint or teacher.name} has rows"
        )
    rows = rows_of(
        names,
        data.labels,
        read_map(Path(options.teacher_map)) if options.teacher_map else {},
        labels,
        "give --teacher-map FILE with their names there, or no --teacher-labels for a linear probe",
    )
    return msgspec.structs.replace(facts, classes="names", rows=rows)


def teacher_accuracy(
    run: RunFolder,
    teacher: TeacherSpec,
    facts: TeacherFacts,
    data: Dataset,
    asked: Asked,
    progress: Progress,
) -> float:
    """Share of the calibration pictures that a teacher with given weights is right on.

    As it is before it is trained further. Raises InputError, also where `run` has another teacher.
    """
    from partitioner.training.teacher import GivenTeacher

    with together():
        run.check_teacher(facts)
    given = GivenTeacher(run, teacher, facts, data, _checkpoint(asked), progress)
    with first_then_others():
        _cut_views(given.pixels, progress)
        given.accuracy()
    share = given.accuracy()
    if asked.teacher_schedule.epochs:
        progress.note(
            f"teacher: {share:.1%} of the calibration pictures before it is trained further, which "
            "the plan is made for; --teacher-accuracy tells it another"
        )
    return share


def _checkpoint(asked: Asked) -> Path | None:
    """The user's teacher checkpoint, if one was named; raises InputError where it is not there."""
    if asked.options.teacher_checkpoint is None:
        return None
    path = Path(asked.options.teacher_checkpoint)
    if not path.is_file():
        raise InputError(f"{path}: expected a teacher checkpoint, found no file")
    return path


def open_asked(asked: Asked) -> Dataset:
    """The pictures that a training was asked for; raises InputError."""
    options = asked.options
    return open_dataset(
        options.data, limit_train=options.limit_train, limit_test=options.limit_test
    )


def train_step(run: RunFolder, plan: Plan, data: Dataset, asked: Asked, progress: Progress) -> Work:
    """Bring the run folder to its end, from wherever it is; raises InputError."""
    from partitioner.training.joint import train_jointly
    from partitioner.training.members import train_members
    from partitioner.training.teacher import ensure_targets, ensure_teacher

    named = {a.k: a.network.name for a in plan.assignments if a.network is not None}
    with together():
        weights = weights_of(asked.options.weights_folder, dict.fromkeys(named.values()))
    settings = _settled(run, plan, data, asked, weights)
    known = {k: weights[name] for k, name in named.items() if name in weights}
    work = Work(run, settings, plan, data, progress, known)
    if data.remark:
        progress.note(data.remark)
    # Pictures that cannot be read have to show up now, all at once, not after hours of training.
    with first_then_others():
        _cut_views(work.first_pixels, progress)
    teacher = ensure_teacher(work, _checkpoint(asked))
    with first_then_others():
        targets = ensure_targets(work, teacher)
    train_members(work, teacher, targets)
    train_jointly(work, targets)
    return work


def _cut_views(cut: Callable[[SplitName], object], progress: Progress) -> None:
    """Cut every split; raises UnreadablePictures naming the unreadable ones of all of them."""
    from partitioner.data.crops import NAMED, UnreadablePictures

    broken: list[str] = []
    for split in SPLITS:
        try:
            cut(split)
        except UnreadablePictures as error:
            broken += error.reasons
    if len(broken) > NAMED:
        for reason in broken:
            progress.note(reason)
    if broken:
        raise UnreadablePictures(broken)


def _settled(
    run: RunFolder, plan: Plan, data: Dataset, asked: Asked, weights: Mapping[str, Path]
) -> Settings:
    """The first process's settings, which are in the run folder from now on; raises InputError."""
    with together():
        _check_plan(plan, asked.schedule)
        _check_calibration(data)
        mine = settings_for(asked, data, plan.require_teacher(), weights)
        if is_first():
            run.start_or_continue(mine, plan)
    with together():
        kept = run.settings()
        # Arithmetic may differ between machines, and the first one decides; pictures may not.
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
    """Raise unless the plan may be built as asked and its teacher has the shape that it says."""
    from partitioner.networks.members import check_member
    from partitioner.networks.teacher import teacher_spec
    from partitioner.networks.weight_init import check_heritage

    if plan.refused:
        raise PlanRefused(f"plan refused: {plan.reason}")
    built = teacher_spec(plan.require_teacher().name, plan.require_teacher().args)
    changed = differences(plan.require_teacher(), built)
    if changed:
        raise ConfigError(f"plan, key `teacher`: not the shape of {built.name!r}: {changed}")
    for assignment in plan.assignments:
        check_member(assignment.spec, schedule.trunks)
    if schedule.start == "teacher":
        vits = [a.submodel for a in plan.assignments if a.submodel is not None]
        check_heritage(plan.require_teacher(), vits)


def reopen(run: RunFolder, progress: Progress) -> Work:
    """A run as its folder describes it; raises InputError if its pictures are not the same."""
    settings, plan = run.settings(), run.plan()
    facts = settings.data
    data = open_dataset(facts.source, limit_train=facts.limit_train, limit_test=facts.limit_test)
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
    """Raise InputError for members that could not be exported or measured here once trained."""
    from partitioner.export.quantize import check_calibration
    from partitioner.export.sessions import check_way

    for assignment in plan.assignments:
        precision = assignment.spec.precision
        try:
            check_way(precision, assignment.runtime)
            if precision == "int8-static":
                check_calibration(len(data.calibration))
        except InputError as error:
            raise InputError(
                f"sub-model {assignment.k} for {assignment.device} could not be measured here: "
                f"{error}"
            ) from error


def export_step(work: Work, out: Path, name: str) -> dict[int, float] | None:
    """Write the bundle; None if `out` is a whole bundle of this very run already."""
    from partitioner.export.write import export_bundle

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


def run_of(bundle: Path, run: Path | None) -> RunFolder | None:
    """The named run folder, or the default one if it is there; raises InputError."""
    if run is not None:
        RunFolder(run).settings()
        return RunFolder(run)
    beside = RunFolder(default_run(bundle))
    return beside if beside.settings_file.is_file() else None


def data_for(
    bundle: Bundle, run: RunFolder | None, source: str | None, limit_test: int | None
) -> Dataset:
    """The pictures to evaluate on: the named ones, else the run's, else the digits if it is them.

    Raises InputError if none of these is at hand.
    """
    if source is not None:
        return open_dataset(source, limit_test=limit_test)
    if run is not None:
        facts = run.settings().data
        data = open_dataset(
            facts.source,
            limit_train=facts.limit_train,
            limit_test=facts.limit_test if limit_test is None else limit_test,
        )
        if not data.train.digest.startswith(facts.train):
            raise InputError(
                f"{facts.source}: the train split changed since {run.path} was made, so that "
                "pictures that were trained on may be among the test's; name others with --data"
            )
        return data
    if bundle.manifest.provenance.get("data") == DIGITS:
        return open_dataset(DIGITS, limit_test=limit_test)
    raise InputError(f"{bundle.path}: give --data, or --run with the folder it was trained in")


def evaluate_step(
    bundle: Bundle,
    data: Dataset,
    run: RunFolder | None,
    progress: Progress,
    *,
    write: bool = False,
) -> Report:
    """Measure the bundle; with `write` put the outcome into its manifest."""
    if run is not None:
        report = evaluate(bundle, data, run, run.cache, progress)
    else:
        with TemporaryDirectory(prefix="mdp-views-") as cache:
            report = evaluate(bundle, data, None, Path(cache), progress)
    if write:
        write_report(bundle, report)
    return report


def quantise_step(
    bundle: Bundle,
    data: Dataset,
    run: RunFolder,
    profiles: Sequence[DeviceProfile],
    progress: Progress,
) -> Report | None:
    """Serve networks of an fp32 bundle in static int8 where the profiles show them to be faster.

    The gate of `mdp-partition quantize` decides, and plain ViTs stay as they were planned. Returns
    the new evaluation, or None where nothing was kept.
    """
    from partitioner.export.precision_choice import MAX_LOSS, needed_pictures
    from partitioner.export.quantize_bundle import quantise
    from partitioner.export.quantize_trials import Asked as AskedPrecisions

    plan, needed = bundle.manifest.plan, needed_pictures(MAX_LOSS)
    networks = [a.k for a in plan.assignments if a.network is not None]
    planned = {a.spec.precision for a in plan.assignments}
    if not networks or planned != {"fp32"} or bundle.manifest.quantisation is not None:
        return None
    if len(data.calibration) < needed:
        progress.note(
            f"int8 not tried: {len(data.calibration)} calibration pictures show too little, "
            f"expected {needed}"
        )
        return None
    devices = {a.device for a in plan.assignments} | {r.device for r in plan.replicas}
    asked = AskedPrecisions(
        max_loss=MAX_LOSS,
        profiles=[profile for profile in profiles if profile.name in devices],
        ways=[("int8-static", "onnxruntime")],
        members=networks,
    )
    report = quantise(bundle, data, run, asked, bundle.path, run.cache, progress)
    record = Bundle.open(bundle.path).manifest.quantisation
    for member in [] if record is None else record.members:
        for tried in member.tried:
            kept = "kept" if tried.kept else "not kept"
            progress.note(f"sub-model {member.k} in {tried.precision}: {kept}: {tried.reason}")
    return report
