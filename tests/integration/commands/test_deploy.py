"""Stages of deploy/, run as an engine would: not as root, on a root that cannot be written."""

import os
import signal
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet
from mdp.formats.keys import load_public, new_keys
from mdp.testing.processes import LineProcess
from mdp.transport import new_pair
from tests.support import container
from tests.support.container import ROOT, Mount, command, reason_against, stages
from tests.support.pictures import encode_picture, four_corners
from tests.support.web.gateway import self_signed

pytestmark = pytest.mark.skipif(bool(reason_against()), reason=reason_against())

BUNDLE = ROOT / "examples" / "bundles" / "cifar10"
DEPLOY = ROOT / "deploy"
USER = 10001


class Host:
    """Runs containers of one test."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._made = 0
        self.network_of: int | None = None
        hosts = folder / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"127.0.0.1 {n}\n" for n in names))
        self._hosts = Mount(place="/etc/hosts", source=hosts)

    def run(
        self,
        stage: str,
        words: Sequence[str],
        mounts: Sequence[Mount],
        *,
        entry: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> list[str]:
        self._made += 1
        root = self._folder / f"root-{self._made}"
        root.mkdir()
        return command(
            stages()[stage],
            words,
            [self._hosts, *mounts],
            root=root,
            entry=entry,
            environment=environment,
            network_of=self.network_of,
        )

    def done(self, line: Sequence[str]) -> str:
        ended = subprocess.run(line, capture_output=True, text=True, timeout=200)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def python(self, program: str, mounts: Sequence[Mount] = ()) -> str:
        return self.done(self.run("gateway", ["-c", program], mounts, entry=["python"]))

    @contextmanager
    def serving(self, line: Sequence[str], until: str) -> Iterator[LineProcess]:
        """A process that has written a line with `until`."""
        with LineProcess("container", [*line], own_session=True) as process:
            seen = ""
            while until not in seen:
                seen = process.line(until)
            yield process


def picture_file(folder: Path) -> Path:
    path = folder / "picture.png"
    path.write_bytes(encode_picture(four_corners(), "PNG"))
    return path


def is_confined(pid: int) -> None:
    """Assert that a process runs as the image's user, without any privilege."""
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {str(USER)}
    assert (int(status["CapEff"], 16), int(status["CapBnd"], 16)) == (0, 0)
    assert status["NoNewPrivs"] == "1"


CLASSIFY = """
import json, ssl, urllib.request as http
context = ssl._create_unverified_context()
def ask(url, body=None, token=""):
    request = http.Request(url, body, {{"Authorization": "Bearer " + token}})
    return http.urlopen(request, timeout=30, context=context).read()
while json.loads(ask("{url}/v2/health/live")) != {{"live": True}}: pass
while True:
    try: ask("{url}/v2/health/ready"); break
    except http.HTTPError as error: assert error.code == 503
body = open("/picture", "rb").read()
print(ask("{url}/v2/models/cifar10/classify?deadline_ms=20000", body, "{token}").decode())
"""


def test_a_checkout_under_tmp_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(dir="/tmp") as name:
        checkout = Path(name, "a checkout")
        checkout.mkdir()
        for source in ("mdp", "mdp_start.py"):
            (checkout / source).symlink_to(ROOT / source)
        link = Path(name, "link")
        link.symlink_to(checkout)
        monkeypatch.setattr(container, "ROOT", link)
        host = Host(tmp_path, [])
        for place in map(str, (link, checkout)):
            program = f"import sys; sys.path.insert(0, {place!r}); import mdp; print(mdp.__file__)"
            assert host.python(program) == f"{place}/mdp/__init__.py\n"


def test_compose(tmp_path: Path) -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    keys = tmp_path / "keys"
    keys.mkdir()
    os.chown(keys, USER, USER)
    bundle = Mount(place="/bundle", source=BUNDLE)
    host = Host(tmp_path, ["laptop-cpu"])
    script = services["keys"]["command"][0].replace("$$", "$")
    writable = Mount(place="/keys", source=keys, writable=True)
    tried = "touch /tmp/fine; for place in / /etc /opt/mdp /bundle /usr; do ! touch $place/x; done"
    host.done(host.run("agent", [tried], [bundle], entry=["sh", "-euc"]))
    # A second `up` finds the keys.
    for _ in range(2):
        first = host.run("gateway", [script], [writable, bundle], entry=["sh", "-euc"])
        assert "3 devices of bundle cifar10" in host.done(first)
    mounts = [Mount(place="/keys", source=keys), bundle]
    agent = host.run("agent", [*services["laptop-cpu"]["command"], "--json"], mounts)
    with host.serving(agent, "READY") as served:
        is_confined(served.process.pid)
        host.network_of = served.process.pid
        healthy = host.run("agent", [], [], entry=stages()["agent"].words("HEALTHCHECK"))
        host.done(healthy)
        # A process that hangs is connected to, and says nothing.
        served.signal(signal.SIGSTOP)
        assert subprocess.run(healthy, capture_output=True, timeout=200).returncode == 3
        served.signal(signal.SIGCONT)
        gateway = host.run("gateway", stages()["gateway"].words("CMD"), mounts)
        with host.serving(gateway, "serves cifar10") as front:
            is_confined(front.process.pid)
            host.done(host.run("gateway", [], [], entry=stages()["gateway"].words("HEALTHCHECK")))
            picture = Mount(place="/picture", source=picture_file(tmp_path))
            answer = host.python(CLASSIFY.format(url="http://127.0.0.1:8080", token=""), [picture])
            assert yaml.safe_load(answer)["used"] == ["laptop-cpu"]


def project_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    """A folder as kubelet mounts secrets for a pod with a group."""
    data = folder / "..2027_01_31"
    data.mkdir(parents=True)
    (folder / "..data").symlink_to(data.name)
    for name, content in files.items():
        (data / name).write_bytes(content)
        os.chown(data / name, 0, USER)
        (data / name).chmod(0o440)
        (folder / name).symlink_to(f"..data/{name}")
    os.chown(folder, 0, USER)
    folder.chmod(0o777 | stat.S_ISVTX | stat.S_ISGID)
    return folder


def pod(name: str) -> tuple[dict[str, Any], list[str]]:
    """A manifest's pod and the arguments of its container."""
    made = filter(None, yaml.safe_load_all((DEPLOY / "kubernetes" / "mdp.yaml").read_text()))
    kinds = ("DaemonSet", "Deployment")
    (found,) = [m for m in made if m["kind"] in kinds and m["metadata"]["name"] == name]
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec, spec["containers"][0]["args"]


def variables(spec: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in spec["containers"][0]["env"] if "value" in one}


def test_kubernetes(tmp_path: Path) -> None:
    for name in ("n100", "client"):
        new_keys(tmp_path / "made", name, new_pair)
    made, token = tmp_path / "made", "a-token-of-some-length"
    new_fleet(
        Bundle.open(BUNDLE),
        ["n100=tcp://agent-n100:7500"],
        made / "fleet.toml",
        public_key=lambda name: load_public(made / f"{name}.public"),
        key=made / "client.secret",
    )
    fleet = (made / "fleet.toml").read_text().splitlines()
    fleet[0] = 'bundle = "/srv/bundle"'
    agent_keys = project_files(
        tmp_path / "agent",
        {
            "agent.secret": (made / "n100.secret").read_bytes(),
            "client.public": (made / "client.public").read_bytes(),
        },
    )
    gateway_keys = project_files(
        tmp_path / "gateway",
        {
            "client.secret": (made / "client.secret").read_bytes(),
            "tokens": token.encode(),
            "fleet.toml": "\n".join(fleet).encode(),
        },
    )
    certificate, key = self_signed(tmp_path)
    tls = project_files(
        tmp_path / "tls", {"tls.crt": certificate.read_bytes(), "tls.key": key.read_bytes()}
    )
    host = Host(tmp_path, ["agent-n100"])
    # As the pods' first containers pull it from a registry.
    bundle = Mount(place="/srv/bundle", source=BUNDLE)

    spec, words = pod("agent-n100")
    keys = Mount(place="/run/mdp", source=agent_keys)
    agent = host.run("agent", words, [keys, bundle], environment=variables(spec))
    with host.serving(agent, "READY") as served:
        is_confined(served.process.pid)
        host.network_of = served.process.pid
        spec, words = pod("gateway")
        mounts = [Mount(place="/run/mdp", source=gateway_keys), Mount(place="/run/tls", source=tls)]
        gateway = host.run("gateway", words, [*mounts, bundle], environment=variables(spec))
        with host.serving(gateway, "serves cifar10"):
            picture = Mount(place="/picture", source=picture_file(tmp_path))
            program = CLASSIFY.format(url="https://127.0.0.1:8443", token=token)
            assert yaml.safe_load(host.python(program, [picture]))["used"] == ["n100"]
