"""The first minutes of a newcomer, timed, with the bytes that they fetch and keep.

    python -m benchmarks.newcomer --keep      (all: ten minutes, 12 GB of disk for a while)
    python -m benchmarks.newcomer --ways uvx demo

Each way has an environment of its own, with an empty home, empty caches and none of this one's
variables but those of certificates; the wheel is built of this checkout. All that is fetched comes
through a proxy that counts it. Ends with 1 where a way fails.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import deque
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.results import RESULTS
from benchmarks.newcomer.fetched import FetchedBytes
from benchmarks.newcomer.page import PAGE
from benchmarks.newcomer.ways import ROOT, SHOWN, Way, ways
from mdp import console
from mdp.files import write_json
from mdp.testing.processes import LineProcess

#: Seconds after which a way has failed.
PATIENCE_S = 3600
_LAST_LINES = 15


class WayFailed(Exception):
    """A command of a way ended as it should not."""


def main() -> None:
    options = arguments(__doc__, "keep", ways=tuple(ways()))
    machine, measured = describe_machine(), {}
    with TemporaryDirectory(prefix="mdp-newcomer-") as name:
        wheel = build_wheel(Path(name))
        wheel_bytes = wheel.stat().st_size
        for one, way in ways().items():
            if one not in options.ways:
                continue
            folder = Path(name) / one
            try:
                found = measure(way, folder, wheel)
            except WayFailed as error:
                print(f"{one}: {error}", file=sys.stderr)
                sys.exit(1)
            measured[one] = found
            print(f"{one}: {found}", flush=True)
            shutil.rmtree(folder)
    if options.keep:
        result = {"machine": machine, "wheel_bytes": wheel_bytes, "ways": measured}
        write_json(RESULTS / "newcomer.json", result)
        PAGE.write()


def build_wheel(out: Path) -> Path:
    """The wheel of this checkout."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = out.glob("*.whl")
    return wheel


def measure(way: Way, folder: Path, wheel: Path) -> dict[str, float]:
    """Seconds, bytes fetched and bytes on disk of one way; raises WayFailed."""
    tools, here = folder / "tools", folder / "here"
    folder.mkdir()
    if way.tool:
        subprocess.run([sys.executable, "-m", "venv", str(tools)], check=True)
        install = [str(tools / "bin/pip"), "install", "--quiet", "--only-binary", ":all:", way.tool]
        subprocess.run(install, check=True)
    if way.clone:
        # Through the protocol: as much as from elsewhere, and without links to this one's files.
        subprocess.run(["git", "clone", "--quiet", "--no-local", str(ROOT), str(here)], check=True)
    else:
        here.mkdir()
    before = used_bytes(folder)
    with FetchedBytes() as fetched:
        variables = environment(folder) | {
            "https_proxy": fetched.url,
            "WHEEL": str(wheel),
            "TOOLS": str(tools / "bin"),
            "PICTURE": str(next(ROOT.glob("examples/bundles/digits/pictures/3/*"))),
        }
        spent = follow(way, here, variables)
        return {
            **spent,
            "commands": way.commands,
            "words": way.words,
            "fetched_bytes": fetched.count,
            "clone_bytes": used_bytes(here / ".git") if way.clone else 0,
            "disk_bytes": used_bytes(folder) - before,
            "cache_bytes": used_bytes(folder / "cache"),
        }


def environment(folder: Path) -> dict[str, str]:
    """Variables of who has just come: nothing of this environment but its certificates."""
    kept = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "LANG", "LC_ALL")
    own = Path(sys.prefix) / "bin"
    path = [part for part in os.environ["PATH"].split(os.pathsep) if Path(part) != own]
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "PATH": os.pathsep.join(path),
        "HOME": str(folder / "home"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        # What a machine's owner set for all has no part in it.
        "PIP_CONFIG_FILE": os.devnull,
        "UV_NO_CONFIG": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        "no_proxy": "127.0.0.1,localhost",
    }


def follow(way: Way, here: Path, variables: dict[str, str]) -> dict[str, float]:
    """Run a way's commands; seconds until all was installed, and until its end or its page."""
    script = f"exec 2>&1\ntrap 'kill -KILL $(jobs -p) 2> /dev/null || true' EXIT\ncd '{here}'\n"
    command = [
        "env", "-i", *(f"{name}={value}" for name, value in variables.items()),
        "timeout", "--signal=KILL", str(PATIENCE_S),
        "bash", "-eo", "pipefail", "-c", script + way.script,
    ]  # fmt: skip
    said: deque[str] = deque(maxlen=_LAST_LINES)
    load, began_s, before_s = os.getloadavg()[0], time.monotonic(), _processor_s()
    installed_s = end_s = None
    with LineProcess("way", command, own_session=True) as process:
        for line in process.rest():
            said.append(line)
            if way.installed in line and installed_s is None:
                installed_s = time.monotonic() - began_s
            if way.page and SHOWN in line:
                _wait_for_page(line.partition(" ")[0])
                end_s = time.monotonic() - began_s
                os.killpg(process.process.pid, signal.SIGINT)
        code = process.process.wait()
        if not way.page and code == 0:
            end_s = time.monotonic() - began_s
    if end_s is None or installed_s is None:
        raise WayFailed(f"ended with {code}:\n" + "\n".join(said))
    return {
        "installed_s": installed_s,
        "end_s": end_s,
        "processor_s": _processor_s() - before_s,
        "load_before": load,
    }


def _wait_for_page(url: str) -> None:
    """Read the page; raises OSError where it does not answer."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        answer.read()


def used_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; those of several names count once."""
    files = (path.lstat() for path in folder.rglob("*"))
    return sum({(one.st_dev, one.st_ino): one.st_size for one in files}.values())


def _processor_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    console.run(main, "benchmarks.newcomer")
