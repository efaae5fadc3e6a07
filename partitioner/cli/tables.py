"""Tables that the commands print on stdout."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from mdp.formats.bundle import MANIFEST, Bundle, Evaluation, PerRule, Rejection, SubsetLabels
from mdp.formats.plan import Assignment, Plan, SingleDevice, Spec, SubModelSpec
from mdp.fusion.anomaly import share_range
from mdp.fusion.anomaly_table import Anomaly, SubsetAnomaly
from mdp.load import is_busy
from partitioner.data.datasets import SPLITS, Dataset, SplitName
from partitioner.data.scenes import remark_on
from partitioner.export.evaluate import Report
from partitioner.fusion.cascade_cost import BothWays
from partitioner.regions import WHOLE, where

#: Pairs of classes that are told to be taken for each other.
_CONFUSED_SHOWN = 3
#: Room for a network's name and size in a table 80 columns wide.
NAME_WIDTH = 17


def short(spec: Spec) -> str:
    """A member in few characters: `112 px, patch 8, 64 x 5`, `effnet-lite0@160`."""
    if isinstance(spec, SubModelSpec):
        return spec.words
    name = spec.name.removeprefix("tf_").replace("_", "-")
    for long, abbreviated in (("efficientnet", "effnet"), ("mobilenet", "mnet")):
        name = name.replace(long, abbreviated)
    return f"{name}@{spec.image_size}"


def describe_part(part: Assignment | SingleDevice) -> str:
    """A member, and where it looks if that is not everywhere."""
    text = short(part.spec)
    return text if part.region == WHOLE else f"{text}, sees {where(part.region)}"


def _looking(part: Assignment) -> str:
    """A member's device, and its camera if that has another name."""
    return part.device + (
        f", camera {part.camera}" if part.camera not in (None, part.device) else ""
    )


def print_report(report: Report, plan: Plan, labels: Sequence[str] = ()) -> None:
    """Accuracy and latency of the teacher, each member and every arrival subset.

    With several labels an item also the shares of each of `labels`.
    """
    console, evaluation = Console(), report.evaluation
    what = "scenes" if plan.cameras else "pictures"
    busy = "*" if is_busy(report.others_cores) else ""
    alone = Table(
        "model", Column("shape", min_width=NAME_WIDTH, overflow="fold"), "accuracy",
        "ms, one thread here",
        title=f"{evaluation.pictures:,} test {what} of {evaluation.data}",
        caption=f"* while other processes kept {report.others_cores:g} cores busy, so it may be "
        "quicker" if busy else None,
    )  # fmt: skip
    if evaluation.teacher is not None:
        teacher, took_ms = evaluation.teacher, report.teacher_latency_ms
        elsewhere = f" on {teacher.pictures:,} of {teacher.data}" if teacher.pictures else ""
        alone.add_row(
            f"teacher {plan.require_teacher().name}", plan.require_teacher().shape.words,
            f"{teacher.accuracy:.2%}{elsewhere}", "" if took_ms is None else f"{took_ms:.2f}{busy}",
            end_section=True,
        )  # fmt: skip
    for member, latency_ms in zip(evaluation.members, report.member_latency_ms, strict=True):
        alone.add_row(
            f"{member.k} {_looking(plan.assignments[member.k])}",
            describe_part(plan.assignments[member.k]),
            f"{member.accuracy:.2%}", f"{latency_ms:.2f}{busy}",
        )  # fmt: skip
    console.print(alone)
    console.print(_together(evaluation, plan))
    if evaluation.by_label:
        console.print(_by_label(evaluation.by_label, labels))
    if report.rungs:
        console.print(_rungs(report, plan))
    if evaluation.rejection:
        told = rejection_of(evaluation.rejection, plan)
        if isinstance(told, str):
            console.print(told, soft_wrap=True, highlight=False)
        else:
            console.print(told)
    if (ways := report.both_ways(plan)) is not None:
        console.print(_cascade(evaluation, plan, ways))
    remarks = (
        one_does_as_well(evaluation, what),
        often_confused(evaluation, what),
        beside_measured(plan, evaluation),
    )
    for remark in remarks:
        if remark:
            console.print(remark, soft_wrap=True, highlight=False)


def _rungs(report: Report, plan: Plan) -> Table:
    """Accuracy and predicted time of each member's rungs, and of all at their tops and lowest."""
    evaluation = report.evaluation
    every = tuple(a.k for a in plan.assignments)
    lowest = evaluation.lowest
    assert lowest
    top, low = (
        next(one.stacked for one in measured.subsets if one.members == every)
        for measured in (evaluation, lowest)
    )
    caption = f"all in: {top:.2%} at their top rungs, {low:.2%} at their lowest"
    table = Table("model", "rung", "accuracy", "predicted ms", title="rungs", caption=caption)
    for a, member in zip(plan.assignments, evaluation.members, strict=True):
        ms = (a.predicted_ms.compute, *(rung.compute_ms for rung in a.lower))
        found = (member.accuracy, *report.rungs.get(a.k, ()))
        for number, (own_ms, share) in enumerate(zip(ms, found, strict=True)):
            name = "" if number else f"{a.k} {_looking(a)}"
            table.add_row(name, str(number or "top"), f"{share:.2%}", f"{own_ms:.3g}")
        table.add_section()
    return table


def beside_measured(plan: Plan, evaluation: Evaluation) -> str:
    """The plan's accuracy with every member in beside the measured one; empty without a teacher.

    An assembled plan predicts none.
    """
    if plan.accuracy is None:
        return ""
    every = tuple(member.k for member in evaluation.members)
    measured = next(s.stacked for s in evaluation.subsets if s.members == every)
    predicted = f"not predicted ({plan.accuracy.unknown})"
    if plan.accuracy.all_in is not None:
        predicted = f"predicted {plan.accuracy.all_in:.1%}"
    return f"accuracy with all in: {predicted}, measured {measured:.1%}"


def often_confused(evaluation: Evaluation, what: str) -> str:
    """The pairs of classes that are confused most, and what helps; empty where there are none.

    what: pictures or scenes.
    """
    pairs = evaluation.confusions or ()
    if not pairs:
        return ""
    shown = "; ".join(
        f"{' and '.join(one.labels)} ({one.confused:,} of {one.pictures:,} {what} of the two)"
        for one in pairs[:_CONFUSED_SHOWN]
    )
    others = len(pairs) - _CONFUSED_SHOWN
    if others > 0:
        shown += f"; and {others} more {'pair' if others == 1 else 'pairs'}"
    return (
        f"taken for each other: {shown}. More or closer {what} of both help where you see the "
        "difference in them; where you do not, make them one class"
    )


def one_does_as_well(evaluation: Evaluation, what: str) -> str:
    """The best member alone, if it is as accurate as all together, both stacked; else empty."""
    every = tuple(member.k for member in evaluation.members)
    stacked = {subset.members: subset.stacked for subset in evaluation.subsets}
    best = max(evaluation.members, key=lambda member: stacked[member.k,])
    alone, together = stacked[best.k,], stacked[every]
    if len(every) < 2 or alone < together:
        return ""
    return (
        f"{best.device} alone is right on {alone:.2%} of these {evaluation.pictures:,} "
        f"{what}, all {len(every)} members together on {together:.2%}: on these {what} the "
        "others add availability, not accuracy"
    )


def print_written(bundle: Bundle, run: Path) -> None:
    """The bundle, the next command, and the run folder."""
    size_mb = sum(file.stat().st_size for file in run.rglob("*") if file.is_file()) / 1e6
    assignments = bundle.manifest.plan.assignments
    members = "1 sub-model" if len(assignments) == 1 else f"{len(assignments)} sub-models"
    device = assignments[0].device
    source = " --source camera:0" if bundle.manifest.plan.cameras else ""
    running = f"; to agents that run with --allow-push, mdp bundle push {bundle.path} --fleet FILE"
    # The page, MQTT and statuses show the name.
    nameless = bundle.manifest.name == "bundle"
    hint = '; it is called "bundle": the same command with --name renames it' if nameless else ""
    for line in (
        f"{bundle.path}: {members}, digest {bundle.digest}{hint}",
        f"next: copy it to every device and serve it there, mdp-agent run --bundle {bundle.path} "
        f"--device {device} --bind tcp://0.0.0.0:7500 --key {device}.secret --clients clients/"
        f"{source}{running}",
        f"{run} ({size_mb:,.0f} MB) lets the same command go on or measure anew; it may be removed",
    ):
        print(line)


def manifest_remark(bundle: Bundle, report: Report, *, write: bool) -> str:
    """Tell whether the manifest of `bundle`, as opened before, contains the report now."""
    known, manifest = bundle.manifest.evaluation, bundle.path / MANIFEST
    if not write:
        has = "no evaluation" if known is None else f"an evaluation on {_pictures(known)}"
        return f"{manifest}: unchanged, with {has}; --write puts these figures there"
    was = "had none" if known is None else f"was of {_pictures(known)}"
    return (
        f"{manifest}: its evaluation is now of {_pictures(report.evaluation)}, {was}; the digest "
        f"stays {bundle.digest[:12]}, so agents need no reload; clients need a copy of this "
        "manifest for the new accuracies"
    )


def _pictures(evaluation: Evaluation) -> str:
    return f"{evaluation.pictures:,} pictures of {evaluation.data}"


def _cascade(evaluation: Evaluation, plan: Plan, ways: BothWays) -> Table:
    """Accuracy and cost of all members at once, and of a cascade."""
    measured = evaluation.cascade
    assert measured is not None
    names = " + ".join(plan.assignments[k].device for k in measured.first)
    every = tuple(range(len(plan.assignments)))
    together = next(s.stacked for s in evaluation.subsets if s.members == every)
    table = Table(
        "stacked", "accuracy", "mean ms", "p99 ms", "device ms", "J per answer",
        title=f"all at once, or {names} first and the others for {measured.escalated.stacked:.1%}",
        caption="ms and J as the plan predicts them, without spread; device ms: computing, of all",
    )  # fmt: skip
    rows = (
        ("all at once", together, ways.at_once),
        ("cascade", measured.accuracy.stacked, ways.cascade),
    )
    for what, accuracy, way in rows:
        energy = "unknown" if way.energy_j is None else f"{way.energy_j:.4f}"
        table.add_row(
            what, f"{accuracy:.2%}", f"{way.mean_ms:.2f}", f"{way.p99_ms:.2f}",
            f"{way.device_ms:.2f}", energy,
        )  # fmt: skip
    return table


def _together(evaluation: Evaluation, plan: Plan) -> Table:
    """Every listed arrival subset, then samples of the sizes that are not listed."""
    # Without boosting no member has a head of that kind.
    rules = ("boosted", "stacked", "bagged") if _is_boosted(evaluation) else ("stacked", "bagged")
    table = Table(
        "arrived", *rules, "stacked ECE",
        title="every arrival subset, with the expected calibration error",
        caption="every label right, and the calibration error of each" if evaluation.by_label
        else None,
    )  # fmt: skip
    for subset in evaluation.subsets:
        names = arrived_devices(subset.members, plan)
        ece = "" if subset.ece is None else f"{subset.ece.stacked:.2%}"
        table.add_row(names, *_by_rule(subset, rules), ece)
    table.add_section()
    for entry in evaluation.sizes:
        what = f"{entry.size} of {len(plan.assignments)}, of {entry.sampled} such sets"
        for word, found in (("mean", entry.mean), ("lowest", entry.lowest)):
            ece = f"{entry.ece.stacked:.2%}" if found is entry.mean else ""
            table.add_row(f"{word} {what}", *_by_rule(found, rules), ece)
    return table


def _by_label(found: Sequence[SubsetLabels], labels: Sequence[str]) -> Table:
    """Precision and recall of each label with all members in, and recall with one missing."""
    every = max(found, key=lambda one: len(one.members))
    fewer = [one for one in found if len(one.members) == len(every.members) - 1]
    table = Table(
        "label", "precision", "recall", "recall with one missing",
        title="each label by itself, stacked",
        caption=f"right on {every.each:.2%} of all labels of all items",
    )  # fmt: skip
    for place, label in enumerate(labels):
        precision, without = every.precision[place], [one.recall[place] for one in fewer]
        table.add_row(
            Text(label), "never told" if precision is None else f"{precision:.1%}",
            f"{every.recall[place]:.1%}",
            f"{min(without):.1%} to {max(without):.1%}" if without else "-",
        )  # fmt: skip
    return table


def arrived_devices(members: Sequence[int], plan: Plan) -> str:
    """The devices that are in: `all`, `all but` one of three or more, or the name of each."""
    absent = [one.device for k, one in enumerate(plan.assignments) if k not in members]
    if len(plan.assignments) > 2 and len(absent) <= 1:
        return f"all but {absent[0]}" if absent else "all"
    return " + ".join(plan.assignments[k].device for k in members)


def rejection_of(found: Rejection, plan: Plan) -> Table | str:
    """Known and unknown items that each arrival subset takes for unknown.

    A line where no unknown ones are there, as nothing else is known then.
    """
    if not found.unknown_pictures:
        known = [one.known for one in found.subsets]
        return (
            f"items of a class that are called unknown: {min(known):.1%} to {max(known):.1%}, with "
            f"thresholds for {found.rate:.1%}; "
            "how many of no class are found is not known: a folder `unknown` has pictures of them"
        )
    table = Table(
        "arrived", "known rejected", "unknown rejected", "AUC",
        title=f"unknown items, with thresholds for {found.rate:.1%} of known ones rejected",
        caption=f"unknown: {found.unknown_pictures:,} pictures of no class",
    )  # fmt: skip
    for one in found.subsets:
        names = arrived_devices(one.members, plan)
        unknown = "-" if one.unknown is None else f"{one.unknown:.1%}"
        area = "-" if one.auc is None else f"{one.auc:.3f}"
        what = names or f"mean {one.size} of {len(plan.assignments)}"
        table.add_row(what, f"{one.known:.1%}", unknown, area)
    return table


def print_inspection(bundle: Bundle) -> None:
    """Each anomaly head, and what every subset of cameras finds at the rate of good items."""
    manifest, table = bundle.manifest, bundle.fusion_weights().anomaly
    inspection, plan = manifest.inspection, manifest.plan
    assert inspection
    assert table
    cameras = [str(a.camera or "-") for a in plan.assignments]
    alone = Table(
        "k", "device", "camera", "layers", "kB", "time", "planted AUC", "found",
        title=f"anomaly heads, fitted to {inspection.good:,} good scenes of {inspection.data}",
        caption="time: against the model without; planted: patches that stand for defects (best 1)",
    )  # fmt: skip
    for member in inspection.members:
        exact = member.fp32_planted_auc
        area = f"{member.planted_auc:.3f}" + ("" if exact is None else f", fp32 {exact:.3f}")
        alone.add_row(
            str(member.k), member.device, cameras[member.k], member.layers,
            f"{member.added_bytes / 1e3:,.0f}", f"{member.time_ratio:.1%}", area,
            "-" if member.planted_found is None else f"{member.planted_found:.0%}",
        )  # fmt: skip
    Console().print(alone)
    fused = {1: "the mean", 64: "the maximum"}.get(table.power, f"the power mean of {table.power}")
    sides = Table(
        "seen by", "threshold", "defects found",
        title=f"different above these thresholds: {table.default:.2%} of good items are",
        caption=f"fused by {fused} of surprises; "
        + (
            f"{table.defective:,} defective scenes, and the range among all like them in 19 of 20"
            if table.defective
            else "no defects to measure"
        ),
    )  # fmt: skip
    for one in table.subsets:
        names = arrived_devices(one.members, plan)
        found = _found_by(one, table)
        what = names or f"mean {one.size} of {len(plan.assignments)}"
        sides.add_row(what, f"{one.thresholds[table.place]:.2f}", found)
    Console().print(sides)


def _found_by(one: SubsetAnomaly, table: Anomaly) -> str:
    """The share of measured defects that is found, and its range among all like them."""
    if not (one.found and table.defective):
        return "-"
    share = one.found[table.place]
    least, most = share_range(share, table.defective)
    return f"{share:.1%} ({least:.0%} to {most:.0%})"


def _is_boosted(evaluation: Evaluation) -> bool:
    return any(subset.boosted is not None for subset in evaluation.subsets)


def _by_rule(found: PerRule, rules: Sequence[str]) -> list[str]:
    values = (getattr(found, rule) for rule in rules)
    return ["-" if value is None else f"{value:.2%}" for value in values]


def data_as_json(data: Dataset) -> dict[str, Any]:
    """The JSON of `mdp-partition data`: labels, and pictures per split and class."""
    return {
        "source": data.source,
        "labels": data.labels,
        "left_out": dict(data.left_out),
        "splits": {
            name: {
                "pictures": len(data.split(name)),
                "digest": data.split(name).digest,
                "classes": dict(zip(data.set_names, _counts(data, name), strict=True)),
            }
            for name in SPLITS
        },
        "unknown": _unknown(data),
    }


def _unknown(data: Dataset) -> dict[str, int]:
    """Numbers of pictures of no class: that choose the score of novelty, and that measure it."""
    sets = {"calibration": data.unknown, "test": data.unknown_test}
    return {name: 0 if found is None else len(found) for name, found in sets.items()}


def print_data(data: Dataset) -> None:
    """Pictures of each class and split."""
    table = Table("class" if data.sets is None else "labels", *SPLITS, title=Text(data.source))
    columns = [_counts(data, name) for name in SPLITS]
    for label, *counts in zip(data.set_names, *columns, strict=True):
        # Texts are no markup, as names of folders may contain square brackets.
        table.add_row(Text(label), *(f"{count:,}" for count in counts))
    table.add_section()
    table.add_row("all", *(f"{len(data.split(name)):,}" for name in SPLITS))
    if any((unknown := _unknown(data)).values()):
        table.add_row("unknown", *(f"{unknown.get(name, 0):,}" for name in SPLITS))
    Console().print(table)
    if remark := remark_on(data):
        Console().print(remark, soft_wrap=True, highlight=False, markup=False)


def _counts(data: Dataset, name: SplitName) -> list[int]:
    counts = Counter(data.split(name).targets.tolist())
    return [counts[index] for index in range(len(data.set_names))]


def print_weights(rows: Sequence[Mapping[str, Any]]) -> None:
    """Networks with weights at hand, as `mdp-partition weights --json` has them."""
    network = Column("network", no_wrap=True)
    table = Table(network, "parameters", "px", "classes", "source", "licence")
    for row in rows:
        facts = ("", "", "")
        if "unusable" not in row:
            classes = str(row["classes"] or "none")
            facts = (f"{row['parameters'] / 1e6:.1f} M", str(row["image_size"]), classes)
        table.add_row(row["network"], *facts, row["source"], row["licence"])
    Console().print(table)
    for row in rows:
        if "unusable" in row:
            text = f"{row['network']} is unusable: {row['unusable']}"
            Console().print(text, soft_wrap=True, highlight=False, markup=False)


def print_quantization(bundle: Bundle) -> None:
    """Every precision tried for every member, and the loss of the fused answer."""
    record, console = bundle.manifest.quantisation, Console()
    assert record is not None
    table = Table(
        "k", "device", "precision", "runtime", "ms", "of fp32", "loss", "",
        title=f"{record.calibration_pictures:,} calibration pictures, "
        f"at most {record.max_loss:.2%} of them lost",
    )  # fmt: skip
    for member in record.members:
        for one in member.tried:
            ms = "" if one.compute_ms is None else f"{one.compute_ms:.3f}"
            share = "" if not one.fp32_ms else f"{(one.compute_ms or 0) / one.fp32_ms:.0%}"
            loss = "" if one.loss is None else f"{one.loss:.2%}"
            kept = "kept" if one.kept else ""
            table.add_row(
                str(member.k), member.device, one.precision, one.runtime, ms, share, loss, kept
            )
        table.add_section()
    console.print(table)
    for member in record.members:
        for one in member.tried:
            text = f"{member.k} {member.device}, {one.precision} in {one.runtime}: {one.reason}"
            console.print(text, soft_wrap=True, highlight=False)
    for what, pair in (
        ("calibration pictures, all in", record.calibration),
        (f"{record.test_pictures:,} test pictures, all in", record.test),
        (f"worst arrival subset on them, {list(record.worst.members)}", record.worst),
    ):
        console.print(
            f"{what}: {pair.fp32:.2%} in fp32, {pair.now:.2%} now", soft_wrap=True, highlight=False
        )
