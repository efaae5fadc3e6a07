"""Registries for tests: one in memory, without sockets, and Debian's own as a process."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from io import BytesIO
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from urllib.request import Request

import yaml

from mdp.testing.processes import LineProcess, until

HOST = "registry.example"
PROGRAM = "docker-registry"


class FakeResponse:
    """A response, whose body may break after some bytes."""

    def __init__(
        self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        self.status, self.headers = status, Message()
        for name, value in (headers or {}).items():
            self.headers[name] = value
        self._body, self.breaks_after = BytesIO(body), len(body) + 1

    def read(self, amount: int = -1, /) -> bytes:
        left = self.breaks_after - self._body.tell()
        if left <= 0:
            raise ConnectionResetError(104, "Connection reset by peer")
        return self._body.read(min(amount, left) if amount >= 0 else left)

    def close(self) -> None:
        self._body.close()


def complaint(status: int, code: str, message: str) -> FakeResponse:
    return FakeResponse(
        status, json.dumps({"errors": [{"code": code, "message": message}]}).encode()
    )


@dataclass(slots=True)
class MemoryRegistry:
    """Manifests and blobs by the distribution specification; a `Send`.

    `before` sees each request first, and may answer it.
    """

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    seen: list[Request] = field(default_factory=list)
    before: Callable[[Request], FakeResponse | None] = lambda request: None
    host: str = HOST

    def __call__(self, request: Request) -> FakeResponse:
        self.seen.append(request)
        assert urlsplit(request.full_url).netloc == self.host
        return self.before(request) or self.answer(request)

    def answer(self, request: Request) -> FakeResponse:
        address = urlsplit(request.full_url)
        _, kind, name = re.fullmatch(
            r"/v2/((?:[^/]+/)*?[^/]+)/(manifests|blobs)/(.*)", address.path
        ).groups()  # type: ignore[union-attr]
        body = request.data if isinstance(request.data, bytes) else b""
        match request.get_method(), kind:
            case "POST", "blobs":
                return FakeResponse(202, headers={"Location": f"{address.path}some-upload?state=x"})
            case "PUT", "blobs":
                digest = parse_qs(address.query)["digest"][0]
                if digest != f"sha256:{hashlib.sha256(body).hexdigest()}":
                    return complaint(400, "DIGEST_INVALID", "provided digest did not match")
                self.blobs[digest] = body
                return FakeResponse(201)
            case "PUT", "manifests":
                digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
                self.manifests |= {name: body, digest: body}
                return FakeResponse(201, headers={"Docker-Content-Digest": digest})
        kept = self.manifests if kind == "manifests" else self.blobs
        if name not in kept:
            return complaint(404, "UNKNOWN", "unknown to registry")
        content = kept[name]
        if request.get_method() == "HEAD":
            return FakeResponse(200)
        asked = re.fullmatch(r"bytes=(\d+)-", request.get_header("Range") or "")
        if asked and int(asked[1]) >= len(content):
            return FakeResponse(416)
        if asked:
            return FakeResponse(206, content[int(asked[1]) :])
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        return FakeResponse(200, content, {"Docker-Content-Digest": digest})

    def requests(self, method: str, ending: str = "") -> list[str]:
        """Paths that were asked, by method."""
        paths = [urlsplit(one.full_url).path for one in self.seen if one.get_method() == method]
        return [path for path in paths if path.endswith(ending)]


#: As Apache's htpasswd -B, by the C library.
_HASHED = """
import ctypes, os, sys
library = ctypes.CDLL("libcrypt.so.1")
library.crypt.restype = library.crypt_gensalt.restype = ctypes.c_char_p
salt = library.crypt_gensalt(b"$2y$", 5, os.urandom(16), 16)
print(library.crypt(sys.argv[1].encode(), salt).decode())
"""


def hashed(password: str) -> str:
    """A password as a registry's file of passwords has it."""
    done = subprocess.run(
        [sys.executable, "-c", _HASHED, password], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def reason_against() -> str:
    """Reason why no real registry can be started here; empty if one can."""
    return "" if shutil.which(PROGRAM) else f"{PROGRAM} is not installed"


@contextmanager
def real_registry(
    folder: Path,
    *,
    http: Mapping[str, object] | None = None,
    auth: Mapping[str, object] | None = None,
) -> Iterator[str]:
    """Debian's docker-registry with its store in `folder`; yields its address, HOST:PORT."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "version": 0.1,
        "log": {"level": "info", "formatter": "text", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "store")}},
        "http": {"addr": "127.0.0.1:0", **(http or {})},
        **({"auth": auth} if auth else {}),
    }
    file = folder / "config.yml"
    file.write_text(yaml.safe_dump(settings))
    log = folder / "log"

    def listens() -> re.Match[str] | None:
        return re.search(r"listening on ([^\s,\"]+)", process.stderr)

    # Its log of requests, which nobody reads, would fill the pipe of its output.
    with LineProcess(PROGRAM, [PROGRAM, "serve", file], log) as process:
        until(lambda: listens() is not None, f"{PROGRAM} listens")
        found = listens()
        assert found is not None
        yield found[1]
