"""A gateway process, what a test asks it over HTTP, and a server's certificate."""

import datetime
import http.client
import ipaddress
import json
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mdp.testing.processes import PATIENCE_S, LineProcess


def with_limits(*changes: str) -> tuple[str, ...]:
    """`mdp` with other limits of `server`, `bodies` and `app`, as these statements set them."""
    modules = ("app", "bodies", "server")
    imports = [f"import mdp.gateway.{name} as {name}" for name in modules]
    program = "; ".join([*imports, "import mdp.cli.main as main", *changes, "main.main()"])
    return (sys.executable, "-c", program)


#: `mdp`, with the limits on slow clients of a moment.
IMPATIENT = with_limits("server.HEADERS_S = server.HANDSHAKE_S = 1", "bodies.BODY_S = 0.5")


class Reply(NamedTuple):
    """An HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body's JSON."""
        return json.loads(self.body)


class Gateway:
    """Address that a gateway listens on."""

    def __init__(self, url: str, process: LineProcess) -> None:
        self.url = url
        self._process = process
        self.host = urlsplit(url).netloc

    def end(self) -> None:
        """SIGTERM, and its end in order."""
        assert self._process.terminate() in (0, -signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        self._process.signal(number)

    def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        return self._process.process.wait(PATIENCE_S)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.process.pid

    @property
    def workers(self) -> list[psutil.Process]:
        """Its worker processes."""
        return psutil.Process(self._process.process.pid).children()

    @property
    def descriptors(self) -> int:
        """The number of file descriptors that the process has open."""
        return len(list(Path(f"/proc/{self._process.process.pid}/fd").iterdir()))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Its process stands still in this block, with its connections as they are."""
        self._process.stop()
        try:
            yield
        finally:
            self._process.signal(signal.SIGCONT)

    def peers(self) -> list[tuple[str, int]]:
        """Address and port of the other side of each connection that the process has open."""
        connections = psutil.Process(self._process.process.pid).net_connections("tcp")
        return [(each.raddr.ip, each.raddr.port) for each in connections if each.raddr]

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.host.rpartition(":")
        return host, int(port)

    def connect(self, source: str = "") -> socket.socket:
        """A connection from address `source` of this machine, on which nothing was sent yet."""
        return socket.create_connection(self.address, PATIENCE_S, source_address=(source, 0))

    def ask(
        self,
        path: str,
        body: bytes | None = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Reply:
        """GET, or POST with a body."""
        connection = http.client.HTTPConnection(self.host, timeout=PATIENCE_S)
        try:
            connection.request(
                method or ("GET" if body is None else "POST"), path, body, dict(headers)
            )
            response = connection.getresponse()
            known = {key.lower(): value for key, value in response.getheaders()}
            return Reply(response.status, known, response.read())
        finally:
            connection.close()


@contextmanager
def gateway(
    *options: object, program: Sequence[object] = (), log: Path | None = None
) -> Iterator[Gateway]:
    """`mdp gateway` with these options, on a port that is free, until the block ends.

    `program` is another one in the place of `mdp`; `log` takes its standard error.
    """
    command = [
        *(program or [Path(sys.executable).parent / "mdp"]),
        "gateway",
        "--bind",
        "127.0.0.1:0",
        "--json",
        *options,
    ]
    with LineProcess("gateway", command, log) as process:
        yield Gateway(json.loads(process.line("an event"))["url"], process)


def self_signed(folder: Path, *names: str) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1, or of these, and its key, as PEM files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    whose = [_general_name(one) for one in names or ("127.0.0.1",)]
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName(whose), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
