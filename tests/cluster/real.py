"""The chart in a Kubernetes that was started for it: `make cluster`. Not collected by `make test`.

Three nodes, one of each device, pull their parts from a registry with a login and a certificate of
its own, and are asked over HTTPS through the gateways' Service. Skipped, with what is missing in
one line, where no such cluster can be started; an image that cannot be built is a failure.
"""

import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mdp import __version__
from mdp.files import write_json
from mdp.testing.processes import until
from tests.cluster.calls import Call, Caller, calling
from tests.cluster.nodes import CONTROL, PAUSE, Cluster, reason_against
from tests.support import registries
from tests.support.pictures import encode_picture, four_corners
from tests.support.web.gateway import self_signed
from tools.containers import SERVING, BuiltImages, prepare
from tools.engine import ROOT
from tools.kubernetes import FOLDER
from tools.prepare import MissingError, run

pytestmark = pytest.mark.timeout(3600)
BUNDLE = ROOT / "examples" / "bundles" / "imagenette"
#: Each on a node of its own.
DEVICES = ("laptop-cpu", "n100", "raspberry-pi-5")
#: Kubernetes' own, where PATH has none.
PROGRAMS = Path(os.environ.get("KUBERNETES") or FOLDER / "bin")
HELM = ROOT / "runs" / "manifests" / "bin" / "python"
REGISTRY, USER, PASSWORD = f"{CONTROL}:5000", "shelf", "of the shelf"
NAME = "gateway.mdp.svc"
PATIENCE_S = 900.0
#: Calls of which each may come to either gateway, so that both are among them.
IN_A_ROW = 20
#: How the agent that ends may be missed; `disconnected` or `late` would be an answer that was lost.
LEAVING = {"draining", "unreachable", "not_ready", "on probation", "unsteady", "failing"}
#: What was measured, which `make cluster KEEP=yes` keeps.
took: dict[str, float] = {}


class ChartFleet:
    """The chart in the cluster, its registry and who asks it."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.keys = folder / "keys"
        self.trusting: dict[str, str] = {}

    def mdp(self, *words: object) -> str:
        """The output of the command `mdp`, on this machine."""
        command = [str(ROOT / ".venv" / "bin" / "mdp"), *map(str, words)]
        return run(command, environment=os.environ | self.trusting)

    def start_registry(self) -> None:
        """Start a registry that has a certificate of its own and asks for a login."""
        certificate, key = self_signed(self.folder / "registry", CONTROL)
        passwords = self.folder / "passwords"
        passwords.write_text(f"{USER}:{registries.hashed(PASSWORD)}\n")
        settings = {
            "version": 0.1,
            "storage": {"filesystem": {"rootdirectory": str(self.folder / "store")}},
            "http": {"addr": REGISTRY, "tls": {"certificate": str(certificate), "key": str(key)}},
            "auth": {"htpasswd": {"realm": "shelf", "path": str(passwords)}},
        }
        file = self.folder / "registry.json"
        file.write_text(json.dumps(settings))
        self.cluster.control.start(registries.PROGRAM, "serve", str(file))
        # A login as `kubectl create secret docker-registry` makes it.
        self.authority, login = certificate, self.folder / "auth.json"
        made = self.kubectl(
            *("create", "secret", "docker-registry", "registry", f"--docker-server={REGISTRY}"),
            *(f"--docker-username={USER}", f"--docker-password={PASSWORD}"),
            "--output=jsonpath={.data.\\.dockerconfigjson}",
        )
        login.write_bytes(subprocess.run(
            ["base64", "--decode"], input=made.encode(), capture_output=True, check=True
        ).stdout)  # fmt: skip
        self.trusting = {"SSL_CERT_FILE": str(certificate), "REGISTRY_AUTH_FILE": str(login)}

    def push(self, bundle: Path, tag: int) -> str:
        """Push a bundle; its name by digest."""
        said = self.mdp("bundle", "push", bundle, f"oci://{REGISTRY}/shelf/imagenette:{tag}")
        return next(word for word in said.split() if "@sha256:" in word)

    def kubectl(self, *words: str, given: str | None = None) -> str:
        """The output of kubectl in the chart's namespace."""
        return self.cluster.kubectl("--namespace=mdp", *words, given=given)

    def pods(self, app: str) -> list[dict[str, Any]]:
        """Pods that are not being deleted."""
        found = self.cluster.objects("pods", "--namespace=mdp", f"--selector=app={app}")
        return [one for one in found if "deletionTimestamp" not in one["metadata"]]

    def pod(self, device: str) -> dict[str, Any]:
        """The agent's pod of a device."""
        (found,) = [one for one in self.pods("mdp-agent")
                    if one["metadata"]["labels"]["mdp/device"] == device]  # fmt: skip
        return found

    def is_ready(self, device: str) -> bool:
        """Tell whether a device has one agent's pod, which is ready."""
        found = [one for one in self.pods("mdp-agent")
                 if one["metadata"]["labels"]["mdp/device"] == device]  # fmt: skip
        states = [
            one["status"]
            for pod in found
            for one in pod["status"].get("conditions", [])
            if one["type"] == "Ready"
        ]
        return states == ["True"]

    def create_secrets(self) -> None:
        """As docs/how-to/containers.md has them."""
        for name in ("client", *DEVICES):
            self.mdp("keys", "new", "--out", self.keys, "--name", name)
        fleet = self.folder / "fleet.toml"
        self.mdp("fleet", "new", "--bundle", BUNDLE, "--keys", self.keys, "--out", fleet,
                 "--key", self.keys / "client.secret",
                 *(f"--device={one}=tcp://agent-{one}:7500" for one in DEVICES))  # fmt: skip
        lines = fleet.read_text().splitlines(keepends=True)
        fleet.write_text("".join(
            'bundle = "/srv/bundle"\n' if one.startswith("bundle = ") else one for one in lines
        ))  # fmt: skip
        tokens = self.folder / "tokens"
        tokens.write_text(f"{os.urandom(24).hex()}\n")
        self.certificate, key = self_signed(self.folder / "tls", NAME)
        generic = ("create", "secret", "generic")
        for device in DEVICES:
            secret = self.keys / f"{device}.secret"
            self.kubectl(*generic, f"agent-{device}", f"--from-file=agent.secret={secret}")
        public = self.keys / "client.public"
        self.kubectl(*generic, "clients", f"--from-file=client.public={public}")
        files = (self.keys / "client.secret", tokens, fleet)
        self.kubectl(*generic, "gateway", *(f"--from-file={path}" for path in files))
        self.kubectl("create", "secret", "tls", "gateway-tls", f"--cert={self.certificate}",
                     f"--key={key}")  # fmt: skip
        self.kubectl(*generic, "authority", f"--from-file=ca.crt={self.authority}")
        self.token = tokens.read_text().strip()

    def apply(self, reference: str, key: str = "", update: str = "RollingUpdate") -> None:
        """Render the chart by Helm, and apply it."""
        values = {
            "updateStrategy": update,
            "bundle": {"reference": reference, "authority": "authority", "key": key},
            "networkPolicy": {"registry": [f"{CONTROL}/32"], "registryPort": 5000},
        }
        done = subprocess.run(
            [HELM, ROOT / "tests" / "deploy" / "chart.py", "--values"],
            input=json.dumps(values), capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        # The one thing that Kubernetes had before 1.21 under another name only.
        assert done.stdout.count("apiVersion: policy/v1\n") == 1
        served = self.cluster.kubectl("api-versions").split()
        version = "policy/v1" if "policy/v1" in served else "policy/v1beta1"
        manifests = done.stdout.replace("apiVersion: policy/v1\n", f"apiVersion: {version}\n")
        self.kubectl("apply", "--filename=-", given=manifests)
        self.cluster.publish_names()

    def caller(self) -> Caller:
        """A caller from outside, which asks the gateways' Service."""
        address = self.kubectl("get", "service", "gateway", "--output=jsonpath={.spec.clusterIP}")
        picture = encode_picture(four_corners(), "PNG")
        return Caller(address, NAME, self.certificate, self.token, "imagenette", picture)

    def answered_by(self, *devices: str) -> float:
        """Wait until exactly these devices answer, whichever gateway is asked; seconds."""
        begun_s, caller = time.monotonic(), self.caller()
        until(
            lambda: all(caller.ask().used == set(devices) for _ in range(IN_A_ROW)),
            f"answers of {devices}", PATIENCE_S,
        )  # fmt: skip
        return time.monotonic() - begun_s

    def rolled_out(self) -> float:
        """Wait until all that was applied runs and is ready; seconds."""
        begun_s = time.monotonic()
        for name in ("deployment/gateway", *(f"daemonset/agent-{one}" for one in DEVICES)):
            self.kubectl("rollout", "status", name, f"--timeout={PATIENCE_S:.0f}s")
        return time.monotonic() - begun_s


@pytest.fixture(scope="module")
def built() -> BuiltImages:
    """Images of this checkout; skipped where no cluster or container can be started."""
    if why := reason_against(PROGRAMS) or registries.reason_against():
        pytest.skip(why)
    if not HELM.is_file():
        pytest.skip("Helm is not there, as make manifests was not run")
    try:
        return prepare()
    except MissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def fleet(built: BuiltImages, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChartFleet]:
    """The chart, applied; no node has a device yet."""
    folder = tmp_path_factory.mktemp("cluster")
    with ExitStack() as stack:
        begun_s = time.monotonic()
        try:
            nodes = [f"node-{device}" for device in DEVICES]
            cluster = stack.enter_context(Cluster(folder / "rooms", PROGRAMS, nodes))
        except MissingError as error:
            pytest.skip(str(error))
        took["nodes_ready_s"] = time.monotonic() - begun_s
        began_s = time.monotonic()
        archive = packed(built, folder)
        cluster.load(archive, {
            f"localhost/mdp-{one}:latest": f"docker.io/library/mdp-{one}:{__version__}"
            for one in SERVING.targets
        })  # fmt: skip
        archive.unlink()
        took["images_loaded_s"] = time.monotonic() - began_s
        cluster.kubectl("apply", f"--filename={ROOT / 'deploy' / 'kubernetes' / 'namespace.yaml'}")
        made = ChartFleet(cluster, folder)
        made.start_registry()
        made.create_secrets()
        made.apply(made.push(BUNDLE, 1))
        yield made
        took["cluster_mb"] = cluster.memory_bytes() / 1e6
        version = {"kubernetes": cluster.version, "nodes": len(DEVICES)}
    figures = {key: round(value, 2) for key, value in took.items()}
    write_json(ROOT / "runs" / "cluster" / "figures.json", version | figures)
    print(f"\nmeasured: {json.dumps(version | figures)}")


def packed(built: BuiltImages, folder: Path) -> Path:
    """The images, and one that only holds a pod's network, in an archive."""
    tree, archive = folder / "pause.tar", folder / "images.tar"
    program = shutil.which("catatonit")
    assert program is not None
    with tarfile.open(tree, "w") as tar:
        tar.add(program, "catatonit")
    built.podman.run("import", '--change=ENTRYPOINT ["/catatonit","-P"]', str(tree), PAUSE)
    built.podman.run("save", "--quiet", "--multi-image-archive", f"--output={archive}",
                     PAUSE, *built.images.values())  # fmt: skip
    return archive


@pytest.fixture
def whole(fleet: ChartFleet) -> ChartFleet:
    """The fleet with each device on its node, READY."""
    for device in DEVICES:
        node = f"node-{device}"
        fleet.cluster.kubectl("uncordon", node)
        fleet.cluster.kubectl("label", "--overwrite", "node", node, f"mdp/device={device}")
    until(lambda: len(fleet.pods("mdp-agent")) == len(DEVICES), "pods of all agents", PATIENCE_S)
    fleet.rolled_out()
    fleet.answered_by(*DEVICES)
    return fleet


def test_gateways_without_agents_are_ready_and_say_why(fleet: ChartFleet) -> None:
    begun_s = time.monotonic()
    fleet.kubectl("rollout", "status", "deployment/gateway", f"--timeout={PATIENCE_S:.0f}s")
    took["gateways_ready_s"] = time.monotonic() - begun_s
    assert fleet.pods("mdp-agent") == []
    answer = fleet.caller().ask()
    assert answer.status == 503, answer
    assert all(device in json.dumps(answer.body) for device in DEVICES)


def test_three_agents_get_ready_and_answer(fleet: ChartFleet) -> None:
    for device in DEVICES:
        fleet.cluster.kubectl("label", "node", f"node-{device}", f"mdp/device={device}")
    took["agents_answer_s"] = fleet.answered_by(*DEVICES)
    fleet.rolled_out()
    for device in DEVICES:
        assert fleet.pod(device)["spec"]["nodeName"] == f"node-{device}"
    caller = fleet.caller()
    answers = [caller.ask() for _ in range(20)]
    assert all((one.status, one.used) == (200, set(DEVICES)) for one in answers)
    took["answer_s"] = sum(one.took_s for one in answers) / len(answers)
    assert caller.ask(token="of somebody else").status == 401


_ASKING = """
import ssl
from urllib.request import urlopen
trusted = ssl.create_default_context(cafile="/run/tls/tls.crt")
print(urlopen("https://{}/v2/health/ready", context=trusted).status)
"""


def test_the_gateway_is_found_by_name_in_the_cluster(whole: ChartFleet) -> None:
    asking = ("exec", "deploy/gateway", "--", "python", "-c", _ASKING.format(NAME))
    assert whole.kubectl(*asking) == "200"


def test_pods_are_confined_and_have_their_part_alone(whole: ChartFleet) -> None:
    for app in ("mdp-agent", "mdp-gateway"):
        for pod in whole.pods(app):
            name = pod["metadata"]["name"]
            status = whole.kubectl("exec", name, "--", "cat", "/proc/1/status")
            shown = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            assert set(shown["Uid"].split()) == {"10001"}
            assert {shown["CapEff"], shown["CapBnd"]} == {"0" * 16}
            assert (shown["NoNewPrivs"], shown["Seccomp"]) == ("1", "2")
            memory_mb = int(shown["VmRSS"].split()[0]) / 1024
            took[f"{app}_mb"] = max(took.get(f"{app}_mb", 0.0), memory_mb)
            for place in ("/opt/mdp/x", "/etc/x", "/srv/x", "/run/mdp/x"):
                assert whole.cluster.tried("--namespace=mdp", "exec", name, "--", "touch",
                                           place).returncode == 1  # fmt: skip
    find = ("find", "/srv/bundle", "-name", "model.onnx")
    pod = whole.pod("n100")["metadata"]["name"]
    found = whole.kubectl("exec", pod, "--container=agent", "--", *find)
    assert found == "/srv/bundle/submodels/1/model.onnx"
    assert whole.kubectl("exec", "deploy/gateway", "--", *find) == ""


def all_answered(calls: Sequence[Call], *, may_miss: str | None = None) -> None:
    """Fail unless each call has an answer, of all devices or without this one, which it names."""
    assert len(calls) > 0
    for call in calls:
        assert call.status == 200, call
        assert call.used | call.missing.keys() == set(DEVICES), call
        assert call.missing.keys() <= {may_miss}, call


def test_an_agent_whose_pod_is_deleted_ends_what_it_accepted(whole: ChartFleet) -> None:
    """Calls flow on, name it while it is missed, and lose no answer that it owed."""
    pod = whole.pod("n100")["metadata"]["name"]
    command = [
        *whole.cluster.command("--namespace=mdp", "logs", "--follow", "--container=agent", pod)
    ]
    with calling(whole.caller(), 4) as calls:
        until(lambda: len(calls) > 20, "calls", PATIENCE_S)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
            begun_s = time.monotonic()
            whole.kubectl("delete", "pod", pod)
            took["agent_pod_stops_s"] = time.monotonic() - begun_s
            said, _ = following.communicate(timeout=PATIENCE_S)
        took["agent_pod_replaced_s"] = until_whole(calls, begun_s)
    assert '"event":"DRAINING"' in said, said
    all_answered(calls, may_miss="n100")
    degraded = [one for one in calls if one.missing]
    assert degraded, "it was never missed"
    reasons = {one.missing["n100"].partition(":")[0] for one in degraded}
    assert reasons <= LEAVING
    took["calls_while_deleted"] = len(calls)
    took["partial_while_deleted"] = len(degraded)


def until_whole(calls: list[Call], since_s: float) -> float:
    """Wait until the last calls are whole again, after some that were not; seconds."""

    def is_whole() -> bool:
        missed = any(one.missing for one in calls if one.begun_s > since_s)
        return missed and all(one.used == set(DEVICES) for one in calls[-20:])

    until(is_whole, "answers of all again", PATIENCE_S)
    return time.monotonic() - since_s


def test_a_killed_agent_is_started_again(whole: ChartFleet) -> None:
    before = whole.pod("n100")
    node = whole.cluster.nodes["node-n100"]
    with calling(whole.caller(), 2) as calls:
        begun_s = time.monotonic()
        kill(node.pid_of("--device=n100"))
        took["agent_killed_s"] = until_whole(calls, begun_s)
    all_answered(calls, may_miss="n100")
    after = whole.pod("n100")
    assert after["metadata"]["name"] == before["metadata"]["name"]
    counts = [one["status"]["containerStatuses"][0]["restartCount"] for one in (before, after)]
    assert counts[1] == counts[0] + 1


def kill(pid: int) -> None:
    """SIGKILL."""
    os.kill(pid, 9)


def lossless(whole: ChartFleet, change: Callable[[], None], what: str) -> None:
    """Fail unless all callers are answered by all devices while the gateways change."""
    with calling(whole.caller(), 4) as calls:
        until(lambda: len(calls) > 20, "calls", PATIENCE_S)
        begun_s = time.monotonic()
        change()
        took[f"{what}_s"] = time.monotonic() - begun_s
        enough = len(calls) + 20
        until(lambda: len(calls) > enough, "further calls", PATIENCE_S)
    took[f"{what}_calls"] = len(calls)
    refused = [one for one in calls if one.status != 200]
    took[f"{what}_lost"] = len(refused)
    assert refused == []
    all_answered(calls)


def test_gateways_are_replaced_without_a_lost_call(whole: ChartFleet) -> None:
    before = {one["metadata"]["name"] for one in whole.pods("mdp-gateway")}

    def restart() -> None:
        whole.kubectl("rollout", "restart", "deployment/gateway")
        whole.rolled_out()

    lossless(whole, restart, "gateways_replaced")
    assert before.isdisjoint(one["metadata"]["name"] for one in whole.pods("mdp-gateway"))


def test_a_node_is_drained_without_a_lost_call(whole: ChartFleet) -> None:
    node = whole.pods("mdp-gateway")[0]["spec"]["nodeName"]

    def drain() -> None:
        whole.cluster.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data",
                              f"--timeout={PATIENCE_S:.0f}s")  # fmt: skip
        whole.rolled_out()

    lossless(whole, drain, "node_drained")
    assert all(one["spec"]["nodeName"] != node for one in whole.pods("mdp-gateway"))


def test_the_last_gateways_keep_their_budget(whole: ChartFleet) -> None:
    """Where no other node takes one, a drain waits, and the last gateway answers."""
    nodes = [f"node-{device}" for device in DEVICES]
    for node in nodes:
        whole.cluster.kubectl("cordon", node)
    done = whole.cluster.tried("drain", *nodes, "--ignore-daemonsets", "--delete-emptydir-data",
                               "--timeout=20s")  # fmt: skip
    assert done.returncode != 0
    assert "disruption budget" in done.stderr
    assert whole.caller().ask().used == set(DEVICES)
    for node in nodes:
        whole.cluster.kubectl("uncordon", node)


def test_a_signed_bundle_replaces_all_pods_at_once(whole: ChartFleet) -> None:
    """By another digest; its agents check the signature. Callers are told why nobody answers."""
    signed = whole.folder / "signed"
    shutil.copytree(BUNDLE, signed)
    whole.mdp("bundle", "key", "--out", whole.keys, "--name", "release")
    whole.mdp("bundle", "sign", "--bundle", signed, "--key", whole.keys / "release.secret")
    public = whole.keys / "release.public"
    whole.kubectl("create", "secret", "generic", "release", f"--from-file={public}")
    before = {one: whole.pod(one)["metadata"]["name"] for one in DEVICES}
    with calling(whole.caller(), 2) as calls:
        begun_s = time.monotonic()
        whole.apply(whole.push(signed, 2), key="release")
        whole.rolled_out()
        took["upgrade_s"] = time.monotonic() - begun_s
        until(lambda: calls[-1].used == set(DEVICES), "answers of all", PATIENCE_S)
    silent = [one for one in calls if one.status != 200]
    for call in silent:
        assert call.status == 503, call
        assert all(device in json.dumps(call.body) for device in DEVICES), call
    took["upgrade_silent_s"] = (
        max(one.begun_s + one.took_s for one in silent) - min(one.begun_s for one in silent)
        if silent
        else 0.0
    )
    for device in DEVICES:
        pod = whole.pod(device)
        assert pod["metadata"]["name"] != before[device]
        args = pod["spec"]["containers"][0]["args"]
        assert "--bundle-key=/run/release/release.public" in args


def test_a_bundle_is_changed_device_by_device_without_a_lost_call(whole: ChartFleet) -> None:
    """With `OnDelete`, whoever deletes the pods decides when; two others answer meanwhile."""
    reference = whole.push(BUNDLE, 1)
    before = {one: whole.pod(one)["metadata"]["name"] for one in DEVICES}
    with calling(whole.caller(), 2) as calls:
        begun_s = time.monotonic()
        whole.apply(reference, update="OnDelete")
        for device in DEVICES:
            assert whole.pod(device)["metadata"]["name"] == before[device]
            whole.kubectl("delete", "pod", before[device])
            until(partial(whole.is_ready, device), f"another {device} is ready", PATIENCE_S)
            until(
                lambda: all(one.used == set(DEVICES) for one in calls[-IN_A_ROW:]),
                "answers of all", PATIENCE_S,
            )  # fmt: skip
        took["by_hand_s"] = time.monotonic() - begun_s
    assert [one for one in calls if one.status != 200] == []
    assert max(len(one.missing) for one in calls) == 1
    for device in DEVICES:
        args = whole.pod(device)["spec"]["containers"][0]["args"]
        assert "--bundle-key=/run/release/release.public" not in args
    whole.apply(reference)


def test_an_upgrade_to_an_image_that_is_not_there_is_rolled_back(whole: ChartFleet) -> None:
    """It replaces no gateway meanwhile."""
    before = {one["metadata"]["name"] for one in whole.pods("mdp-gateway")}

    def waits() -> bool:
        waiting = [
            one.get("state", {}).get("waiting", {}).get("reason")
            for pod in whole.pods("mdp-gateway")
            for one in pod["status"].get("initContainerStatuses", [])
            + pod["status"].get("containerStatuses", [])
        ]
        return bool({"ErrImagePull", "ImagePullBackOff"} & set(waiting))

    with calling(whole.caller(), 2) as calls:
        whole.kubectl("set", "image", "deployment/gateway", "gateway=mdp-gateway:none",
                      "bundle=mdp-gateway:none")  # fmt: skip
        until(waits, "an image that is not there", PATIENCE_S)
        whole.kubectl("rollout", "undo", "deployment/gateway")
        whole.rolled_out()
    all_answered(calls)
    assert {one["metadata"]["name"] for one in whole.pods("mdp-gateway")} == before
