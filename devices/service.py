"""An agent as a systemd service: the text of its unit, and what its own user could not read.

Options as in systemd.exec(5) and systemd.service(5). The service has a user that exists only while
it runs (DynamicUser), so that nothing but its files' rights for others lets it read them.
"""

import hashlib
import math
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mdp.errors import InputError

UNITS = Path("etc/systemd/system")
#: The first line of every unit that `mdp-agent install` writes.
MARK = "# Written by `mdp-agent install`; `mdp-agent uninstall` removes it."
#: Seconds without a ping after which systemd restarts the agent, until which it has to have loaded
#: its model (building engines of TensorRT takes minutes), and to have ended (draining takes 8).
WATCHDOG_S, START_S, STOP_S = 60, 900, 15
#: A unit that fails so often within so many seconds ends: with seconds between two starts, in some
#: minutes, which a network may need after the machine's start.
RESTART_S, MOST_STARTS, STARTS_WITHIN_S = 5, 30, 600
#: Threads; an agent has 9 to 14, and libraries start some for each core.
MOST_TASKS = 512
#: An agent without a model, which was measured to take 80 MB, and as much again as messages that
#: wait in connections; what its queue holds at most.
BASE_BYTES, QUEUE_BYTES = 256 * 2**20, 64 * 2**20
#: OpenCV with the buffers of a stream.
CAMERA_BYTES = 256 * 2**20
#: Where memory is not known beforehand: the machine keeps a fifth.
MEMORY_SHARE = "80%"
#: Of the options' form, and what systemd calls it.
_MEMORY = re.compile(r"(?:[1-9]\d{0,14}[KMGT]?|(?:[1-9]\d?|100)%|infinity)")
KEY = "agent.secret"
#: The service sees the agent's secret key there, and no other file of its folder.
KEY_WORD = "${CREDENTIALS_DIRECTORY}/" + KEY
#: A line of the unit; with another digest, the agent has to start anew.
_INPUTS = "# Reads: "
#: Lines that follow from what it reads, not from options.
_DERIVED = (_INPUTS, "MemoryMax=")
_HOMES = (Path("/home"), Path("/root"), Path("/run/user"))
_PRIVATE = (Path("/tmp"), Path("/var/tmp"))
#: Ports below need a privilege.
_FIRST_PORT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Facts that the unit of one agent depends on; paths are absolute."""

    device: str
    program: Path
    #: Options of `mdp-agent run`; one that is `KEY_WORD` is written as it is.
    words: tuple[str, ...]
    #: The agent's secret key file, which systemd reads.
    key: Path | None
    #: What the service's user reads, by its own path and by that which links lead to, and what
    #: each is.
    reads: Mapping[Path, str]
    #: Whether models are run by onnxruntime on the CPU; all else needs devices or writes code.
    plain_cpu: bool
    #: Whether frames come from a camera of this machine, and whether OpenCV reads them.
    camera: bool
    opencv: bool
    audited: bool
    #: Whether it keeps files of its own: pushed bundles, a mask, a phone's token.
    keeps: bool = False
    #: Groups of which the service's user is a member.
    groups: tuple[str, ...] = ()
    #: Most memory, as systemd writes it.
    memory: str = MEMORY_SHARE
    #: Whether it pins itself to cores.
    pinned: bool = False
    #: Digest of what it reads when it starts (`digest_of`).
    inputs: str = ""


def name_of(device: str) -> str:
    """The service's name, without `.service`."""
    return f"mdp-agent-{device}"


def unit_text(service: Service) -> str:
    """The unit; raises InputError for a word that has no form in it."""
    name = name_of(service.device)
    words = [word if word == KEY_WORD else quote(word) for word in service.words]
    # Not for the program: variables are not expanded in it.
    command = " ".join([quote(str(service.program)).replace("$$", "$"), "run", *words])
    in_home = any(path.is_relative_to(home) for path in service.reads for home in _HOMES)
    lines = [
        MARK,
        *([f"{_INPUTS}{service.inputs}"] if service.inputs else []),
        "[Unit]",
        f"Description=MDP agent {service.device}",
        "Wants=network-online.target",
        "After=network-online.target",
        f"StartLimitIntervalSec={STARTS_WITHIN_S}",
        f"StartLimitBurst={MOST_STARTS}",
        "",
        "[Service]",
        "Type=notify",
        f"ExecStart={command}",
        "ExecReload=/bin/kill -HUP $MAINPID",
        "# For MDP_SOURCE=rtsp://USER:PASSWORD@HOST/PATH, readable by root only.",
        f"EnvironmentFile=-/etc/default/{name}",
        "Restart=on-failure",
        f"RestartSec={RESTART_S}",
        # Bad input stays so; a taken address, or one that is not there yet, has another code.
        f"RestartPreventExitStatus={InputError.exit_code}",
        f"TimeoutStartSec={START_S}",
        f"TimeoutStopSec={STOP_S}",
        f"WatchdogSec={WATCHDOG_S}",
        "DynamicUser=yes",
        *([f"LoadCredential={KEY}:{_plain(service.key)}"] if service.key else []),
        *([f"LogsDirectory={name}"] if service.audited else []),
        *(
            [f"StateDirectory={name}", f"Environment=XDG_STATE_HOME=/var/lib/{name}"]
            if service.keeps
            else []
        ),
        *([f"SupplementaryGroups={' '.join(service.groups)}"] if service.groups else []),
        *_devices(service, name),
        "UMask=0077",
        f"MemoryMax={service.memory}",
        "OOMPolicy=kill",
        f"TasksMax={MOST_TASKS}",
        # A core would hold the key.
        "LimitCORE=0",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "AmbientCapabilities=",
        "ProtectSystem=strict",
        f"ProtectHome={'read-only' if in_home else 'yes'}",
        "PrivateTmp=yes",
        "ProtectClock=yes",
        "ProtectControlGroups=yes",
        "ProtectHostname=yes",
        "ProtectKernelLogs=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelTunables=yes",
        "ProtectProc=invisible",
        "LockPersonality=yes",
        "RestrictNamespaces=yes",
        "RestrictRealtime=yes",
        "RestrictSUIDSGID=yes",
        # By netlink, ZeroMQ and an announcement list the network's interfaces.
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_NETLINK AF_UNIX",
        "SystemCallArchitectures=native",
        "SystemCallFilter=@system-service",
        *_deny_calls(service),
        "SystemCallErrorNumber=EPERM",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def is_same(text: str, other: str) -> bool:
    """Tell whether two units have the same options, though they may read something else."""

    def own(unit: str) -> list[str]:
        return [line for line in unit.splitlines() if not line.startswith(_DERIVED)]

    return own(text) == own(other)


def digest_of(inputs: Iterable[tuple[str, bytes]]) -> str:
    """The digest of names and contents, in any order; none of them may be a secret."""
    found = hashlib.sha256()
    for name, content in sorted(inputs):
        for part in (name.encode(), content):
            found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()


def memory_of(planned_bytes: int | None, *, batch: int, opencv: bool) -> str:
    """Most memory of an agent whose sub-model is planned to take `planned_bytes`; None: unknown.

    While it reloads, there are two models, and one that is read; activations grow with `batch`.
    """
    if planned_bytes is None:
        return MEMORY_SHARE
    camera_bytes = CAMERA_BYTES if opencv else 0
    most_bytes = BASE_BYTES + QUEUE_BYTES + camera_bytes + (2 + batch) * planned_bytes
    return f"{math.ceil(most_bytes / 2**20)}M"


def check_memory(text: str) -> str:
    """`text` if it is a size as systemd writes it; raises InputError."""
    if not _MEMORY.fullmatch(text):
        raise InputError(
            f"--memory-max {text!r}: expected bytes with K, M, G or T, a share as 50%, or infinity"
        )
    return text


def _deny_calls(service: Service) -> list[str]:
    """No system call of @resources (priorities, processors), where no library needs them."""
    if not service.plain_cpu or service.opencv or service.pinned:
        return ["SystemCallFilter=~@privileged"]
    # ZeroMQ sets the policy of its thread, to what it is, and aborts where it may not.
    return ["SystemCallFilter=~@privileged @resources", "SystemCallFilter=sched_setscheduler"]


def _devices(service: Service, name: str) -> list[str]:
    """The devices that it may open, and whether it may write code into its memory."""
    if not service.plain_cpu:
        # The device files of accelerators have no common class.
        return [
            "PrivateDevices=no",
            f"CacheDirectory={name}",
            f"Environment=XDG_CACHE_HOME=/var/cache/{name}",
        ]
    lines = ["PrivateDevices=yes", "PrivateUsers=yes"]
    if service.camera:
        # By class: a camera may be plugged in later.
        lines = ["DevicePolicy=closed", "DeviceAllow=char-video4linux rw"]
    # OpenVINO compiles networks to code, and libswscale its filters.
    return lines if service.opencv else [*lines, "MemoryDenyWriteExecute=yes"]


def quote(word: str) -> str:
    """`word` as it stands in ExecStart; raises InputError for control characters."""
    if not word.isprintable():
        raise InputError(f"{word!r}: expected printable text in a unit")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[\w%$+,./:@=-]+", escaped) else f'"{escaped}"'


def _plain(path: Path) -> str:
    """`path` for a setting that takes no quotes; raises InputError."""
    if re.search(r"""[\s:"'\\]""", str(path)) or not str(path).isprintable():
        raise InputError(f"{path}: expected a path without spaces, colons, quotes and backslashes")
    return str(path).replace("%", "%%")


def check_port(place: str, option: str = "--bind") -> None:
    """Raises InputError for a place whose port only root may listen on."""
    port = int(place.rpartition(":")[2])
    if 0 < port < _FIRST_PORT:
        raise InputError(
            f"{option} {place}: expected a port from {_FIRST_PORT}: the user is not root"
        )


def check_readable(reads: Mapping[Path, str]) -> None:
    """Raises InputError for what the service's user cannot read; a folder, with all within."""
    for path, what in reads.items():
        if any(path.is_relative_to(folder) for folder in _PRIVATE):
            raise InputError(
                f"{what}: {path}: expected another place: a service has a /tmp of its own"
            )
        inside = path.rglob("*") if path.is_dir() else ()
        for part in (*reversed(path.parents), path, *inside):
            above = part in path.parents
            _check_rights(f"{what}: {path}: {part}" if above else f"{what}: {part}", part, above)


def _check_rights(named: str, path: Path, entered: bool) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise InputError(f"{named}: cannot be read: {error.strerror}") from error
    needed = stat.S_IXOTH if entered else stat.S_IROTH
    if stat.S_ISDIR(mode):
        needed |= stat.S_IXOTH
    if mode & needed != needed:
        raise InputError(
            f"{named}: expected rights for others to read it, got mode {stat.S_IMODE(mode):04o}: "
            "the service has a user of its own (/opt and /srv are common places)"
        )
