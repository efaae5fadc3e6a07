"""Networks of families: latencies predicted from the probe's own networks beside measured ones.

    python -m benchmarks.latency.families measure --scratch FOLDER
    python -m benchmarks.latency.families report

`measure` exports every network as devices serve it, in fp32 and static int8, with weights drawn,
and times one picture on one onnxruntime thread, all in turns. Milliseconds are processor time, the
least of several rounds' medians, so that others at work matter little. The networks that
`mdp-agent probe` measures are among them. `report` fits the formula to those alone, in the words of
a profile, and compares its predictions for all others.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness.machine import describe_machine
from mdp.files import Record, write_bytes, write_json
from mdp.formats.plan import NetworkSpec
from mdp.formats.profile import NetworkPoint
from mdp.runtimes.onnxruntime import open_session
from partitioner.estimates.catalogue import catalogue
from partitioner.estimates.latency_networks import NetworkFit, fit_points
from partitioner.export.probe_encoders import (
    NETWORK_PRECISIONS,
    NETWORKS,
    NUM_CLASSES,
    calibration,
    name_of,
    untrained_network,
)
from partitioner.export.quantize import quantised

RESULT = Path(__file__).parents[1] / "results" / "latency-families.json"
#: Rounds in which the networks take turns; seconds and runs of each in a round.
ROUNDS, TURN_S, RUNS = 4, 0.06, 5
#: (network, side in pixels): not among the probe's, of every family that it has and of one more.
OTHERS = (
    *(("mobilenetv4_conv_small", 96), ("mobilenetv4_conv_small", 160)),
    *(("mobilenetv4_conv_medium", 128), ("mobilenetv4_conv_medium", 192)),
    *(("mobilenetv4_hybrid_medium", 128), ("mobilenetv3_large_100", 192)),
    *(("tf_efficientnet_lite0", 160), ("tf_efficientnet_lite1", 144)),
    *(("tf_efficientnet_lite2", 176), ("tf_efficientnet_lite3", 208)),
    *(("efficientnet_b0", 112), ("efficientnet_b0", 224), ("efficientnet_b1", 192)),
    *(("hgnetv2_b0", 192), ("hgnetv2_b1", 160), ("hgnetv2_b3", 128)),
    *(("repvit_m0_9", 128), ("repvit_m0_9", 224)),
    *(("levit_128s", 224), ("levit_192", 160), ("levit_256", 224)),
    *(("efficientvit_b0", 128), ("efficientvit_b0", 224)),
    *(("efficientvit_b1", 224), ("efficientvit_b2", 160)),
    *(("fastvit_t8", 224), ("fastvit_t12", 160), ("fastvit_sa12", 160)),
    *(("tiny_vit_5m_224", 224), ("caformer_s18", 128)),
)


class Row(Record, frozen=True):
    """One network in one precision and what it took here."""

    name: str
    image_size: int
    precision: str
    latency_ms: float

    @property
    def probed(self) -> bool:
        """Whether a probe measures it."""
        return (self.name, self.image_size) in set(_probed())

    @property
    def point(self) -> NetworkPoint:
        """As a profile has it."""
        return msgspec.convert(msgspec.to_builtins(self) | {"threads": 1}, NetworkPoint)

    @property
    def spec(self) -> NetworkSpec:
        """As a plan has it, with hardly a head."""
        return catalogue()[self.name].spec(self.image_size, 0, self.point.precision)


class Rows(Record, frozen=True):
    """What one run measured, and where."""

    machine: dict[str, Any]
    rows: list[Row]


def _probed() -> Iterable[tuple[str, int]]:
    return (network for tier in NETWORKS.values() for network in tier)


def measured(scratch: Path) -> list[Row]:
    """Every network in every precision; models that are in `scratch` are not exported again."""
    files: dict[NetworkSpec, Path] = {}
    for name, size in (*_probed(), *OTHERS):
        spec = catalogue()[name].spec(size, NUM_CLASSES)
        for precision in NETWORK_PRECISIONS:
            wanted = msgspec.structs.replace(spec, precision=precision)
            files[wanted] = scratch / f"{name_of(wanted)}.onnx"
            if not files[wanted].is_file():
                print(f"export {name_of(wanted)}", file=sys.stderr, flush=True)
                pictures = None if precision == "fp32" else calibration(size)
                source = files[spec].read_bytes() if pictures is not None else None
                content = untrained_network(spec) if source is None else source
                write_bytes(files[wanted], quantised(content, precision, pictures, whole=True))
    return [
        Row(name=s.name, image_size=s.image_size, precision=s.precision, latency_ms=ms)
        for s, ms in timed(files).items()
    ]


def timed(files: Mapping[NetworkSpec, Path]) -> dict[NetworkSpec, float]:
    """Milliseconds of processor time of one picture of each; see above."""
    sessions = {spec: open_session(file) for spec, file in files.items()}
    random, least = np.random.default_rng(0), dict.fromkeys(files, float("inf"))
    for number in range(ROUNDS):
        print(f"round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
        for spec, session in sessions.items():
            shape = (1, spec.image_size, spec.image_size, 3)
            feed = {"images": random.integers(0, 256, shape, dtype=np.uint8)}
            session.run(None, feed)
            times_s: list[float] = []
            while len(times_s) < RUNS or sum(times_s) < TURN_S:
                started_s = time.process_time()
                session.run(None, feed)
                times_s.append(time.process_time() - started_s)
            least[spec] = min(least[spec], round(float(np.median(times_s)) * 1e3, 4))
    return least


def report(rows: Sequence[Row]) -> str:
    """Markdown: errors of each family and of all, by precision, then every network."""
    lines = [
        "| networks | precision | number | median error | 95th percentile | largest | in range |",
        "|---|---|---|---|---|---|---|",
    ]
    details = [
        "| network | precision | measured ms | predicted ms | error |",
        "|---|---|---|---|---|",
    ]
    for precision in NETWORK_PRECISIONS:
        fit = fit_points([r.point for r in rows if r.probed and r.precision == precision])
        unseen = [r for r in rows if not r.probed and r.precision == precision]
        errors = dict(zip(unseen, fit.predict_many_ms([r.spec for r in unseen]), strict=True))
        groups: dict[str, list[Row]] = {"all": unseen}
        groups["all of a probed family"] = [r for r in unseen if _family(r) in fit.factors]
        for row in unseen:
            groups.setdefault(_family(row), []).append(row)
        for group, of in groups.items():
            lines.append(_line(group, precision, [(r, errors[r]) for r in of], fit))
        for row, ms in errors.items():
            details.append(
                f"| {row.name} {row.image_size} px | {precision} | {row.latency_ms:.3g} | "
                f"{ms:.3g} | {ms / row.latency_ms - 1:+.0%} |"
            )
    return "\n".join([*lines, "", *details])


def _family(row: Row) -> str:
    return catalogue()[row.name].family


def _line(group: str, precision: str, found: list[tuple[Row, float]], fit: NetworkFit) -> str:
    errors = np.abs([ms / row.latency_ms - 1 for row, ms in found])
    inside = [
        1 / fit.range_of(row.spec) <= row.latency_ms / ms <= fit.range_of(row.spec)
        for row, ms in found
    ]
    return (
        f"| {group} | {precision} | {len(found)} | {np.median(errors):.1%} | "
        f"{np.percentile(errors, 95):.1%} | {errors.max():.1%} | {np.mean(inside):.0%} |"
    )


def main() -> None:
    """Measure or report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency.families")
    parser.add_argument("what", choices=("measure", "report"))
    parser.add_argument("--scratch", type=Path, help="keeps the exported models")
    parser.add_argument("--result", type=Path, default=RESULT)
    asked = parser.parse_args()
    if asked.what == "measure":
        if asked.scratch is None:
            parser.error("measure needs --scratch")
        found = Rows(machine=describe_machine(), rows=measured(asked.scratch))
        write_json(asked.result, found)
    print(report(msgspec.json.decode(asked.result.read_bytes(), type=Rows).rows))


if __name__ == "__main__":
    main()
