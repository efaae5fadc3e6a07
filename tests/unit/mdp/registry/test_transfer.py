"""Bundles to a registry and back, and what a registry may do meanwhile; without sockets."""

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request

import pytest

from mdp.errors import ConfigError, InputError, TransferError
from mdp.formats.bundle import MANIFEST, Bundle, model_path
from mdp.formats.signing import SIGNATURE, load_bundle_key, load_signing_key, new_bundle_key, sign
from mdp.registry.connection import Repository
from mdp.registry.login import RegistryLogin
from mdp.registry.reference import parse_reference
from mdp.registry.transfer import WantedPart, pull_from_registry, push_to_registry
from mdp.testing.bundles import DEVICES, write_bundle
from tests.support.registries import HOST, FakeResponse, MemoryRegistry, complaint

TAG = f"oci://{HOST}/shelf/colours:1"
TOKENS = "tokens.example"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


@pytest.fixture
def registry(bundle: Path) -> MemoryRegistry:
    made = MemoryRegistry()
    push_to_registry(Bundle.open(bundle), repository(made))
    made.seen.clear()
    return made


def repository(registry: MemoryRegistry, text: str = TAG, **more: Any) -> Repository:
    return Repository(parse_reference(text), registry, **more)


def content_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def test_a_bundle_is_stored_once(bundle: Path) -> None:
    registry, told = MemoryRegistry(), list[tuple[int, int]]()
    opened = Bundle.open(bundle)
    stored = push_to_registry(opened, repository(registry), lambda *step: told.append(step))
    assert stored.version.digest == opened.digest
    assert stored.moved_bytes == stored.total_bytes == sum(map(len, registry.blobs.values()))
    assert told[-1] == (stored.total_bytes, stored.total_bytes)
    assert stored.reference == f"oci://{HOST}/shelf/colours@{digest_of(registry.manifests['1'])}"
    # The tag comes last.
    assert registry.seen[-1].full_url.endswith("/manifests/1")
    again = push_to_registry(opened, repository(registry, TAG.replace(":1", ":2")))
    assert (again.moved_bytes, again.reference) == (0, stored.reference)
    assert registry.manifests["1"] == registry.manifests["2"]


def test_the_artifact_is_one_of_modelpack_with_a_layer_for_each_device(
    bundle: Path, registry: MemoryRegistry
) -> None:
    manifest = json.loads(registry.manifests["1"])
    assert manifest["schemaVersion"] == 2
    assert manifest["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    layers = {
        layer["annotations"]["org.cncf.model.filepath"]: layer for layer in manifest["layers"]
    }
    listed = Bundle.open(bundle).manifest.files
    assert layers.keys() == {MANIFEST, *listed}
    for k, device in enumerate(DEVICES):
        layer, entry = layers[model_path(k)], listed[model_path(k)]
        assert layer["mediaType"] == "application/vnd.cncf.model.weight.v1.raw"
        assert layer["annotations"]["org.mdp-edge.device"] == device
        assert (layer["digest"], layer["size"]) == (f"sha256:{entry.sha256}", entry.size_bytes)
    config = json.loads(registry.blobs[manifest["config"]["digest"]])
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.model.config.v1+json"
    # Keys that the schema of ModelPack has, and all that it requires.
    assert config.keys() == {"descriptor", "config", "modelfs"}
    assert config["modelfs"] == {
        "type": "layers",
        "diffIds": [layer["digest"] for layer in manifest["layers"]],
    }


def test_a_whole_bundle_comes_back(bundle: Path, registry: MemoryRegistry, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stored = pull_from_registry(repository(registry), out)
    listed = Bundle.open(bundle).manifest.files
    assert content_of(out) == {
        name: content for name, content in content_of(bundle).items() if name in {MANIFEST, *listed}
    }
    assert stored.moved_bytes == stored.total_bytes == sum(map(len, content_of(out).values()))
    # The tag is asked once; all else by digest.
    assert [path for path in registry.requests("GET") if "manifests" in path] == [
        "/v2/shelf/colours/manifests/1"
    ]


def test_a_device_gets_its_part_alone(registry: MemoryRegistry, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pull_from_registry(repository(registry), out, part=WantedPart(devices=["beta"]))
    assert content_of(out).keys() == {MANIFEST, "fusion.json", model_path(1)}
    assert Bundle.open(out).model(1).content
    assert len(registry.requests("GET")) == 4
    pull_from_registry(repository(registry), tmp_path / "gateway", part=WantedPart(devices=()))
    assert content_of(tmp_path / "gateway").keys() == {MANIFEST, "fusion.json"}
    with pytest.raises(ConfigError, match="no assignment for device 'fridge'"):
        pull_from_registry(
            repository(registry), tmp_path / "x", part=WantedPart(devices=["fridge"])
        )
    assert not (tmp_path / "x").exists()


def test_the_part_of_a_device_with_rungs_has_their_models(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    stored = Bundle.open(write_bundle(tmp_path / "bundle", rungs=2))
    push_to_registry(stored, repository(registry))
    device = stored.manifest.plan.assignments[0].device
    pull_from_registry(repository(registry), tmp_path / "out", part=WantedPart(devices=[device]))
    part = Bundle.open(tmp_path / "out")
    assert [part.model(0, rung).content for rung in range(2)] == [
        stored.model(0, rung).content for rung in range(2)
    ]
    assert not (tmp_path / "out" / model_path(1)).exists()
    layers = {
        layer["annotations"]["org.cncf.model.filepath"]: layer["annotations"]
        for layer in json.loads(registry.manifests["1"])["layers"]
    }
    for rung in range(2):
        assert layers[model_path(0, rung)]["org.mdp-edge.device"] == device


def test_what_is_there_is_not_fetched(
    bundle: Path, registry: MemoryRegistry, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = pull_from_registry(repository(registry), out, part=WantedPart(devices=["beta"]))
    before = {path: path.stat().st_ino for path in out.rglob("*")}
    registry.seen.clear()
    again = pull_from_registry(repository(registry), out, part=WantedPart(devices=["beta"]))
    assert (again.moved_bytes, again.reference) == (0, first.reference)
    assert again.total_bytes == first.total_bytes
    assert len(registry.seen) == 1
    assert {path: path.stat().st_ino for path in out.rglob("*")} == before
    # A damaged file is fetched again, and no other.
    (out / model_path(1)).write_bytes(b"damaged")
    registry.seen.clear()
    size = len((bundle / model_path(1)).read_bytes())
    link = tmp_path / "link"
    link.symlink_to(out)
    mended = pull_from_registry(repository(registry), link, part=WantedPart(devices=["beta"]))
    assert mended.moved_bytes == size
    assert link.is_symlink()
    assert Bundle.open(out).model(1).content
    # As is one that is a link to somewhere.
    (out / model_path(1)).rename(tmp_path / "elsewhere")
    (out / model_path(1)).symlink_to(tmp_path / "elsewhere")
    assert pull_from_registry(repository(registry), out).moved_bytes > size
    assert not (out / model_path(1)).is_symlink()


def test_equal_models_are_fetched_once(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", sizes=(16, 16, 8))
    manifest = json.loads((bundle / MANIFEST).read_bytes())
    (bundle / model_path(1)).unlink()
    (bundle / model_path(1)).symlink_to("../0/model.onnx")
    manifest["files"][model_path(1)] = manifest["files"][model_path(0)]
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    registry = MemoryRegistry()
    push_to_registry(Bundle.open(bundle), repository(registry))
    digest = f"sha256:{manifest['files'][model_path(0)]['sha256']}"
    out = tmp_path / "out"
    for _ in range(2):
        pull_from_registry(repository(registry), out)
        assert len(registry.requests("GET", digest)) == 1
        assert content_of(out) == content_of(bundle)
        # A part of it that is lost is there still, under the other's name.
        (out / "fusion.json").unlink()


def test_by_digest_whatever_the_tag_says(
    bundle: Path, registry: MemoryRegistry, tmp_path: Path
) -> None:
    stored = pull_from_registry(repository(registry), tmp_path / "first")
    registry.manifests["1"] = b"{}"
    again = pull_from_registry(repository(registry, stored.reference), tmp_path / "second")
    assert again.reference == stored.reference
    with pytest.raises(InputError, match="expected oci://HOST/NAME:TAG: a digest follows"):
        push_to_registry(Bundle.open(bundle), repository(registry, stored.reference))


def test_a_tag_that_moves_in_the_middle_of_a_pull(
    bundle: Path, registry: MemoryRegistry, tmp_path: Path
) -> None:
    other = write_bundle(tmp_path / "other", devices=("delta", "beta", "gamma"))

    def move(request: Request) -> None:
        if "/blobs/" in request.full_url:
            registry.before = lambda request: None
            push_to_registry(Bundle.open(other), repository(registry))

    registry.before = move
    first = pull_from_registry(repository(registry), tmp_path / "out")
    assert Bundle.open(tmp_path / "out").digest == Bundle.open(bundle).digest
    second = pull_from_registry(repository(registry), tmp_path / "out")
    assert Bundle.open(tmp_path / "out").digest == Bundle.open(other).digest
    assert first.reference != second.reference


def test_a_signature_travels_and_is_checked_first(
    bundle: Path, tmp_path: Path, registry: MemoryRegistry
) -> None:
    new_bundle_key(tmp_path, "release")
    trusted = load_bundle_key(tmp_path / "release.public")
    with pytest.raises(ConfigError, match="not signed"):
        pull_from_registry(repository(registry), tmp_path / "out", signed_by=trusted)
    assert len(registry.requests("GET")) == 2, "the tag and what would be signed"
    opened = Bundle.open(bundle)
    sign(bundle / MANIFEST, opened.manifest_content, load_signing_key(tmp_path / "release.secret"))
    push_to_registry(opened, repository(registry))
    pull_from_registry(repository(registry), tmp_path / "out", signed_by=trusted)
    assert (tmp_path / "out" / SIGNATURE).read_bytes() == (bundle / SIGNATURE).read_bytes()
    new_bundle_key(tmp_path, "thief")
    (bundle / SIGNATURE).unlink()
    sign(bundle / MANIFEST, opened.manifest_content, load_signing_key(tmp_path / "thief.secret"))
    push_to_registry(opened, repository(registry))
    before = content_of(tmp_path / "out")
    with pytest.raises(ConfigError, match="expected a signature with key release"):
        pull_from_registry(repository(registry), tmp_path / "out", signed_by=trusted)
    assert content_of(tmp_path / "out") == before


def test_a_bundle_that_is_not_whole_is_not_stored(bundle: Path) -> None:
    (bundle / model_path(1)).unlink()
    registry = MemoryRegistry()
    with pytest.raises(ConfigError, match="missing, but listed"):
        push_to_registry(Bundle.open(bundle), repository(registry))
    assert not registry.seen


def faulty(
    registry: MemoryRegistry, part: str, answer: Callable[[FakeResponse], FakeResponse]
) -> None:
    """Have each answer to a request for an address with `part` changed."""

    def before(request: Request) -> FakeResponse | None:
        return answer(registry.answer(request)) if part in request.full_url else None

    registry.before = before


def refused(registry: MemoryRegistry, out: Path, expected: str, **more: Any) -> None:
    """Assert that a pull is refused in one line, with nothing left behind."""
    before = content_of(out.parent)
    with pytest.raises((TransferError, InputError), match=expected) as caught:
        pull_from_registry(repository(registry), out, **more)
    assert "\n" not in str(caught.value)
    assert content_of(out.parent) == before
    assert not list(out.parent.glob(".*"))


def model_digest(bundle: Path) -> str:
    return f"sha256:{Bundle.open(bundle).manifest.files[model_path(1)].sha256}"


def test_another_digest_than_asked_for(
    bundle: Path, registry: MemoryRegistry, tmp_path: Path
) -> None:
    digest, out = model_digest(bundle), tmp_path / "out"
    right = registry.blobs[digest]
    registry.blobs[digest] = right[:-1] + b"x"
    refused(registry, out, f"{model_path(1)}: expected {digest}, is given sha256:")
    registry.blobs[digest] = right + b"x"
    refused(registry, out, f"{model_path(1)}: more than {len(right):,} bytes")
    registry.blobs[digest] = right[:-1]
    refused(registry, out, f"{model_path(1)}: ends after {len(right) - 1:,} bytes, expected")
    del registry.blobs[digest]
    refused(registry, out, rf"{model_path(1)}: is not there \(UNKNOWN: unknown to registry\)")
    registry.blobs[digest] = right
    pinned = pull_from_registry(repository(registry), out).reference
    registry.manifests[pinned.rpartition("@")[2]] += b" "
    with pytest.raises(TransferError, match=r"expected sha256:[0-9a-f]{64}, is given sha256:"):
        pull_from_registry(repository(registry, pinned), out)
    faulty(registry, "manifests/1", lambda reply: FakeResponse(200, b"{}", dict(reply.headers)))
    refused(registry, out, "expected sha256:[0-9a-f]{64}, is given sha256:44136fa355b3")


def test_layers_that_the_bundle_does_not_list(
    bundle: Path, registry: MemoryRegistry, tmp_path: Path
) -> None:
    """A manifest of the registry that does not fit the signed one inside."""
    out, original = tmp_path / "out", registry.manifests["1"]
    other = b"another model"
    registry.blobs[digest_of(other)] = other
    manifest = json.loads(original)
    layer = next(one for one in manifest["layers"] if one["digest"] == model_digest(bundle))
    layer.update(digest=digest_of(other), size=len(other))
    registry.manifests["1"] = json.dumps(manifest).encode()
    refused(registry, out, f"{model_path(1)}: not as its manifest.json lists it")
    manifest["layers"].remove(layer)
    registry.manifests["1"] = json.dumps(manifest).encode()
    refused(registry, out, f"lacks {model_path(1)}, which its manifest.json lists")
    # Paths of layers lead nowhere.
    layer["annotations"]["org.cncf.model.filepath"] = "../../escaped"
    manifest = json.loads(original)
    manifest["layers"].append(layer)
    registry.manifests["1"] = json.dumps(manifest).encode()
    pull_from_registry(repository(registry), out)
    assert not list(tmp_path.parent.rglob("escaped"))
    big = next(
        one for one in manifest["layers"] if one["annotations"].get("x", MANIFEST) == MANIFEST
    )
    big["size"] = 2**40
    registry.manifests["1"] = json.dumps(manifest).encode()
    refused(registry, out, "manifest.json: expected at most 67,108,864 bytes")


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        (b"no JSON", r"expected a bundle \(`mdp bundle push`\)"),
        (b"[]", r"expected a bundle \(`mdp bundle push`\)"),
        (
            b'{"schemaVersion": 2, "layers": [], "config": {"mediaType": "application/vnd.oci.image'
            b'.config.v1+json", "digest": "sha256:1", "size": 1}}',
            r"expected a bundle \(`mdp bundle push`\), found application/vnd.oci.image.config",
        ),
        (b" " * (4 * 2**20 + 1), "more than 4,194,304 bytes"),
    ],
)
def test_what_is_no_bundle(
    registry: MemoryRegistry, tmp_path: Path, manifest: bytes, expected: str
) -> None:
    registry.manifests["1"] = manifest
    refused(registry, tmp_path / "out", expected)


def test_a_registry_that_is_gone_or_has_trouble(registry: MemoryRegistry, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def gone(request: Request) -> FakeResponse:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    registry.before = gone
    refused(registry, out, f"{HOST}: Connection refused")
    registry.before = lambda request: FakeResponse(503, b"<html>\n</html>")
    refused(registry, out, "HTTP status 503$")
    registry.before = lambda request: complaint(429, "TOOMANY", "later,\nplease")
    with pytest.raises(TransferError, match="HTTP status 429"):
        pull_from_registry(repository(registry), out)
    del registry.manifests["1"]
    registry.before = lambda request: None
    refused(registry, out, "shelf/colours:1: is not there")


def test_a_connection_that_breaks_is_resumed(
    bundle: Path, registry: MemoryRegistry, tmp_path: Path
) -> None:
    digest, breaks = model_digest(bundle), [100, 40]

    def breaking(reply: FakeResponse) -> FakeResponse:
        if breaks:
            reply.breaks_after = breaks.pop()
        return reply

    faulty(registry, digest, breaking)
    pull_from_registry(repository(registry), tmp_path / "out")
    asked = [one.get_header("Range") for one in registry.seen if digest in one.full_url]
    assert asked == [None, "bytes=40-", "bytes=140-"]
    assert Bundle.open(tmp_path / "out").model(1).content

    # One that cannot go on in the middle gives it again.
    breaks.append(50)

    def whole(reply: FakeResponse) -> FakeResponse:
        return breaking(FakeResponse(200, registry.blobs[digest]))

    faulty(registry, digest, whole)
    pull_from_registry(repository(registry), tmp_path / "second")
    assert Bundle.open(tmp_path / "second").model(1).content

    def broken(reply: FakeResponse) -> FakeResponse:
        reply.breaks_after = 0
        return reply

    # One that brings nothing is the end.
    faulty(registry, digest, broken)
    refused(registry, tmp_path / "third", f"{model_path(1)}: Connection reset by peer$")


def test_a_full_disk(bundle: Path, registry: MemoryRegistry, tmp_path: Path) -> None:
    refused(registry, tmp_path / "out", r"no room: 0\.0 MB are to be fetched, 0\.0 MB are free",
            free_bytes=lambda folder: 1000)  # fmt: skip

    # It fills up in the middle.
    class Full(Repository):
        def fetch(self, what: str, *rest: Any) -> None:
            if what == model_path(1):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().fetch(what, *rest)

    out = tmp_path / "out"
    with pytest.raises(InputError, match="out: cannot be written: No space left on device"):
        pull_from_registry(Full(parse_reference(TAG), registry), out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle"]


def test_a_folder_of_something_else_stays(registry: MemoryRegistry, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    refused(registry, out, "exists already: expected a new folder, or one of a bundle")
    refused(registry, out / "mine", "exists already")
    refused(registry, out / "mine" / "deeper", "cannot be written: (Not a directory|File exists)")


class Guarded:
    """A registry that lets in who has a login, or a token for it."""

    def __init__(self, registry: MemoryRegistry, challenge: str) -> None:
        self._registry, self._challenge = registry, challenge
        self.tokens: list[Request] = []

    def __call__(self, request: Request) -> FakeResponse:
        given = request.get_header("Authorization") or ""
        if request.host == TOKENS:
            self.tokens.append(request)
            if given not in ("", f"{LOGIN.basic}"):
                return FakeResponse(401)
            return FakeResponse(200, json.dumps({"token": f"t{len(self.tokens)}"}).encode())
        allowed = {LOGIN.basic, f"Bearer t{len(self.tokens)}"} if self.tokens else {LOGIN.basic}
        if given not in allowed:
            return FakeResponse(401, headers={"WWW-Authenticate": self._challenge})
        return self._registry(request)


LOGIN = RegistryLogin(user="shelf", password="secret", source=Path("/auth.json"))
BEARER = f'Bearer realm="https://{TOKENS}/token",service="r",scope="repository:shelf/colours:pull"'


@pytest.mark.parametrize("challenge", ['Basic realm="r"', BEARER])
def test_logins(registry: MemoryRegistry, tmp_path: Path, challenge: str) -> None:
    guarded = Guarded(registry, challenge)
    found = Repository(parse_reference(TAG), guarded, lambda: LOGIN)
    pull_from_registry(found, tmp_path / "out")
    asked = len(guarded.tokens)
    assert asked == (1 if challenge is BEARER else 0)
    if asked:
        assert guarded.tokens[0].full_url == (
            f"https://{TOKENS}/token?service=r&scope=repository%3Ashelf%2Fcolours%3Apull"
        )
    # Never repeated where a redirection leads.
    for request in registry.seen:
        assert "Authorization" not in request.headers


def test_all_may_read_with_a_token_and_no_login(registry: MemoryRegistry, tmp_path: Path) -> None:
    pull_from_registry(Repository(parse_reference(TAG), Guarded(registry, BEARER)), tmp_path / "o")


@pytest.mark.parametrize("challenge", ['Basic realm="r"', BEARER])
def test_a_login_that_is_wrong_or_lacks(
    registry: MemoryRegistry, tmp_path: Path, challenge: str
) -> None:
    wrong = RegistryLogin(user="shelf", password="wrong", source=Path("/auth.json"))
    guarded = Guarded(registry, challenge)
    with pytest.raises(TransferError) as caught:
        pull_from_registry(Repository(parse_reference(TAG), guarded, lambda: wrong), tmp_path / "o")
    expected = f"{HOST}: refuses user 'shelf' of /auth.json for shelf/colours"
    assert str(caught.value) == expected
    if challenge is BEARER:
        return
    files = [Path("/a/auth.json"), Path("/b/config.json")]
    lacking = Repository(parse_reference(TAG), guarded, lambda: None, files)
    expected = re.escape(
        f"{HOST}: asks for a login: expected one in /a/auth.json or /b/config.json (`podman login "
    )
    with pytest.raises(TransferError, match=expected):
        pull_from_registry(lacking, tmp_path / "o")
    with pytest.raises(TransferError, match="asks for a login of an unknown kind"):
        pull_from_registry(
            Repository(parse_reference(TAG), Guarded(registry, "Negotiate"), lambda: LOGIN),
            tmp_path / "o",
        )


@pytest.mark.parametrize("place", [f"http://{HOST}/upload", "http://[", "file:///upload"])
def test_uploads_stay_with_tls(bundle: Path, place: str) -> None:
    registry = MemoryRegistry()

    def elsewhere(request: Request) -> FakeResponse | None:
        if request.get_method() != "POST":
            return None
        return FakeResponse(202, headers={"Location": place})

    registry.before = elsewhere
    with pytest.raises(TransferError, match=re.escape(f"uploads go to {place}: expected TLS")):
        push_to_registry(Bundle.open(bundle), repository(registry))


def test_an_address_that_is_none_is_one_line(registry: MemoryRegistry, tmp_path: Path) -> None:
    def led_away(request: Request) -> FakeResponse:
        raise ValueError("Invalid IPv6 URL")

    registry.before = led_away
    refused(registry, tmp_path / "out", f"{HOST}: Invalid IPv6 URL")
