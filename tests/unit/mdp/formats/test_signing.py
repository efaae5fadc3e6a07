"""Bundles that are signed, and devices that serve no others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from devices.agent.options import ServeOptions
from mdp.errors import ConfigError, InputError
from mdp.formats.bundle import FUSION, MANIFEST, Bundle, model_path
from mdp.formats.signing import (
    SIGNATURE,
    BundleKey,
    fingerprint,
    load_bundle_key,
    load_signing_key,
    new_bundle_key,
    sign,
)
from mdp.testing.bundles import write_bundle
from tests.support.bundles import change_assignment, relist


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with the keys of `release` and of `other`."""
    for name in ("release", "other"):
        new_bundle_key(tmp_path / "keys", name)
    return tmp_path / "keys"


@pytest.fixture
def trusted(keys: Path) -> BundleKey:
    return load_bundle_key(keys / "release.public")


def sign_folder(folder: Path, key: Path) -> Path:
    sign(folder / MANIFEST, Bundle.open(folder).manifest_content, load_signing_key(key))
    return folder


@pytest.fixture
def folder(tmp_path: Path, keys: Path) -> Path:
    return sign_folder(write_bundle(tmp_path / "bundle"), keys / "release.secret")


def test_a_bundle_as_it_was_signed_is_loaded(folder: Path, trusted: BundleKey) -> None:
    candidate = ServeOptions(bundle=folder, device="alpha", bundle_key=trusted).loadable()
    candidate.load().warm_up()


def unsign(folder: Path) -> None:
    (folder / SIGNATURE).unlink()


def sign_by_another(folder: Path) -> None:
    sign_folder(folder, folder.parent / "keys" / "other.secret")


def another_bundle_s_signature(folder: Path) -> None:
    other = write_bundle(folder.parent / "another", bag_scale=9.0)
    sign_folder(other, folder.parent / "keys" / "release.secret")
    shutil.copy(other / SIGNATURE, folder / SIGNATURE)


def forge_name_of_the_key(folder: Path) -> None:
    """Signed by another key, and said to be of the trusted one."""
    public = json.loads((folder / SIGNATURE).read_text())["public"]
    sign_by_another(folder)
    content = json.loads((folder / SIGNATURE).read_text())
    (folder / SIGNATURE).write_text(json.dumps({**content, "public": public}))


def more_threads(folder: Path) -> None:
    """In the plan, but not in the digest that clients and agents compare."""
    change_assignment(folder, batch=64)


def another_model(folder: Path) -> None:
    """With its hash in the manifest."""
    shutil.copy(folder / model_path(1), folder / model_path(0))
    relist(folder, model_path(0))


def other_fusion(folder: Path) -> None:
    (folder / FUSION).write_text((folder / FUSION).read_text() + " ")
    relist(folder, FUSION)


def rubbish(folder: Path) -> None:
    (folder / SIGNATURE).write_bytes(b"{" * 5000)


ALTERED = r"manifest\.json: altered since it was signed with key release \("


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (unsign, r"bundle: not signed: expected signature\.json beside manifest\.json, signed "),
        (sign_by_another, r"signature\.json: expected a signature with key release \(.* got one"),
        (another_bundle_s_signature, ALTERED),
        (forge_name_of_the_key, ALTERED),
        (more_threads, ALTERED),
        (another_model, ALTERED),
        (other_fusion, ALTERED),
        (rubbish, r"signature\.json: expected at most 4,096 bytes, found more"),
    ],
)
def test_any_other_bundle_is_refused(
    folder: Path, trusted: BundleKey, change: Callable[[Path], None], expected: str
) -> None:
    change(folder)
    ServeOptions(bundle=folder, device="alpha").loadable()
    with pytest.raises(ConfigError, match=expected):
        ServeOptions(bundle=folder, device="alpha", bundle_key=trusted).loadable()


def test_a_model_that_was_changed_later_is_refused(folder: Path, trusted: BundleKey) -> None:
    candidate = ServeOptions(bundle=folder, device="alpha", bundle_key=trusted).loadable()
    path = folder / model_path(0)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ConfigError, match=r"0/model\.onnx: expected sha256"):
        candidate.load()


def test_the_signature_is_checked_before_parsing(folder: Path, trusted: BundleKey) -> None:
    (folder / MANIFEST).write_bytes(b"[" * 100_000)
    with pytest.raises(ConfigError, match=ALTERED):
        Bundle.open(folder, signed_by=trusted)


def test_keys_are_written_once_and_for_their_owner(keys: Path) -> None:
    before = {path: path.read_bytes() for path in keys.iterdir()}
    with pytest.raises(InputError, match=r"release\.secret: exists already"):
        new_bundle_key(keys, "release")
    (keys / "release.secret").unlink()
    with pytest.raises(InputError, match=r"release\.public: exists already"):
        new_bundle_key(keys, "release")
    del before[keys / "release.secret"]
    assert {path: path.read_bytes() for path in keys.iterdir()} == before
    assert (keys / "other.secret").stat().st_mode & 0o777 == 0o600
    assert keys.stat().st_mode & 0o777 == 0o700
    with pytest.raises(InputError, match=r"--name ../x: expected lower-case letters"):
        new_bundle_key(keys, "../x")


def readable(keys: Path) -> None:
    (keys / "release.secret").chmod(0o640)


def mix_keys(keys: Path) -> None:
    content = (keys / "release.secret").read_text()
    own, other = (load_bundle_key(keys / f"{name}.public").public for name in ("release", "other"))
    (keys / "release.secret").write_text(content.replace(own, other))


def of_a_client(keys: Path) -> None:
    (keys / "client.public").write_text('name = "client"\npublic = "' + "a" * 40 + '"\n')


def as_it_is(keys: Path) -> None:
    """Only the wrong one of the two is given."""


@pytest.mark.parametrize(
    ("change", "load", "expected"),
    [
        (
            readable,
            load_signing_key,
            "release.secret: expected mode 0600, got 0640: others may read this secret key",
        ),
        (
            mix_keys,
            load_signing_key,
            "release.secret: `public` and `secret` do not belong together",
        ),
        (
            as_it_is,
            load_signing_key,
            "release.public: expected a secret key file, this is a public one",
        ),
        (
            as_it_is,
            load_bundle_key,
            "release.secret: expected a public key file, this is a secret one: it stays",
        ),
        (
            of_a_client,
            load_bundle_key,
            "client.public: expected a key file as `mdp bundle key` writes it, this is",
        ),
    ],
)
def test_a_wrong_key_file_is_named_and_its_secret_is_not(
    keys: Path, change: Callable[[Path], None], load: Callable[[Path], object], expected: str
) -> None:
    secret = (keys / "release.secret").read_text().split('secret = "')[1][:64]
    change(keys)
    with pytest.raises(ConfigError) as caught:
        load(keys / expected.partition(":")[0])
    assert expected in str(caught.value)
    assert secret not in str(caught.value)


def test_keys_are_those_of_rfc_8032(tmp_path: Path) -> None:
    """Test 1 of its section 7.1."""
    secret = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"
    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    path = tmp_path / "rfc.secret"
    path.write_text(
        f'name = "rfc"\nalgorithm = "ed25519"\npublic = "{public}"\nsecret = "{secret}"\n'
    )
    path.chmod(0o600)
    assert load_signing_key(path).key == BundleKey(name="rfc", public=public)
    assert (
        fingerprint(public)
        == "21fe31dfa154a261626bf854046fd2271b7bed4b6abe45aa58877ef47f9721b9"[:32]
    )
