"""Images and a fleet by podman: `make containers`. Not collected by `make test`.

The images are built from deploy/Containerfile, once. Three agents and a gateway, each confined as
the page says, pull what they serve from a registry beside them. Skipped, with what the engine says,
where no container can be run; a build that fails is a failure.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from mdp import __version__
from mdp.testing.processes import until
from tests.support.figures import Figures
from tests.support.patience import PATIENT_S
from tests.support.pictures import encode_picture, four_corners
from tests.support.registries import PROGRAM, reason_against
from tools.containers import BASE, BuiltImages
from tools.engine import ROOT

# Not of fixtures: images are built as quickly as network and machine allow.
pytestmark = pytest.mark.timeout(2 * PATIENT_S, func_only=True)
PART = "containers"
BUNDLE = ROOT / "examples" / "bundles" / "imagenette"
#: For an answer of whoever is there, and one that nobody may miss, whatever else this machine does.
DEADLINE_MS, PLENTY_MS = 10_000, 60_000
DEVICES = ("laptop-cpu", "n100", "raspberry-pi-5")
#: As docs/how-to/containers.md has them.
CONFINED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges",
            "--pids-limit=256", "--memory=1g")  # fmt: skip
SOURCE = "oci://registry:5000/shelf/imagenette:1"
REGISTRY = "version: 0.1\nstorage: {filesystem: {rootdirectory: /tmp}}\nhttp: {addr: ':5000'}\n"
#: Seconds an agent is given to answer what it has accepted, and to end.
GRACE_S = 20


class PodmanFleet:
    """Containers of one network, removed at the end."""

    def __init__(self, built: BuiltImages, folder: Path, stack: ExitStack) -> None:
        self._podman, self.images, self.folder = built.podman, built.images, folder
        self._stack = stack
        self.network = f"mdp-{folder.name}"
        self._run("network", "create", self.network)
        stack.callback(self.tried, "network", "rm", "--force", self.network)
        self.picture = encode_picture(four_corners(), "PNG")

    def _run(self, *words: str) -> str:
        done = self.tried(*words)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def tried(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run podman, which may fail."""
        podman = self._podman
        return subprocess.run(
            podman.command(*words),
            env=podman.environment,
            capture_output=True,
            text=True,
            timeout=PATIENT_S,
        )

    def named(self, name: str) -> str:
        """A container's name on this machine; on the network it is `name` alone."""
        return f"{self.network}-{name}"

    def once(self, image: str, *words: str, entry: str, options: tuple[str, ...] = ()) -> str:
        """The output of a confined container that ends."""
        start = ("run", "--rm", f"--network={self.network}", f"--entrypoint={entry}")
        return self._run(*start, *CONFINED, *options, self.images[image], *words)

    def start(self, name: str, image: str, *words: str, options: tuple[str, ...] = ()) -> None:
        """Start a container."""
        names = (
            f"--name={self.named(name)}",
            f"--network={self.network}",
            f"--network-alias={name}",
        )
        self._run("run", "--detach", *names, *options, self.images.get(image, image), *words)
        self._stack.callback(self.tried, "rm", "--force", "--time=1", self.named(name))

    def agent(self, device: str) -> None:
        """Pull a device's part, and start its agent."""
        bundle = self.folder / "bundles" / device
        bundle.mkdir(parents=True, exist_ok=True)
        shutil.chown(bundle, 10001, 10001)
        pulled = ("bundle", "pull", SOURCE, "--device", device, "--out", "/srv/mdp/bundle")
        where = f"--volume={bundle}:/srv/mdp"
        self.once("agent", *pulled, "--insecure", entry="mdp", options=(where,))
        self.start(
            device,
            "agent",
            *("run", "--bundle=/srv/mdp/bundle", f"--device={device}", "--bind=tcp://0.0.0.0:7500"),
            *(f"--key=/keys/{device}.secret", "--clients=/keys/clients"),
            options=(*CONFINED, f"{where}:ro", f"--volume={self.folder / 'keys'}:/keys:ro"),
        )

    def remove(self, name: str) -> None:
        """Remove a container, whatever it does."""
        self._run("rm", "--force", f"--time={GRACE_S}", self.named(name))

    def kill(self, name: str) -> None:
        """Kill a container's process, and wait for its end."""
        self._run("kill", "--signal=KILL", self.named(name))
        self._run("wait", self.named(name))

    def begin(self, name: str) -> None:
        """Start a container again."""
        self._run("start", self.named(name))

    def stop(self, name: str) -> float:
        """Stop a container as an engine does; the seconds until it has ended, by itself."""
        begun_s = time.monotonic()
        self._run("stop", f"--time={GRACE_S}", self.named(name))
        ended_s = time.monotonic() - begun_s
        assert self.state(name)["ExitCode"] == 0, self.logs(name)
        return ended_s

    def state(self, name: str) -> dict[str, Any]:
        """A container's state."""
        found: dict[str, Any] = json.loads(self._run("inspect", self.named(name)))[0]["State"]
        return found

    def process(self, name: str) -> int:
        """The process on this machine."""
        return int(self.state(name)["Pid"])

    def address(self, name: str) -> str:
        """A container's address on its network."""
        shown = json.loads(self._run("inspect", self.named(name)))[0]
        return str(shown["NetworkSettings"]["Networks"][self.network]["IPAddress"])

    def is_healthy(self, name: str) -> bool:
        """Tell what the image's own check says now."""
        return self.tried("healthcheck", "run", self.named(name)).returncode == 0

    def until_healthy(self, name: str) -> None:
        """Wait until the image's own check is content."""
        until(lambda: self.is_healthy(name), f"{name} is healthy", PATIENT_S)

    def logs(self, name: str) -> str:
        """All that a container has written."""
        done = self.tried("logs", self.named(name))
        return done.stdout + done.stderr

    def execute(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a container."""
        return self.tried("exec", self.named(name), *words)

    def url(self) -> str:
        """The gateway's, on this machine."""
        return f"http://{self._run('port', self.named('gateway'), '8080')}"

    def asked(self, deadline_ms: int = DEADLINE_MS) -> tuple[int, dict[str, Any]]:
        """Status and content of the gateway's answer about a picture."""
        place = f"{self.url()}/v2/models/imagenette/classify?deadline_ms={deadline_ms}"
        try:
            with urlopen(place, self.picture, timeout=PATIENT_S) as reply:
                return reply.status, json.load(reply)
        except HTTPError as error:
            with error:
                return error.code, json.load(error)

    def uses(self, *devices: str, deadline_ms: int = DEADLINE_MS) -> Callable[[], bool]:
        """Tell whether exactly these devices answer."""

        def reached() -> bool:
            try:
                status, answer = self.asked(deadline_ms)
            except (URLError, ConnectionError):
                return False
            return status == 200 and set(answer["used"]) == set(devices)

        return reached

    def answered_by(self, *devices: str) -> float:
        """Wait until exactly these devices answer; seconds."""
        begun_s = time.monotonic()
        until(self.uses(*devices), f"an answer of {devices}", PATIENT_S)
        return time.monotonic() - begun_s


@pytest.fixture(scope="module")
def fleet(built: BuiltImages, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodmanFleet]:
    if why := reason_against():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("fleet")
    with ExitStack() as stack:
        made = PodmanFleet(built, folder, stack)
        (folder / "config.yml").write_text(REGISTRY)
        program = shutil.which(PROGRAM)
        made.start("registry", BASE, PROGRAM, "serve", "/config.yml", options=(
            f"--volume={program}:{program}:ro", f"--volume={folder / 'config.yml'}:/config.yml:ro",
        ))  # fmt: skip
        keys = folder / "keys"
        (keys / "clients").mkdir(parents=True)
        for path in (keys, keys / "clients"):
            shutil.chown(path, 10001, 10001)
        kept = (f"--volume={keys}:/keys",)
        for name in ("client", *DEVICES):
            made.once("gateway", "keys", "new", "--out=/keys", f"--name={name}", entry="mdp",
                      options=kept)  # fmt: skip
        shutil.copy(keys / "client.public", keys / "clients")
        made.once("gateway", "bundle", "push", "/bundle", SOURCE, "--insecure", entry="mdp",
                  options=(f"--volume={BUNDLE}:/bundle:ro",))  # fmt: skip
        gateway = folder / "bundles" / "gateway"
        gateway.mkdir(parents=True)
        shutil.chown(gateway, 10001, 10001)
        where = f"--volume={gateway}:/srv/mdp"
        made.once("gateway", "bundle", "pull", SOURCE, "--no-models", "--out=/srv/mdp/bundle",
                  "--insecure", entry="mdp", options=(where,))  # fmt: skip
        devices = [f"--device={device}=tcp://{device}:7500" for device in DEVICES]
        made.once("gateway", "fleet", "new", "--bundle=/srv/mdp/bundle", "--keys=/keys",
                  "--key=/keys/client.secret", "--out=/keys/fleet.toml", *devices, entry="mdp",
                  options=(where, *kept))  # fmt: skip
        made.start(
            "gateway",
            "gateway",
            options=(
                *(*CONFINED, f"{where}:ro", f"--volume={keys}:/keys:ro"),
                "--publish=127.0.0.1::8080",
            ),
        )
        yield made


@pytest.fixture
def whole(fleet: PodmanFleet) -> PodmanFleet:
    """The fleet with all its agents, READY."""
    for device in DEVICES:
        if fleet.execute(device, "mdp-agent", "health").returncode:
            fleet.tried("rm", "--force", "--time=1", fleet.named(device))
            fleet.agent(device)
    fleet.answered_by(*DEVICES)
    return fleet


def test_images(built: BuiltImages, figures: Figures) -> None:
    figures.put(base_mb=built.base_bytes / 1e6)
    for target in built.images:
        figures.put(**{
            f"{target}_built_s": built.took_s[target],
            f"{target}_added_mb": built.added_bytes[target] / 1e6,
        })  # fmt: skip
    for target, image in built.images.items():
        config = json.loads(built.podman.run("image", "inspect", image))[0]
        assert config["User"] == "10001:10001"
        labels = {
            key.removeprefix("org.opencontainers.image."): value
            for key, value in config["Config"]["Labels"].items()
        }
        assert labels["title"] == f"mdp-{target}"
        assert labels["version"] == __version__
        assert labels["revision"] == built.revision
        assert labels["base.name"] == BASE
        assert labels["licenses"] == metadata.metadata("mdp-edge")["License-Expression"]
        # Which podman's own format of images would have dropped.
        assert config["Healthcheck"]["Test"][0] == "CMD"
        listed = built.podman.run(
            *("run", "--rm", "--network=none", "--entrypoint=find", image),
            *("/opt/mdp/bin", "/opt/mdp/lib", "-name", "pip", "-o", "-name", "pip-*"),
        )
        assert listed == ""
    # The package, and nothing of what trains.
    for name in ("torch", "onnx"):
        assert "No module named" in subprocess.run(
            built.podman.command("run", "--rm", "--network=none", "--entrypoint=python",
                                 built.images["agent"], "-c", f"import {name}"),
            env=built.podman.environment, capture_output=True, text=True,
        ).stderr  # fmt: skip


#: What is installed in an image, as its own Python sees it.
LISTED = """
import json
from importlib.metadata import distributions
print(json.dumps(sorted([one.metadata["Name"], one.version] for one in distributions())))
"""


def test_images_have_bills_of_materials(built: BuiltImages) -> None:
    for target, image in built.images.items():
        start = ("run", "--rm", "--network=none")
        installed = json.loads(built.podman.run(*start, "--entrypoint=python", image, "-c", LISTED))
        text = built.podman.run(*start, "--entrypoint=cat", image, "/opt/mdp/sbom.cdx.json")
        bill = json.loads(text)
        project = bill["metadata"]["component"]
        parts = bill["components"]
        named = [[one["name"], one["version"]] for one in (project, *parts)]
        assert sorted(named) == installed
        assert all(one["hashes"] for one in parts), "each is pinned"
        needs = {one["ref"]: one["dependsOn"] for one in bill["dependencies"]}
        runtime = [ref for ref in needs[project["bom-ref"]] if "onnxruntime" in ref]
        assert bool(runtime) == (target == "agent")


def test_a_gateway_before_its_agents_says_why(fleet: PodmanFleet) -> None:
    fleet.until_healthy("gateway")
    status, said = fleet.asked()
    assert status == 503
    assert all(device in json.dumps(said) for device in DEVICES)


def test_three_agents_answer(whole: PodmanFleet, figures: Figures) -> None:
    for name in (*DEVICES, "gateway"):
        # Which gives up after some seconds, on a busy machine too early.
        whole.until_healthy(name)
    begun_s = time.monotonic()
    for _ in range(20):
        assert whole.uses(*DEVICES, deadline_ms=PLENTY_MS)()
    figures.put(answer_ms=(time.monotonic() - begun_s) / 20 * 1e3)
    # Each has its own model alone, and the gateway none.
    found = whole.execute("n100", "find", "/srv/mdp/bundle", "-name", "model.onnx").stdout.split()
    assert found == ["/srv/mdp/bundle/submodels/1/model.onnx"]
    assert whole.execute("gateway", "find", "/srv/mdp", "-name", "*.onnx").stdout == ""


def test_they_are_confined(whole: PodmanFleet, figures: Figures) -> None:
    resident_mb = {}
    for name in (*DEVICES, "gateway"):
        status = Path(f"/proc/{whole.process(name)}/status").read_text()
        shown = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert set(shown["Uid"].split()) == {"10001"}
        assert {shown["CapEff"], shown["CapBnd"]} == {"0" * 16}
        assert shown["NoNewPrivs"] == "1"
        resident_mb[name] = int(shown["VmRSS"].split()[0]) * 1024 / 1e6
        for place in ("/opt/mdp/x", "/etc/x", "/srv/mdp/x", "/keys/x"):
            assert whole.execute(name, "touch", place).returncode == 1
    figures.put(gateway_resident_mb=resident_mb.pop("gateway"))
    figures.put(agent_resident_mb=max(resident_mb.values()))


def test_a_killed_agent_is_missed_and_comes_back(whole: PodmanFleet, figures: Figures) -> None:
    whole.kill("n100")
    figures.put(missed_s=whole.answered_by("laptop-cpu", "raspberry-pi-5"))
    status, answer = whole.asked()
    assert (status, answer["missing"].keys()) == (200, {"n100"})
    begun_s = time.monotonic()
    whole.begin("n100")
    whole.answered_by(*DEVICES)
    figures.put(back_s=time.monotonic() - begun_s)


def test_an_agent_at_another_address_is_found(whole: PodmanFleet, figures: Figures) -> None:
    before = whole.address("n100")
    whole.remove("n100")
    # Which takes the address that was free.
    whole.start("other", "agent", "-c", "import time; time.sleep(300)",
                options=(f"--ip={before}", "--entrypoint=python"))  # fmt: skip
    try:
        begun_s = time.monotonic()
        whole.agent("n100")
        assert whole.address("n100") != before
        whole.answered_by(*DEVICES)
        figures.put(moved_s=time.monotonic() - begun_s)
    finally:
        whole.remove("other")


def test_health_is_ready_and_no_less(whole: PodmanFleet) -> None:
    pid = str(whole.process("n100"))
    subprocess.run(["kill", "-STOP", pid], check=True)
    try:
        assert not whole.is_healthy("n100")
    finally:
        subprocess.run(["kill", "-CONT", pid], check=True)
    whole.until_healthy("n100")


def test_they_end_by_themselves(whole: PodmanFleet, figures: Figures) -> None:
    figures.put(agent_stops_s=whole.stop("n100"))
    assert "DRAINING" in whole.logs("n100")
    figures.put(gateway_stops_s=whole.stop("gateway"))
    whole.begin("gateway")
    whole.begin("n100")
    whole.answered_by(*DEVICES)


def test_an_image_without_the_extra_that_its_device_needs(fleet: PodmanFleet) -> None:
    """The gateway's has no runtime for models."""
    start = ("run", "--rm", "--network=none", *CONFINED, f"--volume={BUNDLE}:/bundle:ro")
    words = ("run", "--bundle=/bundle", "--device=n100")
    done = fleet.tried(*start, "--entrypoint=mdp-agent", fleet.images["gateway"], *words)
    assert done.returncode == 2
    assert "onnxruntime" in done.stderr.splitlines()[-1], done.stderr


def test_a_registry_that_is_gone_leaves_what_was_pulled(whole: PodmanFleet) -> None:
    whole.remove("registry")
    where = f"--volume={whole.folder / 'bundles' / 'n100'}:/srv/mdp"
    done = whole.tried("run", "--rm", f"--network={whole.network}", *CONFINED, where,
                        "--entrypoint=mdp", whole.images["agent"], "bundle", "pull", SOURCE,
                        "--device=n100", "--out=/srv/mdp/bundle", "--insecure")  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert done.stderr.splitlines()[-1].startswith("mdp: registry:5000: ")
    whole.kill("n100")
    whole.begin("n100")
    whole.answered_by(*DEVICES)
