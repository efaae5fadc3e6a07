"""Store of pushed bundles: resumed, verified, bounded, switched whole or not at all."""

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devices.agent import store as module
from devices.agent.store import (
    KEPT_FREE_BYTES,
    VERSIONS,
    BundleStore,
    check_store,
    current_folder,
    read_versions,
)
from mdp.errors import AgentError, ConfigError, InputError
from mdp.formats.bundle import FUSION, MANIFEST, Bundle, model_path
from mdp.formats.device_part import MODEL, PartFile, entry_of, part_of, version_of
from mdp.formats.signing import SIGNATURE
from mdp.testing.bundles import write_bundle

MAX_BYTES = 10**6


class Push:
    """A bundle's part as a client offers it, for its first device."""

    def __init__(self, folder: Path) -> None:
        self.bundle = Bundle.open(folder)
        self.part = part_of(self.bundle, 0)
        self.files = {file: entry_of(content) for file, content in self.part.items()}
        self.manifest = self.files[MANIFEST].sha256

    def send(self, store: BundleStore) -> None:
        """Offer it, and send what is missing."""
        received = store.offer(self.manifest, self.files)
        for file, content in self.part.items():
            while (at := received[file]) < len(content):
                received = store.append(self.manifest, file, at, content[at : at + 1000])


def read(folder: Path) -> tuple[Bundle, int]:
    return Bundle.open(folder), 0


def open_current(store: BundleStore, original: Bundle) -> Bundle:
    """The bundle to serve."""
    folder = current_folder(store.folder, original.path)
    assert folder is not None
    return Bundle.open(folder)


def open_store(folder: Path, free_bytes: int = 2**40) -> BundleStore:
    return BundleStore(
        folder / "kept",
        folder / "original",
        max_bytes=MAX_BYTES,
        read=read,
        free_bytes=lambda _: free_bytes,
    )


@pytest.fixture
def push(tmp_path: Path) -> Push:
    return Push(write_bundle(tmp_path / "new", name="new", bag_scale=9.0))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Push:
    return Push(write_bundle(tmp_path_factory.mktemp("shared") / "new"))


@pytest.fixture
def original(tmp_path: Path) -> Bundle:
    return Bundle.open(write_bundle(tmp_path / "original"))


def test_a_committed_version_is_served(tmp_path: Path, push: Push, original: Bundle) -> None:
    store = open_store(tmp_path)
    push.send(store)
    folder = store.complete(push.manifest)
    assert current_folder(store.folder, original.path) == original.path
    assert Bundle.open(folder).model(0).content == push.part[MODEL]
    assert not (folder / model_path(1)).exists()
    store.commit(Bundle.open(folder), original)
    assert current_folder(store.folder, original.path) == folder
    assert open_store(tmp_path).versions == [version_of(push.bundle), version_of(original)]
    # Back, and forth again.
    assert store.complete(version_of(original).manifest) == original.path
    store.commit(original, push.bundle)
    assert current_folder(store.folder, original.path) == original.path
    assert store.complete(push.manifest) == folder


def test_a_relative_folder_is_that_of_the_start(
    tmp_path: Path, push: Push, original: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(Path())
    push.send(store)
    monkeypatch.chdir("/")
    assert store.complete(push.manifest) == tmp_path / "kept" / push.manifest
    store.commit(push.bundle, original)
    assert current_folder(tmp_path / "kept", tmp_path) == tmp_path / "kept" / push.manifest


def test_the_third_version_is_removed(tmp_path: Path, push: Push, original: Bundle) -> None:
    store, former = open_store(tmp_path), original
    for scale in (5.0, 6.0, 7.0):
        one = Push(write_bundle(tmp_path / str(scale), bag_scale=scale))
        one.send(store)
        store.commit(Bundle.open(store.complete(one.manifest)), former)
        former = one.bundle
    push.send(store)
    kept = {path.name for path in store.folder.iterdir()}
    last = {version.manifest for version in store.versions}
    assert kept == {VERSIONS, f"{push.manifest}.partial", *last}
    store.tidy()
    assert {path.name for path in store.folder.iterdir()} == {VERSIONS, *last}


@settings(max_examples=25)
@given(st.data())
def test_pieces_in_any_order_make_the_same_files(shared: Push, data: st.DataObject) -> None:
    with TemporaryDirectory() as name:
        folder, push = Path(name), shared
        store = open_store(folder)
        received = store.offer(push.manifest, push.files)
        for _ in range(data.draw(st.integers(0, 30))):
            file: PartFile = data.draw(st.sampled_from(sorted(push.part)))
            content = push.part[file]
            at = data.draw(st.one_of(st.just(received[file]), st.integers(0, len(content))))
            piece = content[at : at + data.draw(st.integers(1, len(content)))]
            if data.draw(st.booleans()):
                store = open_store(folder)
                assert store.offer(push.manifest, push.files) == received
            try:
                after = store.append(push.manifest, file, at, piece)
            except AgentError:
                # Fusion weights or a model before the manifest.
                assert received[MANIFEST] < len(push.part[MANIFEST])
                received = store.count_received()
                continue
            grown = {one for one in after if after[one] != received[one]}
            assert grown <= {file}
            received = after
            for one, length in received.items():
                assert length <= len(push.part[one])
        push.send(store)
        complete = Bundle.open(store.complete(push.manifest))
        assert complete.model(0).content == push.part[MODEL]
        assert complete.content(FUSION) == push.part[FUSION]


@pytest.mark.parametrize("fails_at", range(8))
def test_a_crash_leaves_the_old_version_or_the_new(
    tmp_path: Path, push: Push, original: Bundle, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    class Crash(BaseException):
        pass

    store, left = open_store(tmp_path), fails_at
    push.send(store)
    renamed = Path.replace

    def crashing(do: Callable[..., object], *arguments: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise Crash
        return do(*arguments)

    monkeypatch.setattr(Path, "replace", lambda *paths: crashing(renamed, *paths))
    crashed = False
    try:
        store.commit(Bundle.open(store.complete(push.manifest)), original)
    except Crash:
        crashed = True
    monkeypatch.undo()
    assert crashed == (fails_at < 5)
    served = open_current(store, original)
    assert served.digest == (original.digest if crashed else push.bundle.digest)
    served.model(0)
    # The next push goes on from there.
    again = open_store(tmp_path)
    push.send(again)
    again.commit(Bundle.open(again.complete(push.manifest)), original)
    assert current_folder(store.folder, original.path) == again.folder / push.manifest


def test_what_was_altered_is_not_served_and_is_sent_again(tmp_path: Path, push: Push) -> None:
    store = open_store(tmp_path)
    push.send(store)
    path = store.folder / f"{push.manifest}.partial" / MODEL
    path.write_bytes(b"?" + path.read_bytes()[1:])
    with pytest.raises(AgentError, match=r"model.onnx: expected sha256 .*, got "):
        store.complete(push.manifest)
    assert store.count_received()[MODEL] == 0
    push.send(store)
    folder = store.complete(push.manifest)
    (folder / model_path(0)).write_bytes(b"?" * len(push.part[MODEL]))
    assert open_store(tmp_path).offer(push.manifest, push.files)[MODEL] == 0


def test_a_resigned_version_is_verified_first(tmp_path: Path, push: Push, original: Bundle) -> None:
    store = open_store(tmp_path)
    push.send(store)
    folder = store.complete(push.manifest)
    store.commit(Bundle.open(folder), original)
    push.part = {MANIFEST: push.part[MANIFEST], SIGNATURE: b"forged", **push.part}
    push.files[SIGNATURE] = entry_of(b"forged")

    def strict(folder: Path) -> tuple[Bundle, int]:
        if (folder / SIGNATURE).exists():
            raise ConfigError("not signed for this key")
        return read(folder)

    store._read = strict
    with pytest.raises(ConfigError, match="not signed for"):
        push.send(store)
    assert open_current(store, original).digest == push.bundle.digest
    store._read = read
    push.send(store)
    assert store.complete(push.manifest) == folder
    assert (folder / SIGNATURE).read_bytes() == b"forged"
    assert store.offer(push.manifest, push.files)[MODEL] == len(push.part[MODEL])


@pytest.mark.parametrize("file", [MANIFEST, FUSION, MODEL])
def test_an_incomplete_version_is_not_served(tmp_path: Path, push: Push, file: PartFile) -> None:
    store = open_store(tmp_path)
    push.send(store)
    os.truncate(store.folder / f"{push.manifest}.partial" / file, 100)
    with pytest.raises(AgentError, match=f"{file}: expected .* bytes, got 100"):
        store.complete(push.manifest)


def test_no_model_before_a_verified_manifest(tmp_path: Path, push: Push) -> None:
    def unsigned(folder: Path) -> tuple[Bundle, int]:
        raise ConfigError("not signed")

    store = open_store(tmp_path)
    store.offer(push.manifest, push.files)
    with pytest.raises(AgentError, match=r"manifest.json: expected .* bytes, got 0"):
        store.append(push.manifest, MODEL, 0, b"x")
    strict = BundleStore(
        tmp_path / "strict",
        tmp_path,
        max_bytes=MAX_BYTES,
        read=unsigned,
        free_bytes=lambda _: 2**40,
    )
    with pytest.raises(ConfigError, match="not signed"):
        push.send(strict)
    assert list(strict.folder.iterdir()) == []


def test_an_offer_that_differs_from_its_manifest_is_refused(tmp_path: Path, push: Push) -> None:
    store = open_store(tmp_path)
    other = hashlib.sha256(b"other").hexdigest()
    push.files[MODEL] = type(push.files[MODEL])(sha256=other, size_bytes=MAX_BYTES // 2)
    with pytest.raises(AgentError, match=r"fusion.json|model.onnx: the offer differs"):
        push.send(store)


def test_rungs_are_sent_verified_and_kept(tmp_path: Path, original: Bundle) -> None:
    push, store = Push(write_bundle(tmp_path / "ladder", rungs=3)), open_store(tmp_path)
    assert [*push.part][2:] == [MODEL, "rung-1.onnx", "rung-2.onnx"]
    push.send(store)
    kept = Bundle.open(store.complete(push.manifest))
    for rung in range(3):
        assert kept.model(0, rung).content == push.bundle.model(0, rung).content


@pytest.mark.parametrize("change", ["left out", "one more"])
def test_an_offer_has_the_rungs_of_its_manifest(tmp_path: Path, change: str) -> None:
    push = Push(write_bundle(tmp_path / "ladder", rungs=2))
    if change == "left out":
        del push.files["rung-1.onnx"], push.part["rung-1.onnx"]
    else:
        push.part["rung-2.onnx"] = b"more"
        push.files["rung-2.onnx"] = entry_of(b"more")
    with pytest.raises(AgentError, match=r"rung-[12].onnx: the offer differs from manifest.json"):
        push.send(open_store(tmp_path))


def test_what_is_refused_before_a_byte_is_sent(tmp_path: Path, push: Push) -> None:
    large = Push(write_bundle(tmp_path / "large", comment_bytes=MAX_BYTES))
    with pytest.raises(AgentError, match=r"1.0 MB are offered, this agent takes 1.0 MB"):
        open_store(tmp_path).offer(large.manifest, large.files)
    total = sum(map(len, push.part.values()))
    full = open_store(tmp_path, free_bytes=KEPT_FREE_BYTES + total - 1)
    with pytest.raises(AgentError, match="no room: "):
        full.offer(push.manifest, push.files)
    assert list((tmp_path / "kept").iterdir()) == []
    # What is there already needs no room.
    push.send(open_store(tmp_path, free_bytes=KEPT_FREE_BYTES + total))
    assert full.offer(push.manifest, push.files)[MODEL] == len(push.part[MODEL])
    for missing in (MANIFEST, FUSION, MODEL):
        files = {file: entry for file, entry in push.files.items() if file != missing}
        with pytest.raises(AgentError, match=f"expected {missing} among"):
            full.offer(push.manifest, files)
    with pytest.raises(AgentError, match=r"expected manifest.json with the offer's hash"):
        full.offer("0" * 64, push.files)
    huge = type(push.files[MODEL])(sha256="0" * 64, size_bytes=5000)
    with pytest.raises(AgentError, match=r"signature.json: expected at most 4,096 bytes"):
        full.offer(push.manifest, {**push.files, "signature.json": huge})


def test_more_than_was_offered_is_refused(tmp_path: Path, push: Push) -> None:
    store = open_store(tmp_path)
    push.send(store)
    length = len(push.part[MODEL])
    with pytest.raises(AgentError, match=rf"model.onnx: expected {length:,} bytes, got more"):
        store.append(push.manifest, MODEL, length, b"x")
    with pytest.raises(AgentError, match=r"model.onnx of 000000000000 was not offered"):
        store.append("0" * 64, MODEL, 0, b"x")
    with pytest.raises(AgentError, match=r"signature.json of .* was not offered"):
        store.append(push.manifest, SIGNATURE, 0, b"x")
    with pytest.raises(AgentError, match="was not offered"):
        store.complete("0" * 64)


def test_a_full_disk_is_freed(tmp_path: Path, push: Push, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    store.offer(push.manifest, push.files)
    store.append(push.manifest, MANIFEST, 0, b"{")
    monkeypatch.setattr(module, "_append", partial(_full))
    expected = f"{tmp_path}/kept: cannot be written: No space left on device"
    with pytest.raises(AgentError, match=re.escape(expected)):
        store.append(push.manifest, MANIFEST, 1, b"}")
    assert list(store.folder.iterdir()) == []


def _full(path: Path, data: bytes) -> None:
    raise OSError(28, os.strerror(28))


def test_a_link_in_the_folder_leads_nowhere(tmp_path: Path, push: Push) -> None:
    store = open_store(tmp_path)
    store.offer(push.manifest, push.files)
    staging = store.folder / f"{push.manifest}.partial"
    staging.mkdir()
    (staging / MANIFEST).symlink_to(tmp_path / "victim")
    (tmp_path / "victim").write_bytes(b"")
    length = (staging / MANIFEST).lstat().st_size
    with pytest.raises(AgentError, match="cannot be written"):
        store.append(push.manifest, MANIFEST, length, b"x")
    assert (tmp_path / "victim").read_bytes() == b""


@pytest.mark.parametrize("content", ["{", '{"versions": [{"name": "../x"}]}', '{"versions": 1}'])
def test_unreadable_versions_are_named(tmp_path: Path, content: str, original: Bundle) -> None:
    (tmp_path / VERSIONS).write_text(content)
    with pytest.raises(ConfigError, match=VERSIONS):
        current_folder(tmp_path, original.path)


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    check_store(tmp_path / "made" / "kept")
    assert read_versions(tmp_path / "made" / "kept") == []
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(InputError, match=r"--allow-push .*open: expected a folder of user"):
        check_store(tmp_path / "open")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"--allow-push .*file: File exists"):
        check_store(tmp_path / "file")
    shutil.rmtree(tmp_path / "open")
