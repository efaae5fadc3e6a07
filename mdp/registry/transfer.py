"""Pushes a whole bundle to a registry, and pulls it, or a device's part, into a folder."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mdp.errors import ConfigError, InputError, TransferError
from mdp.files import replacing_folder
from mdp.formats.bundle import FUSION, MANIFEST, Bundle, file_entry
from mdp.formats.device_part import Version, part_files, path_in_bundle, version_of
from mdp.formats.signing import BundleKey
from mdp.registry.artifact import UNLISTED, Descriptor, check_listed, digest_of, layers_of, pack
from mdp.registry.connection import Repository

#: Of the disk, for everything else.
_KEPT_FREE_BYTES: Final = 2**20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A bundle that a registry has."""

    version: Version
    #: By which it is pulled, whatever happens to the tag.
    reference: str
    total_bytes: int
    #: Those of them that were moved this time.
    moved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedPart:
    """The files of a bundle that are wanted."""

    #: Models of these devices of the plan alone; None for all.
    devices: Sequence[str] | None = None

    def names(self, bundle: Bundle) -> list[str]:
        """The listed files to fetch; raises ConfigError for a device that is not in the plan."""
        if self.devices is None:
            return list(bundle.manifest.files)
        ks = [bundle.assignment(device).k for device in self.devices]
        names = (path_in_bundle(file, k) for k in ks for file in part_files(bundle, k))
        return list(dict.fromkeys([FUSION, *names]))


def push_to_registry(
    bundle: Bundle, repository: Repository, progress: Progress = lambda done, total: None
) -> Stored:
    """Store a whole bundle under the reference's tag; sends what the registry lacks.

    The tag names it at the very end. Raises InputError for a reference without a tag, ConfigError
    for a bundle of which something is missing, and TransferError.
    """
    reference = repository.reference
    if reference.tag is None or reference.digest is not None:
        raise InputError(
            f"{reference}: expected oci://HOST/NAME:TAG: a digest follows from content"
        )
    packed = pack(bundle)
    done = moved = 0
    for blob in packed.blobs:
        if not repository.has(blob.descriptor):
            repository.upload(blob.descriptor, blob.read())
            moved += blob.descriptor.size
        done += blob.descriptor.size
        progress(done, packed.size_bytes)
    repository.put_manifest(packed.manifest)
    return Stored(
        version=version_of(bundle),
        reference=f"{reference.repository}@{packed.digest}",
        total_bytes=packed.size_bytes,
        moved_bytes=moved,
    )


def pull_from_registry(
    repository: Repository,
    out: Path,
    *,
    part: WantedPart = WantedPart(),
    signed_by: BundleKey | None = None,
    progress: Progress = lambda done, total: None,
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
) -> Stored:
    """Write a bundle, or a part of it, to the folder `out`, which it replaces at the very end.

    The tag is read once; all else is fetched by digest. Files that `out` has already are not
    fetched, and where it has all, nothing is written. With `signed_by`, the signature is checked
    before anything but it and the manifest is fetched. Raises TransferError, ConfigError for a
    bundle that is wrong in itself, and InputError for a folder that cannot be written.
    """
    reference = repository.reference
    try:
        if out.is_symlink():
            out = out.resolve()
        if out.exists() and not (out / MANIFEST).is_file():
            raise InputError(f"{out}: exists already: expected a new folder, or one of a bundle")
        content = repository.manifest()
        layers = layers_of(str(reference), content)
        pulled = _Pull(repository, layers, out, progress)
        pinned = f"{reference.repository}@{digest_of(content)}"
        if bundle := _complete(out, layers, part, signed_by):
            names = [name for name in (*UNLISTED, *part.names(bundle)) if name in layers]
            return Stored(
                version=version_of(bundle),
                reference=pinned,
                total_bytes=sum(layers[name].size for name in names),
                moved_bytes=0,
            )
        with replacing_folder(out) as folder:
            for name, most_bytes in UNLISTED.items():
                if name in layers:
                    if layers[name].size > most_bytes:
                        raise TransferError(
                            f"{reference}: {name}: expected at most {most_bytes:,} bytes"
                        )
                    pulled.file(name, folder)
            bundle = Bundle.open(folder, signed_by=signed_by)
            files = bundle.manifest.files
            names = part.names(bundle)
            for name in names:
                check_listed(str(reference), name, layers.get(name), files[name])
            pulled.make_room(names, free_bytes(folder))
            for name in names:
                pulled.file(name, folder)
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror or error}") from error
    return Stored(
        version=version_of(bundle),
        reference=pinned,
        total_bytes=pulled.total_bytes,
        moved_bytes=pulled.moved_bytes,
    )


def _complete(
    out: Path, layers: dict[str, Descriptor], part: WantedPart, signed_by: BundleKey | None
) -> Bundle | None:
    """The bundle in `out` where it has all that is wanted of these layers."""
    try:
        for name in UNLISTED:
            if (out / name).exists() != (name in layers) or not _is_there(out, name, layers):
                return None
        bundle = Bundle.open(out, signed_by=signed_by)
        if all(_is_there(out, name, layers) for name in part.names(bundle)):
            return bundle
    except ConfigError:
        # As it is in the registry it may be right.
        pass
    return None


def _is_there(folder: Path, name: str, layers: dict[str, Descriptor]) -> bool:
    """Tell whether a folder has a file of a layer, or neither has."""
    path = folder / name
    if name not in layers:
        return not path.exists()
    return path.is_file() and not path.is_symlink() and file_entry(path) == layers[name].entry


class _Pull:
    """Files of one pull, of which the former folder may have some."""

    def __init__(
        self,
        repository: Repository,
        layers: dict[str, Descriptor],
        former: Path,
        progress: Progress,
    ) -> None:
        self._repository, self._layers, self._former = repository, layers, former
        self._progress = progress
        self.total_bytes = self.moved_bytes = 0
        self._left_bytes = 0
        #: What is written already, by digest: members may have equal models.
        self._written: dict[str, Path] = {}

    def make_room(self, names: Sequence[str], free_bytes: int) -> None:
        """Raise InputError unless there is room for what is still to be fetched."""
        missing = [name for name in names if not _is_there(self._former, name, self._layers)]
        sizes = {self._layers[name].digest: self._layers[name].size for name in missing}
        self._left_bytes = sum(sizes.values())
        if self._left_bytes and self._left_bytes + _KEPT_FREE_BYTES > free_bytes:
            room = max(0, free_bytes - _KEPT_FREE_BYTES)
            raise InputError(
                f"{self._former}: no room: {self._left_bytes / 1e6:,.1f} MB are to be fetched, "
                f"{room / 1e6:,.1f} MB are free"
            )

    def file(self, name: str, folder: Path) -> None:
        """Put a file into the new folder: the former one's, or the registry's."""
        layer = self._layers[name]
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.total_bytes += layer.size
        same = self._written.setdefault(layer.digest, path)
        if same == path and _is_there(self._former, name, self._layers):
            # The former folder goes.
            same = self._former / name
        if same != path:
            with suppress(OSError):
                path.hardlink_to(same)
                return
        with path.open("wb") as into:
            self._repository.fetch(name, layer, into, self._add_moved)

    def _add_moved(self, size_bytes: int) -> None:
        self.moved_bytes += size_bytes
        self._progress(self.moved_bytes, max(self.moved_bytes, self._left_bytes))
