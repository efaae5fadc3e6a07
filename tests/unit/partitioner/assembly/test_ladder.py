"""Rungs for a bundle's members: the same in less precision, or the first of equal students."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdp.errors import InputError
from mdp.formats.bundle import Bundle, SubsetAccuracy
from mdp.fusion.fuse import Contribution, fuse, scale_rung
from mdp.testing.bundles import write_bundle
from partitioner.assembly import ladder
from partitioner.assembly.ladder import Students, add_rungs, parse_rungs
from partitioner.data.crops import load_views, view_of
from partitioner.data.datasets import Dataset, open_dataset
from partitioner.export.evaluate import accuracy, evaluate, write_report
from partitioner.export.quantize_bundle import quantize_bundle
from partitioner.export.sessions import member_contribution, open_member
from partitioner.export.try_precision import QuantizeRequest
from tests.support.models.quantized import write_colours
from tests.support.models.runs import QUIET

STUDENTS = ("pi", "pi-1", "pi-2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return open_dataset(str(write_colours(tmp_path_factory.mktemp("colours") / "tree")))


@pytest.fixture
def students(tmp_path: Path) -> Bundle:
    return Bundle.open(write_bundle(tmp_path / "students", devices=STUDENTS, sizes=(12, 12, 12)))


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> dict[int, Sequence[float]]:
    """Milliseconds that the forms of a member take, by how many there are."""
    told: dict[int, Sequence[float]] = {2: (4.0, 1.0), 3: (3.5, 2.0, 1.0)}
    monkeypatch.setattr(ladder, "best_ms", lambda runs, *_: told[len(runs)])
    return told


def made(bundle: Bundle, data: Dataset, wanted: Any, tmp_path: Path) -> Bundle:
    out = tmp_path / "out"
    add_rungs(bundle, data, wanted, out, 5000, tmp_path / "views", QUIET)
    return Bundle.open(out)


def outputs(bundle: Bundle, data: Dataset, k: int, rung: int, tmp_path: Path) -> Contribution:
    """Logits of the test pictures, as a client fuses them."""
    whole = bundle.manifest.plan.assignments[k]
    part = whole.at(rung)
    (pixels,) = load_views(data.test, [view_of(part)], tmp_path / "views", QUIET, "test")
    runtime = open_member(bundle.model(k, rung), part, len(bundle.manifest.labels))
    own = member_contribution(runtime, pixels, part)
    return scale_rung(own, whole.lower[rung - 1].scales) if rung else own


def test_int8_below_fp32_of_a_bundle_s_own_members(data: Dataset, tmp_path: Path) -> None:
    bundle = Bundle.open(write_bundle(tmp_path / "bundle"))
    out = made(bundle, data, "int8", tmp_path)
    for before, after in zip(
        bundle.manifest.plan.assignments, out.manifest.plan.assignments, strict=True
    ):
        assert after.at(0) == before
        (rung,) = after.lower
        assert rung.spec.precision == "int8"
        assert rung.compute_ms == before.predicted_ms.compute / 4
        assert out.model(after.k).content == bundle.model(before.k).content
        lower = outputs(out, data, after.k, 1, tmp_path)
        assert rung.accuracy == accuracy(lower.bag, data.test.targets)
    assert out.fusion_weights() == bundle.fusion_weights()
    assert out.digest != bundle.digest
    measured = out.manifest.evaluation
    assert measured is not None
    assert measured.lowest
    logits = {k: outputs(out, data, k, 1, tmp_path) for k in range(3)}
    assert [one.stacked for one in measured.lowest.subsets] == [
        right_of(out, logits, one, data) for one in measured.lowest.subsets
    ]


def right_of(
    bundle: Bundle, logits: dict[int, Contribution], one: SubsetAccuracy, data: Dataset
) -> float:
    weights = bundle.fusion_weights().weights_of(one.members)
    assert weights is not None
    return accuracy(fuse(logits, weights), data.test.targets)


def test_the_first_students_for_one_device(students: Bundle, data: Dataset, tmp_path: Path) -> None:
    out = made(students, data, [Students("pi", (0, 1, 2))], tmp_path)
    (whole,) = out.manifest.plan.assignments
    assert (whole.device, whole.spec.outline) == ("pi", "3 x 8 x 1")
    assert whole.predicted_ms.compute == 3.5
    assert [rung.compute_ms for rung in whole.lower] == [2.0, 1.0]
    assert out.manifest.plan.left_out.keys() == {"pi-1", "pi-2"}
    weights = students.fusion_weights()
    logits = {k: outputs(students, data, k, 0, tmp_path) for k in range(3)}
    for rung, members in enumerate([(0, 1, 2), (0, 1), (0,)]):
        fitted = weights.weights_of(members)
        assert fitted is not None
        part = whole.at(rung)
        (pixels,) = load_views(data.test, [view_of(part)], tmp_path / "views", QUIET, "test")
        runtime = open_member(out.model(0, rung), part, len(out.manifest.labels))
        own = member_contribution(runtime, pixels, part)
        assert own.boost is None
        np.testing.assert_allclose(own.bag, fuse(logits, fitted), rtol=1e-4, atol=1e-5)


def test_other_members_stay_as_they_are(data: Dataset, tmp_path: Path) -> None:
    """Students 0 and 2 become one device's; member 1 is the second sub-model then."""
    students = Bundle.open(
        write_bundle(tmp_path / "students", devices=STUDENTS, sizes=(12, 16, 12))
    )
    out = made(students, data, [Students("pi-2", (0, 2))], tmp_path)
    first, second = out.manifest.plan.assignments
    assert (first.device, second.device) == ("pi-2", "pi-1")
    assert (len(first.lower), second.lower) == (1, ())
    assert out.model(1).content == students.model(1).content
    again = evaluate(out, data, None, tmp_path / "views", QUIET)
    assert again.evaluation == out.manifest.evaluation
    assert write_report(out, again).manifest == out.manifest


def test_a_form_that_is_hardly_quicker_is_no_rung(
    students: Bundle, data: Dataset, tmp_path: Path, times: dict[int, Sequence[float]]
) -> None:
    times[3] = (3.5, 3.45, 1.0)
    (whole,) = made(students, data, [Students("pi", (0, 1, 2))], tmp_path).manifest.plan.assignments
    assert [rung.spec.outline for rung in whole.lower] == ["1 x 8 x 1"]
    times[2] = (4.0, 4.1)
    with pytest.raises(InputError, match="a form that is quicker here than the top, found none"):
        made(students, data, "int8", tmp_path)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], r"DEVICE=K,K,\.\. for each group"),
        (["int9"], r"expected one of fp16, int8, int8-static, or DEVICE=K,K,.*got 'int9'"),
        (["pi=0,3"], "each of 0 to 2, got 'pi=0,3'"),
        (["pi=0,0"], "each student once, got pi=0,0"),
        (["pi=0"], "pi: expected 2 to 8 students"),
        (["other=0,1"], "other: expected the device of a student: pi, pi-1"),
        (["int8", "pi=0,1"], "expected one of"),
    ],
)
def test_which_rungs_are_refused(students: Bundle, texts: list[str], expected: str) -> None:
    with pytest.raises(InputError, match=rf"--rungs.*{expected}"):
        parse_rungs(texts, students)


def test_unequal_students_are_refused(tmp_path: Path) -> None:
    bundle = Bundle.open(write_bundle(tmp_path / "bundle"))
    with pytest.raises(InputError, match="sub-models 0 and 1 differ in spec: expected equal stud"):
        parse_rungs(["alpha=0,1"], bundle)


def test_rungs_are_made_once_and_not_of_quantized_ones(data: Dataset, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "bundle", rungs=2)
    bundle, words = Bundle.open(folder), "has 1 rungs below the top: expected a bundle without"
    with pytest.raises(InputError, match=words):
        made(bundle, data, "int8", tmp_path)
    request = QuantizeRequest(max_loss=0.05)
    with pytest.raises(InputError, match=words):
        quantize_bundle(bundle, data, None, request, tmp_path / "out", tmp_path / "views", QUIET)
    assert not (tmp_path / "out").exists()
