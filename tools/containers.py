"""Images of deploy/Containerfile, built by podman on a Debian base: python -m tools.containers

As tools/engine.py says, in runs/containers. The build has no network: pip's settings, which are a
secret of it as the page says, name wheels that were fetched before.
"""

import json
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.arm import PLATFORMS
from tools.engine import ROOT, Podman, check_tools, download, make_base, start_engine
from tools.prepare import CheckoutError, MissingError, report, run

FOLDER = ROOT / "runs" / "containers"
#: What the Containerfile expects of python:slim.
PACKAGES = ("python3", "python-is-python3", "python3-pip", "python3-venv", "ca-certificates")
BASE = "localhost/mdp-python:base"
REGISTERED = Path("/proc/sys/fs/binfmt_misc/qemu-aarch64")
#: The first version of qemu that was seen to start onnxruntime; 7.2, Debian 12's, ends it.
LEAST_EMULATOR = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSet:
    """Targets of the Containerfile that are built of the same wheels, which have these extras."""

    targets: tuple[str, ...]
    extras: tuple[str, ...]
    #: A folder of its own below FOLDER for wheels; and for the base of another architecture.
    place: str = ""
    architecture: str = ""

    @property
    def folder(self) -> Path:
        """The folder of the wheels."""
        return FOLDER / self.place


SERVING = ImageSet(targets=("agent", "gateway"), extras=("agent", "sign", "gateway"))
ARM = ImageSet(
    targets=("agent",), extras=("agent", "sign"), place="arm64", architecture="arm64"
)  # fmt: skip
TRAINING = ImageSet(targets=("trainer",), extras=("partition", "sign"), place="training")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltImages:
    """The images of this checkout."""

    podman: Podman
    base_bytes: int
    #: The commit that was checked out.
    revision: str
    #: Target of the Containerfile -> image, its bytes beyond the base's, and seconds of the build.
    images: dict[str, str]
    added_bytes: dict[str, int]
    took_s: dict[str, float]

    def __str__(self) -> str:
        return ", ".join(
            f"{target} in {self.took_s[target]:.0f} s, {self.added_bytes[target] / 1e6:.0f} MB more"
            for target in self.images
        )


def prepare(wanted: ImageSet = SERVING) -> BuiltImages:
    """Build each image, and what is not there yet for it; raises MissingError, CheckoutError."""
    check_tools()
    if wanted.architecture:
        check_emulator()
    folder, base = (wanted.folder, f"{BASE}-arm64") if wanted.architecture else (FOLDER, BASE)
    wanted.folder.mkdir(parents=True, exist_ok=True)
    tree = folder / "base.tar"
    if not tree.exists():
        make_base(tree, PACKAGES, wanted.architecture)
    podman = start_engine(FOLDER, tree, base, architecture=wanted.architecture)
    download(wanted.folder, wanted.extras, PLATFORMS if wanted.architecture else ())
    settings = FOLDER / "pip.conf"
    settings.write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    revision, foreign = revision_of(ROOT), []
    if wanted.architecture:
        foreign = [f"--platform=linux/{wanted.architecture}"]
    images, added, took = dict[str, str](), dict[str, int](), dict[str, float]()
    for target in wanted.targets:
        images[target] = ":".join(filter(None, (f"localhost/mdp-{target}", wanted.architecture)))
        begun_s = time.monotonic()
        try:
            podman.run(
                # Nothing of a former build, or its seconds would be none of this one.
                "build", "--quiet", "--layers=false", "--format=docker", "--network=none",
                f"--target={target}",
                f"--tag={images[target]}", f"--build-arg=PYTHON={base}", *foreign,
                f"--label=org.opencontainers.image.revision={revision}",
                f"--secret=id=pip.conf,src={settings}",
                f"--volume={wanted.folder / 'wheels'}:/wheels:ro",
                f"--file={ROOT / 'deploy' / 'Containerfile'}",
                f"--ignorefile={ROOT / 'deploy' / 'Containerfile.dockerignore'}", str(ROOT),
            )  # fmt: skip
        except MissingError as error:
            raise CheckoutError(f"{target}: {error}") from error
        took[target] = time.monotonic() - begun_s
        added[target] = size_bytes(podman, images[target]) - size_bytes(podman, base)
    podman.run("image", "prune", "--force")
    return BuiltImages(
        podman=podman,
        base_bytes=size_bytes(podman, base),
        revision=revision,
        images=images,
        added_bytes=added,
        took_s=took,
    )


def check_emulator() -> None:
    """Raise MissingError unless containers of 64-bit ARM can start the agent on this machine."""
    if platform.machine() != "x86_64":
        raise MissingError(f"emulation is for an x86-64 machine, this is {platform.machine()}")
    if not REGISTERED.is_file():
        raise MissingError(
            f"{REGISTERED} is not there: expected qemu-user-binfmt to be installed and registered"
        )
    if why := reason_against_emulator(REGISTERED.read_text(), emulator_version):
        raise MissingError(f"{REGISTERED}: {why}")


def reason_against_emulator(registered: str, version_of: Callable[[str], str]) -> str:
    """Reason why a registered emulator does not do; empty where it does.

    `registered` is the kernel's text, `version_of` asks a program.
    """
    lines = registered.splitlines()
    if "enabled" not in lines:
        return "expected it to be enabled"
    given = dict(line.split(" ", 1) for line in lines if " " in line)
    if "F" not in given.get("flags:", ""):
        return "expected flag F, without which no container sees the emulator"
    said = version_of(given.get("interpreter", ""))
    found = re.search(r"version (\d+)", said)
    if found is None or int(found[1]) < LEAST_EMULATOR:
        return f"expected qemu {LEAST_EMULATOR} or later, got {said or 'one that says nothing'!r}"
    return ""


def emulator_version(program: str) -> str:
    """The first line of what a registered emulator says of itself; raises MissingError."""
    # By its own name, as that of the registration changes how it reads its arguments.
    return run([str(Path(program).resolve()), "--version"]).partition("\n")[0]


def revision_of(checkout: Path) -> str:
    """The commit that is checked out."""
    return run(["git", "rev-parse", "HEAD"], folder=checkout)


def size_bytes(podman: Podman, image: str) -> int:
    """The size of an image."""
    return int(json.loads(podman.run("image", "inspect", image))[0]["Size"])


def main() -> int:
    """Build, or say in one line what is missing."""
    return report("make containers", lambda: str(prepare()))


if __name__ == "__main__":
    sys.exit(main())
