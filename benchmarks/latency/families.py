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
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import RESULTS, kept
from benchmarks.harness.tables import table
from benchmarks.harness.turns import in_turns
from mdp.files import write_bytes, write_json
from mdp.formats.plan import NetworkSpec
from mdp.formats.profile import NetworkPoint
from mdp.runtimes.onnxruntime import open_session
from partitioner.estimates.catalogue import catalogue
from partitioner.estimates.latency_networks import fit_points
from partitioner.export.probe_encoders import (
    NETWORK_PRECISIONS,
    NETWORKS,
    NUM_CLASSES,
    calibration,
    name_of,
    untrained_network,
)
from partitioner.export.quantize import quantized

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


#: Those that a probe measures.
PROBED = tuple(network for tier in NETWORKS.values() for network in tier)


def measured(scratch: Path) -> list[dict[str, Any]]:
    """Every network in every precision; models that are in `scratch` are not exported again."""
    files: dict[NetworkSpec, Path] = {}
    for name, size in (*PROBED, *OTHERS):
        spec = catalogue()[name].spec(size, NUM_CLASSES)
        for precision in NETWORK_PRECISIONS:
            wanted = msgspec.structs.replace(spec, precision=precision)
            files[wanted] = scratch / f"{name_of(wanted)}.onnx"
            if not files[wanted].is_file():
                print(f"export {name_of(wanted)}", file=sys.stderr, flush=True)
                pictures = None if precision == "fp32" else calibration(size)
                source = files[spec].read_bytes() if pictures is not None else None
                content = untrained_network(spec) if source is None else source
                write_bytes(files[wanted], quantized(content, precision, pictures, whole=True))
    return [
        {"name": s.name, "image_size": s.image_size, "precision": s.precision, "latency_ms": ms}
        for s, ms in timed(files).items()
    ]


def timed(files: Mapping[NetworkSpec, Path]) -> dict[NetworkSpec, float]:
    """Milliseconds of processor time of one picture of each; see above."""
    runs = {
        spec: partial(open_session(file).run, None, {"images": calibration(spec.image_size)[:1]})
        for spec, file in files.items()
    }
    found = in_turns(runs, ROUNDS, least=RUNS, seconds=TURN_S, clock=time.process_time)
    return {spec: round(min(map(median, rounds)), 4) for spec, rounds in found.items()}


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: errors of all and of each family, by precision."""
    lines = []
    for precision in NETWORK_PRECISIONS:
        points = [
            msgspec.convert(row | {"threads": 1}, NetworkPoint)
            for row in rows
            if row["precision"] == precision
        ]
        fit = fit_points([p for p in points if (p.name, p.image_size) in PROBED])
        unseen = [p for p in points if (p.name, p.image_size) not in PROBED]
        # As plans have them, with hardly a head.
        specs = [catalogue()[p.name].spec(p.image_size, 0, p.precision) for p in unseen]
        predicted = zip(unseen, specs, fit.predict_many_ms(specs), strict=True)
        groups: dict[str, list[tuple[float, bool]]] = {"all": [], "of a probed family": []}
        for point, spec, ms in predicted:
            times = point.latency_ms / ms
            within = 1 / fit.range_of(spec) <= times <= fit.range_of(spec)
            family = catalogue()[point.name].family
            known = ["of a probed family"] * (family in fit.factors)
            for group in ("all", *known, family):
                groups.setdefault(group, []).append((abs(1 / times - 1), within))
        lines += [(name, precision, np.array(found).T) for name, found in groups.items()]
    return table(
        lines,
        ("", "{0[0]}"),
        ("precision", "{0[1]}"),
        ("networks", lambda line: line[2].shape[1]),
        ("median error", lambda line: f"{np.median(line[2][0]):.1%}"),
        ("95th percentile", lambda line: f"{np.percentile(line[2][0], 95):.1%}"),
        ("largest", lambda line: f"{line[2][0].max():.1%}"),
        ("in the stated range", lambda line: f"{line[2][1].mean():.0%}"),
    )


def main() -> None:
    """Measure or report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency.families")
    parser.add_argument("what", choices=("measure", "report"))
    parser.add_argument("--scratch", type=Path, help="keeps the exported models")
    asked = parser.parse_args()
    if asked.what == "measure":
        if asked.scratch is None:
            parser.error("measure needs --scratch")
        found = {"machine": describe_machine(), "rows": measured(asked.scratch)}
        write_json(RESULTS / "latency-families.json", found)
    print(report(kept("latency-families")["rows"]))


if __name__ == "__main__":
    main()
