"""A coordinator and two trainers that join train a plan, in real processes."""

import json
import math
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from mdp.files import toml_bytes  # noqa: E402
from mdp.testing.processes import until  # noqa: E402
from partitioner.build.steps import reopen  # noqa: E402
from partitioner.crew.folder import CrewFolder  # noqa: E402
from partitioner.crew.planning.facts import Facts, Line, Trainer  # noqa: E402
from partitioner.crew.planning.syncplan import (  # noqa: E402
    Answers,
    KfacOwner,
    MuonOwner,
    Neighbourhood,
    NetworkSync,
    RequestedGroups,
    ShuffledGroups,
    Stage,
    SyncPlan,
    TensorRule,
    WholeGroup,
    write_plan,
)
from partitioner.data.memmaps import load  # noqa: E402
from partitioner.run.folder import RunFolder  # noqa: E402
from partitioner.training.checkpoint import epochs_of  # noqa: E402
from partitioner.training.compute import use_threads  # noqa: E402
from partitioner.training.members import output_files, outputs_of  # noqa: E402
from tests.support.models import crew_run  # noqa: E402
from tests.support.models.crew_run import training  # noqa: E402
from tests.support.models.forked import Forked  # noqa: E402
from tests.support.models.runs import QUIET  # noqa: E402
from tests.support.models.trees import write_scenes, write_tree  # noqa: E402

pytestmark = pytest.mark.torch

PATIENCE_S = 180.0
NAMES = ("coordinator", "tower", "nuc")
NETWORKS = ("teacher", "member-0", "member-1")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Crew:
    """The folders of a coordinator and of the trainers that join it."""

    started: ClassVar[list[Forked]] = []

    def __init__(
        self,
        path: Path,
        data: Path,
        *networks: NetworkSync,
        names: tuple[str, ...] = NAMES,
        answers: tuple[str, ...] = (),
    ) -> None:
        self.path, self.data, self.address = path, data, f"127.0.0.1:{free_port()}"
        self.folder, self.run = CrewFolder(path / "crew"), RunFolder(path / "run")
        self.folder.path.mkdir(parents=True)
        paces = dict.fromkeys((*NETWORKS, "answers"), 100.0)
        trainers = tuple(
            Trainer(
                name=name,
                address=self.address if name == "coordinator" else "127.0.0.1",
                memory_bytes=2**33,
                pictures_per_s=paces,
            )
            for name in names
        )
        pairs = [(a, b) for i, a in enumerate(names) for b in names[:i]]
        lines = tuple(
            Line(a=a, b=b, latency_s=1e-4, bytes_per_s=1e8, back_bytes_per_s=1e8) for a, b in pairs
        )
        facts = Facts(trainer=trainers, line=lines)
        self.folder.facts_file.write_bytes(toml_bytes(facts))
        by = Answers(by=answers or names[1:])
        plan = SyncPlan(facts=facts.digest, chain="star", answers=by, network=networks)
        write_plan(self.folder.plan_file, plan)
        self.folder.token()

    def start(self, name: str, how: str = "join") -> Forked:
        args = ["coordinator", str(self.path), str(self.data)]
        if name != "coordinator":
            run = str(self.path / f"run-{name}")
            args = [how, self.address, name, run, str(self.data)]
        process = Forked(crew_run.main, *args, stderr=self.log_of(name))
        self.started.append(process)
        return process

    def log_of(self, name: str) -> Path:
        """File with what a process wrote to stderr."""
        return self.path / f"{name}.log"

    def ends(self, name: str, process: Forked) -> None:
        """Wait until a process has ended well."""
        assert process.wait(PATIENCE_S) == 0, self.log_of(name).read_text()

    def log(self) -> Iterator[tuple[dict[str, object], list[dict[str, object]]]]:
        """Events, and what was told after each."""
        for line in self.folder.log.read_text().splitlines():
            entry = json.loads(line)
            yield entry["event"], entry["actions"]

    def starts(self) -> list[tuple[object, object]]:
        """Jobs and the ranks that began them."""
        told = [action for _, actions in self.log() for action in actions]
        return [(a["network"], a["rank"]) for a in told if a["kind"] == "start"]


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """No process outlives its test."""
    yield
    for process in Crew.started:
        process.kill()
        process.wait()
    Crew.started.clear()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("pictures") / "data", each=24)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two cameras, one for each sub-model."""
    return write_scenes(tmp_path_factory.mktemp("scenes") / "data", each=14)


@pytest.fixture(scope="module")
def alone(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Run folder that one process trains."""
    run = RunFolder(tmp_path_factory.mktemp("alone") / "run")
    training(run, scenes, QUIET)
    return run


def difference(ours: Path, theirs: Path) -> float:
    one, two = (
        torch.cat([value.flatten().float() for value in load_file(path).values()])
        for path in (ours, theirs)
    )
    return float((one - two).norm() / two.norm())


def factors_of(match: str) -> tuple[TensorRule, ...]:
    """Factors of some dense layers' gradients."""
    return (TensorRule(match=match, codec="factors"),)


def test_jobs_side_by_side_and_exact_crews_give_the_weights_of_one_process(
    scenes: Path, alone: RunFolder, tmp_path: Path
) -> None:
    crew = Crew(
        tmp_path,
        scenes,
        NetworkSync(
            name="teacher",
            by=("coordinator", "tower"),
            shares="pace",
            tensor=factors_of("*.head.*"),
        ),
        NetworkSync(name="member-0", by=("tower",)),
        NetworkSync(name="member-1", by=("nuc",)),
    )
    processes = {name: crew.start(name) for name in NAMES}
    for name, process in processes.items():
        crew.ends(name, process)
    ranks = {e["rank"]: e["name"] for e, _ in crew.log() if e["kind"] == "joined"}
    began = {(network, ranks[rank]) for network, rank in crew.starts()}
    assert began == {
        ("teacher", "coordinator"), ("teacher", "tower"),
        ("member-0", "tower"), ("member-1", "nuc"),
        *(("answers", name) for name in NAMES),
    }  # fmt: skip
    # 1e-5 is asserted where a fixed number of steps is compared: AdamW makes more of rounding.
    assert difference(crew.run.teacher, alone.teacher) < 1e-4
    for k in (0, 1):
        assert difference(crew.run.member(k), alone.member(k)) < 1e-3
    assert set(crew.run.read_curves()) == set(NETWORKS)


@pytest.mark.parametrize("first", ["shuffled", "neighbours"])
def test_rounds_and_passes_survive_a_trainer_that_is_killed(
    data: Path, tmp_path: Path, first: str
) -> None:
    (tmp_path / "by-two").touch()
    # Of the teacher one is lost; of the members who is left are two.
    meetings: tuple[WholeGroup | RequestedGroups | ShuffledGroups | Neighbourhood, ...] = (
        # Without a backup each waits until a neighbour's parameters have come, and takes them.
        ShuffledGroups() if first == "shuffled" else Neighbourhood(backup=0),
        RequestedGroups(reach=math.inf, divide=True),
        WholeGroup(),
    )
    int8: dict[str, Any] = {"codec": "int8"}
    codecs = (int8, int8, {"codec": "top4", "mask": 0.5, "keep": 0.4})
    crew = Crew(
        tmp_path,
        data,
        *(
            NetworkSync(
                name=name, by=NAMES, what="parameters", every_pictures=16, meet=meet, **codec
            )
            for name, meet, codec in zip(NETWORKS, meetings, codecs, strict=True)
        ),
    )
    processes = {name: crew.start(name) for name in NAMES}

    def is_training() -> bool:
        if not crew.folder.log.exists():
            return False
        return any(e["kind"] == "ready" and e["network"] == "teacher" for e, _ in crew.log())

    until(is_training, "a step of the teacher", PATIENCE_S)
    processes["nuc"].kill()
    for name in ("coordinator", "tower"):
        crew.ends(name, processes[name])
    assert processes["nuc"].wait() == -signal.SIGKILL
    assert any(e["kind"] == "gone" for e, _ in crew.log())
    told = [action for _, actions in crew.log() for action in actions]
    some = {a["network"] for a in told if a["kind"] == "meet" and not a.get("whole", True)}
    assert some == {"member-0"} | ({"teacher"} if first == "shuffled" else set())
    takes = set()
    for action in told:
        taken: Any = action.get("takes", ())
        if any(share for _, _, share in taken):
            takes.add(action["network"])
    assert takes == ({"teacher"} if first == "neighbours" else set())
    for path in (crew.run.teacher, crew.run.member(0), crew.run.member(1)):
        assert all(value.isfinite().all() for value in load_file(path).values())
    epochs = {name: len(curve) for name, curve in crew.run.read_curves().items()}
    assert epochs == {"teacher": 3, "member-0": 3, "member-1": 2}
    # What member-1 has learned from was computed by both that were left, as by one process.
    use_threads(1)
    work = reopen(crew.run, QUIET)
    files, of_variant = output_files(work, 0), outputs_of(work, 0)
    assert sum(len(paths) for paths in files.values()) == 4
    for variant, paths in files.items():
        with torch.inference_mode():
            wanted = of_variant(variant)(np.arange(len(work.data.train)))
        for path, one in zip(paths, wanted, strict=True):
            assert np.array_equal(load(path), one.numpy().astype(np.float16))


def test_a_teacher_in_stages_goes_on_after_one_is_lost(
    scenes: Path, alone: RunFolder, tmp_path: Path
) -> None:
    stages = (Stage(blocks=1, by="nuc", in_flight=1), Stage(blocks=2, by="coordinator"))
    crew = Crew(
        tmp_path,
        scenes,
        NetworkSync(name="teacher", micro_batches=3, stage=stages),
        *(NetworkSync(name=name, by=("coordinator",)) for name in NETWORKS[1:]),
        answers=("coordinator",),
    )
    coordinator, nuc = crew.start("coordinator"), crew.start("nuc", "dying")
    assert nuc.wait(PATIENCE_S) != 0
    assert coordinator.wait(PATIENCE_S) == 1
    assert (
        "go on from the last epoch that all stages have" in crew.log_of("coordinator").read_text()
    )
    # The coordinator has written its second epoch, of which the other stage has nothing.
    kept = [*tmp_path.glob("run*/checkpoint-teacher-*")]
    assert sorted(map(epochs_of, kept)) == [1, 1, 2]
    first = torch.load(next(path for path in kept if path.parent.name == "run-nuc"))["curve"]
    for name, process in [(name, crew.start(name)) for name in ("coordinator", "nuc")]:
        crew.ends(name, process)
    assert crew.run.read_curves()["teacher"][:1] == first
    assert difference(crew.run.teacher, alone.teacher) < 1e-4
    assert not [*tmp_path.glob("run*/checkpoint-*"), *tmp_path.glob("run*/cache/teacher-stage*")]


def test_a_teacher_in_two_pipelines(scenes: Path, alone: RunFolder, tmp_path: Path) -> None:
    names = ("coordinator", "tower", "nuc", "den")
    stages = (
        Stage(blocks=1, by=("nuc", "coordinator")),
        Stage(blocks=2, by=("tower", "den"), in_flight=1),
    )
    crew = Crew(
        tmp_path,
        scenes,
        NetworkSync(name="teacher", micro_batches=2, stage=stages),
        NetworkSync(name="member-0", by=("coordinator", "tower"), owner=MuonOwner()),
        NetworkSync(name="member-1", by=("coordinator",)),
        names=names,
        answers=("coordinator",),
    )
    processes = {name: crew.start(name) for name in names}
    for name, process in processes.items():
        crew.ends(name, process)
    assert len(crew.run.read_curves()["teacher"]) == len(alone.read_curves()["teacher"])
    assert difference(crew.run.teacher, alone.teacher) < 1e-4


def test_a_trainer_that_differs_is_refused_in_a_line(data: Path, tmp_path: Path) -> None:
    crew = Crew(tmp_path, data, *(NetworkSync(name=name, by=("coordinator",)) for name in NETWORKS))
    processes = {name: crew.start(name) for name in ("coordinator", "tower")}
    crew.data = write_tree(tmp_path / "others", each=24, seed=1)
    stranger = crew.start("nuc")
    assert stranger.wait(PATIENCE_S) == 2
    refused = "pictures, settings or version of nuc differ from the coordinator's"
    assert crew.log_of("nuc").read_text().splitlines()[-1].startswith(refused)
    # The coordinator waits for the one that was planned.
    crew.data = data
    assert not (tmp_path / "run-nuc").exists()
    processes["nuc"] = crew.start("nuc")
    for name, process in processes.items():
        crew.ends(name, process)


def test_factors_of_a_layer_that_sees_tokens_are_refused_in_a_line(
    data: Path, tmp_path: Path
) -> None:
    names = ("coordinator", "tower")
    alone = (NetworkSync(name=name, by=("tower",)) for name in NETWORKS[1:])
    teacher = NetworkSync(name="teacher", by=names, tensor=factors_of("*.qkv.weight"))
    crew = Crew(tmp_path, data, teacher, *alone, names=names)
    processes = {name: crew.start(name) for name in names}
    for name, process in processes.items():
        assert process.wait(PATIENCE_S) == 2, crew.log_of(name).read_text()
        said = crew.log_of(name).read_text()
        assert "expected dense layers that see one row of a picture, as heads, " in said
        assert "network.blocks.0.attn.qkv.weight sees tokens: [" in said.splitlines()[-1]
        assert "Traceback" not in said
    assert not crew.run.teacher.exists()


def test_a_coordinator_that_dies_goes_on_by_the_same_commands(data: Path, tmp_path: Path) -> None:
    names = ("coordinator", "tower")
    crew = Crew(
        tmp_path,
        data,
        NetworkSync(name="teacher", by=names, what="parameters", every_pictures=16),
        NetworkSync(name="member-0", by=names, owner=KfacOwner(step=1.0)),
        NetworkSync(name="member-1", by=names, when="next_forward"),
        names=names,
    )
    processes = {name: crew.start(name) for name in names}
    until(crew.run.checkpoint("teacher").exists, "an epoch of the teacher", PATIENCE_S)
    processes["coordinator"].kill()
    assert processes["coordinator"].wait() == -signal.SIGKILL
    assert processes["tower"].wait(PATIENCE_S) == 3
    said = crew.log_of("tower").read_text()
    assert "the coordinator is lost: start it again, and this command, to go on" in said
    assert "Traceback" not in said
    # What another run has left is not taken for this one's.
    stale = RunFolder(tmp_path / "run-tower")
    stale.teacher.write_bytes(b"of another run")
    stale.member(1).write_bytes(b"of another run")
    processes = {name: crew.start(name) for name in names}
    for name, process in processes.items():
        crew.ends(name, process)
    epochs = {name: len(curve) for name, curve in crew.run.read_curves().items()}
    assert epochs == {"teacher": 3, "member-0": 3, "member-1": 2}
    assert stale.teacher.read_bytes() == crew.run.teacher.read_bytes()
    for path in (crew.run.member(0), crew.run.member(1)):
        assert all(value.isfinite().all() for value in load_file(path).values())
