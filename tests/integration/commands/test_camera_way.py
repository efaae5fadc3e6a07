"""From cameras to looks: record, build and push, to agents that ran before there was a bundle."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file

from mdp.cli.main import main as mdp_main
from mdp.formats.bundle import Bundle, model_path
from mdp.formats.fleet import read_devices, read_fleet
from mdp.formats.keys import new_keys
from mdp.testing.agents import ANY_PORT, AgentProcess
from mdp.testing.bundles import LABELS, colour_model, write_bundle
from mdp.testing.processes import until
from mdp.transport import new_pair
from partitioner.cli.main import main as partition_main
from partitioner.networks.families import Backbone, create
from tests.support.bundles import relist
from tests.support.command_lines import run_here
from tests.support.faults.stage import Stage
from tests.support.fleet import BIN, PLENTY_MS

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("quick_exports")]

#: A device each, called as its profile; both have one picture in front of them.
CAMERAS = ("laptop-cpu", "n100")
NETWORK = "test_vit"


@contextmanager
def waiting(name: str, source: tuple[str, ...], bind: str = ANY_PORT) -> Iterator[AgentProcess]:
    """An agent that was never given a bundle on its command line; its paths are relative."""
    command = [
        BIN / "mdp-agent", "run", "--json", "--device", name, "--bind", bind, *source,
        "--key", f"{name}.secret", "--clients", "clients",
        "--allow-record", "--allow-push", f"pushed-{name}",
    ]  # fmt: skip
    with AgentProcess(name, command, Path(f"{name}.log")) as agent:
        yield agent.wait_for("READY")


def mdp(*words: object) -> str:
    """Run a command of `mdp`, which succeeds; returns its output."""
    done = run_here(mdp_main, "mdp", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Folders as cameras, keys and a network's weights where one stands."""
    monkeypatch.chdir(tmp_path)
    Path("clients").mkdir()
    Path("weights").mkdir()
    for name in ("client", *CAMERAS):
        new_keys(Path(), name, new_pair)
    shutil.copy("client.public", "clients")
    Path("clients/client.limits").write_text("record = true\npush = true\n")
    torch.manual_seed(0)
    save_file(create(Backbone(NETWORK, 160), 5).state_dict(), f"weights/{NETWORK}.safetensors")
    return Stage(Path(), CAMERAS)


def record(stage: Stage) -> None:
    """All classes by one command, while somebody changes what is in front of the cameras."""
    command = [str(BIN / "mdp"), "record", "--fleet", "fleet.toml", "--label", *LABELS]
    with subprocess.Popen(
        [*command, "--count", "2", "--every", "500ms", "--out", "scenes"],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.fullmatch(r"mdp: put (\w+) before the cameras, .*\n", line):
                stage.show_all(found[1])
                process.stdin.write("\n")
                process.stdin.flush()
    assert process.returncode == 0, said
    assert [line for line in said if "press Enter" not in line] == [
        f"mdp: scenes/{label}: 2 scenes\n" for label in LABELS
    ]


def test_three_commands_lead_from_cameras_to_looks(stage: Stage) -> None:
    with ExitStack() as stack:
        stage.show_all(LABELS[0])
        agents = {one: stack.enter_context(waiting(one, stage.source(one))) for one in CAMERAS}
        where = [word for one in CAMERAS for word in ("--device", f"{one}={agents[one].address}")]
        mdp("fleet", "new", *where, "--keys", ".", "--key", "client.secret")
        before = mdp("status", "--fleet", "fleet.toml")
        assert before.count("this agent has no bundle yet (`mdp bundle push`)") == 2
        assert (
            mdp("bundle", "status", "--fleet", "fleet.toml", "--json").count('"serves":null') == 2
        )
        record(stage)
        # As it would go on for minutes.
        stage.write_scenes(Path("scenes"), 18)
        done = run_here(
            partition_main, "mdp-partition", "build", "--weights", "weights", "--data", "scenes",
            "--profiles", *CAMERAS, "--latency-ms", 1.5, "--minutes", 0, "--out", "bundle",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        bundle = Bundle.open("bundle")
        seen = {part.device: part.camera for part in bundle.manifest.plan.assignments}
        assert seen == {one: one for one in CAMERAS}
        assert "mdp bundle push bundle --fleet FILE" in done.stdout
        assert read_devices(Path("fleet.toml")).bundle == ""
        mdp("bundle", "push", "bundle", "--fleet", "fleet.toml")
        assert read_fleet("fleet.toml")[1].digest == bundle.digest
        for label in LABELS:
            until(lambda label=label: is_seen(stage, label), f"{label} is seen")  # type: ignore[misc]
        for agent in agents.values():
            # Still the process that was there before.
            assert agent.process.poll() is None
            agent.wait_for("READY", 2)
            assert agent.events[-1]["digest"] == bundle.digest[:12]
        first, *_ = agents.values()
        assert first.terminate() == 0
        again = stack.enter_context(waiting(CAMERAS[0], stage.source(CAMERAS[0]), first.address))
        assert again.events[-1]["digest"] == bundle.digest[:12]


@pytest.mark.usefixtures("no_leaks")
def test_a_board_that_died_before_the_first_push_keeps_no_fleet_from_looking(stage: Stage) -> None:
    stage.show_all(LABELS[0])
    living, dead = CAMERAS
    with waiting(living, stage.source(living)) as agent:
        where = ("--device", f"{living}={agent.address}", "--device", f"{dead}=tcp://127.0.0.1:1")
        mdp("fleet", "new", *where, "--keys", ".", "--key", "client.secret")
        write_bundle(Path("bundle"), devices=CAMERAS, sizes=(16, 16))
        fleet = ("--fleet", "fleet.toml")
        pushed = run_here(mdp_main, "mdp", "bundle", "push", "bundle", living, *fleet)
        assert pushed.returncode == 0, pushed.stderr
        assert pushed.stderr.splitlines()[-1] == (
            f"mdp: fleet.toml: names bundle from now on; not pushed to {dead}"
        )
        look = ("look", *fleet, "--deadline-ms", f"{PLENTY_MS:g}", "--json")
        until(lambda: json.loads(mdp(*look))["used"] == [living], "the living board looks")
        mdp("fleet", "remove", "--device", dead, "--anyway", *fleet)
        assert [one.device for one in read_devices(Path("fleet.toml")).devices] == [living]


def is_seen(stage: Stage, label: str) -> bool:
    """Tell whether a look at a new item has both cameras, this label, and an item that is known.

    Some known items are taken for unknown, at the stated rate: the same one again would be so for
    ever.
    """
    stage.show_all(label)
    look = ("look", "--fleet", "fleet.toml", "--deadline-ms", f"{PLENTY_MS:g}", "--json")
    told = json.loads(mdp(*look))
    return (told["used"], told["label"], told["known"]) == ([*CAMERAS], label, True)


@pytest.mark.usefixtures("no_leaks")
def test_an_agent_that_waits_ends_by_a_signal_and_refuses_what_it_cannot_load(stage: Stage) -> None:
    name = CAMERAS[0]
    stage.show_all(LABELS[0])
    with waiting(name, stage.source(name)) as agent:
        keys = ("--keys", ".", "--key", "client.secret")
        mdp("fleet", "new", "--device", f"{name}={agent.address}", *keys)
        fleet = ("--fleet", "fleet.toml")
        pulled = run_here(mdp_main, "mdp", "bundle", "pull", name, "--out", "out", *fleet)
        assert (pulled.returncode, pulled.stderr) == (3, f"mdp: {name}: serves no bundle yet\n")
        back = run_here(mdp_main, "mdp", "bundle", "rollback", name, *fleet)
        assert (back.returncode, back.stderr) == (3, f"mdp: {name}: keeps no previous version\n")
        asked = run_here(mdp_main, "mdp", "look", *fleet)
        assert asked.returncode == 2
        assert "fleet.toml: key `bundle`: expected a bundle folder" in asked.stderr
        # Of another device alone, and then with the model of another picture size.
        other = write_bundle(Path("other"), devices=CAMERAS[1:], sizes=(16,))
        pushed = run_here(mdp_main, "mdp", "bundle", "push", other, *fleet)
        assert pushed.returncode == 2
        broken = write_bundle(Path("broken"), devices=CAMERAS[:1], sizes=(16,))
        (broken / model_path(0)).write_bytes(colour_model(12, 2.0, 4.0))
        relist(broken, model_path(0))
        pushed = run_here(mdp_main, "mdp", "bundle", "push", broken, *fleet)
        assert pushed.returncode == 3
        assert pushed.stderr.startswith(f"mdp: {name}: serves no bundle yet: ")
        assert pushed.stderr.count("\n") == 1
        assert "the pushed bundle was rejected: " in mdp("status", *fleet)
        assert read_devices(Path("fleet.toml")).bundle == ""
        assert agent.terminate() == 0
    assert not Path(f"pushed-{name}/versions.json").exists()
