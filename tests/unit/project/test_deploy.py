"""Contents of deploy/ fit the commands, files and addresses of this checkout."""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from devices.cli.main import app as agent_app
from devices.health import PORT
from mdp.cli.main import app as mdp_app
from mdp.formats.bundle import Bundle
from mdp.gateway.access import OPEN
from mdp.registry.reference import parse_reference
from tests.support.container import ROOT, stages
from tools.systemd import wheel_sources

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
APPS = {"mdp": mdp_app, "mdp-agent": agent_app}
DEVICES = {
    a.device for a in Bundle.open(ROOT / "examples/bundles/cifar10").manifest.plan.assignments
}


def options(program: str, words: list[str]) -> dict[str, Any]:
    """The values of a command line; click ends the test where one is wrong."""
    command: Any = typer.main.get_command(APPS[program])
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    context = command.make_context(name, words)
    found: dict[str, Any] = context.params
    return found


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every pod of the manifests, with its name."""
    for path in sorted(KUBERNETES.rglob("*.yaml")):
        for manifest in filter(None, yaml.safe_load_all(path.read_text())):
            spec, name = manifest.get("spec", {}), manifest["metadata"]["name"]
            if manifest["kind"] in ("DaemonSet", "Deployment"):
                yield name, spec["template"]["spec"]
            elif manifest["kind"] == "ServingRuntime":
                yield name, spec


def rendered() -> list[dict[str, Any]]:
    """Manifests that the chart makes of its own values; `make manifests` compares the file."""
    return list(yaml.safe_load_all((KUBERNETES / "mdp.yaml").read_text()))


def test_images_start_what_there_is() -> None:
    found = stages()
    for name, program in (("agent", "mdp-agent"), ("gateway", "mdp")):
        stage = found[name]
        assert stage.last("USER") == "10001:10001"
        assert stage.words("ENTRYPOINT") == [program]
        assert stage.environment["PATH"].startswith("/opt/mdp/bin:")
        assert "10001" in stage.last("RUN")
    given = options("mdp", found["gateway"].words("CMD"))
    port = given["bind"].rpartition(":")[2]
    assert found["gateway"].last("EXPOSE") == port
    assert f"127.0.0.1:{port}/v2/health/live" in found["gateway"].words("HEALTHCHECK")[-1]
    assert found["agent"].words("HEALTHCHECK") == ["mdp-agent", "health"]
    assert found["agent"].last("EXPOSE") == str(PORT)


def test_images_are_built_from_what_there_is() -> None:
    found = stages()
    sent = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
    copied = [text.split()[:-1] for name, text in found["wheel"].instructions if name == "COPY"]
    for source in [one for sources in copied for one in sources]:
        assert (ROOT / source).exists()
        assert f"!{source}" in sent
    given = {source for sources in copied for source in sources}
    for needed in wheel_sources():
        assert given & {needed, *map(str, Path(needed).parents)}, needed
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for name, extra in (("agent", "agent"), ("gateway", "gateway"), ("trainer", "partition")):
        install = found[f"{name}-packages"].last("RUN")
        chosen = re.findall(r"\.whl\)\[([a-z,]+)\]", install)[0].split(",")
        assert extra in chosen
        assert set(chosen) <= extras.keys()
        assert "--only-binary :all:" in install
        assert "--constraint constraints.txt" in install
        # The bill of materials is of the extras that were installed.
        assert f"--extras {','.join(chosen)} " in install
    for stage in found.values():
        for name, text in stage.instructions:
            if name == "RUN":
                # Options of RUN come before the command.
                script = re.sub(r"^(--\S+\s+)+", "", text)
                subprocess.run(["sh", "-n", "-c", script], check=True)


def test_compose_serves_every_device() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    agents = {name: s for name, s in services.items() if name not in ("keys", "gateway")}
    assert agents.keys() == DEVICES
    for name, service in agents.items():
        given = options("mdp-agent", service["command"])
        assert (given["device"], given["key"]) == (name, Path(f"/keys/{name}.secret"))
        assert given["bind"] == f"tcp://0.0.0.0:{stages()['agent'].last('EXPOSE')}"
        assert f"--device {name}=tcp://{name}:7500" in services["keys"]["command"][0]
        # podman builds images that have none.
        assert service["healthcheck"]["test"] == ["CMD", *stages()["agent"].words("HEALTHCHECK")]
    checked = ["CMD", *stages()["gateway"].words("HEALTHCHECK")]
    assert services["gateway"]["healthcheck"]["test"] == checked
    # Each image is built once.
    built = [s["build"]["target"] for s in services.values() if "build" in s]
    assert sorted(built) == ["agent", "gateway"]
    assert all("build" in s or s["pull_policy"] == "never" for s in services.values())


@pytest.mark.parametrize("name", ["mdp-agent@", "mdp-gateway"])
def test_quadlet_starts_what_there_is(name: str) -> None:
    """Units by podman start the images' own commands; `make containers` has the generator."""
    text = (DEPLOY / "quadlet" / f"{name}.container").read_text()
    given = dict(re.findall(r"^(\w+)=(.*)$", text.split("[Container]")[1], re.M))
    kind = name.strip("@").removeprefix("mdp-")
    stage = stages()[kind]
    assert given["Image"] == f"localhost/mdp-{kind}"
    words = given["Exec"].replace("%i", "n100").split()
    used = options(stage.words("ENTRYPOINT")[0], words)
    port = used["bind"].rpartition(":")[2]
    assert given["PublishPort"].endswith(f"{port}:{port}")
    # Plain HTTP is for this machine alone.
    assert given["PublishPort"].startswith("127.0.0.1:") == bool(used.get("insecure"))
    mounted = [line.split(":")[1:] for line in re.findall(r"^Volume=(.*)$", text, re.M)]
    assert mounted == [["/srv/bundle", "ro"], ["/etc/mdp", "ro"]]
    assert used["key"].parent == Path("/etc/mdp")
    assert shlex.split(given["HealthCmd"]) == stage.words("HEALTHCHECK")


def test_services_name_their_protocol() -> None:
    """A server of before 1.21 refuses server-side apply without it, which Helm uses."""
    found = [one for one in rendered() if one["kind"] == "Service"]
    assert len(found) == len(DEVICES) + 1
    assert all(port["protocol"] == "TCP" for one in found for port in one["spec"]["ports"])


@pytest.mark.parametrize("pod", [one for _, one in pods()], ids=[name for name, _ in pods()])
def test_pods_start_what_there_is_and_have_no_rights(pod: dict[str, Any]) -> None:
    container = pod["containers"][0]
    stage = stages()[container["image"].partition(":")[0].removeprefix("mdp-")]
    given = options(stage.words("ENTRYPOINT")[0], container["args"])
    bound = given["bind"].rpartition(":")[2]
    assert bound == str(container["ports"][0]["containerPort"])
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    for each in (given["key"], given.get("clients"), given.get("tokens"), given.get("certificate")):
        assert each is None or {str(each), str(each.parent)} & mounted
    for first in pod.get("initContainers", ()):
        assert first["image"] == container["image"]
        pulled = options(first["command"][0], first["args"])
        # What is pulled, where it is read, and by a device its own part alone.
        assert parse_reference(pulled["device"])
        own = [given["device"]] if "device" in given else []
        assert (pulled["models"], list(pulled["device_part"])) == (bool(own), own)
        assert str(given.get("bundle") or "/srv/bundle") == str(pulled["out"])
        known = {one["name"]: one for one in first["env"]}
        login = Path(known["REGISTRY_AUTH_FILE"]["value"])
        assert str(login.parent) in {mount["mountPath"] for mount in first["volumeMounts"]}
    for kind in ("readinessProbe", "livenessProbe"):
        probe = container[kind]
        if "exec" in probe:
            # Live in any state, ready in READY alone; asked at the default port.
            live = ["--live"] if kind == "livenessProbe" else []
            assert probe["exec"]["command"] == [*stage.words("ENTRYPOINT"), "health", *live]
            assert bound == str(PORT)
            continue
        checked = probe.get("httpGet", probe.get("tcpSocket"))
        names = (container["ports"][0].get("name"), container["ports"][0]["containerPort"])
        assert checked["port"] in names
        assert checked.get("path", "/") in OPEN
        assert checked.get("scheme") == ("HTTPS" if given.get("certificate") else None)
    for one in (*pod.get("initContainers", ()), container):
        security = pod.get("securityContext", {}) | one["securityContext"]
        assert security["runAsNonRoot"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert one["resources"]["limits"]["memory"]
    assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]


def test_every_device_has_agents_of_its_own() -> None:
    values = yaml.safe_load((DEPLOY / "chart" / "values.yaml").read_text())
    assert {device["name"] for device in values["devices"]} == DEVICES
    made = {one["metadata"]["name"]: one for one in rendered() if one["kind"] == "DaemonSet"}
    assert made.keys() == {f"agent-{device}" for device in DEVICES}
    for device in DEVICES:
        spec = made[f"agent-{device}"]["spec"]
        template = spec["template"]
        assert template["spec"]["nodeSelector"] == {"mdp/device": device}
        assert spec["selector"]["matchLabels"] == template["metadata"]["labels"]
        assert options("mdp-agent", template["spec"]["containers"][0]["args"])["device"] == device
        (keys,) = [one for one in template["spec"]["volumes"] if one["name"] == "keys"]
        secrets = [source["secret"]["name"] for source in keys["projected"]["sources"]]
        assert secrets == [f"agent-{device}", "clients"]


def test_the_role_installs_with_options_that_there_are() -> None:
    role = DEPLOY / "ansible" / "roles" / "mdp_agent"
    tasks = yaml.safe_load((role / "tasks" / "main.yml").read_text())
    written = next(task for task in tasks if "restarted" in task["name"])
    words = re.findall(r"'([^']*)'", written["ansible.builtin.command"]["argv"])
    command: Any = typer.main.get_command(agent_app)
    known = {name for each in command.commands["install"].params for name in each.opts}
    assert {word for word in words if word.startswith("--")} <= known
    assert words[:2] == ["/opt/mdp/bin/mdp-agent", "install"]
    # Each variable has a default but the board's device, which the inventory names.
    defaults = yaml.safe_load((role / "defaults" / "main.yml").read_text())
    used = set(re.findall(r"\bmdp_[a-z_]+", yaml.safe_dump(tasks)))
    assert used - {"mdp_device"} == defaults.keys()
    # What it says of an agent that was left alone decides whether the task has changed anything.
    assert "runs as before" in written["changed_when"]
    playbook = yaml.safe_load((DEPLOY / "ansible" / "agents.yml").read_text())
    assert playbook[0]["serial"][0] == 1
