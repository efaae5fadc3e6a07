"""A bundle as an OCI artifact of ModelPack's media types, and back; pure.

Each file is a layer as it is, so that a layer's digest is the hash that the bundle's own manifest
lists: a device's model is fetched alone, and one that two versions share is kept once. There is no
time in it: the same bundle has the same digest.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from mdp.errors import ConfigError, TransferError
from mdp.files import MAX_JSON_BYTES, decode_content, read_regular
from mdp.formats.bundle import FUSION, MANIFEST, Bundle, FileEntry
from mdp.formats.device_part import MODELS, entry_of, path_in_bundle
from mdp.formats.signing import MAX_FILE_BYTES, SIGNATURE

OCI_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT: Final = "application/vnd.cncf.model.manifest.v1+json"
_CONFIG: Final = "application/vnd.cncf.model.config.v1+json"
_WEIGHT: Final = "application/vnd.cncf.model.weight.v1.raw"
_BESIDE: Final = "application/vnd.cncf.model.weight.config.v1.raw"
#: Of a layer: the file's path in the bundle, as ModelPack and as ORAS name it, and the device of
#: the plan that runs it.
_PATH: Final = "org.cncf.model.filepath"
_TITLE: Final = "org.opencontainers.image.title"
_DEVICE: Final = "org.mdp-edge.device"
#: What the distribution specification lets registries refuse above.
MAX_MANIFEST_BYTES: Final = 4 * 2**20
#: Files that nothing in the bundle lists, and the most that they may have.
UNLISTED: Final = {MANIFEST: MAX_JSON_BYTES, SIGNATURE: MAX_FILE_BYTES}


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A blob of the registry."""

    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def entry(self) -> FileEntry:
        """Hash and size, as the bundle's manifest has them."""
        return FileEntry(sha256=self.digest.removeprefix("sha256:"), size_bytes=self.size)


class Artifact(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An OCI image manifest, as far as it is read; others may have more keys."""

    #: 2 in every one.
    schema_version: int
    config: Descriptor
    layers: list[Descriptor]
    media_type: str = ""
    artifact_type: str = ""
    annotations: dict[str, str] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """Content that a registry has to have, read when it is sent."""

    descriptor: Descriptor
    read: Callable[[], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A bundle as a registry keeps it: the manifest, and all that has to be there before."""

    manifest: bytes
    blobs: tuple[Blob, ...]

    @property
    def digest(self) -> str:
        """The version's identity."""
        return digest_of(self.manifest)

    @property
    def size_bytes(self) -> int:
        """Bytes of all blobs."""
        return sum(blob.descriptor.size for blob in self.blobs)


def digest_of(content: bytes) -> str:
    """The digest of content, as OCI writes it."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def pack(bundle: Bundle) -> Packed:
    """A whole bundle as an artifact, after a check of every file; raises ConfigError."""
    devices = {
        path_in_bundle(file, a.k): a.device
        for a in bundle.manifest.plan.assignments
        for file in MODELS[: 1 + len(a.lower)]
    }
    contents: dict[str, tuple[FileEntry, Callable[[], bytes]]] = {
        MANIFEST: (entry_of(bundle.manifest_content), lambda: bundle.manifest_content)
    }
    signature = bundle.path / SIGNATURE
    if signature.exists():
        signed, _ = read_regular(signature, MAX_FILE_BYTES)
        contents[SIGNATURE] = (entry_of(signed), lambda: signed)
    for name, entry in bundle.manifest.files.items():
        bundle.content(name)
        # Read, and checked, again when it is sent: models may be larger than the memory.
        contents[name] = (entry, partial(bundle.content, name))
    blobs = [
        Blob(descriptor=_layer(name, entry, devices.get(name)), read=read)
        for name, (entry, read) in contents.items()
    ]
    config = msgspec.json.encode(_config(bundle, blobs), order="sorted")
    described = Descriptor(media_type=_CONFIG, digest=digest_of(config), size=len(config))
    artifact = Artifact(
        schema_version=2,
        media_type=OCI_MANIFEST,
        artifact_type=ARTIFACT,
        config=described,
        layers=[blob.descriptor for blob in blobs],
        annotations={_TITLE: bundle.manifest.name, "org.mdp-edge.digest": bundle.digest},
    )
    return Packed(
        manifest=msgspec.json.encode(artifact, order="deterministic"),
        blobs=(Blob(descriptor=described, read=lambda: config), *blobs),
    )


def _layer(name: str, entry: FileEntry, device: str | None) -> Descriptor:
    annotations = {_PATH: name, _TITLE: name}
    if device is not None:
        annotations[_DEVICE] = device
    return Descriptor(
        media_type=_BESIDE if device is None else _WEIGHT,
        digest=f"sha256:{entry.sha256}",
        size=entry.size_bytes,
        annotations=annotations,
    )


def _config(bundle: Bundle, blobs: Iterable[Blob]) -> dict[str, Any]:
    """ModelPack's configuration, whose keys its schema lists."""
    return {
        "descriptor": {"name": bundle.manifest.name, "revision": bundle.digest},
        "config": {
            "format": "onnx",
            "capabilities": {"inputTypes": ["image"], "outputTypes": ["other"]},
        },
        "modelfs": {"type": "layers", "diffIds": [blob.descriptor.digest for blob in blobs]},
    }


def layers_of(where: str, content: bytes) -> dict[str, Descriptor]:
    """The layers of a manifest by their files' paths; raises TransferError unless it is a bundle.

    The paths are not to be trusted as paths.
    """
    try:
        artifact = decode_content(where, content, Artifact, msgspec.json.decode)
    except ConfigError as error:
        raise TransferError(f"{error}: expected a bundle (`mdp bundle push`)") from error
    found = {layer.annotations.get(_PATH, ""): layer for layer in artifact.layers}
    if artifact.artifact_type != ARTIFACT or MANIFEST not in found or FUSION not in found:
        kind = artifact.artifact_type or artifact.config.media_type
        raise TransferError(f"{where}: expected a bundle (`mdp bundle push`), found {kind}")
    return found


def check_listed(where: str, name: str, layer: Descriptor | None, entry: FileEntry) -> Descriptor:
    """The layer of a file; raises TransferError unless it is as the bundle's manifest lists it."""
    if layer is None:
        raise TransferError(f"{where}: lacks {name}, which its {MANIFEST} lists")
    if layer.entry != entry:
        raise TransferError(f"{where}: {name}: not as its {MANIFEST} lists it")
    return layer
