"""Images of deploy/Containerfile, built by podman on a Debian base: python -m tools.containers

As tools/engine.py says, in runs/containers. The build has no network: pip's settings, which are a
secret of it as the page says, name wheels that were fetched before.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tools.engine import ROOT, Podman, check_tools, download, make_base, start_engine
from tools.prepare import CheckoutError, MissingError, report, run

FOLDER = ROOT / "runs" / "containers"
#: What the Containerfile expects of python:slim.
PACKAGES = ("python3", "python-is-python3", "python3-pip", "python3-venv", "ca-certificates")
EXTRAS = ("agent", "sign", "gateway")
BASE = "localhost/mdp-python:base"
TARGETS = ("agent", "gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltImages:
    """The images of this checkout."""

    podman: Podman
    #: Target of the Containerfile -> image, its bytes beyond the base's, and seconds of the build.
    images: dict[str, str]
    added_bytes: dict[str, int]
    took_s: dict[str, float]

    def __str__(self) -> str:
        return ", ".join(
            f"{target} in {self.took_s[target]:.0f} s, {self.added_bytes[target] / 1e6:.0f} MB more"
            for target in self.images
        )


def prepare(folder: Path = FOLDER) -> BuiltImages:
    """Build each image, and what is not there yet for it; raises MissingError, CheckoutError."""
    check_tools()
    folder.mkdir(parents=True, exist_ok=True)
    tree = folder / "base.tar"
    if not tree.exists():
        make_base(tree, PACKAGES)
    podman = start_engine(folder, tree, BASE)
    download(folder, EXTRAS)
    settings = folder / "pip.conf"
    settings.write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    revision = revision_of(ROOT)
    images, added, took = dict[str, str](), dict[str, int](), dict[str, float]()
    for target in TARGETS:
        images[target] = f"localhost/mdp-{target}"
        begun_s = time.monotonic()
        try:
            podman.run(
                "build", "--quiet", "--format=docker", "--network=none", f"--target={target}",
                f"--tag={images[target]}", f"--build-arg=PYTHON={BASE}",
                f"--label=org.opencontainers.image.revision={revision}",
                f"--secret=id=pip.conf,src={settings}", f"--volume={folder / 'wheels'}:/wheels:ro",
                f"--file={ROOT / 'deploy' / 'Containerfile'}",
                f"--ignorefile={ROOT / 'deploy' / 'Containerfile.dockerignore'}", str(ROOT),
            )  # fmt: skip
        except MissingError as error:
            raise CheckoutError(f"{target}: {error}") from error
        took[target] = time.monotonic() - begun_s
        added[target] = size_bytes(podman, images[target]) - size_bytes(podman, BASE)
    return BuiltImages(podman=podman, images=images, added_bytes=added, took_s=took)


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
