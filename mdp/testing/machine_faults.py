"""Faults of a machine: little memory or processor time, a full disk, another clock, no name server.

Linux; all but another clock need root. Each function that makes a fault undoes it at the end of its
`with` block, and `groups_work`, `mounting_works` and `own_names_work` say why one cannot be made.
"""

import contextlib
import os
import socket
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
#: Where Debian puts it, by architecture.
FAKETIME = "/usr/lib/*/faketime/libfaketime.so.1"


@contextmanager
def memory_limit(pid: int, limit_bytes: int) -> Iterator[None]:
    """Have the kernel kill process `pid` when it takes more memory than that."""
    settings = {"memory.limit_in_bytes": limit_bytes, "memory.max": limit_bytes}
    with _group("memory", pid, settings, at_most={"memory.swap.max": 0}):
        yield


@contextmanager
def processor_limit(pid: int, share: float) -> Iterator[None]:
    """Give process `pid` only `share` of one core, in one piece a second."""
    quota_us = int(share * 1e6)
    settings = {"cpu.cfs_period_us": 1_000_000, "cpu.cfs_quota_us": quota_us}
    with _group("cpu", pid, settings | {"cpu.max": f"{quota_us} 1000000"}):
        yield


@contextmanager
def _group(
    controller: str,
    pid: int,
    settings: Mapping[str, object],
    *,
    at_most: dict[str, object] | None = None,
) -> Iterator[None]:
    """A control group with `pid` in it; settings that this version of them lacks are left out."""
    parent = _parent(controller)
    group = parent / f"mdp-{uuid.uuid4().hex[:8]}"
    before = parent / "cgroup.procs"
    group.mkdir()
    try:
        for name, value in settings.items():
            if (group / name).exists():
                (group / name).write_text(str(value))
        for name, value in (at_most or {}).items():
            with contextlib.suppress(OSError):
                (group / name).write_text(str(value))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        # A group with a process cannot be removed.
        for left in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                before.write_text(left)
        group.rmdir()


def _parent(controller: str) -> Path:
    """Folder for groups of `controller`: version 1's own tree, or version 2's only one."""
    own = GROUPS / controller
    return own if own.is_dir() else GROUPS


@cache
def groups_work(controller: str) -> str:
    """Reason why no control group can be made here; empty if one can."""
    group = _parent(controller) / f"mdp-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        return f"no control group can be made: {error.strerror}"
    wanted = {
        "memory": ("memory.limit_in_bytes", "memory.max"),
        "cpu": ("cpu.cfs_quota_us", "cpu.max"),
    }
    has = any((group / name).exists() for name in wanted[controller])
    group.rmdir()
    return "" if has else f"control groups here do not limit {controller}"


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a disk of that size on `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "mdp-small", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip())
    try:
        yield folder
    finally:
        # Lazily: a process may still have a file open there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, *files: Path) -> Path:
    """Write until there is no room left, also in `files`; returns the file to remove for room.

    A file has room up to the end of its last page, however full its disk is.
    """
    path = folder / "full"
    for end, piece in ((path, bytes(4096)), *((file, b"\n") for file in files)):
        with contextlib.suppress(OSError), end.open("ab", buffering=0) as file:
            while file.write(piece):
                pass
    return path


@cache
def mounting_works() -> str:
    """Reason why nothing can be mounted here; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, to mount a small disk"
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    return "" if done.returncode == 0 else f"nothing can be mounted: {done.stderr.strip()}"


@contextmanager
def silent_name_server(folder: Path, *hosts: str) -> Iterator[socket.socket]:
    """Replace the name server by one that never answers, in this whole mount namespace.

    Yields its socket. `hosts` are loopback, by a copy of /etc/hosts in `folder`.
    """
    address, known = "127.0.0.53", Path("/etc/hosts").read_text()
    files = {
        "hosts": known + "".join(f"127.0.0.1 {host}\n" for host in hosts),
        "resolv.conf": f"nameserver {address}\n",
    }
    with contextlib.ExitStack() as undo:
        server = undo.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        server.bind((address, 53))
        for name, text in files.items():
            (folder / name).write_text(text)
            subprocess.run(["mount", "--bind", folder / name, f"/etc/{name}"], check=True)
            undo.callback(subprocess.run, ["umount", "--lazy", f"/etc/{name}"], check=True)
        yield server


@cache
def own_names_work() -> str:
    """Reason why this process alone cannot resolve names in another way; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, for a mount namespace"
    own, parents = (Path(f"/proc/{pid}/ns/mnt").stat().st_ino for pid in ("self", os.getppid()))
    return "needs a mount namespace of its own: `make faults`" if own == parents else ""


@cache
def faketime_library() -> Path | None:
    """The library that shows a process another wall clock, if it is installed."""
    return next(iter(sorted(Path("/").glob(FAKETIME.lstrip("/")))), None)


def another_clock(file: Path) -> dict[str, str]:
    """Environment of a process whose wall clock is ahead as `file` says, read at each look.

    Its monotonic clock stays as it is, as it does when a wall clock is set.
    """
    return {
        "LD_PRELOAD": str(faketime_library()),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
