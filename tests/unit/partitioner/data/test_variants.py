"""Every network sees the same variant of a picture, each in its own view; all of it is kept."""

import errno
import os
import resource
from pathlib import Path

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mdp.errors import InputError  # noqa: E402
from mdp.formats.plan import Region  # noqa: E402
from mdp.pictures.crop import crop  # noqa: E402
from partitioner.data.crops import View, picture_of  # noqa: E402
from partitioner.data.datasets import open_dataset  # noqa: E402
from partitioner.data.memmaps import load, new_array  # noqa: E402
from partitioner.data.variants import Variants  # noqa: E402
from partitioner.run.settings import Augmentation  # noqa: E402
from tests.support.models.runs import QUIET  # noqa: E402
from tests.support.models.trees import write_tree  # noqa: E402

pytestmark = pytest.mark.torch
PART = Region(left=0.25, top=0.0, right=1.0, bottom=0.75)
WHOLE, SMALL, CUT = View(24), View(12), View(12, PART, "jpeg")


@pytest.fixture
def variants(tmp_path: Path) -> Variants:
    data = open_dataset(str(write_tree(tmp_path / "tree", each=8)))
    return Variants(
        pictures=data.train,
        num_classes=3,
        augmentation=Augmentation(variants=3, flip=True),
        seed=5,
        count=3,
        teacher=WHOLE,
        members=(SMALL, CUT),
        cache=tmp_path / "cache",
        progress=QUIET,
    )


def test_variant_0_is_what_is_served(variants: Variants) -> None:
    from mdp.pictures.crop import load_picture

    source = variants.pictures.sources[3]
    picture = load_picture(picture_of(source, None))
    assert np.array_equal(variants.view(WHOLE, 0)[3], crop(picture, Region(), 24))


def test_every_view_is_cut_from_the_same_canvas(variants: Variants) -> None:
    canvas = variants.view(WHOLE, 1)
    assert canvas.shape == (len(variants.pictures), 24, 24, 3)
    assert not np.array_equal(canvas, variants.view(WHOLE, 0))
    assert not np.array_equal(canvas, variants.view(WHOLE, 2))
    assert np.array_equal(variants.view(SMALL, 1)[4], crop(np.array(canvas[4]), Region(), 12))
    through_jpeg = np.abs(
        variants.view(CUT, 1)[4].astype(int) - crop(np.array(canvas[4]), PART, 12).astype(int)
    )
    assert 0 < through_jpeg.mean() < 20


def test_a_canvas_is_as_fine_as_the_finest_view(variants: Variants) -> None:
    fine = View(24, Region(left=0.5, top=0.5, right=1.0, bottom=1.0))
    assert variants.image_size == 24
    changed = Variants(
        **{n: getattr(variants, n) for n in Variants.__slots__ if n != "members"}, members=(fine,)
    )
    assert changed.image_size == 48


def make_canvases(variants: Variants) -> None:
    for variant in range(1, variants.count):
        variants.view(WHOLE, variant)


def test_they_are_made_once_and_anew_for_other_settings(variants: Variants) -> None:
    make_canvases(variants)
    kept = sorted(path.name for path in variants.cache.glob("canvas-*"))
    assert len(kept) == 2
    first = np.array(variants.view(WHOLE, 1))
    stamps = [(variants.cache / name).stat().st_mtime_ns for name in kept]
    make_canvases(variants)
    assert [(variants.cache / name).stat().st_mtime_ns for name in kept] == stamps
    fields = {n: getattr(variants, n) for n in Variants.__slots__}
    other = Variants(**{**fields, "seed": 6})
    assert not np.array_equal(first, other.view(WHOLE, 1))
    for path in variants.cache.glob("canvas-*"):
        path.unlink()
    assert np.array_equal(first, variants.view(WHOLE, 1))


def test_labels_are_certain_unless_pictures_are_mixed(variants: Variants) -> None:
    targets = torch.from_numpy(variants.pictures.targets)
    everyone = np.arange(len(targets))
    assert torch.equal(variants.labels(1)[everyone].argmax(dim=1), targets)
    assert set(variants.labels(1)[everyone].flatten().tolist()) == {0.0, 1.0}
    assert torch.equal(variants.labels(1)[everyone[3:5]].argmax(dim=1), targets[3:5])
    fields = {n: getattr(variants, n) for n in Variants.__slots__}
    blend = msgspec.structs.replace(variants.augmentation, mixup=1.0)
    mixed = Variants(**{**fields, "augmentation": blend})
    assert torch.equal(mixed.labels(0)[everyone].argmax(dim=1), targets)
    assert float(mixed.labels(1)[everyone].max(dim=1).values.min()) < 0.95
    assert torch.allclose(mixed.labels(1)[everyone].sum(dim=1), torch.ones(len(targets)), atol=1e-2)


def test_processes_share_canvases(variants: Variants, monkeypatch: pytest.MonkeyPatch) -> None:
    from partitioner.data import variants as module

    alone = np.array(variants.view(WHOLE, 1))
    next(variants.cache.glob("canvas-*-1.npy")).unlink()
    monkeypatch.setattr(module, "_MANY_PIXELS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert np.array_equal(variants.view(WHOLE, 1), alone)


def test_a_damaged_array_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match=r"a\.npy: damaged; remove it to have it made anew"):
        load(tmp_path / "a.npy")


def test_an_array_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with pytest.raises(ZeroDivisionError), new_array(path, np.float32, (3, 2)) as array:
        array[0] = 1 / 0
    assert list(tmp_path.iterdir()) == []
    with new_array(path, np.float32, (3, 2)) as array:
        array[:] = 7
    assert (load(path) == 7).all()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    wanted = r"a\.npy: cannot be written: No space left on device \(expected room for 8\.0 MB, "
    with pytest.raises(InputError, match=wanted), new_array(tmp_path / "a.npy", "f4", (1000, 2000)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_may_not_grow_is_the_same_line(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with (
            pytest.raises(InputError, match=r"a\.npy: cannot be written: File too large \(expect"),
            new_array(tmp_path / "a.npy", np.float32, (1000, 2000)),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
