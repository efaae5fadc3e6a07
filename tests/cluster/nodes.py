"""A Kubernetes of one machine: a control plane, and nodes that are namespaces.

    this machine ── control plane ── node ── pods

The control plane has etcd, API server, controllers and scheduler, each node a containerd, a kubelet
and a kube-proxy, and each of these rooms its own network, mounts and processes: the firewall and
settings of this machine stay as they are, and all ends with the room's first process. Addresses
are of the block for tests of network devices (RFC 2544). dnsmasq stands in for the cluster's names.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from mdp.closing import Closing
from mdp.testing.processes import until
from tools.prepare import MissingError, run

#: Programs of Kubernetes, and of Debian's packages.
KUBERNETES = (
    *("kube-apiserver", "kube-controller-manager", "kube-scheduler"),
    *("kubelet", "kube-proxy"),
)
TOOLS = ("kubectl", "etcd", "containerd", "ctr", "runc", "dnsmasq", "catatonit", "iptables",
         "conntrack", "ip", "nsenter", "unshare", "openssl")  # fmt: skip
PLUGINS = Path("/usr/lib/cni")
CONTROL, OUTSIDE, NET = "198.18.64.1", "198.18.64.254", "198.18.64.0/24"
SERVICES, PODS = "198.19.64.0/24", "198.18.{}.0/24"
DOMAIN, PAUSE = "cluster.local", "localhost/mdp-pause:1"
LINK, CGROUP = "mdp-cluster", "mdp-cluster"
_TOKEN = "of-this-test-alone"
#: What a kubelet wants of the kernel; it finds these instead of the real ones, and changes nothing.
_KERNEL = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}
#: A first process that ends with this one, and leaves nothing of those that end.
_FIRST = """import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("there", flush=True)
sys.stdin.read()"""
_PATIENCE_S = 600.0


def reason_against(programs: Path | None) -> str:
    """Reason why no cluster can be started here; empty if one can."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if not (PLUGINS / "bridge").is_file():
        return f"{PLUGINS}/bridge is not installed (containernetworking-plugins)"
    for name in KUBERNETES:
        if find(name, programs) is None:
            return f"{name} is neither on PATH nor in {programs}: make cluster-programs"
    return ""


def find(name: str, programs: Path | None) -> str | None:
    """Path of a program, rather of the folder than of this machine."""
    folder = [] if programs is None else [str(programs)]
    return shutil.which(name, path=os.pathsep.join([*folder, os.environ.get("PATH", os.defpath)]))


class Room(Closing):
    """Processes with a network, mounts and process numbers of their own."""

    def __init__(self, name: str, folder: Path) -> None:
        """Logs and what its programs keep are in `folder`, which is removed at the end."""
        self.name, self.folder = name, folder
        for part in ("lib", "log", "kernel"):
            (folder / part).mkdir(parents=True)
        self._programs = dict[str, subprocess.Popen[bytes]]()
        own = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        self._holder = subprocess.Popen(
            ["unshare", *own, sys.executable, "-c", _FIRST],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            _, said = self._holder.communicate()
            raise MissingError(said.decode().strip())
        (child,) = psutil.Process(self._holder.pid).children()
        self.pid = child.pid
        covered = []
        for number, (key, value) in enumerate(_KERNEL.items()):
            stand_in = folder / "kernel" / str(number)
            stand_in.write_text(f"{value}\n")
            covered.append(f"mount --bind {stand_in} /proc/sys/{key}")
        self.run("sh", "-ec", "\n".join([
            "mount --make-rshared /",
            f"mount --bind {folder / 'lib'} /var/lib",
            f"mount --bind {folder / 'log'} /var/log",
            "mount -t tmpfs none /run",
            *covered,
            "ip link set lo up",
        ]))  # fmt: skip

    def command(self, *words: str) -> list[str]:
        """The command line that runs `words` in here."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--pid", "--", *words]

    def run(self, *words: str) -> str:
        """The output of a command in here; raises MissingError."""
        return run(self.command(*words))

    def start(self, *words: str, environment: Mapping[str, str] | None = None) -> None:
        """Start a program that stays."""
        name = Path(words[0]).name
        with (self.folder / f"{name}.log").open("wb") as log:
            self._programs[name] = subprocess.Popen(
                self.command(*words), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=os.environ | dict(environment or {}),
            )  # fmt: skip

    def check(self) -> None:
        """Raise MissingError with the last line of a program that has ended."""
        for name, program in self._programs.items():
            if program.poll() is not None:
                said = (self.folder / f"{name}.log").read_text(errors="replace").strip()
                raise MissingError(f"{self.name}: {name}: {said.splitlines()[-1] if said else ''}")

    def pid_of(self, word: str) -> int:
        """The process, by this machine's numbers, of a pod in here that has this argument."""
        for process in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if word in process.cmdline():
                    return process.pid
        raise AssertionError(f"{self.name}: no process with {word}")

    def memory_bytes(self) -> int:
        """Memory of the programs that were started in here, without pods."""
        found = 0
        for program in self._programs.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += sum(
                    one.memory_info().rss for one in psutil.Process(program.pid).children()
                )
        return found

    def close(self) -> None:
        """End all in it."""
        self._holder.kill()
        self._holder.communicate()
        for program in self._programs.values():
            program.wait(60)

        def is_removed() -> bool:
            # Which fails until the last mount in there is gone.
            shutil.rmtree(self.folder, ignore_errors=True)
            return not self.folder.exists()

        until(is_removed, f"{self.folder} is removed")


class Cluster(Closing):
    """A control plane and nodes, which are Ready."""

    def __init__(self, folder: Path, programs: Path | None, nodes: Sequence[str]) -> None:
        """Raises MissingError with the last line of what does not start."""
        self.folder, self._programs = folder, programs
        self.kubeconfig = folder / "admin.conf"
        self.nodes = dict[str, Room]()
        with contextlib.ExitStack() as undo:
            undo.callback(_remove_groups)
            self.control = undo.enter_context(Room("control", folder / "control"))
            self._connect_control()
            self._start_control()
            numbered = {name: number for number, name in enumerate(nodes, start=1)}
            for name, number in numbered.items():
                self.nodes[name] = undo.enter_context(Room(name, folder / name))
                self._connect_node(
                    name, number, [one for one in numbered.values() if one != number]
                )
                self._start_node(name, number)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """End all of it."""
        self._undo.close()

    def memory_bytes(self) -> int:
        """Memory of the cluster's own programs."""
        return sum(room.memory_bytes() for room in (self.control, *self.nodes.values()))

    @property
    def version(self) -> str:
        """The version of its kubelets."""
        found: str = self.objects("nodes")[0]["status"]["nodeInfo"]["kubeletVersion"]
        return found

    def _found(self, name: str) -> str:
        found = find(name, self._programs)
        assert found is not None, name
        return found

    def _connect_control(self) -> None:
        control = self.control
        _ip("link", "add", LINK, "type", "veth", "peer", "name", "outside", "netns", control.pid)
        _ip("address", "add", f"{OUTSIDE}/24", "dev", LINK)
        _ip("link", "set", LINK, "up")
        for words in (
            "link add nodes type bridge",
            f"address add {CONTROL}/24 dev nodes",
            "link set nodes up",
            "link set outside master nodes up",
            # So that what is asked outside of these networks fails, and is not lost.
            "route add unreachable default",
        ):
            control.run("ip", *words.split())
        # Services are asked by way of the first node, which is none of those that are drained.
        _ip("route", "add", SERVICES, "via", _address(1))

    def _start_control(self) -> None:
        control, folder = self.control, self.folder
        key = folder / "accounts.key"
        run(["openssl", "genrsa", "-out", str(key), "2048"])
        (folder / "tokens.csv").write_text(f'{_TOKEN},admin,admin,"system:masters"\n')
        made = folder / "apiserver"
        self.kubeconfig.write_text(json.dumps(_kubeconfig(made / "apiserver.crt")))
        names = folder / "names"
        names.mkdir()
        control.start("dnsmasq", "--keep-in-foreground", "--no-resolv", "--no-hosts", "--user=root",
                      "--log-facility=-", f"--hostsdir={names}", f"--listen-address={CONTROL}",
                      "--bind-interfaces", "--conf-file=/dev/null", "--pid-file=", "--local=//",
                      f"--local=/{DOMAIN}/")  # fmt: skip
        control.start("etcd", f"--data-dir={folder / 'control' / 'etcd'}")
        control.start(
            self._found("kube-apiserver"),
            "--etcd-servers=http://127.0.0.1:2379",
            *(f"--bind-address={CONTROL}", f"--advertise-address={CONTROL}", f"--cert-dir={made}"),
            f"--service-cluster-ip-range={SERVICES}",
            *(f"--token-auth-file={folder / 'tokens.csv'}", "--authorization-mode=RBAC"),
            f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
            *(f"--service-account-signing-key-file={key}", f"--service-account-key-file={key}"),
            "--kubelet-preferred-address-types=InternalIP",
        )
        until(self._answers, "the API server answers", _PATIENCE_S)
        given = f"--kubeconfig={self.kubeconfig}"
        control.start(
            self._found("kube-controller-manager"),
            *(given, "--leader-elect=false", f"--service-account-private-key-file={key}"),
            f"--root-ca-file={made / 'apiserver.crt'}",
            f"--flex-volume-plugin-dir={folder / 'control' / 'plugins'}",
        )
        control.start(self._found("kube-scheduler"), given, "--leader-elect=false")

    def _answers(self) -> bool:
        self.control.check()
        return self.tried("get", "--raw=/readyz").returncode == 0

    def _connect_node(self, name: str, number: int, others: Sequence[int]) -> None:
        node, end = self.nodes[name], f"node-{number}"
        _ip("link", "add", "eth0", "netns", node.pid, "type", "veth",
            "peer", "name", end, "netns", self.control.pid)  # fmt: skip
        self.control.run("ip", "link", "set", end, "master", "nodes", "up")
        self.control.run("ip", "route", "add", _pods(number), "via", _address(number))
        node.run("ip", "address", "add", f"{_address(number)}/24", "dev", "eth0")
        node.run("ip", "link", "set", "eth0", "up")
        node.run("ip", "route", "add", "default", "via", CONTROL)
        for other in others:
            node.run("ip", "route", "add", _pods(other), "via", _address(other))
        node.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def _start_node(self, name: str, number: int) -> None:
        node, folder = self.nodes[name], self.nodes[name].folder
        _make_group(name)
        network = folder / "network"
        network.mkdir()
        (network / "pods.conflist").write_text(json.dumps(_pod_network(number)))
        (folder / "containerd.toml").write_text(
            _CONTAINERD.format(plugins=PLUGINS, network=network)
        )
        (folder / "resolv.conf").write_text(f"nameserver {CONTROL}\n")
        (folder / "kubelet.json").write_text(json.dumps(_kubelet(name, number, folder)))
        node.start("containerd", f"--config={folder / 'containerd.toml'}")
        socket = "/run/containerd/containerd.sock"

        def answers() -> bool:
            node.check()
            return (
                subprocess.run(node.command("ctr", "version"), capture_output=True).returncode == 0
            )

        until(answers, f"{name}'s containerd answers", _PATIENCE_S)
        node.start(
            self._found("kubelet"),
            f"--config={folder / 'kubelet.json'}",
            *(f"--kubeconfig={self.kubeconfig}", "--container-runtime=remote"),
            f"--container-runtime-endpoint=unix://{socket}",
            *(f"--hostname-override={name}", f"--node-ip={_address(number)}"),
        )
        node.start(
            self._found("kube-proxy"),
            *(f"--kubeconfig={self.kubeconfig}", f"--hostname-override={name}"),
            # What comes from a pod of the same node, too, has to go back by the way that it came.
            *("--proxy-mode=iptables", "--masquerade-all", "--oom-score-adj=0"),
            # As it is on this machine.
            *("--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0"),
            "--conntrack-tcp-timeout-close-wait=0",
        )

        def is_ready() -> bool:
            for room in (self.control, node):
                room.check()
            return self._is_ready(name)

        until(is_ready, f"{name} is Ready", _PATIENCE_S)

    def _is_ready(self, name: str) -> bool:
        done = self.tried("get", "node", name, "--output=json")
        if done.returncode:
            return False
        conditions = json.loads(done.stdout)["status"].get("conditions", [])
        return {"Ready": "True"}.items() <= {
            one["type"]: one["status"] for one in conditions
        }.items()

    def load(self, archive: Path, names: Mapping[str, str]) -> None:
        """Give each node the images of an archive, by other names too."""
        for node in self.nodes.values():
            ctr = ("ctr", "--namespace=k8s.io", "images")
            node.run(*ctr, "import", str(archive))
            for image, other in names.items():
                node.run(*ctr, "tag", "--force", image, other)

    def tried(self, *words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl, which may fail."""
        return subprocess.run(
            self.command(*words), input=given, capture_output=True, text=True, timeout=1800
        )

    def command(self, *words: str) -> list[str]:
        """The command line of kubectl."""
        return [self._found("kubectl"), f"--kubeconfig={self.kubeconfig}", *words]

    def kubectl(self, *words: str, given: str | None = None) -> str:
        """The output of kubectl."""
        done = self.tried(*words, given=given)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def objects(self, *words: str) -> list[dict[str, Any]]:
        """List the objects that `kubectl get` finds."""
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", *words, "--output=json"))[
            "items"
        ]
        return found

    def publish_names(self) -> None:
        """Tell the names of all Services, as a cluster does by itself."""
        lines = [
            f"{one['spec']['clusterIP']} {one['metadata']['name']}.{one['metadata']['namespace']}"
            f".svc.{DOMAIN}\n"
            for one in self.objects("services", "--all-namespaces")
        ]
        (self.folder / "names" / f"{time.time_ns()}").write_text("".join(lines))


def _ip(*words: object) -> None:
    run(["ip", *map(str, words)])


def _address(number: int) -> str:
    return f"198.18.64.{10 + number}"


def _pods(number: int) -> str:
    return PODS.format(128 + number)


def _kubeconfig(authority: Path) -> dict[str, Any]:
    cluster = {"server": f"https://{CONTROL}:6443", "certificate-authority": str(authority)}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "mdp", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": _TOKEN}}],
        "contexts": [{"name": "mdp", "context": {"cluster": "mdp", "user": "admin"}}],
        "current-context": "mdp",
    }


def _pod_network(number: int) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "dataDir": "/run/cni",
        "ranges": [[{"subnet": _pods(number)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "hairpinMode": True}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [{**bridge, "ipam": addresses}]}


def _kubelet(name: str, number: int, folder: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": _address(number),
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}/{name}",
        "clusterDNS": [CONTROL],
        "clusterDomain": DOMAIN,
        "resolvConf": str(folder / "resolv.conf"),
        "failSwapOn": False,
        # Or it would make a folder in /usr.
        "volumePluginDir": str(folder / "plugins"),
        "oomScoreAdj": 0,
        "protectKernelDefaults": True,
        # This machine's disk may be full of other things.
        "evictionHard": {"memory.available": "100Mi"},
        "imageGCHighThresholdPercent": 100,
    }


_CONTAINERD = """version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/mdp-pause:1"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{network}"
"""


def _hierarchies() -> list[Path]:
    """Where this machine's control groups are."""
    found = [Path(one.mountpoint) for one in psutil.disk_partitions(all=True)
             if one.fstype in ("cgroup", "cgroup2")]  # fmt: skip
    return [one for one in found if (one / "cgroup.procs").exists()]


def _make_group(name: str) -> None:
    """Make a node's control group, which a kubelet expects to be there."""
    for top in _hierarchies():
        for group in (top / CGROUP, top / CGROUP / name):
            group.mkdir(exist_ok=True)
            for key in ("cpuset.cpus", "cpuset.mems"):
                if (group / key).is_file() and not (group / key).read_text().strip():
                    (group / key).write_text((group.parent / key).read_text())


def _remove_groups() -> None:
    """Remove all that kubelets have made."""
    for top in _hierarchies():
        if (top / CGROUP).is_dir():
            for place, _, _ in os.walk(top / CGROUP, topdown=False):
                until(partial(_is_removed, Path(place)), f"{place} is removed")


def _is_removed(place: Path) -> bool:
    with contextlib.suppress(OSError):
        place.rmdir()
    return not place.exists()
