"""Everything that an agent needs on 64-bit ARM, in a folder: python -m tools.arm

An emulator, a Python with its libraries from this system's own Debian release, and wheels. All of
it is fetched by apt-get and pip from wherever they fetch other things, as any user, and nothing of
the system is changed: apt-get is given lists and an empty status of its own.
"""

import json
import os
import platform
import shutil
import sys
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.prepare import MissingError, report, run

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "runs" / "arm"
EMULATOR = "qemu-aarch64-static"
#: The Cortex-A76 is a Raspberry Pi 5's.
PROCESSOR = "cortex-a76"
PACKAGES = (
    "python3.11-minimal", "libpython3.11-stdlib", "libpython3.11-minimal", "libc6", "libstdc++6",
    "libgcc-s1", "zlib1g", "libexpat1", "libffi8", "libssl3",
)  # fmt: skip
PYTHON = "usr/bin/python3.11"
#: Of the newer releases, 1.31.1 ends in start-up under this emulator.
ONNXRUNTIME = "onnxruntime==1.23.2"
PLATFORMS = tuple(
    f"manylinux{form}_aarch64" for form in ("_2_28", "_2_27", "_2_26", "_2_17", "2014")
)
#: Constraints that are about other machines than this one.
_NOT_HERE = ("onnxruntime", "openvino", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Paths of the emulator, the system and the wheels."""

    emulator: Path
    system: Path
    wheels: Path

    def command(self, *arguments: str) -> list[str]:
        """The emulated Python with `arguments`, in which this checkout can be imported."""
        return [
            str(self.emulator), "-cpu", PROCESSOR, "-L", str(self.system),
            "-E", f"PYTHONHOME={self.system / 'usr'}",
            "-E", f"PYTHONPATH={self.wheels}:{ROOT}",
            "-E", "PYTHONDONTWRITEBYTECODE=1",
            str(self.system / PYTHON), *arguments,
        ]  # fmt: skip


def prepare(folder: Path = FOLDER) -> Arm:
    """Fetch what is not there yet; raises MissingError."""
    if platform.machine() != "x86_64":
        raise MissingError(
            f"an x86-64 machine is needed to emulate on, this is {platform.machine()}"
        )
    arm = Arm(
        emulator=folder / "emulator" / "usr" / "bin" / EMULATOR,
        system=folder / "system",
        wheels=folder / "wheels",
    )
    done = folder / "prepared.json"
    wanted = {"packages": PACKAGES, "wheels": _requirements(), "python": PYTHON}
    if done.is_file() and json.loads(done.read_text()) == json.loads(json.dumps(wanted)):
        return arm
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise MissingError(
                f"{tool} is not here: this needs Debian 12 or a system derived of it"
            )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _fetch_packages(folder, arm)
    _fetch_wheels(folder, arm.wheels)
    done.write_text(json.dumps(wanted))
    return arm


def _fetch_packages(folder: Path, arm: Arm) -> None:
    environment = _own_apt(folder / "apt")
    # Some of the system's other sources may have nothing for ARM; what counts is what comes next.
    with suppress(MissingError):
        run(["apt-get", "update", "--quiet"], folder=folder, environment=environment)
    packages = folder / "packages"
    packages.mkdir()
    names = ["qemu-user-static", *(f"{name}:arm64" for name in PACKAGES)]
    run(["apt-get", "download", "--quiet", *names], folder=packages, environment=environment)
    for package in packages.iterdir():
        where = arm.system if package.name.endswith("_arm64.deb") else folder / "emulator"
        run(["dpkg", "--extract", str(package), str(where)], folder=folder, environment=environment)
    for needed in (arm.emulator, arm.system / PYTHON):
        if not needed.exists():
            raise MissingError(f"the packages of this release hold no {needed.name}")
    shutil.rmtree(packages)


def _own_apt(folder: Path) -> dict[str, str]:
    """The environment in which apt-get keeps to `folder`, for this architecture and for ARM."""
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True)
    status, settings = folder / "status", folder / "apt.conf"
    status.touch()
    settings.write_text(
        "#clear APT::Architectures;\n"
        'APT::Architectures { "amd64"; "arm64"; };\n'
        'APT::Sandbox::User "root";\n'
        f'Dir::State "{folder}";\nDir::State::status "{status}";\nDir::Cache "{folder}";\n'
        'Acquire::Languages "none";\n'
    )
    return os.environ | {"APT_CONFIG": str(settings)}


def _requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], ONNXRUNTIME]


def _fetch_wheels(folder: Path, wheels: Path) -> None:
    kept = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    kept.write_text("".join(line for line in lines if not line.startswith(_NOT_HERE)))
    platforms = [option for name in PLATFORMS for option in ("--platform", name)]
    run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(wheels),
         "--only-binary=:all:", *platforms, "--python-version", "3.11", "--implementation", "cp",
         "--constraint", str(kept), *_requirements()],
        folder=folder,
    )  # fmt: skip


def main() -> int:
    """Prepare, or say in one line what is missing."""
    return report("make test-arm", lambda: " ".join(prepare().command()))


if __name__ == "__main__":
    sys.exit(main())
