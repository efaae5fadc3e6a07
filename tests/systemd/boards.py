"""A machine of a test whose PID 1 is systemd, in a container."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.support.patience import PATIENT_S
from tools.engine import Podman
from tools.systemd import Prepared

#: Wheels of this package and of what it requires are there.
NOW, LATER, WHEELS = "/now", "/later", "/wheels"


class Board:
    """A container with systemd as PID 1."""

    def __init__(self, podman: Podman, name: str) -> None:
        self.podman, self.name = podman, name

    def try_script(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run `script` by bash there."""
        words = ["exec", "--env=PATH=/opt/mdp/bin:/usr/sbin:/usr/bin:/sbin:/bin", self.name]
        command = self.podman.command(*words, "bash", "-c", script)
        return subprocess.run(
            command,
            env=self.podman.environment,
            capture_output=True,
            text=True,
            timeout=PATIENT_S + 60,
        )

    def run(self, script: str) -> str:
        """Its output; fails unless it succeeds."""
        done = self.try_script(script)
        assert done.returncode == 0, f"{script}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def until(self, condition: str) -> None:
        """Wait until a command succeeds."""
        tried = f"until {condition}; do test $SECONDS -gt {PATIENT_S:.0f} && break; sleep .1; done"
        self.run(f"{{ {tried}; }} > /dev/null 2>&1; {condition}")

    def property_of(self, setting: str, unit: str) -> str:
        """A property of a unit."""
        return self.run(f"systemctl show --property={setting} --value {unit}")

    def until_booted(self) -> None:
        """Wait until all units have started."""
        self.until("systemctl is-system-running --wait")

    def restart(self) -> None:
        """Boot again."""
        self.podman.run("restart", "--time=60", self.name)
        self.until_booted()


@contextmanager
def boot_board(
    prepared: Prepared, mounts: Sequence[str] = (), network: str = "none"
) -> Iterator[Board]:
    """A board that has booted; removed with the block. Raises MissingError."""
    podman = prepared.podman
    folders = [
        f"--volume={prepared.wheel.parent}:{NOW}:ro",
        f"--volume={prepared.later.parent}:{LATER}:ro",
        f"--volume={prepared.wheels}:{WHEELS}:ro",
        *(f"--volume={mount}:ro" for mount in mounts),
    ]
    # A systemd that ends would empty the register of emulators, which is that of the one kernel.
    mask = "ln -sf /dev/null /etc/systemd/system/systemd-binfmt.service"
    # Credentials are mounted, and have to be seen from the services' own mounts.
    start = ["sh", "-c", f"{mask} && mount --make-rshared / && exec /sbin/init"]
    options = ["--systemd=always", "--privileged", f"--network={network}", "--pids-limit=2000"]
    # Else, beside control groups of version 1, systemd finds none of memory.
    options.append("--cgroupns=private")
    name = podman.run("run", "--detach", *options, *folders, prepared.image, *start)
    board = Board(podman, name)
    try:
        board.until_booted()
        yield board
    finally:
        podman.run("rm", "--force", "--time=1", name)


def engines_of(board: Board) -> dict[str, str]:
    """Versions of what runs a board, and on it."""
    return {
        "podman": board.podman.run("version", "--format={{.Client.Version}}"),
        "systemd": board.run("systemctl --version").split()[1],
    }
