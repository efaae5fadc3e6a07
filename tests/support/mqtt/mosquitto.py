"""A mosquitto broker on loopback, and what it is told, as its own clients read it."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mdp.testing.processes import LineProcess, until

USER, PASSWORD = "fleet", "s3cret"


def require_program(program: str) -> str:
    """Path of one of mosquitto's programs; skips the test that needs it where it is missing."""
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"{program} is not installed")
    return found


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        return int(place.getsockname()[1])


class Mosquitto:
    """Whoever knows the password is let in; with a certificate, over TLS only."""

    def __init__(self, folder: Path, tls: tuple[Path, Path] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._folder, self._program = folder, require_program("mosquitto")
        passwords = folder / "passwords"
        make = [require_program("mosquitto_passwd"), "-b", "-c", str(passwords), USER, PASSWORD]
        subprocess.run(make, check=True, capture_output=True)
        passwords.chmod(0o644)
        lines = [f"listener {self.port} 127.0.0.1", f"password_file {passwords}"]
        if tls is not None:
            lines += [f"certfile {tls[0]}", f"keyfile {tls[1]}"]
        # As root it would give up the rights to read the files here.
        self._config = folder / "mosquitto.conf"
        self._config.write_text("\n".join([*lines, "user root", ""]))
        self.login = folder / "login"
        self.login.touch(mode=0o600)
        self.login.write_text(f"{USER}\n{PASSWORD}\n")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let it run until the block ends."""
        command = [self._program, "-c", self._config]
        with LineProcess("mosquitto", command, self._folder / "mosquitto.log") as process:
            until(self._listens, f"mosquitto listens: {process.stderr}")
            yield

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @contextmanager
    def hear(self, topics: str = "#") -> Iterator[LineProcess]:
        """Lines of retained or not (1 or 0), topic and payload, from now on."""
        command = [
            require_program("mosquitto_sub"), "-h", "127.0.0.1", "-p", self.port, "-u", USER,
            "-P", PASSWORD, "-t", topics, "-F", "%r %t %p",
        ]  # fmt: skip
        with LineProcess("mosquitto_sub", command) as process:
            yield process

    def publish(self, topic: str, payload: str) -> None:
        """Publish a retained message."""
        command = [
            require_program("mosquitto_pub"), "-h", "127.0.0.1", "-p", str(self.port), "-u", USER,
            "-P", PASSWORD, "-r", "-t", topic, "-m", payload,
        ]  # fmt: skip
        subprocess.run(command, check=True)
