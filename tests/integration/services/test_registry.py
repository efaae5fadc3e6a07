"""Bundles in Debian's registry, by the commands: TLS, logins, tokens, and what goes wrong."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, urlsplit
from urllib.request import Request, urlopen

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from mdp.errors import InputError
from mdp.formats.bundle import MANIFEST, Bundle, model_path
from mdp.registry.connection import Repository, connect
from mdp.registry.reference import parse_reference
from mdp.registry.transfer import pull_from_registry, push_to_registry
from mdp.testing.agents import AgentFleet
from mdp.testing.bundles import DEVICES, colour_picture, write_bundle
from mdp.testing.machine_faults import mounting_works, small_disk
from tests.support.registries import hashed, real_registry, reason_against
from tests.support.web.gateway import self_signed

pytestmark = pytest.mark.skipif(bool(reason_against()), reason=reason_against())

USER, PASSWORD = "shelf", "s3cret"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_registry(tmp_path_factory.mktemp("registry")) as host:
        yield host


def ran(*words: object, environment: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """The exit code, output and errors of `mdp bundle`; as a user without any login."""
    none = {"REGISTRY_AUTH_FILE": "/nonexistent", "NO_PROXY": "*"}
    command = [sys.executable, "-c", "from mdp_start import mdp; mdp()", "bundle", *map(str, words)]
    done = subprocess.run(
        command,
        env=os.environ | none | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def content_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def login_file(path: Path, host: str, password: str = PASSWORD) -> dict[str, str]:
    """The environment of a user who is logged in, as `podman login` leaves it."""
    auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
    path.write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    return {"REGISTRY_AUTH_FILE": str(path)}


def test_a_bundle_goes_and_a_part_of_it_comes(plain: str, bundle: Path, tmp_path: Path) -> None:
    to = f"oci://{plain}/whole/colours:1"
    code, said, wrong = ran("push", bundle, to, "--insecure", "--json")
    assert code == 0, wrong
    stored = json.loads(said)["stored"]
    assert stored["moved_bytes"] == stored["total_bytes"] > 0
    code, said, wrong = ran(
        "push", bundle, f"oci://{plain}/whole/colours:2", "--insecure", "--json"
    )
    assert code == 0, wrong
    assert json.loads(said)["stored"] == {**stored, "moved_bytes": 0}
    out = tmp_path / "out"
    code, said, wrong = ran("pull", to, "--device", "beta", "--out", out, "--insecure")
    assert code == 0, wrong
    assert content_of(out).keys() == {MANIFEST, "fusion.json", model_path(1)}
    assert stored["reference"] in said
    pinned = stored["reference"]
    code, said, wrong = ran("pull", pinned, "--out", tmp_path / "all", "--insecure")
    assert code == 0, wrong
    assert content_of(tmp_path / "all") == content_of(bundle)
    code, said, wrong = ran("pull", pinned, "--out", out, "--insecure", "--no-models")
    assert code == 0, wrong
    size = sum(len(one) for name, one in content_of(out).items() if "submodels" not in name)
    assert f", 0 of {size:,} bytes fetched: {pinned}" in said


def test_each_device_and_the_client_pull_their_own(
    plain: str, bundle: Path, tmp_path: Path
) -> None:
    to = f"oci://{plain}/served/colours:1"
    assert ran("push", bundle, to, "--insecure")[0] == 0
    client = tmp_path / "client"
    assert ran("pull", to, "--no-models", "--out", client, "--insecure")[0] == 0
    with AgentFleet(tmp_path, client) as fleet:
        for device in DEVICES:
            pulled = tmp_path / device
            assert ran("pull", to, "--device", device, "--out", pulled, "--insecure")[0] == 0
            fleet.start(device, bundle=pulled)
        with fleet.client() as asking:
            answer = asking.classify(colour_picture("green"), deadline_ms=20_000)
    assert (answer.label, answer.used) == ("green", DEVICES)


def test_skopeo_reads_it(plain: str, bundle: Path, tmp_path: Path) -> None:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed")
    code, _, wrong = ran("push", bundle, f"oci://{plain}/read/colours:1", "--insecure")
    assert code == 0, wrong
    there = f"docker://{plain}/read/colours:1"
    shown = subprocess.run(
        ["skopeo", "inspect", "--tls-verify=false", "--raw", there],
        check=True, capture_output=True, timeout=60,
    ).stdout  # fmt: skip
    assert json.loads(shown)["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    copied = tmp_path / "copied"
    subprocess.run(
        ["skopeo", "copy", "--quiet", "--src-tls-verify=false", there, f"dir:{copied}"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    for name, entry in Bundle.open(bundle).manifest.files.items():
        assert (copied / entry.sha256).read_bytes() == (bundle / name).read_bytes()
    # What a mirror keeps, another registry takes, and is the same bundle.
    subprocess.run(
        ["skopeo", "copy", "--quiet", "--dest-tls-verify=false", f"dir:{copied}",
         f"docker://{plain}/mirror/colours:9"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    out = tmp_path / "out"
    assert ran("pull", f"oci://{plain}/mirror/colours:9", "--out", out, "--insecure")[0] == 0
    assert content_of(out) == content_of(bundle)


def test_tls_and_a_login(bundle: Path, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path / "tls")
    passwords = tmp_path / "passwords"
    passwords.write_text(f"{USER}:{hashed(PASSWORD)}\n")
    tls = {"tls": {"certificate": str(certificate), "key": str(key)}}
    auth = {"htpasswd": {"realm": "shelf", "path": str(passwords)}}
    with real_registry(tmp_path / "registry", http=tls, auth=auth) as host:
        to = f"oci://{host}/shelf/colours:1"
        trusting = {"SSL_CERT_FILE": str(certificate)}
        knowing = trusting | login_file(tmp_path / "auth.json", host)
        for words, environment, expected in (
            ((), {}, "its certificate is not trusted: self-signed certificate"),
            ((), trusting, "asks for a login: expected one in /nonexistent (`podman login "),
            ((), trusting | login_file(tmp_path / "wrong.json", host, "no"),
             f"refuses user '{USER}' of {tmp_path}/wrong.json for shelf/colours"),
            (("--insecure",), knowing, "HTTP status 400"),
        ):  # fmt: skip
            code, said, wrong = ran("push", bundle, to, *words, environment=environment)
            assert (code, said, len(wrong.splitlines())) == (3, "", 1), wrong
            assert expected in wrong
            assert PASSWORD not in wrong
        code, _, wrong = ran("push", bundle, to, environment=knowing)
        assert code == 0, wrong
        out = tmp_path / "out"
        code, _, wrong = ran("pull", to, "--out", out, environment=knowing)
        assert code == 0, wrong
        assert content_of(out) == content_of(bundle)
        # A helper of credentials instead of a password in the file.
        (tmp_path / "bin").mkdir()
        helper = tmp_path / "bin" / "docker-credential-keyring"
        answer = json.dumps({"Username": USER, "Secret": PASSWORD})
        helper.write_text(f"#!/bin/sh\ngrep -qx '{host}' || exit 1\necho '{answer}'\n")
        helper.chmod(0o755)
        (tmp_path / "config.json").write_text('{"credsStore": "keyring"}')
        helped = trusting | {
            "REGISTRY_AUTH_FILE": str(tmp_path / "config.json"),
            "PATH": f"{helper.parent}:{os.environ['PATH']}",
        }
        code, _, wrong = ran("pull", to, "--out", tmp_path / "second", environment=helped)
        assert code == 0, wrong
    with real_registry(tmp_path / "other") as host:
        code, _, wrong = ran("pull", f"oci://{host}/shelf/colours:1", "--out", tmp_path / "x")
        assert code == 3
        assert "speaks no TLS (--insecure for plain HTTP)" in wrong


class TokenServer:
    """Tokens as Docker's token specification has them, for who knows the password.

    Each is a JSON Web Token of ES256, with the certificate that the registry trusts.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        loaded = serialization.load_pem_private_key(key.read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        chain = x509.load_pem_x509_certificate(certificate.read_bytes())
        raw = chain.public_bytes(serialization.Encoding.DER)
        self._key = loaded
        self._head = {"typ": "JWT", "alg": "ES256", "x5c": [base64.b64encode(raw).decode()]}
        #: Queries, and whether there was a login.
        self.seen: list[tuple[dict[str, list[str]], bool]] = []

    def token(self, asked: dict[str, list[str]]) -> str:
        access = []
        for scope in asked.get("scope", []):
            kind, name, actions = scope.split(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        now = int(time.time())
        claims = {"iss": "test", "sub": USER, "aud": asked["service"][0], "exp": now + 300,
                  "nbf": now - 10, "iat": now, "jti": "1", "access": access}  # fmt: skip
        signed = ".".join(_base64(json.dumps(part).encode()) for part in (self._head, claims))
        made = self._key.sign(signed.encode(), ec.ECDSA(hashes.SHA256()))
        number = b"".join(part.to_bytes(32, "big") for part in decode_dss_signature(made))
        return f"{signed}.{_base64(number)}"

    @contextmanager
    def serving(self) -> Iterator[str]:
        expected = f"Basic {base64.b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}"

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                given = self.headers.get("Authorization")
                asked = parse_qs(urlsplit(self.path).query)
                tokens.seen.append((asked, given is not None))
                if given != expected:
                    self.send_error(401)
                    return
                body = json.dumps({"token": tokens.token(asked)}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        tokens = self
        with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
            thread = Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_address[1]}/token"
            finally:
                server.shutdown()
                thread.join()


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def test_tokens(bundle: Path, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path / "tokens")
    tokens = TokenServer(certificate, key)
    with tokens.serving() as realm:
        auth = {"token": {"realm": realm, "service": "shelf", "issuer": "test",
                          "rootcertbundle": str(certificate)}}  # fmt: skip
        with real_registry(tmp_path / "registry", auth=auth) as host:
            to = f"oci://{host}/shelf/colours:1"
            code, _, wrong = ran("push", bundle, to, "--insecure")
            assert (code, "asks for a login" in wrong) == (3, True), wrong
            knowing = login_file(tmp_path / "auth.json", host)
            code, _, wrong = ran("push", bundle, to, "--insecure", environment=knowing)
            assert code == 0, wrong
            tokens.seen.clear()
            out = tmp_path / "out"
            code, _, wrong = ran("pull", to, "--out", out, "--insecure", environment=knowing)
            assert code == 0, wrong
            assert content_of(out) == content_of(bundle)
            # One for all that is pulled, and no right to push.
            expected = {"service": ["shelf"], "scope": ["repository:shelf/colours:pull"]}
            assert tokens.seen == [(expected, True)]


def store_of(folder: Path, digest: str) -> Path:
    """The file in which the registry keeps a blob."""
    name = digest.removeprefix("sha256:")
    return folder / "store/docker/registry/v2/blobs/sha256" / name[:2] / name / "data"


def test_a_registry_that_is_gone_or_serves_something_else(bundle: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "registry", tmp_path / "out"
    with real_registry(folder) as host:
        to = f"oci://{host}/shelf/colours:1"
        assert ran("push", bundle, to, "--insecure")[0] == 0
        assert ran("pull", to, "--out", out, "--insecure", "--device", "alpha")[0] == 0
        before = content_of(out)
        entry = Bundle.open(bundle).manifest.files[model_path(1)]
        kept = store_of(folder, entry.sha256)
        right = kept.read_bytes()
        for wrong_content, expected in (
            (
                right[:-1] + b"x",
                f"{model_path(1)}: expected sha256:{entry.sha256}, is given sha256",
            ),
            (right[:-1], f"{model_path(1)}: ends after {len(right) - 1:,} bytes, expected"),
            (b"", f"{model_path(1)}: ends after 0 bytes, expected"),
        ):
            kept.write_bytes(wrong_content)
            code, said, wrong = ran("pull", to, "--out", out, "--insecure")
            assert (code, said, len(wrong.splitlines())) == (3, "", 1), wrong
            assert expected in wrong
            assert content_of(out) == before
        kept.unlink()
        code, _, wrong = ran("pull", to, "--out", out, "--insecure")
        assert (code, f"{model_path(1)}: is not there" in wrong) == (3, True), wrong
        # The manifest itself, whose digest the reference names.
        manifest = urlopen(Request(
            f"http://{host}/v2/shelf/colours/manifests/1",
            headers={"Accept": "application/vnd.oci.image.manifest.v1+json"},
        )).read()  # fmt: skip
        digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
        store_of(folder, digest).write_bytes(manifest.replace(b"beta", b"bela"))
        pinned = f"oci://{host}/shelf/colours@{digest}"
        code, _, wrong = ran("pull", pinned, "--out", out, "--insecure")
        assert code == 3, wrong
        code, _, wrong = ran("pull", f"oci://{host}/shelf/none:1", "--out", out, "--insecure")
        assert code == 3
        assert "shelf/none:1: is not there (MANIFEST_UNKNOWN: manifest unknown)" in wrong
    code, said, wrong = ran("pull", to, "--out", out, "--insecure")
    assert (code, said, wrong) == (3, "", f"mdp: {host}: Connection refused\n")
    assert content_of(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "out", "registry"]


def test_a_tag_that_moves_in_the_middle_of_a_pull(
    plain: str, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_bundle(tmp_path / "other", devices=("delta", "beta", "gamma"))
    to = parse_reference(f"oci://{plain}/moving/colours:1")
    push_to_registry(Bundle.open(bundle), connect(to, insecure=True))
    fetch, moved = Repository.fetch, list[str]()

    def moving(self: Repository, what: str, *rest: object) -> None:
        if not moved:
            moved.append(what)
            push_to_registry(Bundle.open(other), connect(to, insecure=True))
        fetch(self, what, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Repository, "fetch", moving)
    out = tmp_path / "out"
    pull_from_registry(connect(to, insecure=True), out)
    assert moved == [MANIFEST]
    assert content_of(out) == content_of(bundle)
    pull_from_registry(connect(to, insecure=True), out)
    assert content_of(out) == content_of(other)


@pytest.mark.skipif(bool(mounting_works()), reason=mounting_works())
def test_a_full_disk(plain: str, tmp_path: Path) -> None:
    large = write_bundle(tmp_path / "large", comment_bytes=3 * 2**20)
    to = f"oci://{plain}/large/colours:1"
    assert ran("push", large, to, "--insecure")[0] == 0
    with small_disk(tmp_path / "disk", 4 * 2**20) as disk:
        out = disk / "out"
        code, said, wrong = ran("pull", to, "--out", out, "--insecure")
        assert (code, said) == (2, "")
        assert f"{out}: no room: 9.4 MB are to be fetched, " in wrong
        assert not list(disk.iterdir())
        # It fills up meanwhile: what was free is taken by another.
        with pytest.raises(InputError, match="cannot be written: No space left on device"):
            pull_from_registry(
                connect(parse_reference(to), insecure=True), out, free_bytes=lambda folder: 2**30
            )
        assert not list(disk.iterdir())
        # A part has room.
        code, _, wrong = ran("pull", to, "--out", out, "--insecure", "--no-models")
        assert code == 0, wrong
