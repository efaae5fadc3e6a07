"""Write down what published models say: shapes of plain ViTs, and networks at two picture sizes.

    python -m benchmarks.law.published --results results-imagenet.csv

The file is timm's table of published accuracies (huggingface/pytorch-image-models,
results/results-imagenet.csv, Apache-2.0); shapes are read off timm's models of the same names.
Writes benchmarks/results/published-vits.csv and published-sizes.csv.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import torch

from mdp.files import write_bytes
from partitioner.estimates.catalogue import catalogue
from partitioner.export.catalogue import published
from partitioner.torchvision_shim import import_timm

RESULTS = Path(__file__).resolve().parents[1] / "results"
_SOURCE = """\
# Top-1 accuracy in % on ImageNet-1k's 50,000 validation pictures, as published in
# huggingface/pytorch-image-models, results/results-imagenet.csv (commit aa4b5850, Apache-2.0).
"""
VITS = (
    _SOURCE
    + """\
# Plain ViTs: every family is one training recipe; shapes are read off timm's models of these names.
family,model,image_size,patch_size,embed_dim,depth,num_heads,mlp_dim,top1
"""
)
SIZES = (
    _SOURCE
    + """\
# Networks of the planner's catalogue that were published at several picture sizes.
model,image_size,top1
"""
)
_PLAIN = re.compile(r"(vit|deit3?|flexivit)_|test_vit")
#: Convolutional stems, rotary or relative positions, and other blocks.
_OTHER = re.compile(r"_r26_|_r50_|_r_s16|rope|relpos|huge|so400m|pwee")


def family(model: str) -> str:
    """The recipe that a model was trained with."""
    name, _, tag = model.partition(".")
    kind = next((k for k in ("deit3", "deit", "flexivit", "test_vit", "clip") if k in name), "")
    kind += " distilled" if "distilled" in name else ""
    tag = re.sub(r"^(sbb2?)_e[0-9]+", r"\1", tag)
    return f"{kind} {tag}".strip()


def shape(timm: Any, name: str, image_size: int) -> tuple[int, ...]:
    """Patch, width, depth, heads and width of the MLP of a plain ViT."""
    with torch.device("meta"):
        model = timm.create_model(name, img_size=image_size)
    block = model.blocks[0]
    return (
        model.patch_embed.patch_size[0], model.embed_dim, len(model.blocks),
        block.attn.num_heads, block.mlp.fc1.out_features,
    )  # fmt: skip


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.law.published")
    parser.add_argument("--results", type=Path, required=True)
    known = published(parser.parse_args().results)
    timm = import_timm()
    rows = [
        (family(model), model, image_size, *shape(timm, model.partition(".")[0], image_size), top1)
        for model, sizes in known.items()
        if _PLAIN.match(model) and not _OTHER.search(model)
        for image_size, top1 in sizes
    ]
    lines = [",".join(map(str, row)) for row in sorted(rows)]
    write_bytes(RESULTS / "published-vits.csv", (VITS + "\n".join(lines) + "\n").encode())
    tagged = [f"{network.name}.{network.recipe}" for network in catalogue().values()]
    lines = [
        f"{model},{size},{top1}"
        for model in tagged
        if len(known[model]) > 1
        for size, top1 in sorted(known[model])
    ]
    write_bytes(RESULTS / "published-sizes.csv", (SIZES + "\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
