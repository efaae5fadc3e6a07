"""Tables of `mdp-partition plan`."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from mdp.formats.plan import Assignment, Plan, PredictedAccuracy, PredictedMs, Replica
from partitioner.cli.tables import NAME_WIDTH, describe_part
from partitioner.estimates.accuracy import Predictor
from partitioner.planner.deadline import DECODED, DECODING_MS
from partitioner.planner.explain import Explanation, cautions
from partitioner.planner.make_plan import Planned
from partitioner.planner.targets import ParetoPoint


def print_planned(planned: Planned, console: Console | None = None) -> None:
    """The plan, its predictions and remarks, explanations and the Pareto front."""
    console = console or Console()
    console.print(_plan_table(planned.plan, list_estimated(planned)))
    if planned.plan.reason and not planned.plan.refused:
        console.print(planned.plan.reason, soft_wrap=True, highlight=False)
    _print_accuracy(console, planned.plan.accuracy, planned.problem.predictor)
    if planned.plan.deadline_ms is not None and not planned.plan.refused:
        console.print(_deadline(planned.plan), soft_wrap=True, highlight=False)
    for camera in planned.plan.cameras:
        console.print(_camera(planned, camera), soft_wrap=True, highlight=False)
    for name, reason in planned.plan.left_out.items():
        console.print(f"left out: {name}: {reason}", soft_wrap=True, highlight=False)
    for device in planned.problem.devices:
        for caution in cautions(device.profile):
            console.print(f"{device.name}: {caution}", soft_wrap=True, highlight=False)
    for explanation in planned.explanations:
        _print_explanation(console, explanation)
    if planned.pareto:
        console.print(_pareto_table(planned.pareto))


def _deadline(plan: Plan) -> str:
    """The deadline that goes with the target, and the predicted share of complete answers."""
    text = (
        f"ask with a deadline of {plan.deadline_ms:g} ms or more, {DECODING_MS:g} of them for "
        f"decoding a picture of {DECODED} (estimated; larger ones take longer, arrays nothing): "
    )
    if plan.percentile is None or plan.on_time is None:
        return text + "the target is about the typical answer"
    return (
        f"{text}{plan.on_time:.1%} of the answers are predicted to be complete within "
        f"{plan.target_ms:g} ms, with all devices there ({plan.percentile:g} % were asked for)"
    )


def _camera(planned: Planned, camera: str) -> str:
    """The device that computes a camera's pictures, and where it has them from."""
    device = next(
        device
        for device in planned.problem.devices
        for a in planned.plan.assignments
        if a.camera == camera and a.device == device.name
    )
    text = f"camera {camera}: {device.name} computes it"
    if device.sight is not None and device.sight.owner:
        owner = device.sight.owner
        text += (
            f" for {owner}, whose pictures it fetches: start mdp-agent camera there, and "
            f"{device.name} with --source mdp://HOST:PORT of {owner}"
        )
    return text


def list_estimated(planned: Planned) -> list[str]:
    """The plan's devices with estimated latencies."""
    plan = planned.plan
    named = {a.device for a in plan.assignments} | {r.device for r in plan.replicas}
    if plan.single_device is not None:
        named.add(plan.single_device.device)
    profiles = [device.profile for device in planned.problem.devices]
    return [
        p.name
        for p in profiles
        if p.name in named and p.provenance["latency"].method == "estimated"
    ]


def _plan_table(plan: Plan, guessed: Sequence[str]) -> Table:
    """One row per device, replicas below their member, and the best single device.

    Milliseconds of `guessed` devices carry a `~`.
    """
    caption = (
        f"~ estimated, not measured on {', '.join(guessed)}: mdp-agent probe measures a device"
        if guessed
        else None
    )

    def format_ms(ms: PredictedMs, device: str) -> list[str]:
        form = "~{:.3g}" if device in guessed else "{:.2f}"
        return [form.format(value) for value in (ms.compute, ms.network, ms.total)]

    table = Table(
        "k", Column("device", overflow="fold"),
        Column("sub-model, width x depth", overflow="fold", min_width=NAME_WIDTH),
        "compute\nms", "network\nms", "total\nms", "memory\nMB",
        title=f"plan for {plan.require_teacher().name} ({plan.require_teacher().shape.words}), "
        f"target {plan.target_ms:g} ms",
        caption=caption,
    )  # fmt: skip
    for a in plan.assignments:
        parts: list[Assignment | Replica] = [a, *(r for r in plan.replicas if r.k == a.k)]
        for part in parts:
            what = describe_part(a) if part is a else "the same"
            table.add_row(
                str(a.k), part.device, what, *format_ms(part.predicted_ms, part.device),
                f"{part.memory_bytes / 1e6:.0f}",
            )  # fmt: skip
    if plan.single_device is not None:
        one = plan.single_device
        what = "the teacher itself" if one.is_teacher else describe_part(one)
        table.add_section()
        if one.accuracy is not None:
            what += f": right on {one.accuracy:.1%}"
        table.add_row(
            "", f"{one.device} alone", what, *format_ms(one.predicted_ms, one.device), "",
        )  # fmt: skip
    return table


def _print_accuracy(
    console: Console, accuracy: PredictedAccuracy | None, predictor: Predictor
) -> None:
    if accuracy is None:
        return
    lines = [f"accuracy: {not_predicted(accuracy.unknown)}"]
    if accuracy.all_in is not None and accuracy.expected is not None:
        lines = [
            f"predicted to be right on {accuracy.all_in:.1%} with all in, {accuracy.expected:.1%} "
            "as devices fail; the mean error of such predictions is "
            f"{100 * (accuracy.typical_error or 0):.1f} points "
            f"(teacher: {predictor.teacher_accuracy:.1%})"
        ]
    if accuracy.low is not None and accuracy.high is not None:
        lines.append(
            f"nine of ten such trainings end between {accuracy.low:.1%} and {accuracy.high:.1%} "
            "with all in"
        )
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    if predictor.views:
        console.print(predictor.views, soft_wrap=True, highlight=False)
    if not predictor.has_networks:
        console.print(
            f"single networks of other families: none known for {predictor.teacher.image_size} px",
            soft_wrap=True,
            highlight=False,
        )


def not_predicted(unknown: str) -> str:
    """The words in place of an accuracy that no recorded training supports."""
    return f"not predicted: no training like this is on record ({unknown})"


def _print_explanation(console: Console, explanation: Explanation) -> None:
    what = "no part" if explanation.k is None else f"member {explanation.k}"
    console.print(f"\n[bold]{explanation.device}[/bold] ({what})", highlight=False)
    for sentence in explanation.sentences:
        console.print(f"  {sentence}", soft_wrap=True, highlight=False, markup=False)


def _pareto_table(points: list[ParetoPoint]) -> Table:
    """Plans by ascending latency."""
    known = all(point.accuracy.all_in is not None for point in points)
    table = Table(
        "latency ms", "expected", "all in", "members", "replicas", "J per answer",
        title="no plan is predicted to be as accurate in less time"
        if known
        else "by the law's order no plan is as accurate in less time",
    )  # fmt: skip
    for point in points:
        energy = "" if point.energy_j is None else f"{point.energy_j:.3f}"
        table.add_row(
            f"{point.latency_ms:.2f}", _share(point.accuracy.expected),
            _share(point.accuracy.all_in), str(point.members), str(point.replicas), energy,
        )  # fmt: skip
    return table


def _share(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{accuracy:.1%}"
