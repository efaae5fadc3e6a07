"""Pack pictures and pretrained weights for benchmarks.families.train on another machine.

    python -m benchmarks.families.pack DATA WEIGHTS OUT

DATA has the data sets by name, WEIGHTS the files lite0.safetensors, lite1.safetensors,
lite2.safetensors and vit.safetensors under timm's tensor names, and imagenet1k.txt, the names of
their 1,000 classes, one a line.
"""

import json
import lzma
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from partitioner.assembly.members import read_names
from partitioner.data.datasets import SPLITS, open_dataset

DATA_SETS = ("imagenette", "cifar10", "tinyimagenet40")
CLASSIFIERS = {"lite0": "classifier", "lite1": "classifier", "lite2": "classifier", "vit": "head"}


def main(data: Path, weights: Path, out: Path) -> None:
    """Write the pictures of all splits, the trunks, and rows of their classifiers."""
    out.mkdir(parents=True, exist_ok=True)
    names = read_names(weights / "imagenet1k.txt")
    rows = {name: pack_pictures(data / name, out, names) for name in DATA_SETS}
    heads: dict[str, Tensor] = {}
    for kind, classifier in CLASSIFIERS.items():
        state = load_file(weights / f"{kind}.safetensors")
        for part in ("weight", "bias"):
            tensor = state.pop(f"{classifier}.{part}")
            for name, kept in rows.items():
                if kept is not None:
                    heads[f"{kind}.{name}.{part}"] = tensor[kept].contiguous()
        save_file(state, out / f"{kind}.trunk.safetensors")
    save_file(heads, out / "heads.safetensors")


def pack_pictures(source: Path, out: Path, names: list[str]) -> list[int] | None:
    """One data set's files one after another; returns its rows among `names`, if it has them."""
    pictures = open_dataset(str(source))
    meta: dict[str, object] = {"labels": list(pictures.labels)}
    files: list[bytes] = []
    for split in SPLITS:
        chosen = pictures.split(split)
        contents = [Path(str(file)).read_bytes() for file in chosen.sources]
        files += contents
        meta[split] = {
            "sizes": [len(content) for content in contents],
            "targets": chosen.targets.tolist(),
            "digest": chosen.digest,
        }
    raw = b"".join(files)
    (out / f"{source.name}.bin").write_bytes(lzma.compress(raw))
    (out / f"{source.name}.json").write_text(json.dumps(meta))
    (out / f"{source.name}.ready").touch()
    known = set(pictures.labels) <= set(names)
    return [names.index(label) for label in pictures.labels] if known else None


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]))
