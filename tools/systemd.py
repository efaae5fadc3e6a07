"""A Debian with systemd, and wheels of this checkout to install into it: python -m tools.systemd

As tools/engine.py says, in runs/systemd.
"""

import shutil
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tools.engine import ROOT, Podman, check_tools, download, has_image, make_base, start_engine
from tools.prepare import CheckoutError, MissingError, report, run

FOLDER = ROOT / "runs" / "systemd"
PACKAGES = ("systemd", "systemd-sysv", "dbus", "procps", "python3", "python3-venv")
EXTRAS = ("agent", "sign", "gateway", "mqtt")
IMAGE = "localhost/mdp-systemd"


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
    """Make what is not there yet; raises MissingError, CheckoutError."""
    check_tools()
    folder.mkdir(parents=True, exist_ok=True)
    tree = folder / "base.tar"
    if not tree.exists():
        make_base(tree, PACKAGES)
    podman = start_engine(folder, tree, f"{IMAGE}:base")
    wheel, later = _wheels(folder)
    image = f"{IMAGE}:{download(folder, EXTRAS)}"
    if not has_image(podman, image):
        _install(podman, folder / "wheels", wheel, image)
    return Prepared(podman=podman, image=image, wheels=folder / "wheels", wheel=wheel, later=later)


def wheel_sources() -> list[str]:
    """Files and folders that the wheel is built from, as pyproject.toml names them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    beside = [project["project"]["readme"], *project["project"]["license-files"]]
    return ["pyproject.toml", *beside, *wheel["packages"], *wheel["force-include"]]


def _wheels(folder: Path) -> tuple[Path, Path]:
    """The wheel of this checkout, and one whose version is later."""
    built = []
    for name, later in (("now", False), ("later", True)):
        out = folder / name
        shutil.rmtree(out, ignore_errors=True)
        with tempfile.TemporaryDirectory() as copy:
            for source in wheel_sources():
                path, to = ROOT / source, Path(copy, source)
                to.parent.mkdir(parents=True, exist_ok=True)
                if path.is_dir():
                    shutil.copytree(path, to, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(path, to)
            if later:
                project = Path(copy) / "pyproject.toml"
                text = project.read_text()
                project.write_text(text.replace('\nversion = "', '\nversion = "9.', 1))
            hatchling = [sys.executable, "-m", "hatchling", "build", "--target=wheel"]
            try:
                run([*hatchling, f"--directory={out}"], folder=Path(copy))
            except MissingError as error:
                raise CheckoutError(f"no wheel of this checkout can be built: {error}") from error
        built.append(next(out.glob("*.whl")))
    return built[0], built[1]


def _install(podman: Podman, wheels: Path, wheel: Path, image: str) -> None:
    """Make an image with a virtual environment; the package itself is installed by each test."""
    script = (
        # podman keeps the two outputs apart.
        "exec 2>&1; python3 -m venv /opt/mdp && /opt/mdp/bin/pip install --quiet --no-index "
        f"--find-links /wheels '/wheel/{wheel.name}[{','.join(EXTRAS)}]'"
    )
    mounts = [f"--volume={wheels}:/wheels:ro", f"--volume={wheel.parent}:/wheel:ro"]
    made = podman.run(
        "run", "--detach", "--network=none", *mounts, f"{IMAGE}:base", "sh", "-c", script
    )
    try:
        if podman.run("wait", made) != "0":
            # Both wheels and what they require are of this checkout.
            said = podman.run("logs", made).splitlines() or ["nothing was said"]
            raise CheckoutError(f"the wheel cannot be installed: {said[-1]}")
        podman.run("commit", "--quiet", made, image)
    finally:
        podman.run("rm", "--force", made)


def main() -> int:
    """Prepare, or say in one line what is missing."""
    return report("make systemd", lambda: prepare().image)


if __name__ == "__main__":
    sys.exit(main())
