"""The agent's image of 64-bit ARM, emulated: `make containers`. Not collected by `make test`.

deploy/Containerfile is built, unchanged, by emulated programs on a Debian of that architecture. Its
agent serves beside this machine's image; both are asked the same by a client with a key. Skipped,
with the reason, where the kernel starts no such program in a container.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mdp.client.sync import Client
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet
from mdp.formats.keys import load_public, new_keys
from mdp.requests.prediction import Prediction
from mdp.testing.processes import until
from mdp.transport import new_pair
from tests.support.figures import Figures
from tests.support.patience import PATIENT_S
from tests.support.pictures import encode_picture, four_corners
from tools.containers import ARM, BuiltImages, prepare
from tools.engine import ROOT
from tools.prepare import MissingError

# Not of fixtures: images are built as quickly as network and emulator allow.
pytestmark = pytest.mark.timeout(3 * PATIENT_S, func_only=True)
PART = "arm64"
BUNDLE = ROOT / "examples" / "bundles" / "cifar10"
DEVICE = "n100"
#: As docs/how-to/containers.md has them.
CONFINED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges",
            "--pids-limit=256", "--memory=1g")  # fmt: skip
#: Largest difference of a probability that other instructions may make.
TOLERANCE = 1e-3
#: ELF's number of the architecture (elf.h), and where it stands.
_EM_AARCH64, _E_MACHINE = 183, slice(18, 20)


@pytest.fixture(scope="module")
def emulated() -> BuiltImages:
    try:
        return prepare(ARM)
    except MissingError as error:
        pytest.skip(str(error))


class ServedAgent:
    """An agent in a container of an image, and what its clients need."""

    def __init__(self, images: BuiltImages, folder: Path) -> None:
        self._podman, self._image, self.folder = images.podman, images.images["agent"], folder
        self.name = f"mdp-{folder.parent.name}-{folder.name}"
        #: Keys of the agent, whose user reads them, and of the client, which is this process.
        self._keys, self._own = folder / "keys", folder / "own"
        (self._keys / "clients").mkdir(parents=True)
        self._own.mkdir()
        new_keys(self._keys, DEVICE, new_pair)
        new_keys(self._own, "client", new_pair)
        shutil.copy(self._own / "client.public", self._keys / "clients")
        shutil.copy(self._keys / f"{DEVICE}.public", self._own)
        for path in (self._keys, *self._keys.rglob("*")):
            shutil.chown(path, 10001, 10001)

    def run(self, *words: str) -> str:
        """The output of podman; raises MissingError."""
        return self._podman.run(*words)

    @contextmanager
    def serving(self, *options: str) -> Iterator[float]:
        """Run the agent until the block ends; gives the seconds until READY."""
        begun_s = time.monotonic()
        self.run(
            *("run", "--detach", f"--name={self.name}", "--publish=127.0.0.1::7500", *options),
            *(*CONFINED, f"--volume={BUNDLE}:/bundle:ro"),
            *(f"--volume={self._keys}:/keys:ro", self._image),
            *("run", "--bundle=/bundle", f"--device={DEVICE}", "--bind=tcp://0.0.0.0:7500"),
            *(f"--key=/keys/{DEVICE}.secret", "--clients=/keys/clients"),
        )
        try:
            until(self._is_ready, f"{self.name} is READY", PATIENT_S)
            yield time.monotonic() - begun_s
        finally:
            self.run("rm", "--force", "--time=1", self.name)

    def _is_ready(self) -> bool:
        said = self._tried("logs", self.name)
        assert self.inspect("State")["Running"], said.stdout + said.stderr
        # An agent writes its states to standard error.
        return " READY: " in said.stderr

    def _tried(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = self._podman.command(*words)
        return subprocess.run(
            command, env=self._podman.environment, capture_output=True, text=True, timeout=PATIENT_S
        )

    def health(self) -> str:
        """Ask the image's own check for its verdict; empty where it gave up."""
        return self._tried("exec", self.name, "mdp-agent", "health").stdout.strip()

    def inspect(self, key: str) -> dict[str, object]:
        """A part of what podman knows of the container."""
        found: dict[str, object] = json.loads(self.run("inspect", self.name))[0][key]
        return found

    def answer(self) -> Prediction:
        """The answer to a picture, through keys and TCP."""
        address = f"tcp://{self.run('port', self.name, '7500')}"
        fleet = self.folder / "fleet.toml"
        new_fleet(
            Bundle.open(BUNDLE), [f"{DEVICE}={address}"], fleet,
            public_key=lambda name: load_public(self._own / f"{name}.public"),
            key=self._own / "client.secret",
        )  # fmt: skip
        with Client(fleet) as client:
            picture = encode_picture(four_corners(), "PNG")
            return client.classify(picture, deadline_ms=PATIENT_S * 1e3)


def test_an_emulated_agent_answers_as_this_machine_s(
    built: BuiltImages, emulated: BuiltImages, figures: Figures, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    here, there = ServedAgent(built, tmp_path / "here"), ServedAgent(emulated, tmp_path / "there")
    image = json.loads(there.run("image", "inspect", emulated.images["agent"]))[0]
    assert image["Architecture"] == "arm64"
    assert image["Config"]["Labels"]["org.opencontainers.image.title"] == "mdp-agent"
    with ExitStack() as stack:
        stack.enter_context(here.serving())
        ready_s = stack.enter_context(there.serving("--arch=arm64"))
        process = Path(f"/proc/{there.inspect('State')['Pid']}")
        assert (process / "exe").readlink().name.startswith("qemu-aarch64")
        # The kernel's own root of the process: files are the image's.
        (runtime,) = (process / "root/opt/mdp/lib").rglob("onnxruntime_pybind11_state*.so")
        machine = runtime.read_bytes()[:20][_E_MACHINE]
        assert int.from_bytes(machine, "little") == _EM_AARCH64
        assert str(runtime.relative_to(process / "root")) in (process / "maps").read_text()
        until(lambda: there.health() == f"READY {DEVICE}", "its health", PATIENT_S)
        begun_s = time.monotonic()
        got = there.answer()
        answered_s = time.monotonic() - begun_s
        wanted = here.answer()
    assert got.used == wanted.used == (DEVICE,)
    assert got.label == wanted.label
    assert got.probability == pytest.approx(wanted.probability, abs=TOLERANCE)
    figures.put(
        base_mb=emulated.base_bytes / 1e6,
        agent_built_s=emulated.took_s["agent"],
        agent_added_mb=emulated.added_bytes["agent"] / 1e6,
        ready_s=ready_s,
        answer_s=answered_s,
    )
