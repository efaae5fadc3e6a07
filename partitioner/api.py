"""The partitioner from Python: plan, build, export and evaluate, as `mdp-partition` does.

docs/reference/partitioner.md has an example. Nothing is printed but to `progress`. Raises
InputError for unusable input, ConfigError for a wrong file, PlanRefused for a plan that one device
beats. Importing this loads no torch; the functions do.
"""

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from mdp.errors import InputError
from mdp.formats.bundle import Bundle
from mdp.formats.profile import read_profiles
from partitioner.config import BuildConfig, check_config, check_plan, key_of, naming, read_config
from partitioner.planner.make_plan import Planned
from partitioner.run.folder import RunFolder, bundle_name
from partitioner.run.plan_settings import PlanSettings, check_cameras
from partitioner.run.progress import Progress
from partitioner.run.settings import Augmentation, MemberSchedule, RunOptions, TeacherSchedule
from partitioner.run.weights import weights_in
from partitioner.training.compute import own_threads, use_threads
from partitioner.training.world import world

if TYPE_CHECKING:
    from partitioner.export.evaluate import Report

__all__ = [
    "Augmentation",
    "BuildConfig",
    "MemberSchedule",
    "PlanSettings",
    "Planned",
    "Progress",
    "RunOptions",
    "TeacherSchedule",
    "build",
    "evaluate",
    "export",
    "plan",
    "read_config",
]

Where = str | os.PathLike[str]


def plan(
    settings: PlanSettings,
    *,
    data: str | None = None,
    epochs: int | None = None,
    weights: Where | None = None,
    explained: bool = False,
    front: bool = False,
    even_refused: bool = False,
) -> Planned:
    """Decide which device runs which sub-model; `Planned.plan` is the content of plan.toml.

    `data` has the classes, by default 1,000; `epochs` per sub-model on its pictures count in the
    predicted accuracy. `weights` is a folder of pretrained weights. `explained` adds explanations,
    `front` the best plan of every latency. Raises PlanRefused unless `even_refused`.
    """
    with naming(key_of):
        settings = check_plan(settings)
        if epochs is not None and data is None:
            raise InputError("--epochs: expected --data beside it, for how many pictures there are")
        use_threads(own_threads())
        from partitioner.data.datasets import open_dataset
        from partitioner.estimates.accuracy_law import Training
        from partitioner.networks.teacher import teacher_spec
        from partitioner.planner.make_plan import make_planned

        profiles = read_profiles(settings.profiles)
        check_cameras(settings, [profile.name for profile in profiles])
        cameras = list(settings.cameras.values())
        pictures = None if data is None else open_dataset(data, cameras=cameras)
        if pictures is not None:
            from partitioner.build.inputs import own_cameras

            if own := own_cameras(settings, [profile.name for profile in profiles], pictures):
                settings = replace(settings, cameras=own)
                pictures = pictures.for_cameras(list(own.values()))
        training = None
        if pictures is not None and epochs is not None:
            training = Training(pictures=len(pictures.train), epochs=epochs)
        planned = make_planned(
            teacher_spec(settings.require_teacher(), settings.teacher_args),
            settings,
            1000 if pictures is None else len(pictures.labels),
            training=training,
            profiles=profiles,
            weights=None if weights is None else weights_in(Path(weights)),
            explained=explained,
            front=front,
        )
        if not even_refused:
            planned.check()
        return planned


def build(
    config: BuildConfig,
    out: Where,
    *,
    run: Where | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> "Report":
    """Plan, train, export to the bundle folder `out` and evaluate, resuming where it stopped.

    By measurement where `config` has no teacher, or minutes, as `mdp-partition build` does. `run`
    is the folder that keeps finished steps, by default `<out>.run`; `name` is the bundle's.
    In one process; for torchrun there is `mdp-partition build`.
    """
    if world().size > 1:
        raise InputError("build: expected one process; torchrun needs mdp-partition build")
    with naming(key_of):
        config = check_config(config)
        use_threads(config.options.threads or own_threads())
        from partitioner.build.bundle import build_bundle

        folder = None if run is None else Path(run)
        built = build_bundle(
            config, Path(out), _progress_or_silent(progress), run=folder, name=name
        )
        assert built is not None
        return built.report


def export(
    run: Where, out: Where, *, name: str | None = None, progress: Progress | None = None
) -> dict[int, float]:
    """Write a finished run's sub-models to the bundle folder `out`, without measuring them.

    Returns by member the largest difference of any logit from torch's.
    """
    named = bundle_name(name, Path(out))
    use_threads(own_threads())
    from partitioner.build.steps import reopen
    from partitioner.export.write import export_bundle
    from partitioner.run.target import check_target

    folder, shown = RunFolder(Path(run)), _progress_or_silent(progress)
    folder.settings()
    check_target(Path(out))
    with folder.lock():
        return export_bundle(reopen(folder, shown), Path(out), named)


def evaluate(
    bundle: Where,
    *,
    data: str | None = None,
    run: Where | None = None,
    limit_test: int | None = None,
    write: bool = False,
    progress: Progress | None = None,
) -> "Report":
    """Measure each sub-model and every arrival subset of a bundle on the test pictures of `data`.

    Without `data` on those of its run. With `write` the manifest gets the evaluation.
    """
    from partitioner.build.steps import inputs_of
    from partitioner.data.scenes import remark_on
    from partitioner.export.evaluate import evaluate as measure
    from partitioner.export.evaluate import write_report

    opened, shown = Bundle.open(bundle), _progress_or_silent(progress)
    folder = None if run is None else Path(run)
    with inputs_of(opened, folder, data, limit_test=limit_test) as inputs:
        if remark := remark_on(inputs.data):
            shown.note(remark)
        report = measure(opened, inputs.data, inputs.run, inputs.cache, shown)
    if write:
        write_report(opened, report)
    return report


def _progress_or_silent(progress: Progress | None) -> Progress:
    return Progress(io.StringIO()) if progress is None else progress
