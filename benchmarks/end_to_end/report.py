"""Results of the benchmark: what is kept in its file, and tables of it."""

from collections.abc import Sequence
from typing import Any

from benchmarks.accuracy.table import Sheet, as_markdown
from benchmarks.end_to_end.outcomes import Answers, Found
from mdp.cli.bench import percentiles
from mdp.files import Record
from mdp.formats.plan import Plan

#: What everything is compared with.
OURS = "MDP"
#: A machine that has more to do before the run than this is not idle.
IDLE_LOAD = 0.5
#: By how much the teacher's time on a whole core may differ between devices that kept their shares.
KEPT = 1.25


class DeviceRow(Record, frozen=True):
    """One emulated device."""

    name: str
    core: int
    share: float
    #: Mean milliseconds of the teacher while all devices compute it.
    teacher_ms: float
    blocks: int
    heads: int
    hidden: int


class LinkResult(Record, frozen=True):
    """Everything over one kind of link."""

    bandwidth_bps: float
    #: Row's name -> the plan that was served, and the latency that was asked of it.
    plans: dict[str, Plan]
    found: Found


class Results(Record, frozen=True):
    """The content of benchmarks/results/end-to-end.json."""

    machine: dict[str, Any]
    teacher: str
    quick: bool
    period_us: int
    devices: list[DeviceRow]
    client_share: float
    in_flight: int
    #: Why the HTTP servers are missing, if they are.
    without_http: str
    #: Largest difference of any logit between the teacher and its tensors split over all devices.
    split_error: float
    picture_bytes: int
    links: list[LinkResult]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def sheets(results: Results) -> list[Sheet]:
    """Devices, then for each link everybody's figures, and what splitting tensors is made of."""
    found = [_devices(results)]
    for link in results.links:
        found += [_link(link), _plans(link)]
    return [*found, _split(results)]


def _devices(results: Results) -> Sheet:
    rows = [
        (
            d.name,
            str(d.core),
            f"{d.share:.0%}",
            f"{d.teacher_ms:.0f}",
            str(d.blocks),
            str(d.heads),
            str(d.hidden),
        )
        for d in results.devices
    ]
    rows.append(("client", "1", f"{results.client_share:.0%}", "", "", "", ""))  # fmt: skip
    return Sheet(
        f"The devices, and what each has of {results.teacher} where it is cut",
        ("device", "core", "share of it", "teacher, ms", "blocks", "heads", "MLP columns"),
        rows,
    )


def _link(link: LinkResult) -> Sheet:
    ours = next(row for row in link.found.answers if row.name == OURS)
    return Sheet(
        f"{link.bandwidth_bps / 1e6:.0f} Mbit/s",
        ("", "p50, ms", "p99, ms", "p50 / MDP", "p99 / MDP", "pictures/s", "/ MDP", "kB a picture",
         "/ MDP"),
        [_row(row, ours) for row in link.found.answers],
    )  # fmt: skip


def _row(row: Answers, ours: Answers) -> tuple[str, ...]:
    own, base = (percentiles(one.latency_ms, (50, 99)) for one in (row, ours))
    rate, sent = mean(row.per_s), mean(row.sent_bytes)
    mark = " (calculated)" if row.calculated else ""
    return (
        row.name + mark,
        f"{own['p50']:.0f}",
        f"{own['p99']:.0f}",
        f"{own['p50'] / base['p50']:.2f}",
        f"{own['p99'] / base['p99']:.2f}",
        f"{rate:.1f}",
        f"{rate / mean(ours.per_s):.2f}",
        f"{sent / 1e3:.1f}",
        f"{sent / mean(ours.sent_bytes):.1f}",
    )


def _plans(link: LinkResult) -> Sheet:
    rows = []
    for name, plan in link.plans.items():
        alone = plan.single_device
        for a in plan.assignments:
            spec, last = a.vit, a is plan.assignments[-1]
            shape = (
                f"{spec.image_size} px / {spec.patch_size}, {spec.embed_dim} wide, "
                f"{spec.depth} deep, MLP x{spec.mlp_ratio:g}, {a.encoding}"
            )
            both = _percent(plan.accuracy.all_in if plan.accuracy and last else None)
            one = _percent(alone.accuracy if alone and last else None)
            rows.append((name, a.device, shape, f"{a.predicted_ms.total:.0f}", both, one))
    return Sheet(
        f"What was planned for {link.bandwidth_bps / 1e6:.0f} Mbit/s",
        ("", "device", "sub-model", "predicted, ms", "accuracy predicted",
         "one device alone, as quick"),
        rows,
    )  # fmt: skip


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _split(results: Results) -> Sheet:
    rows = [
        (f"{link.bandwidth_bps / 1e6:.0f} Mbit/s", name, f"{found.compute_ms:.0f}",
         f"{found.exchange_ms:.0f}", f"{found.ends_ms:.0f}",
         f"{link.found.link.bandwidth_bps / 1e6:.1f}", f"{link.found.link.round_trip_s * 1e3:.2f}")
        for link in results.links
        for name, found in link.found.split.items()
    ]  # fmt: skip
    return Sheet(
        "Tensors split: what one picture is made of, in ms",
        ("link", "", "layers, measured", "exchange, calculated", "picture, ends and answer",
         "link measured, Mbit/s", "round trip, ms"),
        rows,
    )  # fmt: skip


def figures(results: Results, picture: str = "") -> str:
    """Markdown of everything, with a picture if there is one, and what was not measured said."""
    lines = [f"![latency, throughput and bytes of everybody]({picture})"] if picture else []
    if results.quick:
        lines.append(
            "**A quick run**: too few pictures to conclude anything from small differences."
        )
    load = float(results.machine["load_before"])
    if load > IDLE_LOAD:
        lines.append(f"**A busy machine**: load {load:.1f} before the run, so read ratios only.")
    whole_ms = [device.teacher_ms * device.share for device in results.devices]
    if max(whole_ms) > KEPT * min(whole_ms):
        lines.append(
            "**Not usable**: devices did not get their shares when the teacher was timed, so plans "
            "and cuts are for other devices than were measured."
        )
    if results.without_http:
        lines.append(f"Without HTTP servers: {results.without_http}")
    exact = max(link.found.pipeline_error for link in results.links)
    lines.append(
        f"Largest difference of any logit from the whole teacher's: pipeline {exact:.1e}, tensors "
        f"split {results.split_error:.1e} (logits up to {_largest(results):.1f}). A camera's "
        f"picture has {results.picture_bytes / 1e3:.0f} kB."
    )
    return "\n\n".join([*lines, *(as_markdown(sheet) for sheet in sheets(results))])


def _largest(results: Results) -> float:
    return max(link.found.largest_logit for link in results.links)
