"""Ready-set batching: callers that ask one at a time, beside the best fixed batch of the runtime.

    python -m benchmarks.serving --only batches

A real agent (`mdp-agent run --batch 8`) serves a ViT of untrained weights, 64 px, 192 wide, 6 deep,
on one thread, and computes as many waiting requests at once as are all in time and quickest a
picture. Callers ask again as they are answered. In turns with them the same model runs in a loop in
this process, with the same runtime and threads, in batches of 1, 2, 4 and 8, of which the quickest
a picture is the rival: nobody can be quicker. `exact` is the largest difference of any probability
from the same picture asked alone, `waits` what a picture that is alone waits in the agent.
"""

import asyncio
import io
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from msgspec.structs import replace

import mdp
from benchmarks.harness.resampling import in_rounds, ratio_interval
from benchmarks.harness.serving_fleet import serve_fleet
from mdp.cli.bench import noise_picture
from mdp.formats.bundle import Bundle
from mdp.formats.plan import SubModelSpec
from mdp.pictures.crop import Pixels
from mdp.runtimes.base import Execution, Runtime
from mdp.runtimes.select import open_runtime
from mdp.testing.agents import AgentFleet
from mdp.testing.bundles import LABELS, colour_plan
from mdp.testing.processes import PATIENCE_S
from partitioner.run.progress import Progress

SHAPE = SubModelSpec(
    image_size=64, patch_size=8, embed_dim=192, depth=6, num_heads=3, mlp_ratio=4.0
)
BATCH, SIZES, CALLERS = 8, (1, 2, 4, 8), (1, 2, 4, 8, 16)
DEADLINE_MS, ROUNDS, BLOCK_S, COMPARED = 10_000.0, 12, 2.0, 64


def write_vit(folder: Path) -> None:
    """A bundle of one device whose model is a ViT of drawn weights."""
    from partitioner.export.write import export_untrained

    plan = colour_plan(("pi",), (SHAPE.image_size,))
    own = replace(plan.assignments[0], submodel=SHAPE)
    plan, progress = replace(plan, assignments=[own]), Progress(io.StringIO())
    export_untrained(plan, LABELS, folder, "batches", progress)


def fixed_rate(runtime: Runtime, pixels: Pixels, seconds: float) -> list[float]:
    """Pictures a second in a loop over `pixels` `[N, S, S, 3]`."""
    runs, started_s = 0, time.perf_counter()
    while (took_s := time.perf_counter() - started_s) < seconds:
        runtime.run(pixels)
        runs += 1
    return [runs * len(pixels) / took_s]


async def _called(path: Path, callers: int, seconds: float) -> list[float]:
    picture = noise_picture(SHAPE.image_size)
    async with mdp.AsyncClient.connect(path, timeout_s=PATIENCE_S) as client:
        until_s, answered = time.perf_counter() + seconds, 0

        async def caller() -> None:
            nonlocal answered
            while time.perf_counter() < until_s:
                await client.classify(picture, deadline_ms=DEADLINE_MS)
                answered += 1

        started_s = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        return [answered / (time.perf_counter() - started_s)]


def called_rate(fleet: AgentFleet, callers: int, seconds: float) -> list[float]:
    """Answers a second of so many callers."""
    return asyncio.run(_called(fleet.folder / "fleet.toml", callers, seconds))


def exact(fleet: AgentFleet) -> tuple[float, float]:
    """Largest difference of a probability between asked alone and together; ms alone in queue."""
    draw = np.random.default_rng(0)
    size = (COMPARED, SHAPE.image_size, SHAPE.image_size, 3)
    pictures = list(draw.integers(0, 256, size, dtype=np.uint8))
    with fleet.client() as client:
        alone = [client.classify(one, deadline_ms=DEADLINE_MS) for one in pictures]
        together = client.classify_many(pictures, deadline_ms=DEADLINE_MS, in_flight=16)
    worst = max(
        abs(dict(one.top)[label] - share)
        for one, other in zip(alone, together, strict=True)
        for label, share in other.top
    )
    return worst, median(one.members[0].queue_ms for one in alone)


def run(*, quick: bool) -> Iterator[dict[str, Any]]:
    rounds, seconds = (2, 0.3) if quick else (ROUNDS, BLOCK_S)
    with serve_fleet(write_vit, "--threads", 1, "--batch", BATCH) as fleet:
        bundle = Bundle.open(fleet.bundle)
        (part,) = bundle.manifest.plan.assignments
        runtime = open_runtime(bundle.model(0), Execution.of(part), num_classes=len(LABELS))
        picture = noise_picture(SHAPE.image_size)
        fixed = {n: partial(fixed_rate, runtime, np.stack([picture] * n), seconds) for n in SIZES}
        called = {-n: partial(called_rate, fleet, n, seconds) for n in CALLERS}
        rates = in_rounds({**fixed, **called}, rounds)
        worst, waits_ms = exact(fleet)
    per_s = {name: median(one for block in found for one in block) for name, found in rates.items()}
    best = max(SIZES, key=per_s.__getitem__)
    for callers in CALLERS:
        low, high = ratio_interval(rates[-callers], rates[best], 50)
        yield {
            "callers": callers,
            "per_s": per_s[-callers],
            "fixed_per_s": {str(n): per_s[n] for n in SIZES},
            "best": best,
            "best_per_s": per_s[best],
            "ratio": per_s[-callers] / per_s[best],
            "ratio_95": [low, high],
            "exact": worst,
            "waits_ms": waits_ms,
            "rounds": rates[-callers],
        }


COLUMNS = (
    ("callers", "{callers}"),
    ("answers a second", "{per_s:.0f}"),
    ("best fixed batch", "{best}"),
    ("its pictures a second", "{best_per_s:.0f}"),
    ("ratio (95 %)", "{ratio:.2f} ({ratio_95[0]:.2f}-{ratio_95[1]:.2f})"),
    ("exact", "{exact:.0e}"),
    ("waits alone, ms", "{waits_ms:.2f}"),
)
