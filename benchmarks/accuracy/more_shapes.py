"""What members of other shapes are worth: runs that the accuracy predictor is fitted to.

    python -m benchmarks.accuracy.more_shapes --data FOLDER --work FOLDER

Teacher, pictures, epochs and training are those of `benchmarks.accuracy`, and only the members
differ. Members of other shapes are trained as independent students that start from the teacher's
weights: alone they are worth what ours are worth alone, in half the time.
Members with other views are ours with its defaults. The file of results is rewritten after every
finished run, and what is in it is not run again.
"""

import argparse
import dataclasses
from functools import partial

import msgspec

from benchmarks.accuracy.__main__ import carried_out, new_parser
from benchmarks.accuracy.shapes import REAL, Shapes
from benchmarks.harness.models import vit
from benchmarks.harness.results import RESULTS
from mdp.errors import InputError
from mdp.formats.plan import Plan, Region, SubModelSpec

STUDENTS = "independent-start-teacher"
#: Members as unlike as devices are: 32 to 192 wide, 2 to 6 deep, 5 to 65 tokens, 16 to 32 px.
FLEETS: dict[str, tuple[SubModelSpec, ...]] = {
    "few-tokens": (vit(24, 8, 144, 2, 3), vit(16, 8, 48, 2, 1), vit(32, 8, 64, 4, 2)),
    "deep-and-flat": (vit(24, 8, 96, 6, 2), vit(32, 8, 128, 2, 2), vit(16, 4, 48, 4, 1)),
    "large-and-tiny": (vit(16, 8, 192, 6, 3), vit(32, 8, 32, 2, 1), vit(24, 8, 96, 2, 2)),
    "wide-and-narrow": (vit(32, 8, 192, 3, 3), vit(32, 8, 48, 3, 1), vit(16, 8, 96, 4, 2)),
    "many-tokens": (vit(32, 4, 64, 2, 2), vit(24, 4, 96, 3, 2), vit(24, 8, 48, 3, 1)),
    "same-view": (vit(24, 8, 96, 3, 2),) * 4,
    "views": (vit(24, 8, 96, 3, 2),) * 4,
    "wider-views": (vit(24, 8, 96, 3, 2),) * 4,
}  # fmt: skip
#: What members see: the whole square, a closer look at parts of it, or all of them the whole.
REGIONS: dict[str, tuple[Region, ...]] = {
    "same-view": (Region(),) * 4,
    "views": (
        Region(),
        Region(left=0.125, top=0.125, right=0.875, bottom=0.875),
        Region(right=0.75, bottom=0.75),
        Region(left=0.25, top=0.25),
    ),
    "wider-views": (
        Region(),
        Region(left=0.0625, top=0.0625, right=0.9375, bottom=0.9375),
        Region(right=0.875, bottom=0.875),
        Region(left=0.125, top=0.125),
    ),
}


def main(arguments: list[str] | None = None) -> int:
    parser = new_parser()
    parser.prog, parser.description = "python -m benchmarks.accuracy.more_shapes", __doc__
    parser.add_argument("--fleets", nargs="+", default=list(FLEETS), metavar="FLEET")
    parser.set_defaults(seeds=[0], out=RESULTS / "shapes.json")
    return carried_out(parser.parse_args(arguments), _work)


def _work(asked: argparse.Namespace) -> None:
    # Loaded late: torch has to find the environment that main prepares.
    from benchmarks.accuracy.methods import DEFAULT_RATE, OURS
    from benchmarks.accuracy.results import Choice, Results, ResultsFile
    from benchmarks.accuracy.runs import keep_teacher, performed
    from benchmarks.accuracy.site import make_teacher, open_site, prepare, request_for
    from partitioner.run.settings import RunOptions

    if asked.data is None or asked.work is None:
        raise InputError("expected --data FOLDER and --work FOLDER")
    unknown = sorted(set(asked.fleets) - set(FLEETS))
    if unknown:
        raise InputError(f"--fleets: expected some of {', '.join(FLEETS)}, got {unknown[0]!r}")
    options = RunOptions(data=asked.data, limit_train=asked.limit_train)
    site = open_site(REAL, options, asked.epochs, asked.teacher_epochs, asked.work)
    file = ResultsFile(asked.out, site.lock("results"), site.configuration())
    file.read()
    make_teacher(site)

    for seed in asked.seeds:
        keep_teacher(file, prepare(site, seed))
        for name in asked.fleets:
            if file.read().run(name, seed) is not None:
                continue
            fleet = dataclasses.replace(site, shapes=_with(FLEETS[name]))
            method = OURS if name in REGIONS else STUDENTS
            request = request_for(fleet, method, seed, Choice(learning_rate=DEFAULT_RATE))
            if name in REGIONS:
                seen = _seeing(request.plan, REGIONS[name])
                request = dataclasses.replace(request, plan=seen)
            run = msgspec.structs.replace(performed(fleet, request), method=name)
            file.change(partial(Results.with_run, run=run))


def _with(members: tuple[SubModelSpec, ...]) -> Shapes:
    return dataclasses.replace(REAL, members=members, singles=members[:1])


def _seeing(plan: Plan, regions: tuple[Region, ...]) -> Plan:
    pairs = zip(plan.assignments, regions, strict=True)
    assignments = [msgspec.structs.replace(a, region=region) for a, region in pairs]
    return msgspec.structs.replace(plan, assignments=assignments)


if __name__ == "__main__":
    raise SystemExit(main())
