"""Pushed bundles on disk: one folder, in which a crash at any point leaves the old or the new.

    FOLDER/versions.json          the version to serve and the one before; replaced atomically
    FOLDER/SHA256.partial/        files that are being received; their lengths are the positions
    FOLDER/SHA256/                a complete version, named by its manifest's hash

A version without a folder is the agent's own `--bundle`, if it has one. Names come from this
program, never from a client.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from mdp.errors import AgentError, ConfigError, InputError
from mdp.files import Record, read_json, sync, write_json
from mdp.formats.bundle import FUSION, MANIFEST, Bundle, FileEntry, Sha256
from mdp.formats.device_part import MODEL, PartFile, Version, part_files, path_in_bundle, version_of
from mdp.formats.signing import MAX_FILE_BYTES, SIGNATURE
from mdp.protocol.messages import Buffer

VERSIONS = "versions.json"
#: Of the disk, for everything else.
KEPT_FREE_BYTES = 64 * 2**20
#: MDP's largest have 130 kB and 600 kB; parsed, they take a multiple.
MAX_PUSHED_JSON_BYTES = 2**23
_OWN = re.compile(r"[0-9a-f]{64}(\.partial)?")
_MOST_BYTES: Mapping[PartFile, int] = {
    MANIFEST: MAX_PUSHED_JSON_BYTES,
    SIGNATURE: MAX_FILE_BYTES,
    FUSION: MAX_PUSHED_JSON_BYTES,
}


class Versions(Record, frozen=True):
    """The content of `versions.json`: the version to serve and the previous one, at most."""

    versions: list[Version]
    format_version: Literal[1] = 1


def read_versions(folder: Path) -> list[Version]:
    """The versions that `folder` names, none before the first push; raises ConfigError."""
    path = folder / VERSIONS
    return read_json(path, Versions).versions if path.is_symlink() or path.exists() else []


def folder_of(manifest: Sha256, folder: Path, original: Path | None) -> Path:
    """Folder with the files of a version: below `folder`, or `original`."""
    own = folder / manifest
    return own if original is None or own.is_dir() else original


def current_folder(folder: Path | None, original: Path | None) -> Path | None:
    """The bundle folder to serve; None before the first one is pushed. Raises ConfigError."""
    versions = [] if folder is None else read_versions(folder)
    if folder is None or not versions:
        return original
    return folder_of(versions[0].manifest, folder, original)


def check_store(folder: Path) -> None:
    """Make `folder` if it is missing; raises InputError unless this user alone may write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise InputError(f"--allow-push {folder}: {error.strerror}") from error
    if found.st_uid != os.geteuid() or found.st_mode & 0o022 or not stat.S_ISDIR(found.st_mode):
        raise InputError(
            f"--allow-push {folder}: expected a folder of user {os.geteuid()} in which no other "
            f"may write, got owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}"
        )


class BundleStore:
    """Receives versions and keeps two; one thread at a time. Its errors are `AgentError`."""

    def __init__(
        self,
        folder: Path,
        original: Path | None,
        *,
        max_bytes: int,
        read: Callable[[Path], tuple[Bundle, int]],
        free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    ) -> None:
        """`read` opens a bundle, checks its signature, and gives this device's sub-model.

        Raises InputError or ConfigError for a folder that cannot be used.
        """
        check_store(folder)
        # As it is now: what comes later does not depend on the current folder.
        self.folder, self.versions = folder.resolve(), read_versions(folder)
        self._original, self._max_bytes = original, max_bytes
        self._read, self._free_bytes = read, free_bytes
        self._offered: dict[PartFile, FileEntry] = {}
        self._manifest = ""
        #: Whether manifest and signature of the offer have been verified.
        self._verified = False
        #: Whether the complete version of the same manifest differs from the offer.
        self._differs = False

    def folder_of(self, manifest: Sha256) -> Path:
        """Folder with the files of a version."""
        return folder_of(manifest, self.folder, self._original)

    def offer(self, manifest: Sha256, files: Mapping[PartFile, FileEntry]) -> dict[PartFile, int]:
        """Begin or resume to receive `files`; returns how much of each is there.

        What was received of another version is dropped.
        """
        missing = [file for file in (MANIFEST, FUSION, MODEL) if file not in files]
        if missing:
            raise AgentError(f"expected {missing[0]} among the offered files")
        if files[MANIFEST].sha256 != manifest:
            raise AgentError(f"expected {MANIFEST} with the offer's hash")
        for file, most in _MOST_BYTES.items():
            if file in files and files[file].size_bytes > most:
                raise AgentError(f"{file}: expected at most {most:,} bytes")
        total = sum(entry.size_bytes for entry in files.values())
        if total > self._max_bytes:
            raise AgentError(
                f"{_mb(total)} are offered, this agent takes {_mb(self._max_bytes)} (--max-push-mb)"
            )
        self.tidy(manifest)
        self._manifest, self._offered, self._verified = manifest, dict(files), False
        self._differs = False
        self._differs = self._is_complete() and not self._is_right()
        received = self.count_received()
        free, left = self._free_bytes(self.folder), total - sum(received.values())
        if left and left + KEPT_FREE_BYTES > free:
            raise AgentError(
                f"no room: {_mb(left)} are offered, {_mb(max(0, free - KEPT_FREE_BYTES))} are free"
            )
        return received

    def count_received(self) -> dict[PartFile, int]:
        """Bytes that are there of each offered file."""
        if self._is_complete():
            return {file: entry.size_bytes for file, entry in self._offered.items()}
        return {file: _length(self._staging / file) for file in self._offered}

    def append(
        self, manifest: Sha256, file: PartFile, offset: int, data: Buffer
    ) -> dict[PartFile, int]:
        """Append `data` where it belongs at the end of a file; returns how much of each is there.

        A piece that is there already, or comes too early, changes nothing.
        """
        if manifest != self._manifest or file not in self._offered:
            raise AgentError(
                f"{file} of {manifest[:12]} was not offered, or another client pushes meanwhile"
            )
        received = self.count_received()
        if offset != received[file] or self._is_complete():
            return received
        if offset + len(data) > self._offered[file].size_bytes:
            raise AgentError(f"{file}: expected {self._offered[file].size_bytes:,} bytes, got more")
        if file not in (MANIFEST, SIGNATURE) and not self._verified:
            self._verify_manifest()
        try:
            self._staging.mkdir(mode=0o700, exist_ok=True)
            _append(self._staging / file, data)
        except OSError as error:
            # Whatever the disk lacks, it gets back what was received.
            self._drop()
            raise self._unwritable(error) from error
        received[file] += len(data)
        return received

    def check_there(self, manifest: Sha256) -> None:
        """Raise AgentError unless all files of a version are there, right or wrong. Quick."""
        if manifest == self._manifest:
            received = self.count_received()
            for file, entry in self._offered.items():
                _check_length(file, received[file], entry)
        elif manifest not in [version.manifest for version in self.versions]:
            raise AgentError(f"{manifest[:12]} was not offered")

    def complete(self, manifest: Sha256) -> Path:
        """The folder of a version that is there; verified, durable and final.

        Not quick. Any thread, while no other method but `count_received` is called.
        """
        self.check_there(manifest)
        if (self.folder / manifest).is_dir() and (manifest != self._manifest or not self._differs):
            return self.folder / manifest
        if manifest != self._manifest:
            return self.folder_of(manifest)
        k = self._verify_manifest()
        for file in self._offered:
            self._check_file(self._staging / file, self._offered[file])
        try:
            for file in self._offered:
                place = Path(path_in_bundle(file, k))
                (self._staging / place).parent.mkdir(parents=True, exist_ok=True)
                (self._staging / file).replace(self._staging / place)
                for durable in (place, *place.parents):
                    sync(self._staging / durable)
            if self._differs:
                shutil.rmtree(self.folder / manifest)
            self._staging.replace(self.folder / manifest)
            self._differs = False
            sync(self.folder)
        except OSError as error:
            self._drop()
            raise self._unwritable(error) from error
        return self.folder / manifest

    def commit(self, new: Bundle, former: Bundle | None) -> None:
        """Serve `new` from now on, also after a restart, and keep `former`, which was served."""
        current = version_of(new)
        before = [*([] if former is None else [version_of(former)]), *self.versions]
        previous = [version for version in before if version.manifest != current.manifest]
        versions = [current, *previous[:1]]
        write_json(self.folder / VERSIONS, Versions(versions=versions))
        self.versions = versions

    def tidy(self, *keep: Sha256) -> None:
        """Remove all files but those of the versions, and of `keep`, however far they are."""
        kept = {*keep, *(version.manifest for version in self.versions)}
        for path in self.folder.iterdir():
            if _OWN.fullmatch(path.name) and path.name.partition(".")[0] not in kept:
                shutil.rmtree(path, ignore_errors=True)

    @property
    def _staging(self) -> Path:
        return self.folder / f"{self._manifest}.partial"

    def _is_complete(self) -> bool:
        there = bool(self._manifest) and (self.folder / self._manifest).is_dir()
        return there and not self._differs

    def _verify_manifest(self) -> int:
        """Check what the other files are accepted by; returns this device's sub-model."""
        try:
            for file in (MANIFEST, SIGNATURE):
                if file in self._offered:
                    self._check_file(self._staging / file, self._offered[file])
            bundle, k = self._read(self._staging)
            wanted = part_files(bundle, k)
            for file in (wanted.keys() | self._offered.keys()) - {MANIFEST, SIGNATURE}:
                if wanted.get(file) != self._offered.get(file):
                    raise AgentError(f"{file}: the offer differs from {MANIFEST}")
        except (AgentError, ConfigError):
            self._drop()
            raise
        self._verified = True
        return k

    def _is_right(self) -> bool:
        """Tell whether the complete version of the offer is as offered, on this disk, still."""
        folder = self.folder / self._manifest
        try:
            _, k = self._read(folder)
            for file, entry in self._offered.items():
                self._check_file(folder / path_in_bundle(file, k), entry)
        except (AgentError, ConfigError, OSError):
            return False
        return True

    def _check_file(self, path: Path, entry: FileEntry) -> None:
        """Raise AgentError unless a file is whole and as offered; removes a wrong one."""
        _check_length(path.name, _length(path), entry)
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != entry.sha256:
            path.unlink()
            raise AgentError(f"{path.name}: expected sha256 {entry.sha256[:12]}, got {found[:12]}")

    def _unwritable(self, error: OSError) -> AgentError:
        path = error.filename or self.folder
        return AgentError(f"{path}: cannot be written: {error.strerror or error}")

    def _drop(self) -> None:
        if self._manifest:
            shutil.rmtree(self._staging, ignore_errors=True)


def _check_length(file: str, length: int, entry: FileEntry) -> None:
    if length != entry.size_bytes:
        raise AgentError(f"{file}: expected {entry.size_bytes:,} bytes, got {length:,}")


def _append(path: Path, data: Buffer) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "ab", buffering=0) as file:
        written = file.write(data)
    if written != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _length(path: Path) -> int:
    """Bytes of the file at `path`; 0 if there is none."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
