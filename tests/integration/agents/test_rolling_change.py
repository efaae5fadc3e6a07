"""A fleet changes its bundle under load, agents first, then clients; or a client its fleet."""

import asyncio
import itertools
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mdp
from mdp.client.sync import Client
from mdp.formats.bundle import FUSION, MANIFEST, Bundle
from mdp.formats.fleet import new_fleet
from mdp.requests.prediction import Prediction
from mdp.testing.bundles import DEVICES, colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from tests.support.fleet import PLENTY_MS, Fleet

pytestmark = pytest.mark.usefixtures("no_leaks")

RED = colour_picture("red")
SERVED = DEVICES[:2]


def write_new(folder: Path) -> None:
    """A bundle with crops of other sizes, and surer answers."""
    write_bundle(folder, name="new", devices=SERVED, sizes=(20, 8), bag_scale=9.0)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Agents serve `live`, clients hold `held`; both are links to `old`."""
    write_bundle(tmp_path / "old", name="old", devices=SERVED, sizes=(16, 12))
    write_new(tmp_path / "new")
    for link in ("live", "held"):
        (tmp_path / link).symlink_to("old")
    with Fleet(tmp_path, tmp_path / "live") as fleet:
        yield fleet.start_all(*SERVED)


def point(fleet: Fleet, link: str, name: str) -> None:
    """Let a link lead to another bundle, at once."""
    (fleet.folder / "next").symlink_to(name)
    (fleet.folder / "next").replace(fleet.folder / link)


def digest(fleet: Fleet, name: str) -> str:
    return Bundle.open(fleet.folder / name).digest


def fleet_file(fleet: Fleet, *, without: tuple[str, ...] = ()) -> Path:
    path = fleet.folder / "fleet.toml"
    agents = {name: agent for name, agent in fleet.agents.items() if name not in without}
    devices = [f"{name}={agent.address}" for name, agent in agents.items()]
    written = new_fleet(Bundle.open(fleet.folder / "old"), devices, path)
    path.write_text(path.read_text().replace(f'"{written.bundle}"', '"held"'))
    return path


def ask(client: Client) -> Prediction:
    return client.classify(RED, deadline_ms=PLENTY_MS)


def change_agents(fleet: Fleet, name: str) -> None:
    """Let one agent after the other change over."""
    point(fleet, "live", name)
    for device in SERVED:
        fleet.agents[device].signal(signal.SIGHUP)
        fleet.agents[device].wait_for(f"serves {name} {digest(fleet, name)[:12]}")


class Load:
    """Answers to calls that never pause, of several threads."""

    def __init__(self, *calls: Callable[[], Iterator[Prediction]]) -> None:
        self.answers: list[list[Prediction]] = [[] for _ in calls]
        self.errors: list[BaseException] = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(call, answers))
            for call, answers in zip(calls, self.answers, strict=True)
        ]

    def _run(self, call: Callable[[], Iterator[Prediction]], answers: list[Prediction]) -> None:
        try:
            for answer in call():
                answers.append(answer)
                if self._over.is_set():
                    return
        except BaseException as error:
            self.errors.append(error)
            raise

    def more(self, count: int = 5) -> None:
        """Wait until each has some more answers."""
        wanted = [len(answers) + count for answers in self.answers]
        until(
            lambda: (
                bool(self.errors)
                or all(len(a) >= n for a, n in zip(self.answers, wanted, strict=True))
            ),
            "answers go on",
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(PATIENCE_S)
                assert not thread.is_alive()


def check(answers: list[Prediction], old: Prediction, new: Prediction) -> None:
    """Each answer is wholly that of one bundle, and none of the old one comes after the new one."""
    assert [answer.missing for answer in answers] == [{}] * len(answers)
    known = {old.bundle: old.probability, new.bundle: new.probability}
    assert [answer.probability for answer in answers] == [known[a.bundle] for a in answers]
    order = [bundle for bundle, _ in itertools.groupby(answer.bundle for answer in answers)]
    assert order == [old.bundle, new.bundle]


def test_a_fleet_changes_over_under_load_without_a_failed_or_a_mixed_answer(fleet: Fleet) -> None:
    with Client.connect(fleet_file(fleet), timeout_s=PATIENCE_S) as client:
        before = ask(client)
        assert before.bundle == digest(fleet, "old")
        load = Load(
            lambda: (ask(client) for _ in itertools.count()),
            lambda: client.stream(itertools.repeat(RED), deadline_ms=PLENTY_MS, in_flight=4),
        )
        with load.running():
            load.more()
            change_agents(fleet, "new")
            load.more()
            point(fleet, "held", "new")
            client.reload(timeout_s=PATIENCE_S)
            load.more()
        after = ask(client)
        assert after.bundle == client.bundle.digest == digest(fleet, "new")
        assert after.probability > before.probability
        assert load.errors == []
        for answers in load.answers:
            check(answers, before, after)
        for status in client.status(timeout_s=PATIENCE_S):
            assert (status.usable, status.bundle) == (True, "new")
            assert status.counts["wrong_bundle"] == 0


def test_a_call_keeps_its_bundle(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    change_agents(fleet, "new")
    with Client.connect(fleet_file(fleet), timeout_s=PATIENCE_S) as client:
        began_with, cut = client.bundle.digest, client._cut

        def cut_slowly(*args: Any) -> Any:
            monkeypatch.undo()
            question = cut(*args)
            point(fleet, "held", "new")
            client.reload(timeout_s=PATIENCE_S)
            return question

        monkeypatch.setattr(client, "_cut", cut_slowly)
        first, second = ask(client), ask(client)
    assert (first.bundle, first.missing) == (began_with, {})
    assert (second.bundle, second.missing) == (digest(fleet, "new"), {})


def test_calls_of_an_event_loop_change_over_too(fleet: Fleet) -> None:
    async def change() -> tuple[list[list[Prediction]], Prediction]:
        async with mdp.AsyncClient.connect(fleet_file(fleet), timeout_s=PATIENCE_S) as client:
            answers: list[list[Prediction]] = [[] for _ in range(4)]
            over = asyncio.Event()

            async def load(mine: list[Prediction]) -> None:
                while not over.is_set():
                    mine.append(await client.classify(RED, deadline_ms=PLENTY_MS))

            async def more() -> None:
                wanted = [len(mine) + 3 for mine in answers]
                while any(len(mine) < n for mine, n in zip(answers, wanted, strict=True)):
                    await asyncio.sleep(0.005)

            async with asyncio.TaskGroup() as group:
                for mine in answers:
                    group.create_task(load(mine))
                await more()
                await asyncio.to_thread(change_agents, fleet, "new")
                await more()
                point(fleet, "held", "new")
                await client.reload(timeout_s=PATIENCE_S)
                assert len(client._connections) == 1, "nobody is left on the old one"
                await more()
                over.set()
            return answers, await client.classify(RED, deadline_ms=PLENTY_MS)

    with Client.connect(fleet_file(fleet), timeout_s=PATIENCE_S) as client:
        before = ask(client)
    answers, after = asyncio.run(change())
    for mine in answers:
        check(mine, before, after)


def test_a_client_that_cannot_change_goes_on_as_before(fleet: Fleet) -> None:
    with Client.connect(fleet_file(fleet), timeout_s=PATIENCE_S) as client:
        before = ask(client)
        for name, content, expected in (
            ("fleet.toml", "bundle = 'held'\ndevices = 3\n", r"Expected `array`, got `int`"),
            (f"new/{MANIFEST}", "{}", "Object missing required field"),
            (f"new/{FUSION}", "{}", r"fusion\.json: expected \d+ bytes, found 2"),
            ("new", None, r"held: expected a bundle folder with a manifest\.json"),
        ):
            shutil.rmtree(fleet.folder / "new")
            write_new(fleet.folder / "new")
            fleet_file(fleet)
            point(fleet, "held", "new")
            if content is None:
                (fleet.folder / name).rename(fleet.folder / "away")
            else:
                (fleet.folder / name).write_text(content)
            with pytest.raises(mdp.ConfigError, match=expected):
                client.reload()
            after = ask(client)
            assert (after.bundle, after.probability) == (before.bundle, before.probability)
            assert client.bundle.digest == before.bundle


def test_a_client_that_changes_before_the_agents_gets_a_remedy(fleet: Fleet) -> None:
    with Client.connect(fleet_file(fleet), timeout_s=PATIENCE_S) as client:
        point(fleet, "held", "new")
        client.reload(timeout_s=PATIENCE_S)
        with pytest.raises(mdp.QuorumNotMet) as refused:
            ask(client)
        old, new = digest(fleet, "old")[:12], digest(fleet, "new")[:12]
        expected = (
            f"wrong_bundle: serves old {old}: give client and agent the same bundle, and reload "
            f"whichever had another; asked for {new}"
        )
        assert refused.value.outcomes == dict.fromkeys(SERVED, expected)
        # Either side may be the one to change.
        point(fleet, "held", "old")
        client.reload(timeout_s=PATIENCE_S)
        assert ask(client).used == SERVED


def test_a_reload_adds_new_devices_and_drops_old_ones(fleet: Fleet) -> None:
    path = fleet_file(fleet, without=("beta",))
    with Client.connect(path, timeout_s=PATIENCE_S) as client:
        assert ask(client).missing == {"beta": "not in the fleet"}
        fleet.start("beta/attic")
        fleet_file(fleet, without=("beta",))
        client.reload(timeout_s=PATIENCE_S)
        assert ask(client).used == ("alpha", "beta/attic")
        fleet_file(fleet, without=("alpha", "beta"))
        client.reload(timeout_s=PATIENCE_S)
        assert [entry.device for entry in client.fleet.devices] == ["beta/attic"]
        assert ask(client).used == ("beta/attic",)
