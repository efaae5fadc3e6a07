"""A device's part of a bundle: few files, which have fixed names on the wire."""

import hashlib
from typing import Final, Literal, get_args

from mdp.files import Record, read_regular
from mdp.formats.bundle import FUSION, MANIFEST, Bundle, BundleName, FileEntry, Sha256, model_path
from mdp.formats.signing import MAX_FILE_BYTES, SIGNATURE

#: In the order in which they are sent: what is verified first comes first.
PartFile = Literal[
    "manifest.json", "signature.json", "fusion.json", "model.onnx",
    "rung-1.onnx", "rung-2.onnx", "rung-3.onnx", "rung-4.onnx", "rung-5.onnx", "rung-6.onnx",
    "rung-7.onnx",
]  # fmt: skip
MODEL: Final = "model.onnx"
#: Models, the top rung's first.
MODELS: Final[tuple[PartFile, ...]] = get_args(PartFile)[3:]


class Version(Record, frozen=True):
    """A bundle, and this state of its manifest, measurements included."""

    name: BundleName
    digest: Sha256
    #: SHA-256 of `manifest.json`.
    manifest: Sha256


def version_of(bundle: Bundle) -> Version:
    """The version of a bundle that was read from its folder."""
    manifest = hashlib.sha256(bundle.manifest_content).hexdigest()
    return Version(name=bundle.manifest.name, digest=bundle.digest, manifest=manifest)


def path_in_bundle(file: PartFile, k: int) -> str:
    """Path of a file of the part that serves sub-model `k`, relative to the bundle's folder."""
    return model_path(k, MODELS.index(file)) if file in MODELS else file


def part_files(bundle: Bundle, k: int) -> dict[PartFile, FileEntry]:
    """Those of the part's files that the manifest lists."""
    files, lower = bundle.manifest.files, bundle.manifest.plan.assignments[k].lower
    models = {file: files[path_in_bundle(file, k)] for file in MODELS[: 1 + len(lower)]}
    return {FUSION: files[FUSION], **models}


def part_of(bundle: Bundle, k: int) -> dict[PartFile, bytes]:
    """The files to send for sub-model `k`, verified, in their order; raises ConfigError."""
    part: dict[PartFile, bytes] = {MANIFEST: bundle.manifest_content}
    signature = bundle.path / SIGNATURE
    if signature.exists():
        part[SIGNATURE], _ = read_regular(signature, MAX_FILE_BYTES)
    part[FUSION] = bundle.content(FUSION)
    for rung in range(1 + len(bundle.manifest.plan.assignments[k].lower)):
        part[MODELS[rung]] = bundle.model(k, rung).content
    return part


def entry_of(content: bytes) -> FileEntry:
    """Hash and size of a file's content."""
    return FileEntry(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
