"""A teacher's answers of which only the largest logits are kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from mdp.errors import InputError  # noqa: E402
from partitioner.build.settings import check_kept  # noqa: E402
from partitioner.data.datasets import open_dataset  # noqa: E402
from partitioner.data.memmaps import Array, Index, load  # noqa: E402
from partitioner.run.folder import RunFolder  # noqa: E402
from partitioner.run.settings import MemberSchedule  # noqa: E402
from partitioner.training.cached_outputs import keep_outputs  # noqa: E402
from partitioner.training.largest_logits import Keep, LargestLogits, dense, largest  # noqa: E402
from partitioner.training.student import DistillationTargets, MemberLoss, StudentOutput  # noqa: E402
from partitioner.training.teacher import target_files  # noqa: E402
from tests.support.models.runs import config_of, tiny_plan  # noqa: E402
from tests.support.models.training import train  # noqa: E402
from tests.support.models.trees import write_tree  # noqa: E402

pytestmark = pytest.mark.torch

PICTURES, CLASSES, KEEP = 12, 1000, 32


def softmax(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: Array = raised / raised.sum(axis=-1, keepdims=True)
    return shares


def made() -> Array:
    """Logits of made classes."""
    drawn = np.random.default_rng(0).normal(size=(PICTURES, CLASSES))
    return (2 * drawn).astype(np.float32)


def test_the_largest_stay_and_the_rest_shares_its_weight() -> None:
    logits = np.array([[4, 3, 1, 0, -1, -2]], dtype=np.float32)
    packed = largest(logits, Keep(2))
    assert packed.nbytes == 10
    found, wanted = softmax(dense(packed, 6))[0], softmax(logits)[0]
    assert found[:2] == pytest.approx([0.691946, 0.254553], abs=2e-5)
    assert found[2:] == pytest.approx([0.013375] * 4, abs=1e-5)  # its log-sum is in fp16
    assert float((wanted * np.log(wanted / found)).sum()) == pytest.approx(0.023474, abs=1e-5)


@pytest.mark.parametrize("keep", [1, 7, CLASSES])
def test_kept_logits_are_those_of_fp16_at_their_classes(keep: int) -> None:
    logits = made()
    found = dense(largest(logits, Keep(keep)), CLASSES)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :keep]
    wanted = np.take_along_axis(logits, order, axis=1).astype(np.float16)
    assert np.array_equal(np.take_along_axis(found, order, axis=1), wanted)
    assert np.exp(found).sum(axis=1) == pytest.approx(np.exp(logits).sum(axis=1), rel=5e-3)


def test_kept_classes_have_their_softened_probabilities() -> None:
    logits, temperature = made(), 2.0
    order = np.argsort(-logits, axis=1, kind="stable")[:, :KEEP]
    wanted = np.take_along_axis(softmax(logits / temperature), order, axis=1)
    found = softmax(dense(largest(logits, Keep(KEEP, temperature)), CLASSES) / temperature)
    assert np.take_along_axis(found, order, axis=1) == pytest.approx(wanted, rel=5e-3)
    at_one = softmax(dense(largest(logits, Keep(KEEP)), CLASSES) / temperature)
    assert np.take_along_axis(at_one, order, axis=1).sum() < 0.95 * wanted.sum()


def logits_of(index: Index) -> list[Tensor]:
    return [torch.from_numpy(made()[index])]


def test_rows_of_1000_classes_take_a_15th_of_what_all_take(tmp_path: Path) -> None:
    for name, keep in (("whole", None), ("kept", Keep(KEEP))):
        keep_outputs(
            [tmp_path / name], logits_of, PICTURES,
            arithmetic="fp32", dtype=np.float16, advance=lambda more, said: None, keep=keep,
        )  # fmt: skip
    whole, kept = load(tmp_path / "whole"), load(tmp_path / "kept")
    assert (whole.itemsize * CLASSES, kept.nbytes) == (2000, PICTURES * (4 * KEEP + 2))
    assert 15 * kept.nbytes <= whole.nbytes
    assert 30 * kept.nbytes <= made().nbytes  # fp32


class Fixed(nn.Module):
    """A network with constant logits."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.from_numpy(np.random.default_rng(1).normal(size=(3, CLASSES)))
        self.bag = nn.Parameter(drawn.float())

    def forward(self, pixels: Tensor) -> StudentOutput:
        return StudentOutput(None, self.bag, torch.zeros(3, 2), None)


def test_a_step_on_kept_rows_is_one_on_the_logits_that_they_stand_for() -> None:
    packed, index = largest(made(), Keep(KEEP)), np.array([4, 0, 3])
    written_out = np.empty((PICTURES, CLASSES), dtype=np.float32)
    for row, numbers in zip(written_out, packed, strict=True):
        values = numbers.view(np.float16).astype(np.float64)
        row[:] = values[-1] - np.log(CLASSES - KEEP)
        for place in range(KEEP):
            row[numbers[KEEP + place]] = values[place]
    found = []
    for teacher in (LargestLogits(packed, CLASSES), written_out):
        targets = DistillationTargets(
            pixels=[np.zeros((PICTURES, 4, 4, 3), dtype=np.uint8)],
            labels=[torch.eye(CLASSES)[:PICTURES]],
            teacher=[teacher],
            before=[],
            imitated=[],
        )
        network = Fixed()
        loss = MemberLoss(targets, MemberSchedule(distillation=0.5))(network, index, 0)["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        assert network.bag.grad is not None
        found.append((float(loss.detach()), network.bag.grad))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-8)


def test_more_classes_than_16_bits_are_refused() -> None:
    check_kept(None, 2**16 + 1)
    check_kept(32, 2**16)
    with pytest.raises(InputError, match="expected at most 65,536 classes, found 65,537"):
        check_kept(32, 2**16 + 1)


def test_a_run_keeps_the_largest_and_refuses_another_number(tmp_path: Path) -> None:
    data = open_dataset(str(write_tree(tmp_path / "tree", each=12)))
    classes, run = len(data.labels), RunFolder(tmp_path / "run")

    def again(**options: Any) -> Any:
        return train(run, tiny_plan(), data, config_of(tmp_path / "tree", epochs=1, **options))

    many = f"expected at most {classes}, as many as classes, got {classes + 1}"
    with pytest.raises(InputError, match=f"run.answers_keep: {many}"):
        again(answers_keep=classes + 1)
    work = again(answers_keep=2)
    assert work.settings.answers_keep == 2
    for path in target_files(work):
        assert load(path).shape == (len(data.train), 5)
    for options in ({"answers_keep": 1}, {}):
        now = options.get("answers_keep")
        with pytest.raises(
            InputError, match=f"made with other settings: answers_keep was 2, is now {now} "
        ):
            again(**options)
    again(answers_keep=2)
