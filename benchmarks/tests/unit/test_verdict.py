"""Cameras against one network that sees all views: classes, folders, and the largest features."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import torch

from benchmarks.scenes.few import CAMERAS
from benchmarks.scenes.verdict import (
    LEARNED,
    LEFT_OUT,
    LargestOverViews,
    classes_of,
    features_of,
    logits_of,
    tree,
)
from partitioner.networks.families import Backbone, FamilyMember

NAMES = [f"{pair}{twin}" for pair in "abcdefgh" for twin in "12"]


def parts(tmp_path: Path) -> Namespace:
    for label in NAMES:
        for number in range(LEARNED + 2):
            scene = tmp_path / "parts" / label / f"s{number:03}"
            scene.mkdir(parents=True)
            (scene / "top.jpg").write_bytes(b"")
    return Namespace(parts=tmp_path / "parts", scratch=tmp_path, seed=3)


def test_the_twin_of_every_class_that_is_left_out_is_taught(tmp_path: Path) -> None:
    taught, twins = classes_of(parts(tmp_path))
    assert sorted(taught + twins) == NAMES
    assert len(twins) == len({twin[0] for twin in twins}) == LEFT_OUT


def test_scenes_and_one_camera_s_pictures_are_split_alike(tmp_path: Path) -> None:
    options = parts(tmp_path)
    scenes, pictures = tree(options, "scenes", ["a1"]), tree(options, "top", ["a1"], "top")
    for part, count in (("train", LEARNED), ("test", 2)):
        names = sorted(path.name for path in (scenes / part / "a1").iterdir())
        assert len(names) == count
        assert [f"{n}.jpg" for n in names] == sorted(
            p.name for p in (pictures / part / "a1").iterdir()
        )


def test_the_largest_of_each_feature_decides_whatever_views_there_are() -> None:
    torch.manual_seed(0)
    network = LargestOverViews(FamilyMember(Backbone("tf_efficientnet_lite0", 32), 3)).eval()
    pixels = torch.randint(0, 256, (len(CAMERAS), 2, 3, 32, 32), dtype=torch.uint8)
    with torch.inference_mode():
        features = network.features(pixels.float())
        wanted = network.member.bag(torch.maximum(features[0], features[2]))
    seen = features_of(network, pixels)
    found = logits_of(network, seen, (0, 2))
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-5)
    assert not np.allclose(found, logits_of(network, seen, (0,)), atol=1e-5)
