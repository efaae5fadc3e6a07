"""podman with a store of its own, a Debian for containers, and wheels of what the package needs.

Debian's packages come from this system's own sources of packages, wheels from wherever pip fetches
other things; both are kept in a folder. podman has nothing of its own outside of that folder. Needs
Debian or a system derived of it, and root.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.prepare import CheckoutError, MissingError, run

ROOT = Path(__file__).resolve().parent.parent
#: What nobody reads in a container.
LEFT_OUT = ("doc", "man", "locale")
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


def check_tools(*more: str) -> None:
    """Raise MissingError unless this machine has what makes and runs containers."""
    for tool in ("podman", "mmdebstrap", "apt-get", *more):
        if shutil.which(tool) is None:
            raise MissingError(f"{tool} is not installed")
    if os.geteuid() != 0:
        raise MissingError("needs root")


def make_base(tree: Path, packages: Sequence[str], architecture: str = "") -> None:
    """Write a minimal system of this one's release, from its own sources of packages.

    Of another Debian architecture, such as arm64, its packages are set up by an emulator.
    """
    sources = [path for path in (Path("/etc/apt/sources.list"),) if path.is_file()]
    lists = Path("/etc/apt/sources.list.d")
    sources += sorted(one for one in lists.glob("*") if one.suffix in (".sources", ".list"))
    suite = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    unfinished = tree.with_name("unfinished.tar")
    left_out = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in LEFT_OUT]
    words = ["--variant=minbase", f"--include={','.join(packages)}", *left_out]
    words += [f"--architectures={architecture}"] if architecture else []
    words.append(suite)
    run(["mmdebstrap", "--quiet", *words, str(unfinished), *map(str, sources)])
    unfinished.rename(tree)


def start_engine(
    folder: Path, tree: Path, image: str, changes: Iterable[str] = (), architecture: str = ""
) -> Podman:
    """podman as this machine has it set up, or with modest settings; raises MissingError.

    It has run the tree as an image of that name, with `changes` as a Containerfile has them, and of
    another architecture where one is given.
    """
    foreign = [f"--arch={architecture}"] if architecture else []
    modest = folder / "containers.conf"
    modest.write_text(_MODEST)
    why = ""
    for settings in (None, modest):
        podman = Podman(folder=folder, settings=settings)
        try:
            if not has_image(podman, image):
                options = [f"--change={change}" for change in changes]
                podman.run("import", *foreign, *options, str(tree), image)
            podman.run("run", "--rm", "--network=none", *foreign, image, "true")
        except MissingError as error:
            why = str(error)
        else:
            return podman
    raise MissingError(why)


def has_image(podman: Podman, image: str) -> bool:
    """Tell whether podman has an image."""
    command = podman.command("image", "exists", image)
    return subprocess.run(command, env=podman.environment, capture_output=True).returncode == 0


def download(folder: Path, extras: Sequence[str], platforms: Sequence[str] = ()) -> str:
    """Fetch wheels of what the package requires, and its build, into `folder`/wheels.

    `platforms` are pip's names of another machine's. Returns a digest of what that is; raises
    MissingError, or CheckoutError for requirements that exclude each other.
    """
    constraints, text = ROOT / "constraints.txt", (ROOT / "pyproject.toml").read_bytes()
    content = constraints.read_bytes() + text + ",".join((*extras, *platforms)).encode()
    digest = hashlib.sha256(content).hexdigest()[:12]
    wheels, done = folder / "wheels", folder / "wheels.json"
    if not done.is_file() or json.loads(done.read_text()) != digest:
        shutil.rmtree(wheels, ignore_errors=True)
        made = tomllib.loads(text.decode())
        wanted = [*made["project"]["dependencies"], *made["build-system"]["requires"]]
        for extra in extras:
            wanted += made["project"]["optional-dependencies"][extra]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
        pip += [f"--platform={name}" for name in platforms]
        try:
            run([*pip, "--dest", str(wheels), "--constraint", str(constraints), *wanted])
        except MissingError as error:
            if "ResolutionImpossible" in str(error):
                raise CheckoutError(str(error)) from error
            raise
        done.write_text(json.dumps(digest))
    return digest
