"""Changes of a fleet's bundle while it answers: pushes and rollbacks, by the command line."""

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.soak.clients import PATIENCE_S
from benchmarks.soak.pictures import DEVICES

#: Seconds between two changes, and before a refused one is tried again.
EVERY_S, AGAIN_S = (4.0, 10.0), 0.5
#: Every so many changes, agents go back by a rollback instead of another push.
ROLLBACK_EVERY = 3
#: A command takes no longer unless it fails.
COMMAND_S = 600.0
#: Exit codes: done; a device does not serve it, which a killed one cannot.
DONE, DEVICE_FAILED = 0, 3
#: The link to the bundle that clients and gateway hold.
HELD = "held"


def point(folder: Path, bundle: Path) -> None:
    """Let the link in `folder` lead to another bundle, at once."""
    following = folder / f"{HELD}-next"
    following.symlink_to(bundle)
    following.replace(folder / HELD)


class Changes:
    """Has all agents serve each of `bundles` in turns, and then clients and gateway hold it."""

    def __init__(self, fleet: Path, bundles: Sequence[Path], seed: int) -> None:
        self._fleet, self._bundles = fleet, bundles
        self._chance = random.Random(seed)
        self._place = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        #: Changes that were made, and commands by their name and exit code.
        self.counts: Counter[str] = Counter()
        #: Exit codes that are neither success nor a device's failure, with what was said.
        self.complaints: list[str] = []

    def begin(self) -> None:
        """Change over and over, in a thread of its own."""
        self._over.clear()
        self._thread = threading.Thread(target=self._run, name="changes")
        self._thread.start()

    def finish(self) -> None:
        """End, with all agents serving what clients and gateway hold."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._chance.uniform(*EVERY_S)):
            self._place = 1 - self._place
            back = self.counts["changes"] % ROLLBACK_EVERY == ROLLBACK_EVERY - 1
            if back:
                for device in DEVICES:
                    self._command("rollback", device)
            self._push(self._bundles[self._place])
            point(self._fleet.parent, self._bundles[self._place])
            self.counts["changes"] += 1
            self.counts["by rollback"] += back

    def _push(self, bundle: Path) -> None:
        """Push until every agent serves `bundle`; where a rollback has done it, that is at once."""
        until_s = time.monotonic() + PATIENCE_S
        while self._command("push", bundle) != DONE:
            if time.monotonic() > until_s:
                self.complaints.append(f"push: {bundle.name} is not served after {PATIENCE_S:g} s")
                return
            time.sleep(AGAIN_S)

    def _command(self, name: str, what: object) -> int:
        program = Path(sys.executable).parent / "mdp"
        words = [program, "bundle", name, what, "--fleet", self._fleet]
        done = subprocess.run(
            list(map(str, words)), capture_output=True, text=True, check=False, timeout=COMMAND_S
        )
        self.counts[f"{name}: exit code {done.returncode}"] += 1
        if done.returncode not in (DONE, DEVICE_FAILED):
            self.complaints.append(f"{name}: exit code {done.returncode}: {done.stderr.strip()}")
        return done.returncode
