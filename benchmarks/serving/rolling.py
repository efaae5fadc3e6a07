"""What it costs clients that a fleet changes its bundle while they ask.

    python -m benchmarks.serving.rolling

The agents of the trained example bundle, or another, one thread each, are asked by one client
without a pause: before; while one agent after the other loads another bundle of the same models
beside the old one and changes over; then, with the client reloaded, after it. Reported are the
latencies of each part, how long each agent took from SIGHUP to serving the new bundle, and how many
answers failed, lacked a member or were late, all of which have to be 0, else it ends with 1. Takes
half a minute.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.harness.machine import describe_machine
from mdp.cli.bench import noise_picture, percentiles
from mdp.client.sync import Client
from mdp.errors import InferenceError
from mdp.files import write_json
from mdp.formats.bundle import MANIFEST, Bundle
from mdp.requests.prediction import Prediction
from mdp.testing.agents import AgentFleet
from mdp.testing.processes import PATIENCE_S

RESULTS = Path(__file__).parents[1] / "results" / "rolling.json"
EXAMPLE = Path(__file__).parents[2] / "examples" / "bundles" / "cifar10"
DEADLINE_MS = 1000.0
#: Length of each part in which nothing changes.
QUIET_S = 8.0


class Asking:
    """Answers of one client that asks without a pause, by part of the run."""

    def __init__(self, client: Client) -> None:
        self.part = "before"
        self.answers: dict[str, list[Prediction]] = {}
        self.failed: list[str] = []
        self._client = client
        self._over = False
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        picture = noise_picture(self._client.bundle.manifest.plan.finest_px)
        while not self._over:
            part = self.part
            try:
                answer = self._client.classify(picture, deadline_ms=DEADLINE_MS)
                self.answers.setdefault(part, []).append(answer)
            except InferenceError as error:
                self.failed.append(str(error))

    def stop(self) -> None:
        self._over = True
        self._thread.join()


def another_bundle(bundle: Path, folder: Path) -> None:
    """The models of `bundle` in one of another identity."""
    shutil.copytree(bundle, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    for assignment in manifest["plan"]["assignments"]:
        assignment["why"] += " (another bundle)"
    (folder / MANIFEST).write_text(json.dumps(manifest))


def point(link: Path, folder: Path) -> None:
    """Let `link` lead to `folder`, at once."""
    aside = link.with_name("aside")
    aside.symlink_to(folder.name)
    aside.replace(link)


def measure(bundle: Path, folder: Path) -> dict[str, object]:
    """One change of bundle, agents first, then the client."""
    shutil.copytree(bundle, folder / "old")
    another_bundle(bundle, folder / "new")
    live = folder / "live"
    live.symlink_to("old")
    digest = Bundle.open(folder / "new").digest[:12]
    with AgentFleet(folder, live) as fleet:
        devices = [a.device for a in Bundle.open(live).manifest.plan.assignments]
        for device in devices:
            fleet.start(device, "--threads", 1)
        with Client.connect(fleet.write(), timeout_s=PATIENCE_S) as client:
            name = client.bundle.manifest.name
            asking = Asking(client)
            try:
                time.sleep(QUIET_S)
                asking.part, took_s = "changing over", {}
                point(live, folder / "new")
                for device in devices:
                    started_s = time.perf_counter()
                    fleet.agents[device].signal(signal.SIGHUP)
                    fleet.agents[device].wait_for(f"serves {name} {digest}")
                    took_s[device] = round(time.perf_counter() - started_s, 3)
                asking.part = "both served"
                time.sleep(QUIET_S)
                asking.part = "reloaded"
                # A fleet file names the folder, not the link to it.
                fleet.write()
                client.reload(timeout_s=PATIENCE_S)
                time.sleep(QUIET_S)
            finally:
                asking.stop()
    return report(asking, took_s)


def report(asking: Asking, took_s: dict[str, float]) -> dict[str, object]:
    """Latencies of every part, and whatever should not have been."""
    answers = [answer for part in asking.answers.values() for answer in part]
    return {
        "answers": len(answers),
        "bundles": len({answer.bundle for answer in answers}),
        "failed": asking.failed,
        "lacking": sum(answer.partial for answer in answers),
        "late": sum(answer.latency_ms > DEADLINE_MS for answer in answers),
        "changed_over_s": took_s,
        "latency_ms": {
            part: {"answers": len(mine), **percentiles([a.latency_ms for a in mine], (50, 99, 100))}
            for part, mine in asking.answers.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bundle", type=Path, default=EXAMPLE, help="whose models to serve")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        result = {"machine": machine, **measure(options.bundle, Path(folder))}
    print(json.dumps(result, indent=1))
    if options.keep:
        write_json(RESULTS, result)
    wrong = result["failed"] or result["lacking"] or result["late"] or result["bundles"] != 2
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
