"""Surface of `mdp-partition`: one-line errors, exit codes, JSON alone on stdout."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

import mdp.cli.main
from mdp.files import write_toml
from mdp.formats.bundle import Bundle, model_path
from mdp.formats.plan import Assignment
from mdp.formats.profile import read_profile
from mdp.testing.bundles import write_bundle
from partitioner.cli import main as cli
from partitioner.cli.tables import print_written
from partitioner.data.datasets import open_dataset
from tests.support.models.quantized import profile_of, write_colours
from tests.support.models.runs import SHARED_ARGS, SHARED_MS, tiny_plan, write_profiles
from tests.support.models.trees import write_tree
from tests.unit.partitioner.cli.conftest import Run

TEACHER = ["--teacher", "vit_tiny_patch16_224"]
SHARED = [*TEACHER, "--teacher-arg", *SHARED_ARGS]


@pytest.fixture
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a test's profiles, apart from what it writes."""
    return tmp_path_factory.mktemp("profiles")


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "import partitioner.cli.main\n"
        "heavy = {'torch', 'timm', 'onnx', 'onnxruntime', 'sklearn'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_without_the_partition_extra_one_line_says_what_to_install(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle")
    plan = [*TEACHER, "--profiles", "n100", "--latency-ms", "4"]
    commands = [
        ["mdp-partition", "plan", *plan],
        ["mdp-partition", "build", *plan, "--data", "digits", "--out", "b"],
        ["mdp-partition", "evaluate", "--bundle", "bundle", "--data", "digits"],
    ]
    code = (
        "import sys\n"
        "hidden = ['torch', 'timm', 'onnx', 'onnxruntime', 'sklearn', 'scipy', 'safetensors']\n"
        "sys.modules.update(dict.fromkeys(hidden))\n"
        "import partitioner.cli.main\n"
        f"for sys.argv in {commands}:\n"
        "    try:\n"
        "        partitioner.cli.main.main()\n"
        "    except SystemExit as ended:\n"
        "        assert ended.code == 2, ended.code"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, cwd=tmp_path, timeout=60,
    )  # fmt: skip
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == [command[0] for command in commands]
    for line in lines:
        assert " is not installed" in line
        assert "pip install '.[partition]' in a checkout" in line
    assert {path.name for path in tmp_path.iterdir()} == {"bundle"}


@pytest.mark.parametrize(
    "command", ["plan", "train", "export", "evaluate", "quantize", "build", "data", "simulate"]
)
def test_every_command_has_help_with_an_example(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"Example: mdp-partition {command}" in out
    assert "--json" in out


@pytest.mark.parametrize("app", [cli.app, mdp.cli.main.app], ids=["mdp-partition", "mdp"])
def test_every_option_says_what_it_is(app: typer.Typer) -> None:
    def options(command: Any, path: str) -> Iterator[tuple[str, str | None]]:
        for name, inner in getattr(command, "commands", {}).items():
            yield from options(inner, f"{path} {name}")
        yield from ((f"{path} {p.opts[0]}", p.help) for p in command.params if p.opts[0][0] == "-")

    silent = [what for what, text in options(typer.main.get_command(app), "") if not text]
    assert silent == []


def test_exit_codes_are_documented(run: Run) -> None:
    _, out, _ = run("--help")
    words = " ".join(out.split())
    assert "Exit codes: 0 fine, 2 usage or bad input, 4 the plan was refused" in words


def test_data_counts_and_writes(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("data", "--data", "digits", "--split", "test", "--out", "tree")
    assert code == 0
    assert "359" in out
    assert len(list((tmp_path / "tree").glob("*/*.png"))) == 359


@pytest.mark.torch
def test_non_pictures_are_left_out_and_broken_ones_named(run: Run, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", each=10)
    for path in ("ring/Thumbs.db", "ring/desktop.ini", "cross/notes.txt", "__MACOSX/ring/000.png"):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(b"not a picture")
    (tree / "ring/000.png").rename(tree / "ring/renamed")  # its content says what it is
    code, out, err = run("data", "--data", "tree", "--json")
    assert code == 0, err
    counted = json.loads(out)
    assert sum(split["pictures"] for split in counted["splits"].values()) == 30
    assert counted["left_out"] == {".db": 1, ".ini": 1, ".txt": 1, "__MACOSX": 1}

    data = open_dataset("tree")
    broken = [Path(str(data.split(split).sources[0])) for split in ("train", "calibration", "test")]
    for picture in broken:
        picture.write_bytes(b"not a picture")
    write_toml(tmp_path / "plan.toml", tiny_plan())
    code, _, err = run("train", "--plan", "plan.toml", "--data", "tree", "--run", "r",
                       "--teacher-epochs", 1)  # fmt: skip
    assert code == 2
    said = "left out 4 files that are no pictures: 1 .db, 1 .ini, 1 .txt, 1 __MACOSX"
    assert err.count(said) == 1
    last = err.splitlines()[-1]
    assert last.startswith("mdp-partition: 3 pictures cannot be read: ")
    assert all(str(path) in last for path in broken)
    assert "training" not in err


@pytest.mark.torch
def test_a_refused_plan_is_shown_and_ends_with_4(run: Run, profiles: Path, tmp_path: Path) -> None:
    args = ["plan", *SHARED, "--profiles", *write_profiles(profiles), "--latency-ms", 1000]
    code, out, err = run(*args)
    assert code == 4
    assert err.startswith("mdp-partition: plan refused: ")
    assert "refused" not in out
    assert "alone" in err
    assert err.count("\n") == 1
    code, out, _ = run(*args, "--json")
    assert code == 4
    assert json.loads(out)["refused"] is True
    assert not (tmp_path / "plan.toml").exists()


@pytest.mark.torch
def test_build_measures_a_given_teacher(run: Run, profiles: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from partitioner.config import parse_arguments
    from partitioner.networks.teacher import build_teacher, teacher_spec

    spec = teacher_spec("vit_tiny_patch16_224", parse_arguments(SHARED_ARGS))
    weights = tmp_path / "t.safetensors"
    save_file(build_teacher(spec, 5, pretrained=False).network.state_dict(), weights)
    args = [
        "build", *SHARED, "--profiles", *write_profiles(profiles), "--latency-ms", 1000,
        "--data", "digits", "--limit-train", 100, "--teacher-checkpoint", weights, "--out", "b",
    ]  # fmt: skip
    code, out, err = run(*args, "--json")
    predictor = json.loads(out)["predictor"]
    assert code == 4
    # Ten calibration pictures, and half a picture right and half a picture wrong beside them.
    assert 11 * predictor["teacher_accuracy"] % 1 == pytest.approx(0.5)
    assert "a linear probe fitted on 90 training pictures" in err
    assert {path.name for path in tmp_path.iterdir()} == {weights.name, "b.run"}


BUILD = ["build", *TEACHER, "--profiles", "n100", "--out", "b", "--data", "digits"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([*BUILD, "--latency-ms", 0], "--latency-ms: expected a number above 0, got 0"),
        ([*BUILD, "--latency-ms", 5, "--epochs", -1], "--epochs: expected `int` >= 1, got -1"),
        ([*BUILD, "--latency-ms", 5, "--config", "no.toml"], "no.toml: cannot be read: No such"),
        ([*BUILD, "--latency-ms", 5, "--name", "a b"], "--name: expected letters, digits"),
        (["data", "--data", "nowhere"], "nowhere: expected a folder of pictures"),
        (["data", "--data", "digits", "--split", "dev"], "--split: expected one of train, calib"),
        (["export", "--run", "nowhere", "--out", "b"], "nowhere: expected a run folder"),
        (["evaluate", "--bundle", "nowhere"], "nowhere: expected a bundle's folder, or one of "),
        (["train", "--plan", "no.toml", "--data", "digits", "--run", "r"], "no.toml: cannot"),
    ],
)  # fmt: skip
def test_bad_input(run: Run, tmp_path: Path, args: list[object], message: str) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith(f"mdp-partition: {message}")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.torch
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--teacher", "vit_tiny"], "--teacher: timm has no model 'vit_tiny'"),
        (["--teacher", "resnet18"], "--teacher: 'resnet18' cannot be decomposed"),
        ([*TEACHER, "--teacher-arg", "depth"], "--teacher-arg: expected key=value, got 'depth'"),
        ([*SHARED], "--teacher: 'vit_tiny_patch16_224' does not know"),
        (
            [*SHARED, "--teacher-checkpoint", "none.pth"],
            "none.pth: expected a teacher checkpoint, found no file",
        ),
        (
            [*SHARED, "--teacher-checkpoint", "x.pth", "--pretrained"],
            "--pretrained and --teacher-checkpoint: expected one of the two, got both",
        ),
    ],
)  # fmt: skip
def test_bad_teachers(run: Run, profiles: Path, args: list[str], message: str) -> None:
    code, _, err = run(
        "build", "--data", "digits", "--profiles", *write_profiles(profiles),
        "--latency-ms", SHARED_MS, "--out", "b", *args,
    )  # fmt: skip
    assert code == 2
    assert err.startswith(f"mdp-partition: {message}")
    assert err.count("\n") == 1


@pytest.mark.torch
def test_a_bad_picture_is_named_first(run: Run, profiles: Path, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", each=8)
    (tree / "ring" / "003.png").write_text("not a picture")
    code, _, err = run(
        "build", *SHARED, "--profiles", *write_profiles(profiles), "--latency-ms", SHARED_MS,
        "--data", tree, "--teacher-epochs", 1, "--out", "b",
    )  # fmt: skip
    assert code == 2
    assert err.splitlines()[-1].startswith(f"mdp-partition: {tree}/ring/003.png: ")
    assert "training" not in err
    assert not (tmp_path / "b").exists()
    assert not list(tmp_path.glob("b.run/cache/.*"))


@pytest.mark.torch
def test_something_else_at_out_is_noticed(run: Run, profiles: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("keep")
    code, _, err = run(
        "build", *SHARED, "--profiles", *write_profiles(profiles), "--latency-ms", SHARED_MS,
        "--data", "digits", "--teacher-epochs", 1, "--out", "b",
    )  # fmt: skip
    assert code == 2
    assert "b: expected a new folder or a bundle to replace" in err
    assert not (tmp_path / "b.run").exists()


@pytest.mark.torch
def test_a_runtime_that_is_not_here_is_noticed_before_any_training(
    run: Run, profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    written = write_profiles(profiles)
    for path in written:
        profile = read_profile(path)
        points = [msgspec.structs.replace(p, runtime="openvino") for p in profile.latency]
        write_toml(path, msgspec.structs.replace(profile, latency=points))
    code, _, err = run(
        "build", *SHARED, "--profiles", *written, "--latency-ms", SHARED_MS,
        "--data", "digits", "--teacher-epochs", 1, "--out", "b",
    )  # fmt: skip
    assert code == 2
    assert err.splitlines()[-1].endswith(
        "could not be measured here: the plan asks for openvino in fp32, which is not installed "
        "(pip install '.[openvino]' in a checkout of MDP)"
    )
    assert "training" not in err
    assert not (tmp_path / "b.run").exists()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("colours", ""),
        ("bundle", '; it is called "bundle": the same command with --name renames it'),
    ],
)
def test_a_bundle_that_is_called_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, hint: str
) -> None:
    manifest = write_bundle(tmp_path / "bundle") / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"name": "colours"', f'"name": "{name}"'))
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.manifest.name == name
    print_written(bundle, tmp_path)
    first, _, _ = capsys.readouterr().out.splitlines()
    assert first == f"{bundle.path}: 3 sub-models, digest {bundle.digest}{hint}"


def test_measuring_changes_nothing_unless_asked_to(run: Run, tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle")
    write_colours(tmp_path / "pictures")
    manifest, bundle = tmp_path / "bundle/manifest.json", Bundle.open(tmp_path / "bundle")
    before, known = manifest.read_bytes(), bundle.manifest.evaluation
    assert known is not None
    assert known.teacher is not None
    args = ["evaluate", "--bundle", "bundle", "--data", "pictures", "--json"]

    code, out, err = run(*args)
    assert code == 0, err
    measured = json.loads(out)
    assert (measured["written"], measured["digest"]) == (False, bundle.digest)
    assert manifest.read_bytes() == before
    assert "manifest.json: unchanged, with an evaluation on 100 pictures of colours; --write" in err

    code, out, err = run(*args, "--write")
    assert code == 0, err
    assert json.loads(out)["written"] is True
    now = Bundle.open(tmp_path / "bundle")
    assert now.manifest.evaluation is not None
    assert now.manifest.evaluation.pictures == measured["pictures"] != known.pictures
    # The teacher is not at hand: its accuracy stays, and says which pictures it is of.
    assert msgspec.to_builtins(now.manifest.evaluation.teacher) == {
        "accuracy": known.teacher.accuracy, "data": "colours", "pictures": 100,
    }  # fmt: skip
    assert now.digest == bundle.digest
    assert "was of 100 pictures of colours" in err
    assert f"the digest stays {bundle.digest[:12]}" in err


PLANNED = ["export", "--untrained", "--plan", "plan.toml", "--out", "b"]


def test_untrained_classes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from partitioner.export import write

    def member(assignment: Assignment, folder: Path, name: str, num_classes: int) -> float:
        path = folder / model_path(assignment.k)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"model")
        return 0.0

    monkeypatch.setattr(write, "_write_random_member", member)
    write_toml(tmp_path / "plan.toml", tiny_plan())
    code, out, err = run(*PLANNED, "--labels", 7)
    assert code == 0, err
    assert out.startswith("exported untrained: b (at most ")
    bundle = Bundle.open("b")
    assert bundle.manifest.labels == ["0", "1", "2", "3", "4", "5", "6"]
    assert bundle.expected_accuracy((0, 1), "stacked") is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["export", "--out", "b"], "expected --run, or --untrained with --plan; got neither"),
        (
            ["export", "--run", "r", "--labels", 3, "--out", "b"],
            "--labels: expected only with --untrained; a run has its own",
        ),
        ([*PLANNED, "--run", "r"], "--untrained: expected --plan instead of --run"),
        (
            ["export", "--untrained", "--labels", 3, "--out", "b"],
            "--untrained: expected --plan with the plan to export",
        ),
        (PLANNED, "--untrained: expected either --labels or --data, to know the classes"),
        ([*PLANNED, "--labels", 3], "plan.toml: cannot be read: No such file or directory"),
    ],
)
def test_an_empty_export(run: Run, tmp_path: Path, arguments: list[object], expected: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err == f"mdp-partition: {expected}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--max-loss", 0], "--max-loss: expected a number above 0 and up to 100, got 0"),
        (["--max-loss", "nan"], "--max-loss: expected a number above 0 and up to 100, got nan"),
        (
            ["--precision", "int4"],
            "--precision: expected some of fp32, fp16, bf16, int8, int8-static, got 'int4'",
        ),
        ([], "bundle: give --data, or --run with the folder it was trained in"),
        (["--run", "nowhere"], "nowhere: expected a run folder of mdp-partition train or build"),
        (
            ["--data", "tree", "--here", "omega"],
            "--here: bundle has no device 'omega' (there are: alpha, beta, gamma)",
        ),
        (
            ["--data", "tree"],
            "--data tree: 36 calibration pictures cannot show a loss of 0.50 points: expected at "
            "least 200, or a larger --max-loss",
        ),
    ],
)
def test_not_quantizable(run: Run, tmp_path: Path, arguments: list[object], expected: str) -> None:
    write_bundle(tmp_path / "bundle")
    write_colours(tmp_path / "tree")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code, out, err = run("quantize", "--bundle", "bundle", *arguments)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == f"mdp-partition: {expected}"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_people_see_what_was_tried_and_what_it_costs(run: Run, tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle")
    write_colours(tmp_path / "tree")
    write_toml(tmp_path / "alpha.toml", profile_of("alpha", {("int8", "onnxruntime"): 0.5}))
    code, out, err = run(
        "quantize", "--bundle", "bundle", "--data", "tree", "--profiles", "alpha.toml",
        "--max-loss", 5, "--precision", "int8",
    )  # fmt: skip
    assert code == 0, err
    assert "0 alpha, int8 in onnxruntime: 50% of fp32's time" in out
    assert "1 beta, int8 in onnxruntime: nothing was measured on beta" in out
    assert "90 test pictures, all in: " in out
    # Without --out the bundle is replaced.
    assert Bundle.open("bundle").assignment("alpha").vit.precision == "int8"
