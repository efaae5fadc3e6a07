"""Results of the benchmark as figures for its page, and as a picture."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from benchmarks.harness import figure
from benchmarks.harness.page import Page
from benchmarks.harness.results import kept
from benchmarks.harness.tables import share, table
from mdp.cli.bench import percentiles
from mdp.formats.plan import Assignment, Plan

#: What everything is compared with.
OURS = "MDP"
#: A machine that has more to do before the run than this is not idle.
IDLE_LOAD = 0.5
#: By how much the teacher's time on a whole core may differ between devices that kept their shares.
KEPT = 1.25
#: The distance of the two links' dots from their rival's line.
_APART = 0.25


def figures(results: Mapping[str, Any], picture: str = "") -> str:
    """Markdown of everything, with a picture if there is one, and what was not measured said."""
    lines = [f"![latency, throughput and bytes of everybody]({picture})"] if picture else []
    if results["quick"]:
        lines.append(
            "**A quick run**: too few pictures to conclude anything from small differences."
        )
    load = float(results["machine"]["load_before"])
    if load > IDLE_LOAD:
        lines.append(f"**A busy machine**: load {load:.1f} before the run, so read ratios only.")
    whole_ms = [device["teacher_ms"] * device["share"] for device in results["devices"]]
    if max(whole_ms) > KEPT * min(whole_ms):
        lines.append(
            "**Not usable**: devices did not get their shares when the teacher was timed, so plans "
            "and cuts are for other devices than were measured."
        )
    if results["without_http"]:
        lines.append(f"Without HTTP servers: {results['without_http']}")
    exact, largest = (
        max(link["found"][what] for link in results["links"])
        for what in ("pipeline_error", "largest_logit")
    )
    lines.append(
        f"Largest difference of any logit from the whole teacher's: pipeline {exact:.1e} (logits "
        f"up to {largest:.1f}). A camera's picture has {results['picture_bytes'] / 1e3:.0f} kB."
    )
    lines.append(
        table(
            [*results["devices"], None],
            ("device", lambda d: d["name"] if d else "client"),
            ("core", lambda d: d["core"] if d else 1),
            ("share of it", lambda d: f"{d['share'] if d else results['client_share']:.0%}"),
            ("teacher, ms", lambda d: f"{d['teacher_ms']:.0f}" if d else ""),
            ("blocks", lambda d: d["blocks"] if d else ""),
            title=f"The devices, and what each has of {results['teacher']} where it is cut",
        )
    )
    lines += [_answers(link) for link in results["links"]]
    return "\n\n".join([*lines, _plans(results)])


def _mbit(link: Mapping[str, Any]) -> str:
    return f"{link['bandwidth_bps'] / 1e6:.0f} Mbit/s"


def _answers(link: Mapping[str, Any]) -> str:
    rows = [
        {**percentiles(row["latency_ms"], (50, 99)), "name": row["name"],
         "rate": fmean(row["per_s"]), "kb": fmean(row["sent_bytes"]) / 1e3}
        for row in link["found"]["answers"]
    ]  # fmt: skip
    ours = next(row for row in rows if row["name"] == OURS)

    def over(key: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{row[key] / ours[key]:.2f}"

    return table(
        rows,
        ("", "{name}"),
        ("p50, ms", "{p50:.0f}", min),
        ("p99, ms", "{p99:.0f}", min),
        ("p50 / MDP", over("p50")),
        ("pictures/s", "{rate:.1f}", max),
        ("/ MDP", over("rate")),
        ("kB a picture", "{kb:.1f}", min),
        title=_mbit(link),
    )


def _plans(results: Mapping[str, Any]) -> str:
    return table(
        [(link, name, msgspec.convert(plan, Plan))
         for link in results["links"] for name, plan in link["plans"].items()],
        ("link", lambda row: _mbit(row[0])),
        ("", "{0[1]}"),
        ("members: px / patch, width x depth, MLP (ms)", lambda row: _members(row[2].assignments)),
        ("accuracy", lambda row: share(row[2].accuracy.all_in) if row[2].accuracy else ""),
        ("one device, as quick",
         lambda row: share(row[2].single_device.accuracy) if row[2].single_device else ""),
        title="What was planned, and predicted",
    )  # fmt: skip


def _members(assignments: Sequence[Assignment]) -> str:
    return "; ".join(
        f"{a.device} {a.vit.image_size} / {a.vit.patch_size}, {a.vit.embed_dim} x {a.vit.depth}, "
        f"x{a.vit.mlp_ratio:g} ({a.predicted_ms.total:.0f})"
        for a in assignments
    )


def draw(results: Mapping[str, Any]) -> bytes:
    def panels(canvas: "figure.Figure") -> None:
        latency, rate, sent = canvas.subplots(1, 3, sharey=True)
        links = results["links"]
        _dots(latency, links, lambda row: percentiles(row["latency_ms"], (50,))["p50"])
        _dots(rate, links, lambda row: fmean(row["per_s"]))
        _dots(sent, links, lambda row: fmean(row["sent_bytes"]) / 1e3)
        latency.set_title("one picture, p50 in ms (less is better)")
        rate.set_title(f"pictures/s, {results['in_flight']} under way (more is better)")
        sent.set_title("kB on the wire for a picture (less is better)")
        canvas.legend(*sent.get_legend_handles_labels(), loc="outside upper right", ncols=2)

    return figure.drawn(12, 5, panels)


def _dots(
    axes: "figure.Axes",
    links: Sequence[Mapping[str, Any]],
    value: Callable[[Mapping[str, Any]], float],
) -> None:
    """A dot for each rival and link; lengths mean nothing here."""
    names = [row["name"] for row in links[0]["found"]["answers"]]
    for number, (link, colour) in enumerate(zip(links, (figure.BLUE, figure.RED), strict=False)):
        places = [place + (number - 0.5) * _APART for place in range(len(names))]
        values = [value(row) for row in link["found"]["answers"]]
        axes.plot(values, places, figure.MARKERS[number], color=colour, label=_mbit(link))
    axes.set_yticks(range(len(names)), names)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    figure.logarithmic(axes, "x")


PAGE = Page(
    "benchmarks.end_to_end",
    lambda: figures(kept("end-to-end"), "end-to-end.svg"),
    lambda: draw(kept("end-to-end")),
)
