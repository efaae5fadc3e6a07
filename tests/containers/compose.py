"""deploy/compose.yaml by Docker Compose: `make containers`. Not collected by `make test`.

A dockerd of its own runs the images that podman has built; skipped, with its last line, where it
does not start. Compose is `docker compose`, or the binary that `make manifests` has fetched. It has
no rules of the firewall, so nothing here shows that the network `fleet` leads nowhere else.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from mdp.testing.processes import until
from tests.support.figures import Figures
from tests.support.patience import PATIENT_S
from tests.support.pictures import encode_picture, four_corners
from tools.containers import BuiltImages
from tools.engine import ROOT
from tools.prepare import MissingError, run

# Not of fixtures: images are built as quickly as network and machine allow.
pytestmark = pytest.mark.timeout(2 * PATIENT_S, func_only=True)
PART = "compose"
FILE = ROOT / "deploy" / "compose.yaml"
DEVICES = {"laptop-cpu", "n100", "raspberry-pi-5"}
#: A network that nothing else of this machine should have.
BRIDGE = "10.250.0.1/24"
URL = "http://127.0.0.1:8080"


class Composed:
    """The services of the file."""

    def __init__(self, compose: list[str], environment: dict[str, str]) -> None:
        self._compose, self._environment = compose, environment

    def run(self, *words: str) -> str:
        """The output of Compose."""
        done = subprocess.run(
            [*self._compose, "--file", str(FILE), *words],
            env=self._environment, capture_output=True, text=True, timeout=PATIENT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def version(self) -> str:
        """Compose's."""
        done = subprocess.run(
            [*self._compose, "version", "--short"], capture_output=True, text=True
        )
        return done.stdout.strip()

    def docker(self, *words: str) -> str:
        """The output of docker."""
        return run(["docker", *words], environment=self._environment)

    def state(self, service: str) -> dict[str, Any]:
        """State of a service's container."""
        made = self.run("ps", "--all", "--quiet", service)
        found: dict[str, Any] = json.loads(self.docker("inspect", made))[0]["State"]
        return found

    def until_healthy(self, service: str) -> None:
        """Wait until docker says so."""
        until(
            lambda: self.state(service)["Health"]["Status"] == "healthy",
            f"{service} is healthy",
            PATIENT_S,
        )

    def until_whole(self) -> float:
        """Wait until all devices answer; seconds."""
        begun_s = time.monotonic()
        until(lambda: self.used() == DEVICES, "an answer of all", PATIENT_S)
        return time.monotonic() - begun_s

    def used(self) -> set[str]:
        """Devices of an answer; none while there is none."""
        place = f"{URL}/v2/models/cifar10/classify?deadline_ms=10000"
        try:
            with urlopen(place, encode_picture(four_corners(), "PNG"), timeout=PATIENT_S) as reply:
                return set(json.load(reply)["used"])
        except (URLError, ConnectionError):
            return set()


def compose_command() -> list[str]:
    """The command; raises MissingError."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    for path in ROOT.glob("runs/manifests/lib/python3*/site-packages/compose/docker-compose"):
        return [str(path)]
    raise MissingError("docker compose is not installed, and make manifests was not run")


@pytest.fixture(scope="module")
def composed(
    built: BuiltImages, figures: Figures, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Composed]:
    folder = tmp_path_factory.mktemp("docker")
    with ExitStack() as stack:
        try:
            for tool in ("docker", "dockerd", "containerd"):
                if shutil.which(tool) is None:
                    raise MissingError(f"{tool} is not installed")
            compose = compose_command()
            environment = start_docker(folder, stack)
        except MissingError as error:
            pytest.skip(str(error))
        for target in built.images:
            kept = folder / f"{target}.tar"
            image = built.images[target]
            built.podman.run("save", "--quiet", "--output", str(kept), image)
            run(["docker", "load", "--quiet", "--input", str(kept)], environment=environment)
            run(["docker", "tag", image, f"mdp-{target}"], environment=environment)
            kept.unlink()
        made = Composed(compose, environment)
        stack.callback(made.run, "down", "--volumes")
        begun_s = time.monotonic()
        made.run("up", "--detach", "--no-build")
        made.until_whole()
        figures.put(up_s=time.monotonic() - begun_s)
        figures.engines["docker"] = made.docker("version", "--format={{.Server.Version}}")
        figures.engines["compose"] = made.version()
        yield made


def start_docker(folder: Path, stack: ExitStack) -> dict[str, str]:
    """Environment of clients of a dockerd of its own; raises MissingError with its last line."""
    stack.callback(subprocess.run, ["ip", "link", "delete", "docker0"], capture_output=True)
    log = folder / "dockerd.log"
    where = f"unix://{folder / 'docker.sock'}"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            ["dockerd", f"--data-root={folder / 'data'}", f"--exec-root={folder / 'exec'}",
             f"--pidfile={folder / 'pid'}", f"--host={where}", f"--bip={BRIDGE}",
             # This machine's firewall stays as it is.
             "--iptables=false"],
            stdout=errors, stderr=errors,
        )  # fmt: skip
    stack.callback(process.wait, PATIENT_S)
    stack.callback(process.terminate)
    environment = os.environ | {"DOCKER_HOST": where}

    def is_over() -> bool:
        asked = subprocess.run(["docker", "version"], env=environment, capture_output=True)
        return asked.returncode == 0 or process.poll() is not None

    until(is_over, "dockerd starts", PATIENT_S)
    if process.poll() is not None:
        said = log.read_text().strip().splitlines() or ["nothing was said"]
        raise MissingError(f"dockerd: {said[-1]}")
    return environment


def test_all_are_healthy(composed: Composed) -> None:
    for service in (*DEVICES, "gateway"):
        composed.until_healthy(service)
    assert composed.state("keys")["ExitCode"] == 0


def test_an_agent_that_is_killed_is_started_again(composed: Composed, figures: Figures) -> None:
    before = composed.state("n100")["Pid"]
    begun_s = time.monotonic()
    subprocess.run(["kill", "-KILL", str(before)], check=True)
    until(
        lambda: composed.state("n100")["Pid"] not in (0, before),
        "docker starts it again",
        PATIENT_S,
    )
    composed.until_whole()
    figures.put(back_s=time.monotonic() - begun_s)


def test_keys_outlive_another_up(composed: Composed) -> None:
    words = ("exec", "--no-TTY", "n100", "cat", "/keys/n100.public")
    before = composed.run(*words)
    composed.run("up", "--detach", "--no-build", "--force-recreate")
    composed.until_whole()
    assert composed.run(*words) == before


def test_they_end_by_themselves(composed: Composed) -> None:
    # Within the file's own `stop_grace_period`, after which Docker kills.
    composed.run("stop")
    for service in (*DEVICES, "gateway"):
        assert composed.state(service)["ExitCode"] == 0, service
