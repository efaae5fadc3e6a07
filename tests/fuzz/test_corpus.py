"""Every input that is kept is read again, and some hundred that nobody has seen."""

import random
from collections.abc import Iterator

import pytest

from tests.fuzz import agents
from tests.fuzz.mutation import mutate
from tests.fuzz.target import CORPUS, Target, seeds_of
from tests.fuzz.targets import TARGETS

#: New inputs for each target; `make fuzz` makes as many millions.
GENERATED = 120


@pytest.fixture(scope="module", autouse=True)
def no_agent_stays() -> Iterator[None]:
    yield
    agents.serve_once().close()


every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))


def test_shares_add_up_to_one() -> None:
    assert sum(target.share for target in TARGETS.values()) == pytest.approx(1)


def test_every_kept_input_belongs_to_a_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} <= TARGETS.keys()


@every_target
def test_every_seed_is_accepted(target: Target) -> None:
    seeds = target.seeds()
    assert seeds
    assert [name for name, data in seeds.items() if not target.read(data)] == []


@every_target
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_kept_inputs_break_no_promise(target: Target) -> None:
    for data in seeds_of(target).values():
        target.read(data)


@every_target
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_new_inputs_break_no_promise(target: Target) -> None:
    chance = random.Random(target.name)
    kept = [data for data in seeds_of(target).values() if len(data) <= target.max_bytes]
    # Half of them near to what is accepted: most of what is kept is refused early.
    seeds = list(target.seeds().values())
    outcomes = set()
    for _ in range(GENERATED):
        data = mutate(target, chance.choice(chance.choice((seeds, kept))), chance)
        try:
            outcomes.add(target.read(data))
        except BaseException:
            print(f"{target.name} on {data!r}")
            raise
    # Neither all nor none are refused: what is generated comes near to the border.
    assert outcomes == {True, False}
