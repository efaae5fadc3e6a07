"""The accuracy benchmark: what rivals are built of, how runs are kept, and that all of it runs."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.accuracy import __main__ as accuracy  # noqa: E402
from benchmarks.accuracy import numbers as accuracy_numbers  # noqa: E402
from benchmarks.accuracy.methods import METHODS, RATES, choices, joint_epochs  # noqa: E402
from benchmarks.accuracy.results import Choice, Results, ResultsFile, Run, Trial  # noqa: E402
from benchmarks.accuracy.shapes import REAL, SMOKE, cost, even  # noqa: E402
from benchmarks.harness.models import vit  # noqa: E402
from benchmarks.harness.timed import TimedProgress  # noqa: E402
from benchmarks.rivals.class_split import joined  # noqa: E402
from benchmarks.rivals.dealing import dealt, own_labels, own_logits  # noqa: E402
from benchmarks.rivals.outcome import Subset  # noqa: E402
from benchmarks.rivals.pruning import measured, pruned_for  # noqa: E402
from mdp.errors import InputError  # noqa: E402
from partitioner.networks.teacher import Teacher, build_teacher  # noqa: E402

pytestmark = pytest.mark.torch
RUN_IN_SMOKE = ["ours", "joint", "single", "independent", "class-split-drop", "class-pruned",
                "replicated"]  # fmt: skip


def test_larger_members_get_more_classes_and_every_class_is_dealt_once() -> None:
    deal = dealt(REAL.members, 10)
    assert [c for classes in deal for c in classes] == list(range(10))
    counts = [len(classes) for classes in deal]
    by_cost = sorted(range(4), key=lambda k: cost(REAL.members[k]))
    assert [counts[k] for k in by_cost] == sorted(counts)
    assert max(counts) > min(counts)
    assert min(counts) >= 1
    assert [len(c) for c in dealt((vit(8, 4, 8, 1, 1), vit(8, 4, 64, 4, 1)), 4)] == [1, 3]
    with pytest.raises(InputError, match="expected at least 4 classes for a class split, got 3"):
        dealt(REAL.members, 3)


def test_restricted_targets_are_the_marginals_of_the_whole_ones() -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5, 3.0]])
    whole = torch.softmax(logits / 2, dim=1)
    restricted = torch.softmax(own_logits(logits, (1, 3), temperature=2.0) / 2, dim=1)
    wanted = torch.tensor([[whole[0, 1], whole[0, 3], whole[0, 0] + whole[0, 2]]])
    assert torch.allclose(restricted, wanted, atol=1e-6)
    assert torch.allclose(own_labels(whole, (1, 3)), wanted, atol=1e-6)
    assert own_logits(logits, (0, 1, 2, 3), 2.0)[0, 4] == -30


def test_a_missing_members_token_is_zeros() -> None:
    fused = joined({1: torch.ones(2, 3)}, (2, 3, 1))
    assert fused.tolist() == [[0, 0, 1, 1, 1, 0]] * 2


def test_a_teacher_pruned_to_its_own_size_is_the_teacher() -> None:
    teacher, pixels = _teacher(), torch.rand(3, 3, 8, 8) * 255
    pruned = pruned_for(teacher, vit(8, 4, 48, 2, 3), pixels).eval()
    network: Any = teacher.network
    feature = network.forward_features(teacher.normalise(pixels))[:, 0]
    assert torch.allclose(pruned(pixels), feature, atol=1e-5)


def test_pruning_keeps_what_is_active_on_the_pictures_shown() -> None:
    teacher, pixels = _teacher(), torch.rand(3, 3, 8, 8) * 255
    kept = torch.arange(1, 48, 2)
    network: Any = teacher.network
    with torch.no_grad():
        for block in network.blocks:
            block.mlp.fc2.bias[kept] += 50
    assert set(measured(teacher, pixels).stream[1].argsort()[-24:].tolist()) == set(kept.tolist())
    pruned = pruned_for(teacher, vit(8, 4, 24, 2, 3), pixels)
    assert torch.equal(pruned.network.cls_token, network.cls_token[..., kept])
    with pytest.raises(InputError, match="cannot be pruned: embed_dim is 48, expected 96"):
        pruned_for(teacher, vit(8, 4, 96, 2, 3), pixels)


def _teacher() -> Teacher:
    torch.manual_seed(0)
    return build_teacher(SMOKE.teacher(), 10, pretrained=False).eval()


def test_shapes_cost_what_they_may() -> None:
    for shapes in (REAL, SMOKE):
        assert all(cost(spec) <= cost(shapes.largest) for spec in shapes.fitting_singles())
        for spec in shapes.members:
            assert even(spec).depth % 2 == 0
            assert cost(even(spec)) <= cost(spec)
    assert len(choices("single", REAL)) == len(RATES) * len(REAL.fitting_singles())
    assert joint_epochs(METHODS["joint"], 10) == 2
    assert joint_epochs(METHODS["no-joint"], 10) == 0


def test_times_add_up_over_processes(tmp_path: Path) -> None:
    for _ in range(2):
        progress = TimedProgress(tmp_path / "tasks.json")
        with progress.task("a", 1):
            before = progress.tasks
            np.linalg.inv(np.eye(100))
    (task,) = progress.tasks
    assert before[0].wall_s < task.wall_s
    assert TimedProgress(tmp_path / "tasks.json").tasks == [task]


def run(method: str, seed: int, right: float, *, loss: float = 0.0, **changes: object) -> Run:
    """A run of two members whose pair is right so often."""
    accuracies = {(0,): right - 0.1, (1,): right - 0.1, (0, 1): right}
    stacked = {"stacked": 0.0, "boosted": loss, "bagged": -0.3, "averaged": 0.0, "alone": 0.0}
    return Run(
        method=method, seed=seed, choice=Choice(learning_rate=1e-3), made_of="x",
        settings={"schedule": {"stack_weight": 0.5}, "joint_schedule": {"epochs": 0}},
        members=list(SMOKE.members[:2]), alone=[0.1, 0.2],
        subsets=[
            Subset(members=m, accuracy={r: v + d for r, d in stacked.items()}, ece={})
            for m, v in accuracies.items()
        ],
        headline="stacked", calibration=0.5, tasks=[], train_s=1, train_cpu_s=1, cost_ratio=2.5,
        notes={},
    )  # fmt: skip


def test_differences_are_paired_by_seed_and_aims_judged_by_their_mean() -> None:
    ours = [run("ours", 0, 0.80, loss=0.001), run("ours", 1, 0.84, loss=0.001)]
    rivals = [run("single", 0, 0.77), run("single", 1, 0.83), run("single", 2, 0.99)]
    results = Results(machine={}, configuration={}, runs=(*ours, *rivals))
    gain = accuracy_numbers.paired(ours, "stacked", rivals, "alone")
    assert gain is not None
    assert gain.mean == pytest.approx(0.02)
    assert gain.seeds == 2
    assert gain.deviation == pytest.approx(0.01 * 2**0.5)
    found = {aim.aim: aim for aim in accuracy_numbers.aims(results)}
    assert found["all in: at least 2 points above single, alone"].figure == "+2.00 points"
    assert found["all in: above class-pruned, fused"].holds is None
    assert found["any one missing: at most 1.5 points under all in, on average"].holds is False
    stacked = next(aim for name, aim in found.items() if name.startswith("stacked:"))
    assert (stacked.holds, stacked.figure[:5]) == (True, "-0.10")
    assert found["training: under 3 times the largest member alone"].holds is True
    joint = found["joint pass: earns its place, or is off by default"]
    assert (joint.holds, joint.figure) == (True, "off; not measured")


def test_a_run_takes_the_place_of_its_older_self_and_the_best_choice_is_chosen() -> None:
    results = Results(machine={}, configuration={}).with_run(run("ours", 0, 0.5))
    results = results.with_run(run("ours", 1, 0.6)).with_run(run("ours", 0, 0.7))
    assert [(r.seed, r.alone) for r in results.runs] == [(1, [0.1, 0.2]), (0, [0.1, 0.2])]
    newer = results.run("ours", 0)
    assert newer is not None
    assert accuracy_numbers.all_in(newer, "stacked") == pytest.approx(0.7)
    for rate, right in ((1e-3, 0.5), (2e-3, 0.6), (5e-4, 0.6)):
        trial = Trial(choice=Choice(learning_rate=rate), calibration=right)
        results = results.with_trial("ours", trial)
    assert results.chosen("ours") == Choice(learning_rate=2e-3)
    assert results.chosen("single") is None


def test_results_of_another_configuration_are_refused(tmp_path: Path) -> None:
    path, lock = tmp_path / "accuracy.json", tmp_path / ".lock"
    ResultsFile(path, lock, {"epochs": 10}).change(lambda r: r.with_run(run("ours", 0, 0.5)))
    assert len(ResultsFile(path, lock, {"epochs": 10}).read().runs) == 1
    with pytest.raises(InputError, match=r"epochs was 10, is now 20 \(give another --out\)"):
        ResultsFile(path, lock, {"epochs": 20}).read()


def test_wrong_arguments_say_what_is_expected(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    threads = ["--threads", str(torch.get_num_threads())]
    assert accuracy.main(["--work", str(tmp_path), *threads]) == 2
    assert "expected --data FOLDER and --work FOLDER" in capsys.readouterr().err
    wrong = ["--smoke", "--work", str(tmp_path), "--methods", "magic", *threads]
    assert accuracy.main(wrong) == 2
    assert "--methods: expected some of ours, no-stack" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        accuracy.main(["--epochs", "1"])
    assert "--epochs: expected a whole number from 2, got '1'" in capsys.readouterr().err


def test_everything_runs_once_and_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half of the time would go into pictures of the curves, which have a test of their own.
    monkeypatch.setattr("partitioner.run.curves.draw_curves", lambda curves: b"<svg/>")
    threads = ["--threads", str(torch.get_num_threads())]
    command = ["--smoke", "--work", str(tmp_path), "--methods", *RUN_IN_SMOKE, *threads]
    assert accuracy.main(command) == 0
    content = (tmp_path / "accuracy.json").read_bytes()
    runs = {r.method: r for r in msgspec.json.decode(content, type=Results).runs}
    assert list(runs) == RUN_IN_SMOKE
    for method, found in runs.items():
        count = 1 if method == "single" else 4
        assert len(found.subsets) == 2**count - 1
        assert len(found.alone) == len(found.members) == count
        assert all(0 <= v <= 1 for s in found.subsets for v in s.accuracy.values())
    assert [t.what for t in runs["joint"].tasks][-1] == "training all sub-models together"
    assert (runs["ours"].cost_ratio or 0) > 1
    assert str(tmp_path) not in content.decode()
    capsys.readouterr()
    assert accuracy.main(command) == 0
    assert "training" not in capsys.readouterr().err
    assert json.loads((tmp_path / "accuracy.json").read_bytes()) == json.loads(content)
    out = ["--table", "--out", str(tmp_path / "accuracy.json"), *threads]
    assert accuracy.main(out) == 0
    shown = capsys.readouterr().out
    (row,) = [
        line for line in shown.splitlines() if line.startswith("| class-split-drop | fused |")
    ]
    assert "±" not in row, "one seed has no spread"
    assert shown.count("any one missing: at most 1.5 points") == 1


def test_expected_accuracy_weighs_every_subset_by_its_chance() -> None:
    from benchmarks.accuracy.page import LOST, arrived_by, expected_accuracy

    assert arrived_by(1.0) == pytest.approx((1 - LOST) / 2)
    assert arrived_by(1e9) == pytest.approx(1 - LOST)
    there = arrived_by(1.5)
    found = expected_accuracy({(0,): 50.0, (1,): 40.0, (0, 1): 60.0}, 2, 1.5)
    assert found == pytest.approx(90 * there * (1 - there) + 60 * there**2)
    assert expected_accuracy({(0,): 50.0}, 1, 3.0, slower=2.0) == pytest.approx(50 * there)
