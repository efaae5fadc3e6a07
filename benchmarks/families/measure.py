"""Single models, several models on one device each, and fleets of them, at equal latency.

    python -m benchmarks.families.measure --candidates FOLDER --data FOLDER --scratch FOLDER

`--candidates` has a models.toml per data set, NAME.toml, as `mdp-partition assemble` reads it; its
`device` is the candidate's name, which begins with the group it is compared in. `--data` has the
data sets by name. All run in fp32 on one onnxruntime thread of this machine, timed in turns;
milliseconds are processor time, so that others at work matter little.

Which model and which fleet a budget gets is decided on the calibration split, and reported on the
test split. Writes benchmarks/results/families.json and prints the tables of its page.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, kept
from benchmarks.harness.tables import table
from benchmarks.harness.turns import in_turns
from mdp.files import write_bytes, write_json
from mdp.fusion.fuse import Contribution, fuse
from mdp.runtimes.onnxruntime import open_session
from partitioner.assembly.imported import HEADS, timm_module
from partitioner.assembly.members import read_map, read_models, read_names, rows_of
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import Dataset, open_dataset
from partitioner.export.evaluate import accuracy
from partitioner.export.sessions import run_session
from partitioner.export.write import to_onnx
from partitioner.fusion.stacking import fit_subset
from partitioner.run.progress import Progress

#: Rounds in which the candidates take turns, and runs of each in a round.
ROUNDS, RUNS = 6, 9
#: Members of a fleet.
FLEET = 3
#: Pictures of ImageNet's own validation set, which pretraining has not seen.
UNSEEN = "ILSVRC2012_val_"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model with its logits on both splits, and the milliseconds that it takes here."""

    name: str
    ms: float
    calibration: Contribution
    test: Contribution

    @property
    def group(self) -> str:
        return self.name.partition("-")[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families.measure")
    for option in ("--candidates", "--data", "--scratch"):
        parser.add_argument(option, type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS / "families.json")
    asked = parser.parse_args()
    found: dict[str, Any] = {"machine": describe_machine(), "precision": "fp32", "threads": 1}
    for listed in sorted(asked.candidates.glob("*.toml")):
        data = open_dataset(str(asked.data / listed.stem))
        candidates = measured(listed, data, asked.scratch / listed.stem)
        found[listed.stem] = compared(candidates, data)
        write_json(asked.out, found)
    print(figures(found))


def measured(listed: Path, data: Dataset, scratch: Path) -> list[Candidate]:
    """Every candidate of a list; logits that are in `scratch` are not computed again."""
    files, logits, sizes = {}, {}, {}
    for model in read_models(listed).models:
        assert model.image_size is not None
        size = sizes[model.device] = model.image_size
        file = files[model.device] = scratch / f"{model.device}.onnx"
        if not file.is_file():
            names = read_names(listed.parent / model.labels)
            mapped = read_map(listed.parent / model.map) if model.map else {}
            rows = rows_of(names, data.labels, mapped, model.labels)
            module = timm_module(model, listed.parent / model.source, len(names), rows)
            write_bytes(file, to_onnx(module, size, HEADS, {}))
        kept = scratch / f"{model.device}.npz"
        if not kept.is_file():
            session = open_session(file)
            heads: dict[str, Any] = {}
            for split in ("calibration", "test"):
                pictures = data.calibration if split == "calibration" else data.test
                pixels = load_views(
                    pictures, [View(size)], scratch / "views", Progress(), f"{split}, {size} px"
                )[0]
                both = Contribution(*run_session(session, pixels, HEADS))
                heads |= {split[0] + "b": both.boost, split[0] + "g": both.bag}
            np.savez(kept, **heads)
        logits[model.device] = np.load(kept)
        print(model.device, flush=True)
    times_ms = timed(files, sizes)
    return [
        Candidate(
            name,
            times_ms[name],
            Contribution(kept["cb"], kept["cg"]),
            Contribution(kept["tb"], kept["tg"]),
        )
        for name, kept in logits.items()
    ]


def timed(files: Mapping[str, Path], sizes: Mapping[str, int]) -> dict[str, float]:
    """Least median processor time of one picture on one thread; the candidates take turns."""
    random = np.random.default_rng(0)
    runs = {}
    for name, file in files.items():
        pixels = random.integers(0, 256, (1, sizes[name], sizes[name], 3), dtype=np.uint8)
        runs[name] = partial(open_session(file).run, None, {"images": pixels})
    blocks = in_turns(runs, ROUNDS, least=RUNS, clock=time.process_time)
    return {name: min(float(np.median(block)) for block in own) for name, own in blocks.items()}


@dataclass(frozen=True, slots=True)
class Fleet:
    """Some candidates at once, each on a device of its own, and what fusing them gives."""

    members: tuple[str, ...]
    ms: float
    #: Shares of the calibration and the test pictures.
    calibration: float
    test: float
    #: All but one, by the one that is missing; the lowest of them counts.
    one_missing: float | None
    #: Of the best model that answered: all in, and without the best one.
    best_answer: float
    best_answer_missing: float | None
    unseen: float | None


def fused(
    members: Sequence[Candidate], data: Dataset, unseen: np.ndarray[Any, Any] | None
) -> Fleet:
    """What these members give, fused as a bundle fuses them."""
    right = _right(members, data)
    alone = sorted((_right([m], data)[1].mean() for m in members), reverse=True)
    left = [tuple(m for m in members if m is not out) for out in members]
    return Fleet(
        members=tuple(m.name for m in members),
        ms=max(m.ms for m in members),
        calibration=float(right[0]),
        test=float(right[1].mean()),
        one_missing=(
            min(float(_right(some, data)[1].mean()) for some in left) if len(members) > 1 else None
        ),
        best_answer=float(alone[0]),
        best_answer_missing=float(alone[1]) if len(alone) > 1 else None,
        unseen=None if unseen is None else float(right[1][unseen].mean()),
    )


_known: dict[tuple[str, ...], tuple[float, np.ndarray[Any, Any]]] = {}


def _right(members: Sequence[Candidate], data: Dataset) -> tuple[float, np.ndarray[Any, Any]]:
    """Share right on the calibration split, and which test pictures are right."""
    key = (data.source, *(m.name for m in members))
    if key not in _known:
        calibration = {k: m.calibration for k, m in enumerate(members)}
        weights = fit_subset(calibration, tuple(range(len(members))), data.calibration.targets)
        logits = fuse({k: m.test for k, m in enumerate(members)}, weights)
        _known[key] = (
            accuracy(fuse(calibration, weights), data.calibration.targets),
            logits.argmax(axis=1) == data.test.targets,
        )
    return _known[key]


def compared(candidates: Sequence[Candidate], data: Dataset) -> dict[str, Any]:
    """Of every group and budget: the best single model of all and the group's best fleet."""
    names = [Path(name).name for name in data.test.names]
    mask = np.array([name.startswith(UNSEEN) for name in names])
    unseen = mask if mask.any() else None
    rows = []
    for group in dict.fromkeys(c.group for c in candidates):
        own = [c for c in candidates if c.group == group]
        budgets = sorted(c.ms for c in own)[FLEET - 1 :]
        for budget in budgets:
            within = [c for c in own if c.ms <= budget]
            any_group = [c for c in candidates if c.ms <= budget]
            single = max(any_group, key=lambda c: _right([c], data)[0])
            fleet = max(
                itertools.combinations(within, FLEET), key=lambda members: _right(members, data)[0]
            )
            rows.append({
                "group": group,
                "budget_ms": budget,
                "single": asdict(fused([single], data, unseen)),
                "fleet": asdict(fused(fleet, data, unseen)),
            })  # fmt: skip
    return {
        "calibration_pictures": len(data.calibration),
        "test_pictures": len(data.test),
        "unseen_pictures": int(mask.sum()),
        "candidates": [asdict(fused([c], data, unseen)) for c in candidates],
        "budgets": rows,
    }


def figures(found: Mapping[str, Any]) -> str:
    return "\n\n".join(
        _figures(name, rows) for name, rows in found.items()
        if isinstance(rows, dict) and "budgets" in rows
    )  # fmt: skip


def _figures(name: str, found: Mapping[str, Any]) -> str:
    def share(*path: str) -> Callable[[Mapping[str, Any]], str]:
        def cell(row: Any) -> str:
            value = reduce(lambda of, key: of[key], path, row)
            return "" if value is None else f"{value * 100:.1f}"

        return cell

    def unseen(row: Mapping[str, Any]) -> str:
        single, fleet = share("single", "unseen")(row), share("fleet", "unseen")(row)
        return f"{single}, {fleet}" if single else ""

    candidates = table(
        found["candidates"],
        ("candidate", "{members[0]}"),
        ("ms", "{ms:.2f}"),
        ("accuracy", share("test")),
        ("unseen", share("unseen")),
    )
    budgets = table(
        found["budgets"],
        ("within ms", "{budget_ms:.2f}"),
        ("best single", "{single[members][0]}"),
        ("accuracy", share("single", "test")),
        ("fleet of three", lambda row: ", ".join(row["fleet"]["members"])),
        ("all in", share("fleet", "test")),
        ("gain", lambda row: f"{(row['fleet']['test'] - row['single']['test']) * 100:+.1f}"),
        ("one missing", share("fleet", "one_missing")),
        ("best answer, one missing", share("fleet", "best_answer_missing")),
        ("unseen: single, fleet", unseen),
    )
    return (
        f"### {name}\n\n{found['test_pictures']:,} test pictures, "
        f"{found['calibration_pictures']:,} to fit and choose with.\n\n{candidates}\n\n{budgets}"
    )


PAGE = Page("benchmarks.families.measure", lambda: figures(kept("families")))

if __name__ == "__main__":
    main()
