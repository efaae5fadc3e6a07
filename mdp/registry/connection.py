"""One repository of a registry, over HTTP: manifests and blobs, each checked by its digest.

Sources: the OCI distribution specification 1.1, and Docker's token specification for logins.
urllib is what Python has: proxies (HTTPS_PROXY, NO_PROXY) and roots (SSL_CERT_FILE) are as it takes
them, and a login never follows a redirection to another place.
"""

import hashlib
import http.client
import os
import ssl
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

import msgspec

from mdp.errors import ConfigError, TransferError
from mdp.registry.artifact import MAX_MANIFEST_BYTES, OCI_MANIFEST, Descriptor, digest_of
from mdp.registry.login import (
    RegistryLogin,
    ask_program,
    find_login,
    login_files,
    parse_challenge,
    token_address,
)
from mdp.registry.reference import Reference

#: Without a byte for so long, a registry is given up.
SILENCE_S: Final = 30.0
PIECE_BYTES: Final = 2**16
#: Of a reply that is no content: an error, a token.
_MAX_WORDS_BYTES: Final = 2**20
_MAX_SHOWN: Final = 200
#: Folders HOST/*.crt of certificates, as containers-certs.d(5) and Docker have them.
CERTIFICATES: Final = (Path("/etc/containers/certs.d"), Path("/etc/docker/certs.d"))


class Response(Protocol):
    """The part of urllib's responses that is used."""

    @property
    def status(self) -> Any: ...

    @property
    def headers(self) -> Any: ...

    def read(self, amount: int = ..., /) -> bytes: ...

    def close(self) -> None: ...


#: Sends a request, and returns its response whatever the status; raises OSError or HTTPException.
Send = Callable[[Request], Response]
Fetched = Callable[[int], None]


class _SameScheme(HTTPRedirectHandler):
    """Follows no redirection from HTTPS to anything else."""

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        if urlsplit(newurl).scheme != req.type:
            raise URLError(f"leads to {urlsplit(newurl).scheme}, expected {req.type}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def sender(host: str, folders: tuple[Path, ...] = CERTIFICATES) -> Send:
    """Requests over real connections; raises ConfigError for certificates that are none.

    `folders` have certificates to trust beside the machine's own, for each host.
    """
    context = ssl.create_default_context()
    for path in sorted(one for folder in folders for one in (folder / host).glob("*.crt")):
        try:
            context.load_verify_locations(path)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"{path}: expected certificates in PEM") from error
    opener = build_opener(HTTPSHandler(context=context), _SameScheme)

    def send(request: Request) -> Response:
        try:
            found: Response = opener.open(request, timeout=SILENCE_S)
        except HTTPError as error:
            # Which is the response.
            return error
        return found

    return send


def connect(reference: Reference, *, insecure: bool) -> "Repository":
    """A repository over real connections, with the logins of this user; raises ConfigError."""
    files = login_files(os.environ, os.geteuid())

    def find() -> RegistryLogin | None:
        return find_login(reference.host, reference.name, files, ask_program)

    send = sender(reference.host)
    return Repository(reference, send, find, files, insecure=insecure)


class Repository:
    """Manifests and blobs of one name in a registry; its errors are TransferError."""

    def __init__(
        self,
        reference: Reference,
        send: Send,
        find: Callable[[], RegistryLogin | None] = lambda: None,
        files: list[Path] | None = None,
        *,
        insecure: bool = False,
    ) -> None:
        """`find` is asked for a login when the registry wants one; `files` are where it looks."""
        self.reference = reference
        self._send, self._find, self._files = send, find, files or []
        self._insecure = insecure
        scheme = "http" if insecure else "https"
        self._base = f"{scheme}://{reference.host}/v2/{reference.name}/"
        self._authorization = ""

    def manifest(self) -> bytes:
        """The manifest that the reference names, of its digest where it has one."""
        wanted = self.reference.digest or self.reference.tag
        response = self._ask("GET", f"manifests/{wanted}", {"Accept": OCI_MANIFEST})
        with closing(response):
            self._expect(response, "", 200)
            content = self._read(response, MAX_MANIFEST_BYTES)
            told = response.headers.get("Docker-Content-Digest")
        found = digest_of(content)
        for expected in (self.reference.digest, told):
            if expected is not None and expected != found:
                raise TransferError(f"{self.reference}: expected {expected}, is given {found}")
        return content

    def has(self, blob: Descriptor) -> bool:
        """Tell whether a blob is there."""
        response = self._ask("HEAD", f"blobs/{blob.digest}")
        with closing(response):
            if response.status == 404:
                return False
            self._expect(response, "", 200)
        return True

    def upload(self, blob: Descriptor, content: bytes) -> None:
        """Store a blob."""
        what = blob.annotations.get("org.opencontainers.image.title", "")
        begun = self._ask("POST", "blobs/uploads/", {"Content-Length": "0"}, b"")
        with closing(begun):
            self._expect(begun, what, 202)
            place = begun.headers.get("Location") or ""
        try:
            place = urljoin(f"{self._base}blobs/uploads/", place)
            scheme = urlsplit(place).scheme
        except ValueError:
            scheme = ""
        if scheme != urlsplit(self._base).scheme:
            raise TransferError(f"{self.reference.host}: uploads go to {place}: expected TLS")
        place += f"{'&' if urlsplit(place).query else '?'}digest={blob.digest}"
        headers = {"Content-Type": "application/octet-stream"}
        done = self._ask("PUT", place, headers, content)
        with closing(done):
            self._expect(done, what, 201, 204)

    def put_manifest(self, content: bytes) -> None:
        """Have the reference's tag name a manifest, all of whose blobs are there."""
        headers = {"Content-Type": OCI_MANIFEST}
        done = self._ask("PUT", f"manifests/{self.reference.tag}", headers, content)
        with closing(done):
            self._expect(done, "", 201)

    def fetch(self, what: str, blob: Descriptor, into: BinaryIO, fetched: Fetched) -> None:
        """Write a blob into a new file, called `what` in messages.

        A connection that breaks is resumed while each one brings something. `fetched` is told how
        many bytes have come. Raises OSError where the file cannot be written.
        """
        digest, done = hashlib.sha256(), 0
        while done < blob.size or done == 0:
            before = done
            headers = {"Range": f"bytes={done}-"} if done else {}
            response = self._ask("GET", f"blobs/{blob.digest}", headers)
            with closing(response):
                if done and response.status == 416:
                    # The registry has no more of it.
                    raise self._too_short(what, done, blob)
                if done and response.status != 206:
                    # The whole of it again.
                    digest, done = hashlib.sha256(), 0
                    into.seek(0)
                    into.truncate()
                self._expect(response, what, 200, 206)
                broken: Exception | None = None
                while True:
                    try:
                        piece = response.read(PIECE_BYTES)
                    except (OSError, http.client.HTTPException) as error:
                        broken = error
                        break
                    if not piece:
                        break
                    done += len(piece)
                    if done > blob.size:
                        raise TransferError(f"{self._message(what)}: more than {blob.size:,} bytes")
                    digest.update(piece)
                    into.write(piece)
                    fetched(len(piece))
            if done == blob.size:
                break
            if done <= before:
                if broken is None:
                    raise self._too_short(what, done, blob)
                raise TransferError(f"{self._message(what)}: {_reason(broken)}") from broken
        if (found := f"sha256:{digest.hexdigest()}") != blob.digest:
            raise TransferError(f"{self._message(what)}: expected {blob.digest}, is given {found}")

    def _too_short(self, what: str, done: int, blob: Descriptor) -> TransferError:
        return TransferError(
            f"{self._message(what)}: ends after {done:,} bytes, expected {blob.size:,}"
        )

    def _message(self, what: str) -> str:
        return f"{self.reference}: {what}" if what else str(self.reference)

    def _ask(
        self, method: str, place: str, headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Response:  # fmt: skip
        """The response to a request, after a login where one is wanted."""
        address = urljoin(self._base, place)
        response = self._send_once(method, address, headers or {}, body, self._authorization)
        if response.status != 401:
            return response
        with closing(response):
            self._authorization = self._log_in(response.headers.get("WWW-Authenticate") or "")
        return self._send_once(method, address, headers or {}, body, self._authorization)

    def _send_once(
        self,
        method: str,
        address: str,
        headers: Mapping[str, str],
        body: bytes | None,
        authorization: str,
    ) -> Response:
        request = Request(address, data=body, headers=dict(headers), method=method)
        # Not of the headers that a redirection repeats. No other place gets it, either.
        if authorization and urlsplit(address).netloc == self.reference.host:
            request.add_unredirected_header("Authorization", authorization)
        try:
            return self._send(request)
        except (OSError, http.client.HTTPException, ValueError) as error:
            # ValueError: an address that is none, to which it was led.
            place = urlsplit(address).netloc
            raise TransferError(f"{place}: {_reason(error)}") from error

    def _log_in(self, header: str) -> str:
        """The value of `Authorization` that a challenge asks for."""
        challenge = parse_challenge(header)
        if challenge is None:
            raise TransferError(f"{self.reference.host}: asks for a login of an unknown kind")
        login = self._find()
        if challenge.scheme == "basic":
            if login is None:
                raise self._no_login()
            return login.basic
        address = token_address(challenge, insecure=self._insecure)
        # A token may be had without a login, of what all may read.
        request = Request(address)
        if login is not None:
            request.add_unredirected_header("Authorization", login.basic)
        try:
            response = self._send(request)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise TransferError(f"{urlsplit(address).netloc}: {_reason(error)}") from error
        with closing(response):
            if response.status in (401, 403):
                raise self._no_login() if login is None else self._refusal(login)
            self._expect(response, "token", 200)
            content = self._read(response, _MAX_WORDS_BYTES)
        try:
            told = msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise TransferError(f"{urlsplit(address).netloc}: expected a token in JSON") from error
        token = told.get("token") or told.get("access_token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise TransferError(f"{urlsplit(address).netloc}: expected a token")
        return f"Bearer {token}"

    def _no_login(self) -> TransferError:
        places = " or ".join(map(str, self._files)) or "a file"
        host = self.reference.host
        return TransferError(
            f"{host}: asks for a login: expected one in {places} (`podman login {host}` or "
            f"`docker login {host}`)"
        )

    def _refusal(self, login: RegistryLogin) -> TransferError:
        return TransferError(
            f"{self.reference.host}: refuses user {login.user!r} of {login.source} for "
            f"{self.reference.name}"
        )

    def _expect(self, response: Response, what: str, *statuses: int) -> None:
        """Raise TransferError unless a response has one of these statuses."""
        if response.status in statuses:
            return
        if response.status in (401, 403):
            login = self._find()
            raise self._no_login() if login is None else self._refusal(login)
        said = _complaint(self._read(response, _MAX_WORDS_BYTES, refuse=False))
        reason = "is not there" if response.status == 404 else f"HTTP status {response.status}"
        raise TransferError(f"{self._message(what)}: {reason}{f' ({said})' if said else ''}")

    def _read(self, response: Response, most_bytes: int, *, refuse: bool = True) -> bytes:
        content = bytearray()
        try:
            while len(content) <= most_bytes and (piece := response.read(PIECE_BYTES)):
                content += piece
        except (OSError, http.client.HTTPException) as error:
            if refuse:
                raise TransferError(f"{self.reference}: {_reason(error)}") from error
        if len(content) > most_bytes and refuse:
            raise TransferError(f"{self.reference}: more than {most_bytes:,} bytes")
        return bytes(content)


def _complaint(content: bytes) -> str:
    """The registry's own reason in an error, as the distribution specification has it."""
    try:
        first = msgspec.json.decode(content)["errors"][0]
        return f"{first['code']}: {first['message']}"[:_MAX_SHOWN]
    except (msgspec.MsgspecError, LookupError, TypeError):
        return ""


def _reason(error: Exception) -> str:
    """An error of a connection in words."""
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted: {cause.verify_message} (SSL_CERT_FILE, or a file in "
            f"{CERTIFICATES[0]}/HOST/)"
        )
    if isinstance(cause, ssl.SSLError) and cause.reason in (
        "WRONG_VERSION_NUMBER",
        "RECORD_LAYER_FAILURE",
    ):
        return "speaks no TLS (--insecure for plain HTTP)"
    if isinstance(cause, TimeoutError):
        return f"says nothing within {SILENCE_S:g} s"
    if isinstance(cause, http.client.RemoteDisconnected | http.client.IncompleteRead):
        return "breaks the connection"
    return str(getattr(cause, "strerror", None) or cause or type(cause).__name__)
