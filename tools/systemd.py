"""A Debian with systemd, and wheels of this checkout to install into it: python -m tools.systemd

Its packages come from this system's own sources of packages, wheels from wherever pip fetches other
things; both are kept in a folder. podman runs it, with nothing of its own outside of that folder.
Needs Debian or a system derived of it, and root.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.prepare import MissingError, report, run

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "runs" / "systemd"
PACKAGES = ("systemd", "systemd-sysv", "dbus", "procps", "python3", "python3-venv")
#: What nobody reads in a container.
LEFT_OUT = ("doc", "man", "locale")
EXTRAS = "agent,sign,gateway,mqtt"
IMAGE = "localhost/mdp-systemd"
#: What the wheel is built from.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "mdp_start.py", "mdp", "devices",
           "partitioner", "profiles")  # fmt: skip
#: For machines on which raising a limit is not allowed, or which have control groups of version 1.
_MODEST = """[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Podman:
    """podman with a store of its own."""

    folder: Path
    #: A file for CONTAINERS_CONF; None for this machine's own.
    settings: Path | None

    def command(self, *words: str) -> list[str]:
        """The command line for `words`."""
        place = ["--root", str(self.folder / "store"), "--runroot", str(self.folder / "run")]
        return ["podman", *place, *words]

    @property
    def environment(self) -> dict[str, str]:
        """Environment of its processes."""
        more = {} if self.settings is None else {"CONTAINERS_CONF": str(self.settings)}
        return os.environ | more

    def run(self, *words: str) -> str:
        """The output of `words`; raises MissingError."""
        return run(self.command(*words), environment=self.environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An image with what this package needs installed in /opt/mdp, and wheels of the package."""

    podman: Podman
    image: str
    #: A folder of wheels of what the package requires.
    wheels: Path
    #: Of this checkout; of the same with a later version.
    wheel: Path
    later: Path


def prepare(folder: Path = FOLDER) -> Prepared:
    """Make what is not there yet; raises MissingError."""
    for tool in ("podman", "mmdebstrap", "apt-get"):
        if shutil.which(tool) is None:
            raise MissingError(f"{tool} is not installed")
    if os.geteuid() != 0:
        raise MissingError("needs root")
    folder.mkdir(parents=True, exist_ok=True)
    tree = folder / "base.tar"
    if not tree.exists():
        _make_base(tree)
    podman = _engine(folder, tree)
    wheel, later = _wheels(folder)
    requirements = _downloads(folder, wheel)
    image = f"{IMAGE}:{requirements}"
    if not _has(podman, image):
        _install(podman, folder / "wheels", wheel, image)
    return Prepared(podman=podman, image=image, wheels=folder / "wheels", wheel=wheel, later=later)


def _make_base(tree: Path) -> None:
    """A minimal system of this one's release, from its own sources of packages."""
    sources = [path for path in (Path("/etc/apt/sources.list"),) if path.is_file()]
    lists = Path("/etc/apt/sources.list.d")
    sources += sorted(one for one in lists.glob("*") if one.suffix in (".sources", ".list"))
    suite = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    unfinished = tree.with_name("unfinished.tar")
    left_out = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in LEFT_OUT]
    words = ["--variant=minbase", f"--include={','.join(PACKAGES)}", *left_out, suite]
    run(["mmdebstrap", "--quiet", *words, str(unfinished), *map(str, sources)])
    unfinished.rename(tree)


def _engine(folder: Path, tree: Path) -> Podman:
    """podman as this machine has it set up, or with modest settings; raises MissingError."""
    modest = folder / "containers.conf"
    modest.write_text(_MODEST)
    why = ""
    for settings in (None, modest):
        podman = Podman(folder=folder, settings=settings)
        try:
            if not _has(podman, f"{IMAGE}:base"):
                podman.run("import", str(tree), f"{IMAGE}:base")
            podman.run("run", "--rm", "--network=none", f"{IMAGE}:base", "true")
        except MissingError as error:
            why = str(error)
        else:
            return podman
    raise MissingError(why)


def _has(podman: Podman, image: str) -> bool:
    command = podman.command("image", "exists", image)
    return subprocess.run(command, env=podman.environment, capture_output=True).returncode == 0


def _wheels(folder: Path) -> tuple[Path, Path]:
    """The wheel of this checkout, and one whose version is later."""
    built = []
    for name, later in (("now", False), ("later", True)):
        out = folder / name
        shutil.rmtree(out, ignore_errors=True)
        with tempfile.TemporaryDirectory() as copy:
            for source in SOURCES:
                path = ROOT / source
                if path.is_dir():
                    unread = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(path, Path(copy) / source, ignore=unread)
                else:
                    shutil.copy(path, copy)
            if later:
                project = Path(copy) / "pyproject.toml"
                text = project.read_text()
                project.write_text(text.replace('\nversion = "', '\nversion = "9.', 1))
            pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
            run([*pip, "--no-build-isolation", "--wheel-dir", str(out), copy])
        built.append(next(out.glob("*.whl")))
    return built[0], built[1]


def _downloads(folder: Path, wheel: Path) -> str:
    """Fetch what the package requires; returns a digest of that."""
    constraints = ROOT / "constraints.txt"
    project = (ROOT / "pyproject.toml").read_bytes()
    digest = hashlib.sha256(constraints.read_bytes() + project + EXTRAS.encode()).hexdigest()[:12]
    wheels, done = folder / "wheels", folder / "wheels.json"
    if not done.is_file() or json.loads(done.read_text()) != digest:
        shutil.rmtree(wheels, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
        where = ["--dest", str(wheels), "--constraint", str(constraints)]
        run([*pip, *where, f"{wheel}[{EXTRAS}]"])
        for own in wheels.glob(wheel.name):
            own.unlink()
        done.write_text(json.dumps(digest))
    return digest


def _install(podman: Podman, wheels: Path, wheel: Path, image: str) -> None:
    """Make an image with a virtual environment; the package itself is installed by each test."""
    script = (
        "python3 -m venv /opt/mdp && /opt/mdp/bin/pip install --quiet --no-index "
        f"--find-links /wheels '/wheel/{wheel.name}[{EXTRAS}]'"
    )
    mounts = [f"--volume={wheels}:/wheels:ro", f"--volume={wheel.parent}:/wheel:ro"]
    made = podman.run(
        "run", "--detach", "--network=none", *mounts, f"{IMAGE}:base", "sh", "-c", script
    )
    try:
        if podman.run("wait", made) != "0":
            raise MissingError(podman.run("logs", made).splitlines()[-1])
        podman.run("commit", "--quiet", made, image)
    finally:
        podman.run("rm", "--force", made)


def main() -> int:
    """Prepare, or say in one line what is missing."""
    return report("make systemd", lambda: prepare().image)


if __name__ == "__main__":
    sys.exit(main())
