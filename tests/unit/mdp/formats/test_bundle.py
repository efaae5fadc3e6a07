"""The manifest, and the files that it answers for."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mdp.errors import ConfigError, InputError
from mdp.files import MAX_JSON_BYTES, write_json
from mdp.formats.bundle import FUSION, MANIFEST, Bundle, model_path
from mdp.formats.plan import Assignment
from mdp.fusion.fuse import weights_for
from mdp.testing.bundles import LABELS, size_accuracy, subset_accuracy, write_bundle
from tests.support.bundles import change_assignment, change_manifest, relist

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


def _confused(manifest: dict[str, Any], *labels: str) -> None:
    found = {"labels": labels, "pictures": 50, "confused": 24}
    manifest["evaluation"]["confusions"] = [found]


def _cascade(manifest: dict[str, Any], **changes: Any) -> None:
    thresholds = dict.fromkeys(("boosted", "stacked", "bagged"), 0.9)
    told = {"first": [0], "pictures": 1000, "escalated": 0.25, **thresholds}
    manifest["cascade"] = told | changes


def test_a_bundle_opens_and_its_files_are_as_listed(folder: Path) -> None:
    bundle = Bundle.open(folder)
    assert bundle.manifest.labels == LABELS
    for name in bundle.manifest.files:
        assert bundle.verified(name) == folder / name
    assert bundle.fusion_weights().num_classes == len(LABELS)


def test_an_assignment_or_the_names_there_are(folder: Path) -> None:
    bundle = Bundle.open(folder)
    assert bundle.assignment("gamma").k == 2
    with pytest.raises(
        ConfigError, match=r"no assignment for device 'delta' \(there are: alpha, beta, gamma\)"
    ):
        bundle.assignment("delta")


def test_what_is_no_bundle_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: expected a bundle folder with a manifest\.js"):
        Bundle.open(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"manifest\.json: cannot be read: No such file"):
        Bundle.open(tmp_path)


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "a/../../b", "..", "", ".", "C:/x", "a\\..\\b", "a\0b"]
)
def test_a_listed_path_may_not_leave_the_folder(folder: Path, path: str) -> None:
    change_manifest(folder, lambda m: m["files"].update({path: m["files"][FUSION]}))
    with pytest.raises(ConfigError, match=r"`files` holds '.*': expected a relative path inside"):
        Bundle.open(folder)


@pytest.mark.parametrize("level", ["file", "folder"])
def test_a_link_may_not_lead_out_of_the_folder(folder: Path, tmp_path: Path, level: str) -> None:
    inside = folder / "submodels" / "0" / "model.onnx"
    outside = tmp_path / "outside"
    if level == "folder":
        inside = inside.parent
    inside.rename(outside)
    inside.symlink_to(outside)
    with pytest.raises(ConfigError, match=r"model\.onnx: leads out of the bundle"):
        Bundle.open(folder).verified(model_path(0))


def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert Bundle.open(link).verified(model_path(0)) == link / model_path(0)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (flip_a_bit, "expected sha256 [0-9a-f]{64}, found"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), r"expected \d+ bytes, found \d+"),
        (lambda path: path.unlink(), r"missing, but listed in manifest\.json"),
        (link_to_itself, "cannot be read: Symlink loop"),
    ],
)
def test_a_changed_file_is_named(
    folder: Path, change: Callable[[Path], None], expected: str
) -> None:
    change(folder / model_path(1))
    with pytest.raises(ConfigError, match=rf"1/model\.onnx: {expected}"):
        Bundle.open(folder).verified(model_path(1))


def test_a_path_that_no_file_system_takes_is_named(folder: Path) -> None:
    name = "a" * 300
    change_manifest(folder, lambda m: m["files"].update({name: m["files"][FUSION]}))
    with pytest.raises(ConfigError, match="aaa: cannot be read: File name too long"):
        Bundle.open(folder).verified(name)


def _first(manifest: dict[str, Any]) -> dict[str, Any]:
    subset: dict[str, Any] = manifest["evaluation"]["subsets"][0]
    return subset


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: m.update(surprise=1), "unknown field `surprise`"),
        (lambda m: m["evaluation"].update(surprise=1), r"`surprise` - at `\$\.evaluation`"),
        (lambda m: m.pop("labels"), "missing required field `labels`"),
        (lambda m: m.update(labels=["one"]), r"length >= 2 - at `\$\.labels`"),
        (lambda m: m.update(labels=["one", "two", "one"]), "`labels` name a class twice"),
        (lambda m: m.update(labels="red"), r"Expected `array`, got `str` - at `\$\.labels`"),
        (lambda m: m.update(name="no name"), r"matching regex .* - at `\$\.name`"),
        (lambda m: m.update(name="line\n"), r"matching regex .* - at `\$\.name`"),
        (
            lambda m: m.update(labels=["a\x1b]0;b", "c"]),
            r"printable text, got .* - at `\$\.labels\[0",
        ),
        (
            lambda m: m.update(labels=["a", "b\nc"]),
            r"printable text, got .* - at `\$\.labels\[1\]`",
        ),
        (lambda m: m.update(provenance={"by\u202e": "x"}), r"printable .* - at `\$\.provenance`"),
        (lambda m: m["plan"].update(reason="\x9b31m"), r"printable .* - at `\$\.plan\.reason`"),
        (lambda m: m.update(format_version=2), r"Invalid enum value 2 - at `\$\.format_version`"),
        (lambda m: m["files"].pop(model_path(1)), "`files` lacks submodels/1/model.onnx"),
        (lambda m: m["files"].pop(FUSION), "`files` lacks fusion.json"),
        (lambda m: m["files"][FUSION].update(sha256="ab"), r"regex .* - at `\$\.files\[\.\.\.\]"),
        (lambda m: m["files"][FUSION].update(size_bytes=-1), r"`int` >= 0"),
        (lambda m: m["evaluation"]["subsets"].pop(), "have to list every arrival subset once"),
        (
            lambda m: m["evaluation"]["subsets"].append(_first(m)),
            "have to list every arrival subset once",
        ),
        (lambda m: _first(m).update(members=[7]), "have to list every arrival subset once"),
        (lambda m: _first(m).update(stacked=1.5), r"`float` <= 1"),
        (
            lambda m: m["evaluation"].update(sizes=[msgspec.to_builtins(size_accuracy(2))]),
            r"`evaluation.sizes` have to list each of the sizes \[\]",
        ),
        (lambda m: _confused(m, "red", "mauve"), "`evaluation.confusions` name red, mauve"),
        (lambda m: _confused(m, "red", "red"), "`evaluation.confusions` name red, red"),
        (lambda m: m["plan"]["assignments"][0].update(threads=1025), "`int` <= 1024"),
        (lambda m: m["plan"]["assignments"][0].update(k=1), "listed by `k`, from 0 without gaps"),
        (lambda m: _cascade(m, first=[]), r"length >= 1 - at `\$\.cascade\.first`"),
        (lambda m: _cascade(m, first=[1, 0]), "distinct, not negative and ascending"),
        (lambda m: _cascade(m, first=[3]), "`cascade.first` has to be some and not all of 3 mem"),
        (lambda m: _cascade(m, first=[0, 1, 2]), "has to be some and not all of 3 members"),
        (lambda m: _cascade(m, stacked=1.1), r"`float` <= 1.0 - at `\$\.cascade\.stacked`"),
    ],
)
def test_what_a_manifest_may_not_say(folder: Path, change: Change, expected: str) -> None:
    change_manifest(folder, change)
    with pytest.raises(ConfigError, match=rf"manifest\.json: .*{expected}"):
        Bundle.open(folder)


def _rungs(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the first device: its top takes 1 ms, the others half of the one above."""
    rungs: list[dict[str, Any]] = manifest["plan"]["assignments"][0]["rungs"]
    return rungs


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: _rungs(m)[0].pop("accuracy"), "missing required field `accuracy`"),
        (lambda m: _rungs(m)[0].update(accuracy=1.5), "`float` <= 1"),
        (lambda m: _rungs(m)[0].update(compute_ms=1.0), "rung 1 to take less than the 1 ms of the"),
        (lambda m: _rungs(m)[1].update(compute_ms=0.75), "rung 2 to take less than the 0.5 ms"),
        (lambda m: _rungs(m)[1].update(scales=[1.0, 0.0]), "`float` > 0"),
        (lambda m: _rungs(m)[0].update(submodel=None), "either `submodel` or `network`"),
        (
            lambda m: _rungs(m)[0]["submodel"].update(image_size=8),
            "expected pictures of 16 px at rung 1, as at the top, got 8",
        ),
        (lambda m: _rungs(m).clear(), "length >= 1"),
        (lambda m: _rungs(m).extend(_rungs(m)[:1] * 6), "length <= 7"),
        (lambda m: m["files"].pop(model_path(1, 2)), "`files` lacks submodels/1/rung-2.onnx"),
        (lambda m: m["evaluation"].pop("lowest"), "`evaluation.lowest` goes with `rungs`"),
        (
            lambda m: m["evaluation"]["lowest"]["subsets"].pop(),
            "`evaluation.lowest.subsets` have to list every arrival subset once",
        ),
    ],
)
def test_what_rungs_may_not_say(tmp_path: Path, change: Change, expected: str) -> None:
    folder = write_bundle(tmp_path / "bundle", rungs=3)
    change_manifest(folder, change)
    with pytest.raises(ConfigError, match=rf"manifest\.json: .*{expected}"):
        Bundle.open(folder)


def test_rungs_change_the_digest_and_their_measurements_do_not(tmp_path: Path) -> None:
    plain, two, three = (
        Bundle.open(write_bundle(tmp_path / str(rungs), rungs=rungs)) for rungs in (1, 2, 3)
    )
    assert len({plain.digest, two.digest, three.digest}) == 3
    change_manifest(two.path, lambda m: _rungs(m)[0].update(accuracy=0.1, compute_ms=0.2))
    assert Bundle.open(two.path).digest == two.digest
    change_manifest(two.path, lambda m: m["files"].update({model_path(0, 1): _other(m)}))
    assert Bundle.open(two.path).digest != two.digest


def _other(manifest: dict[str, Any]) -> Any:
    return manifest["files"][model_path(1, 1)]


def test_a_bundle_without_rungs_is_written_as_before(folder: Path, tmp_path: Path) -> None:
    """Agents and clients that predate rungs refuse unknown keys, and name them."""
    content = json.loads((folder / MANIFEST).read_text())
    assert not any("rungs" in assignment for assignment in content["plan"]["assignments"])
    assert "lowest" not in content["evaluation"]
    fields = [
        (field.name, field.type, field.default)
        for field in msgspec.structs.fields(Assignment)
        if field.name != "rungs" and field.default is not msgspec.NODEFAULT
    ]
    required = [
        (field.name, field.type)
        for field in msgspec.structs.fields(Assignment)
        if field.default is msgspec.NODEFAULT
    ]
    older = msgspec.defstruct(
        "OlderAssignment", [*required, *fields], kw_only=True, forbid_unknown_fields=True
    )
    ours = Bundle.open(folder).manifest.plan.assignments[0]
    msgspec.json.decode(msgspec.json.encode(ours), type=older)
    with_rungs = Bundle.open(write_bundle(tmp_path / "rungs", rungs=2)).manifest.plan.assignments[0]
    with pytest.raises(msgspec.ValidationError, match="unknown field `rungs`"):
        msgspec.json.decode(msgspec.json.encode(with_rungs), type=older)


def test_what_answers_at_lower_rungs_are_expected_to_be(tmp_path: Path) -> None:
    """Measured are all at their top and each at its lowest; of anything between, nothing is."""
    bundle = Bundle.open(write_bundle(tmp_path / "bundle", rungs=3))
    top = subset_accuracy((0, 2)).stacked

    def expected(*rungs: int) -> float | None:
        return bundle.expected_accuracy((0, 2), "stacked", rungs)

    assert expected(0, 0) == expected() == top
    assert expected(2, 2) == pytest.approx(top / 2)
    assert expected(1, 1) is expected(2, 0) is expected(0, 1) is None


def pipe(folder: Path) -> None:
    os.mkfifo(folder / MANIFEST)


def device(folder: Path) -> None:
    (folder / MANIFEST).symlink_to("/dev/zero")


def outside(folder: Path) -> None:
    write_bundle(folder.parent / "other")
    (folder / MANIFEST).symlink_to(folder.parent / "other" / MANIFEST)


def truncate(folder: Path) -> None:
    (folder / MANIFEST).write_bytes(b'{"name": ')


def endless(folder: Path) -> None:
    with (folder / MANIFEST).open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)  # a hole: it takes no room on the disk


@pytest.mark.timeout(20)  # a pipe that is waited for never ends
@pytest.mark.parametrize(
    ("replace", "expected"),
    [
        (pipe, "expected a regular file, found a pipe or a device"),
        (device, "leads out of the bundle"),
        (outside, "leads out of the bundle"),
        (endless, "expected at most 67,108,864 bytes, found more"),
        (truncate, "Input data was truncated"),
    ],
)
def test_an_unreadable_manifest(
    folder: Path, replace: Callable[[Path], None], expected: str
) -> None:
    (folder / MANIFEST).unlink()
    replace(folder)
    with pytest.raises(ConfigError, match=rf"manifest\.json: {expected}"):
        Bundle.open(folder)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_classes": 10}, "key `num_classes`: expected 3, the number of labels, got 10"),
        (
            {"by_size": [{"size": 2, "a": [1.0] * 4, "b": [1.0] * 4}]},
            "key `by_size`: expected weights of 3 members, .*, got 4",
        ),
    ],
)
def test_another_bundles_weights(folder: Path, change: dict[str, object], expected: str) -> None:
    content = json.loads((folder / FUSION).read_text())
    (folder / FUSION).write_text(json.dumps({**content, **change}))
    relist(folder, FUSION)
    with pytest.raises(ConfigError, match=rf"fusion\.json: {expected}"):
        Bundle.open(folder).fusion_weights()


def test_the_digest_tells_models_labels_and_plans_apart(folder: Path, tmp_path: Path) -> None:
    digest = Bundle.open(folder).digest
    assert len(digest) == 64
    assert Bundle.open(write_bundle(tmp_path / "same")).digest == digest
    assert Bundle.open(write_bundle(tmp_path / "model", bag_scale=5.0)).digest != digest
    assert Bundle.open(write_bundle(tmp_path / "plan", devices=("a", "b", "c"))).digest != digest
    change_manifest(folder, lambda m: m.update(labels=["blue", "green", "rouge"]))
    assert Bundle.open(folder).digest != digest


def test_the_digest_does_not_depend_on_what_changes_no_answer(folder: Path) -> None:
    digest = Bundle.open(folder).digest
    change_assignment(folder, batch=3)
    change_assignment(folder, spin=True)
    assert Bundle.open(folder).manifest.plan.assignments[0].spin
    assert Bundle.open(folder).digest == digest


@pytest.mark.parametrize(
    ("bundle", "digest"),
    [
        # Of plain ViTs, written before there were other families.
        (
            "tests/support/plain_vits",
            "143a2f3da63bbca1390a0a883d6a7d19f44b2c742af5e1bdc747a86397015eba",
        ),
        (
            "examples/bundles/cifar10",
            "7d6d4656744ade8610389550bf81ba9ec5926077193595b2a294ec03878157ee",
        ),
    ],
)
def test_a_bundle_keeps_its_digest_from_one_version_to_the_next(bundle: str, digest: str) -> None:
    # Agents that serve it would refuse clients of a version that takes it for another one.
    assert Bundle.open(Path(__file__).parents[4] / bundle).digest == digest


def test_the_digest_does_not_depend_on_what_was_measured(folder: Path, tmp_path: Path) -> None:
    digest = Bundle.open(folder).digest
    never = Bundle.open(write_bundle(tmp_path / "never", evaluated=False))
    assert never.digest == digest
    assert never.manifest.evaluation is None
    write_json(folder / FUSION, {"num_classes": 3, "subsets": []})
    relist(folder, FUSION)
    assert Bundle.open(folder).digest == digest


def test_expected_accuracy_of_every_subset_and_rule(folder: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(folder)
    both = subset_accuracy((0, 2))
    for rule in ("stacked", "bagged", "boosted"):
        assert bundle.expected_accuracy((0, 2), rule) == getattr(both, rule)
    assert len({both.stacked, both.bagged, both.boosted}) == 3
    never = Bundle.open(write_bundle(tmp_path / "never", evaluated=False))
    assert never.expected_accuracy((0, 2), "stacked") is None


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    devices = tuple(f"d{k}" for k in range(16))
    return write_bundle(
        tmp_path_factory.mktemp("many") / "bundle", devices=devices, sizes=(8,) * 16
    )


def test_sixteen_members_have_the_mean_of_the_size_where_a_subset_is_not_listed(many: Path) -> None:
    bundle = Bundle.open(many)
    assert bundle.manifest.evaluation is not None
    assert len(bundle.manifest.evaluation.subsets) < 300
    assert (many / MANIFEST).stat().st_size < 200_000
    for members in ((3, 9), (0, 1, 2, 3, 4), tuple(range(16)), tuple(range(1, 15))):
        assert bundle.expected_accuracy(members, "stacked") == subset_accuracy(members).stacked
    odd, rest = (1, 3, 5, 7, 9), tuple(range(3, 16))
    for members in (odd, rest):
        mean = size_accuracy(len(members)).mean
        for rule in ("stacked", "bagged", "boosted"):
            assert bundle.expected_accuracy(members, rule) == getattr(mean, rule)
    fitted = bundle.fusion_weights().weights_of(odd)
    assert fitted is not None
    assert fitted.b == (0.2,) * 5


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda e: e["subsets"].pop(),
            r"list every arrival subset once but those of the sizes \[3, 4, .* 13\]",
        ),
        (lambda e: e["subsets"].append({**e["subsets"][0], "members": [1, 3, 5]}), "every arrival"),
        (lambda e: e["sizes"].pop(), r"`evaluation.sizes` have to list each of the sizes \[3, 4"),
        (lambda e: e["sizes"].append(e["sizes"][0]), "each of the sizes"),
        (lambda e: e.pop("sizes"), "each of the sizes"),
        (lambda e: e["sizes"][0].update(sampled=0), "`int` >= 1"),
        (lambda e: e["sizes"][0]["mean"].update(stacked=2.0), "`float` <= 1"),
    ],
)
def test_evaluations_of_many(many: Path, tmp_path: Path, change: Change, expected: str) -> None:
    content = json.loads((many / MANIFEST).read_text())
    change(content["evaluation"])
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"manifest\.json: .*{expected}"):
        Bundle.open(tmp_path)


def test_a_bundle_from_before_temperatures_and_calibration_errors_opens(folder: Path) -> None:
    content = json.loads((folder / FUSION).read_text())
    content.pop("by_size")
    for subset in content["subsets"]:
        subset.pop("temperatures")
    (folder / FUSION).write_text(json.dumps(content))
    relist(folder, FUSION)

    def older(manifest: dict[str, Any]) -> None:
        manifest["evaluation"].pop("sizes")
        # Bounds of early exit, which others had.
        del manifest["cascade"], manifest["evaluation"]["cascade"]
        manifest["early"] = {"pictures": 1000, "pulls": [{"members": [0, 1], "stacked": 0.5}]}
        manifest["evaluation"]["early"] = [{"arrived": [0], "ended": 0.5, "changed": 0.0}]
        for subset in manifest["evaluation"]["subsets"]:
            subset.pop("ece")

    change_manifest(folder, older)
    bundle = Bundle.open(folder)
    assert bundle.expected_accuracy((0, 2), "stacked") == subset_accuracy((0, 2)).stacked
    assert bundle.manifest.evaluation is not None
    assert bundle.manifest.evaluation.subsets[0].ece is None
    assert bundle.manifest.cascade is None
    assert bundle.cascade_accuracy("stacked") is None
    assert weights_for((0, 2), "bagged", bundle.fusion_weights()).b == (0.5, 0.5)


def test_a_bundle_of_several_labels_an_item(folder: Path, tmp_path: Path) -> None:
    several = Bundle.open(write_bundle(tmp_path / "several", several=True))
    assert several.manifest.several
    assert several.fusion_weights().several
    assert not Bundle.open(folder).manifest.several
    # Clients of one label an item would show another answer of the same models.
    assert several.digest != Bundle.open(folder).digest
    # Readers that predate the key name it first.
    content = json.loads((several.path / MANIFEST).read_bytes())
    assert next(iter(content)) == "labels_per_item"
    assert "labels_per_item" not in json.loads((folder / MANIFEST).read_bytes())
    with pytest.raises(InputError, match=r"quantize: expected a bundle with one label an item"):
        several.require_one_label("quantize")
    Bundle.open(folder).require_one_label("quantize")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: m["labels"].__setitem__(0, "a+b"), "hold 'a\\+b': not with several labels"),
        (lambda m: m["labels"].__setitem__(0, "none"), "hold 'none': not with several labels"),
        (lambda m: m["labels"].__setitem__(0, ""), "hold '': not with several labels"),
        (lambda m: m.pop("labels_per_item"), r"`evaluation\.by_label` needs `labels_per_item`"),
        (_cascade, "a cascade or rungs need one label an item, got several"),
        (
            lambda m: m["evaluation"].pop("by_label"),
            r"`evaluation\.by_label` has to list the subsets of `evaluation`",
        ),
        (
            lambda m: m["evaluation"]["by_label"][0]["recall"].pop(),
            r"`evaluation\.by_label` needs a number for each of 3 labels",
        ),
    ],
)
def test_what_a_manifest_of_several_labels_may_not_say(
    tmp_path: Path, change: Change, expected: str
) -> None:
    folder = write_bundle(tmp_path / "bundle", several=True)
    change_manifest(folder, change)
    with pytest.raises(ConfigError, match=expected):
        Bundle.open(folder)


def test_weights_of_the_other_kind_are_named(folder: Path, tmp_path: Path) -> None:
    several = write_bundle(tmp_path / "several", several=True)
    for one, other in ((folder, several), (several, folder)):
        mixed = tmp_path / f"mixed-{one.name}"
        write_bundle(mixed, several=one is several)
        (mixed / FUSION).write_bytes((other / FUSION).read_bytes())
        relist(mixed, FUSION)
        with pytest.raises(ConfigError, match="key `thresholds`: they go with several labels"):
            Bundle.open(mixed).fusion_weights()
