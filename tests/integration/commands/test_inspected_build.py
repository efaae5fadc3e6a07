"""Builds whose models get anomaly heads in the same command: whole, stopped, and refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from mdp.errors import InputError  # noqa: E402
from mdp.formats.bundle import Bundle  # noqa: E402
from partitioner.build.steps import inspect_step  # noqa: E402
from partitioner.cli.main import main  # noqa: E402
from partitioner.export.anomaly_head import has_head  # noqa: E402
from partitioner.export.inspect_bundle import InspectRequest  # noqa: E402
from partitioner.networks.families import Backbone, create  # noqa: E402
from tests.support.command_lines import run_here  # noqa: E402
from tests.support.inspection import PARTS  # noqa: E402
from tests.support.inspection import write_scenes as inspection_scenes  # noqa: E402
from tests.support.models.runs import QUIET, write_profiles  # noqa: E402
from tests.support.models.trees import write_scenes, write_tree  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("quick_exports")]
COMMAND = Path(sys.executable).parent / "mdp-partition"
NETWORK = "test_vit"
#: A teacher whose sub-models have 6 x 6 places.
TEACHER_ARGS = ["img_size=24", "patch_size=4", "embed_dim=48", "depth=2", "num_heads=3"]
LATENCY_MS = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, scenes, two profiles, and the weights of a network."""
    made = tmp_path_factory.mktemp("inspected")
    write_tree(made / "tree", each=24)
    write_scenes(made / "scenes", each=21)
    write_profiles(made)
    (made / "run.toml").write_text("[schedule]\nbatch_size = 16\n[augmentation]\nvariants = 2\n")
    (made / "weights").mkdir()
    torch.manual_seed(0)
    weights = create(Backbone(NETWORK, 160), 5).state_dict()
    save_file(weights, made / "weights" / f"{NETWORK}.safetensors")
    return made


def taught(folder: Path, out: Path, *more: object) -> list[str]:
    """A build with a teacher, of one device."""
    words = (
        "build", "--teacher", "vit_tiny_patch16_224", "--teacher-arg", *TEACHER_ARGS,
        "--profiles", folder / "alpha.toml", "--data", folder / "tree", "--latency-ms", LATENCY_MS,
        "--teacher-epochs", 1, "--epochs", 1, "--anyway", "--config", folder / "run.toml",
        "--out", out, *more,
    )  # fmt: skip
    return [str(word) for word in words]


def measured(folder: Path, out: Path, *more: object) -> list[str]:
    """A build by measurement, of two cameras."""
    words = (
        "build", "--weights", folder / "weights", "--data", folder / "scenes", "--profiles",
        folder / "alpha.toml", folder / "beta.toml", "--camera", "alpha=left", "beta=right",
        "--latency-ms", LATENCY_MS, "--minutes", 0, "--out", out, *more,
    )  # fmt: skip
    return [str(word) for word in words]


def has_heads(bundle: Bundle) -> bool:
    """Tell whether models, thresholds and manifest are of a bundle that inspects."""
    parts = bundle.manifest.plan.assignments
    found = {has_head(bundle.model(part.k).content) for part in parts}
    found |= {bool(bundle.fusion_weights().anomaly), bool(bundle.manifest.inspection)}
    assert len(found) == 1
    return found == {True}


def test_a_build_that_is_killed_while_it_learns_good_pictures_goes_on(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = taught(folder, out, "--inspect", folder / "tree" / "ring", "--rate", 5, "--json")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    ) as process:  # fmt: skip
        assert process.stderr
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("cutting 24 pictures, good scenes: done"):
                process.kill()
                break
        process.communicate()
    assert process.returncode == -9, said
    assert not has_heads(Bundle.open(out))
    weights = Path(f"{out}.run") / "member-0.safetensors"
    before = weights.stat()
    done = run_here(main, "mdp-partition", *words)
    assert done.returncode == 0, done.stderr
    # Nothing was trained again.
    assert weights.stat() == before
    bundle = Bundle.open(out)
    assert has_heads(bundle)
    told = json.loads(done.stdout)
    assert (told["digest"], told["inspection"]["good"]) == (bundle.digest, 24)
    assert told["inspection"]["rate"] == 0.05
    assert told["anomaly"]["default"] == pytest.approx(1 / 25, abs=1e-6)
    assert bundle.manifest.evaluation


def test_a_finished_build_without_heads_has_none(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for more in (("--inspect", folder / "tree" / "ring"), ()):
        done = run_here(main, "mdp-partition", *taught(folder, out, *more))
        assert done.returncode == 0, done.stderr
        assert has_heads(Bundle.open(out)) is bool(more)


def test_a_build_by_measurement_learns_good_scenes_of_its_cameras(
    folder: Path, tmp_path: Path
) -> None:
    out, scenes = tmp_path / "out", folder / "scenes"
    more = ("--inspect", scenes / "ring", "--defects", scenes / "stripes")
    done = run_here(main, "mdp-partition", *measured(folder, out, *more))
    assert done.returncode == 0, done.stderr
    assert "fitting anomaly heads: done in " in done.stderr
    bundle = Bundle.open(out)
    assert has_heads(bundle)
    assert bundle.manifest.inspection
    facts = bundle.manifest.inspection
    assert (facts.data, facts.defects, facts.good, facts.defective) == ("ring", "stripes", 21, 10)
    assert "anomaly heads, fitted to 21 good scenes of ring" in " ".join(done.stdout.split())


def test_good_scenes_with_others_among_them_leave_the_bundle_as_it_is(tmp_path: Path) -> None:
    good = inspection_scenes(tmp_path / "good", 30, patched=[7])
    out = shutil.copytree(PARTS, tmp_path / "out")
    before = Bundle.open(out)
    with pytest.raises(InputError) as refused:
        inspect_step(out, InspectRequest(good=str(good), option="--inspect"), QUIET)
    told = str(refused.value)
    assert told.startswith(f"--inspect {good}: 1 of 30 good scenes differ from all the others")
    assert "s007: move them out" in told
    assert told.endswith(f"; {out} is whole, without anomaly heads")
    assert not has_heads(Bundle.open(out))
    assert Bundle.open(out).digest == before.digest


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--inspect", "FOLDER/none"), "none: expected a folder of scenes, found none"),
        (("--inspect", "FOLDER/few"), "--inspect FOLDER/few: expected at least 20 good scenes"),
        (("--inspect", "FOLDER/tree/ring", "--defects", "FOLDER/few/one"),
         "--defects FOLDER/few/one: expected at least 2 defective scenes"),
        (("--inspect", "FOLDER/tree/ring", "--rate", 0), "--rate: expected a number above 0"),
        (("--defects", "FOLDER/few"), "--defects, --rate, --all-good: expected --inspect GOOD"),
        (("--rate", 2), "--defects, --rate, --all-good: expected --inspect GOOD"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_is_trained(
    folder: Path, tmp_path: Path, more: tuple[object, ...], told: str
) -> None:
    write_tree(tmp_path / "few", each=1, classes=("ring", "cross"))
    write_tree(tmp_path / "few" / "one", each=1, classes=("stripes",))
    (tmp_path / "tree").symlink_to(folder / "tree")
    words = [str(word).replace("FOLDER", str(tmp_path)) for word in more]
    done = run_here(main, "mdp-partition", *taught(folder, tmp_path / "out", *words))
    assert done.returncode == 2
    assert told.replace("FOLDER", str(tmp_path)) in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.run").exists()


def test_good_scenes_of_other_cameras_are_refused(folder: Path, tmp_path: Path) -> None:
    words = measured(folder, tmp_path / "out", "--inspect", folder / "tree")
    done = run_here(main, "mdp-partition", *words)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "expected scenes with a picture each of left, right, found none" in last
    assert not (tmp_path / "out").exists()
