"""Three machines train a bundle, by the commands that a person types."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from msgspec.structs import replace  # noqa: E402

from mdp.files import write_new, write_toml  # noqa: E402
from mdp.formats.bundle import Bundle  # noqa: E402
from mdp.testing.processes import until  # noqa: E402
from partitioner.build.steps import reopen  # noqa: E402
from partitioner.cli.main import main  # noqa: E402
from partitioner.crew.bus.control import log_lines  # noqa: E402
from partitioner.crew.folder import CrewFolder  # noqa: E402
from partitioner.crew.history import spans_of  # noqa: E402
from partitioner.crew.jobs.passes import HELD_OUT  # noqa: E402
from partitioner.crew.planning.losses import MEASURED  # noqa: E402
from partitioner.crew.planning.syncplan import NetworkSync, SyncPlan, read_plan, write_plan  # noqa: E402
from partitioner.export.evaluate import run_on  # noqa: E402
from partitioner.export.sessions import logits_file  # noqa: E402
from partitioner.run.folder import RunFolder  # noqa: E402
from tests.integration.crew.test_training_together import PATIENCE_S, free_port  # noqa: E402
from tests.support.command_lines import run_here  # noqa: E402
from tests.support.models.forked import Forked, command  # noqa: E402
from tests.support.models.runs import QUIET, SHARED_ARGS, SHARED_MS, write_profiles  # noqa: E402
from tests.support.models.trees import write_scenes  # noqa: E402

pytestmark = pytest.mark.torch

NAMES = ["coordinator", "tower", "nuc"]
CONFIG = """
[run]
data = "photos"
threads = 1
[plan]
teacher = "vit_tiny_patch16_224"
teacher_args = {{{args}}}
profiles = ["alpha.toml", "beta.toml"]
latency_ms = {ms}
anyway = true
cameras = {{alpha = "left", beta = "right"}}
[teacher_schedule]
epochs = 1
batch_size = 16
[schedule]
epochs = 1
batch_size = 16
shared = true
[augmentation]
variants = 1
"""
OF_CREW = ["--config", "build.toml", "--plan", "plan.toml", "--crew", "crew"]


def here(*words: object) -> subprocess.CompletedProcess[str]:
    return run_here(main, "mdp-partition", *words)


class Machines:
    """A folder for each machine: the coordinator, and two that join it."""

    def __init__(self, path: Path) -> None:
        self.path, self.address = path, f"127.0.0.1:{free_port()}"
        self.started: dict[str, Forked] = {}
        coordinator = self.folder("coordinator")
        write_scenes(coordinator / "photos", each=14)
        write_profiles(coordinator)
        config = CONFIG.format(args=", ".join(SHARED_ARGS), ms=SHARED_MS)
        (coordinator / "build.toml").write_text(config)
        for name in NAMES[1:]:
            shutil.copytree(coordinator / "photos", self.folder(name) / "photos")

    def folder(self, name: str) -> Path:
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        return folder

    def join_words(self, name: str, data: str = "photos", key: str = "crew.key") -> list[str]:
        rest = ["--key", key, "--run", "run", "--threads", "1"]
        return ["crew", "join", self.address, "--name", name, "--data", data, *rest]

    def start(self, name: str, *words: str) -> None:
        folder = self.folder(name)
        self.started[name] = Forked(
            command, main, "mdp-partition", *words,
            stdout=folder / "printed", stderr=folder / "said", folder=folder,
        )  # fmt: skip

    def all_end(self) -> str:
        """Let the others join the coordinator; returns what that wrote to stdout."""
        key = CrewFolder(self.folder("coordinator") / "crew").key
        until(key.exists, "the key", PATIENCE_S)
        for name in NAMES[1:]:
            shutil.copy(key, self.folder(name))
            self.start(name, *self.join_words(name))
        for name, process in self.started.items():
            assert process.wait(PATIENCE_S) == 0, (self.folder(name) / "said").read_text()
        return (self.folder("coordinator") / "printed").read_text()


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """With a plan, and measured."""
    made = Machines(tmp_path_factory.mktemp("machines"))
    listen = ["--listen", made.address, "--trainers", "tower", "nuc", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made.folder("coordinator"))
        assert here("plan", "--config", "build.toml", "--out", "plan.toml").returncode == 0
    made.start("coordinator", "crew", "probe", *OF_CREW, *listen)
    facts = json.loads(made.all_end())
    assert [trainer["name"] for trainer in facts["trainer"]] == NAMES
    assert len(facts["line"]) == 3
    yield made
    for process in made.started.values():
        process.kill()
        process.wait()


def test_a_plan_that_does_not_pay_is_refused(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(machines.folder("coordinator"))
    crew = CrewFolder(Path("slow"))
    crew.path.mkdir()
    shutil.copy("crew/facts.toml", crew.facts_file)
    of_slow = [*OF_CREW[:-1], "slow"]
    facts_of = crew.facts()
    slow = dict.fromkeys(facts_of.trainer[0].pictures_per_s, 1e-3)
    others = [replace(trainer, pictures_per_s=slow) for trainer in facts_of.trainer[1:]]
    write_toml(crew.facts_file, replace(facts_of, trainer=(facts_of.trainer[0], *others)))
    refused = here("crew", "plan", *of_slow, "--exact")
    assert refused.returncode == 4
    assert "train on" in refused.stderr.splitlines()[-1]
    assert "coordinator, tower, nuc have one address: if they share a machine" in refused.stderr
    assert not crew.plan_file.exists()
    assert here("crew", "plan", *of_slow, "--exact", "--anyway").returncode == 0
    predicted = here("crew", "simulate", *of_slow, "--plot", "predicted.svg", "--json")
    assert json.loads(predicted.stdout)["seconds"] > 0
    assert "<svg" in Path("predicted.svg").read_text()
    assert json.loads(predicted.stdout)["loss_percent"] == {}
    names = [network.name for network in read_plan(crew.plan_file).network]
    drawn = NetworkSync(name="teacher", what="parameters", codec="int8", by=("coordinator", "nuc"))
    same_pace = dict.fromkeys(slow, 100.0)
    alike = [replace(trainer, pictures_per_s=same_pace) for trainer in facts_of.trainer]
    write_toml(crew.facts_file, replace(facts_of, trainer=tuple(alike)))
    exact = [NetworkSync(name=name) for name in names if name != "teacher"]
    write_plan(crew.plan_file, SyncPlan(network=(drawn, *exact)))
    predicted = here("crew", "simulate", *of_slow, "--json")
    assert json.loads(predicted.stdout)["loss_percent"] == {
        "teacher": [*MEASURED["drawn", "given"]]
    }
    said = here("crew", "simulate", *of_slow).stdout.splitlines()[-1]
    assert said.startswith("teacher: in rounds ")
    assert said.endswith("--exact loses nothing")
    short = [NetworkSync(name=name, what="parameters", every_pictures=1) for name in names]
    write_plan(crew.plan_file, SyncPlan(network=tuple(short)))
    refused = here("crew", "simulate", *of_slow)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "and rounds of at least four steps" in refused.stderr.splitlines()[-1]


def test_a_crew_builds_a_bundle(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = machines.folder("coordinator")
    monkeypatch.chdir(coordinator)
    crew = CrewFolder(Path("crew"))
    # What pays here depends on what else runs.
    assert here("crew", "plan", *OF_CREW, "--exact", "--force").returncode == 0
    build = ["build", "--config", "build.toml", "--crew", "crew", "--out", "bundle", "--json"]
    machines.start("coordinator", *build)
    strangers(machines)
    interrupt(machines, crew)
    machines.start("coordinator", *build)
    built = json.loads(machines.all_end())
    assert built["digest"] == Bundle.open("bundle").digest
    one, two = (Path(f"bundle.run/member-{k}.safetensors").read_bytes() for k in (0, 1))
    assert one == two
    assert {cost["trainer"] for cost in built["crew"]} == set(NAMES)
    assert all(cost["waited_s"] >= 0 for cost in built["crew"])
    assert sum(cost["work_s"] for cost in built["crew"]) > 0
    assert "coordinator" in crew.picture.read_text()
    assert "s at work" in (coordinator / "said").read_text()
    spans = spans_of(log_lines(crew.log))
    assert {span.trainer for span in spans if span.what == "evaluation"} == set(NAMES)
    run, bundle = RunFolder(Path("bundle.run")), Bundle.open("bundle")
    data = reopen(run, QUIET).data
    for split in HELD_OUT:
        pictures = data.split(split)
        alone, *_ = run_on(bundle, pictures, split, Path("alone"), QUIET)
        for a in bundle.manifest.plan.assignments:
            kept = logits_file(run.cache, bundle.model(a.k), a, pictures.digest)
            assert np.array_equal(np.load(kept), np.stack(alone[a.k].heads, axis=1))


def interrupt(machines: Machines, crew: CrewFolder) -> None:
    """Ctrl-C ends a trainer and the coordinator in a line each; the same commands go on."""
    shutil.copy(crew.key, machines.folder("tower"))
    machines.start("tower", *machines.join_words("tower"))
    until(lambda: crew.log.read_text().count('"accepted"') == 2, "a trainer", PATIENCE_S)
    for name, kept in (("tower", "in run"), ("coordinator", "same command goes on from there")):
        process = machines.started[name]
        process.interrupt()
        ended = process.wait(PATIENCE_S)
        out, said = ((machines.folder(name) / one).read_text() for one in ("printed", "said"))
        assert (ended, out) == (130, ""), said
        assert "Traceback" not in said
        last = said.splitlines()[-1]
        assert last.startswith("mdp-partition: interrupted; what is finished is kept in")
        assert last.endswith(kept)
    assert '"kind":"gone"' in crew.log.read_text()


def strangers(machines: Machines) -> None:
    """The coordinator goes on waiting for those that it expects."""
    write_scenes(Path("others"), each=14, seed=1)
    write_new(Path("other.key"), b"1234\n", 0o600)
    for words, expected in (
        (machines.join_words("stranger", key="crew/crew.key"), "--name: expected a trainer of"),
        (
            machines.join_words("tower", key="other.key"),
            "key: expected a copy of the coordinator's",
        ),
        (
            machines.join_words("tower", "others", "crew/crew.key"),
            "pictures, settings or version of tower differ",
        ),
    ):
        stopped = here(*words)
        assert stopped.returncode == 2, stopped.stderr
        assert expected in stopped.stderr.splitlines()[-1]


def test_a_coordinator_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_new(Path("crew.key"), b"1234\n", 0o600)
    address = f"127.0.0.1:{free_port()}"
    words = ["--name", "tower", "--data", "photos", "--key", "crew.key", "--run", "run"]
    stopped = here("crew", "join", address, *words, "--wait", "0", "--threads", "1")
    assert stopped.returncode == 3
    assert f"{address}: no coordinator of a crew answers" in stopped.stderr
    assert not Path("run").exists()
