"""Variants of a picture, made by timm's augmentations, each keyed by (seed, picture, variant).

The key makes a variant the same in every process and at every time, so that what a teacher said to
it can be kept. Variant 0 is the picture itself.
"""

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from mdp.errors import InputError
from mdp.pictures.crop import Pixels
from partitioner.run.settings import Augmentation
from partitioner.torchvision_shim import import_timm

#: How far a crop may leave the square, as width over height.
_ASPECT = (0.85, 1.18)
#: Pictures that are mixed with one another by one call of timm's Mixup; it asks for even numbers.
_MIXED = 256
_POLICY = re.compile(r"rand(-((m|n|p|mstd|mmax|inc|w)[0-9]+(\.[0-9]+)?|t[a-z0-9]+))*")


class Augmenter:
    """timm's transforms for square canvases of `image_size` pixels; raises InputError."""

    def __init__(self, augmentation: Augmentation, image_size: int) -> None:
        check_policy(augmentation.rand_augment)
        import_timm()
        from timm.data import create_transform
        from timm.data.random_erasing import RandomErasing

        try:
            self._transform: Any = create_transform(
                image_size,
                is_training=True,
                use_prefetcher=True,  # which only means: uint8 out, neither scaled nor normalised
                scale=(augmentation.min_area, 1.0),
                ratio=_ASPECT,
                hflip=0.5 if augmentation.flip else 0.0,
                color_jitter=None,
                auto_augment=augmentation.rand_augment or None,
                interpolation="bilinear",
            )
        except Exception as error:  # timm checks its policy's numbers by assertions of many kinds
            raise _no_policy(augmentation.rand_augment) from error
        self._erasing: Any = RandomErasing(augmentation.erasing, mode="pixel", device="cpu")

    def variant(self, picture: Pixels, seed: int, number: int, variant: int) -> Pixels:
        """Canvas `[S, S, 3]` of `picture` number `number` in `variant`, 1 or more."""
        _seed_all(seed, number, variant)
        moved = self._transform(Image.fromarray(picture))
        # timm erases with noise of unit variance: uint8 is brought to about that scale and back.
        erased = self._erasing(moved.float().sub_(127.5).div_(64.0))
        pixels = erased.mul_(64.0).add_(127.5).round_().clamp_(0, 255).to(torch.uint8)
        return np.asarray(pixels.permute(1, 2, 0).numpy())


def check_policy(text: str) -> None:
    """Raise InputError unless `text` is empty or RandAugment in timm's notation.

    timm itself passes over what it does not know, and a typing error would train for hours.
    """
    if text and not _POLICY.fullmatch(text):
        raise _no_policy(text)


def _no_policy(text: str) -> InputError:
    return InputError(
        "augmentation.rand_augment: expected timm's notation, for instance rand-m6-n2-mstd0.5 "
        f"(keys m, n, p, mstd, mmax, inc, w, t), got {text!r}"
    )


def mix(
    canvases: NDArray[np.uint8],
    labels: NDArray[np.floating],
    targets: NDArray[np.int64],
    augmentation: Augmentation,
    key: tuple[int, int],
) -> None:
    """Mix canvases `[N, S, S, 3]` in place by timm's Mixup and CutMix, into soft `labels[N, C]`.

    `key` is (seed, variant); it decides who is mixed with whom, and how much.
    """
    import_timm()
    from timm.data import Mixup

    mixup = Mixup(
        mixup_alpha=augmentation.mixup,
        cutmix_alpha=augmentation.cutmix,
        mode="elem",
        label_smoothing=0.0,
        num_classes=labels.shape[1],
    )
    order = np.random.Generator(np.random.PCG64(key)).permutation(len(canvases))
    for start in range(0, len(order), _MIXED):
        chunk = order[start : start + _MIXED]
        chunk = chunk[: len(chunk) // 2 * 2]
        if len(chunk):
            _seed_all(key[0], start, key[1])
            x = torch.from_numpy(canvases[chunk]).permute(0, 3, 1, 2).float()
            x, soft = mixup(x, torch.from_numpy(targets[chunk]))
            canvases[chunk] = x.round_().to(torch.uint8).permute(0, 2, 3, 1).numpy()
            labels[chunk] = soft.numpy()


@contextmanager
def own_randomness() -> Iterator[None]:
    """Leave the three global generators, which timm draws from, as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _seed_all(*key: int) -> None:
    python, numpy, torch_ = np.random.SeedSequence(key).generate_state(3).tolist()
    random.seed(python)
    np.random.seed(numpy)
    torch.manual_seed(torch_)
