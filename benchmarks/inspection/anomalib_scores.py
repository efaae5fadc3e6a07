"""Scores of cameras' pictures by anomalib's models.

    runs/anomalib/bin/python -m benchmarks.inspection.anomalib_scores FOLDER WEIGHTS KEPT ...

Runs in an environment with anomalib and without MDP's own packages. FOLDER has a folder of each
camera with `good.npy`, pictures `[N, S, S, 3]` that each model is fitted to, and `test.npy` and
`defects.npy`, which it scores; WEIGHTS is a .safetensors of timm's tf_efficientnet_lite0, KEPT the
shares of patches that a PatchCore keeps, each. Writes `scores.json` into each camera's folder: of
each model its scores and its costs. What is there already is not made anew.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from partitioner.torchvision_shim import import_timm

timm = import_timm()
# anomalib imports timm and torchvision too.
from anomalib.models.image.padim.torch_model import PadimModel  # noqa: E402
from anomalib.models.image.patchcore.torch_model import PatchcoreModel  # noqa: E402

NETWORK = "tf_efficientnet_lite0"
#: Their outputs are the tensors that an anomaly head reads: places 8 and 16 pixels apart.
LAYERS = ["blocks.2", "blocks.4"]
#: Features that PaDiM keeps of the layers' 152: all, or anomalib's number for its smallest network.
FEATURES = {"padim_152": 152, "padim_100": 100}
#: anomalib's own number of neighbours.
NEIGHBOURS = 9
PARTS = ("test", "defects")
_BATCH, _TIMED = 16, 20

Pictures = NDArray[np.uint8]


def with_weights(model: Any, weights: Path) -> Any:
    """`model` whose network has the given weights; its last stages are cut off by timm."""
    network = model.feature_extractor.feature_extractor
    missing = network.load_state_dict(load_file(weights), strict=False).missing_keys
    assert not missing, f"{weights}: expected tensors of {NETWORK}, without {missing[:3]}"
    return model


def batches(pictures: Pictures, size: int = _BATCH) -> Iterator[torch.Tensor]:
    """Pictures `[N, S, S, 3]` as the network reads them: `[n, 3, S, S]`, normalised."""
    usual = timm.get_pretrained_cfg(NETWORK)
    assert usual is not None
    mean, std = (torch.tensor(each)[:, None, None] for each in (usual.mean, usual.std))
    for start in range(0, len(pictures), size):
        some = torch.from_numpy(np.ascontiguousarray(pictures[start : start + size]))
        yield (some.permute(0, 3, 1, 2).float() / 255 - mean) / std


def padim(features: int, weights: Path, good: Pictures) -> Any:
    """anomalib's PaDiM, fitted to good pictures."""
    model = with_weights(
        PadimModel(backbone=NETWORK, layers=[*LAYERS], pre_trained=False, n_features=features),
        weights,
    )
    model.train()
    for batch in batches(good):
        model(batch)
    model.fit()
    return model.eval()


def patchcore(kept: float, weights: Path, good: Pictures) -> Any:
    """anomalib's PatchCore, which keeps a share of the patches of good pictures."""
    model = with_weights(
        PatchcoreModel(
            layers=LAYERS, backbone=NETWORK, pre_trained=False, num_neighbors=NEIGHBOURS
        ),
        weights,
    )
    model.train()
    for batch in batches(good):
        model(batch)
    model.subsample_embedding(kept)
    return model.eval()


def scores_of(model: Any, pictures: Pictures) -> list[float]:
    """The score of each picture."""
    with torch.inference_mode():
        found = [model(batch).pred_score.flatten() for batch in batches(pictures)]
    scores: list[float] = torch.cat(found).tolist()
    return scores


def median_ms(run: Callable[[torch.Tensor], object], picture: Pictures) -> float:
    """Median milliseconds of processor time of one picture."""
    (batch,) = batches(picture[:1])
    times_ms = []
    with torch.inference_mode():
        for _ in range(_TIMED):
            began_s = time.process_time()
            run(batch)
            times_ms.append((time.process_time() - began_s) * 1e3)
    return median(times_ms)


def kept_bytes(model: Any) -> int:
    """Bytes of what was fitted, without the network."""
    own = [model.gaussian] if isinstance(model, PadimModel) else [model]
    tensors = [one for each in own for one in each.buffers(recurse=False)]
    return sum(one.numel() * one.element_size() for one in tensors)


def add_scores(folder: Path, name: str, make: Callable[[Pictures], Any]) -> None:
    """Fit a model to one camera's pictures, score the others, and write that of it."""
    file = folder / "scores.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    if name in found:
        return
    torch.manual_seed(0)
    good = np.load(folder / "good.npy")
    began_s = time.process_time()
    model = make(good)
    fit_s = time.process_time() - began_s
    found[name] = {
        "fit_s": round(fit_s, 1),
        "bytes": kept_bytes(model),
        "network_ms": round(median_ms(model.feature_extractor, good), 2),
        "whole_ms": round(median_ms(model, good), 2),
        **{part: scores_of(model, np.load(folder / f"{part}.npy")) for part in PARTS},
    }
    file.write_text(json.dumps(found))


def main(words: list[str]) -> None:
    """Score the pictures of every camera, by one model after another."""
    torch.set_num_threads(1)
    weights, shares = Path(words[1]), [float(word) for word in words[2:]]
    makers: dict[str, Callable[[Pictures], Any]] = {
        name: partial(padim, count, weights) for name, count in FEATURES.items()
    }
    makers |= {f"patchcore_{100 * one:g}": partial(patchcore, one, weights) for one in shares}
    for name, make in makers.items():
        for folder in sorted(Path(words[0]).iterdir()):
            add_scores(folder, name, make)


if __name__ == "__main__":
    main(sys.argv[1:])
