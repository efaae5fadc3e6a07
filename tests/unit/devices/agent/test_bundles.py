"""The bundles that an agent serves, and hot reload. Pure, with runtimes of a simulated clock."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from devices.agent.bundles import (
    LoadableBundle,
    ServedBundle,
    ServedBundles,
    measure_batches,
    warm_up,
)
from devices.agent.reload import NewBundle, Rejected, Reloader, Unchanged, prepare_bundle
from mdp.errors import AgentError
from mdp.formats.bundle import Bundle
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.protocol.messages import FrameRequest, Infer
from mdp.testing.bundles import SIZES, write_bundle

MB = 1_000_000


class Pretending:
    """A runtime by whose clock a batch takes a second and a tenth of one for each picture."""

    provider = "PretendedExecutionProvider"
    fallback = False

    def __init__(self, error: Exception | None = None) -> None:
        self.now_s = 0.0
        self.sizes: list[int] = []
        self.error = error
        self.warm = False

    def clock(self) -> float:
        return self.now_s

    def warm_up(self) -> None:
        if self.error is not None:
            raise self.error
        self.warm = True

    def run(self, pixels: Pixels) -> Contribution:
        assert pixels.dtype == np.uint8
        self.sizes.append(len(pixels))
        self.now_s += 1.0 + 0.1 * len(pixels)
        logits = np.zeros((len(pixels), 3), np.float32)
        return Contribution(logits, logits)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    folder = tmp_path_factory.mktemp("served")
    return [
        Bundle.open(write_bundle(folder / name, name=name, bag_scale=scale))
        for name, scale in (("first", 4.0), ("second", 5.0), ("third", 6.0))
    ]


@pytest.fixture
def candidates(bundles: list[Bundle]) -> list[LoadableBundle]:
    return [
        LoadableBundle(bundle=bundle, assignment=bundle.assignment("alpha"), load=Pretending)
        for bundle in bundles
    ]


@pytest.fixture
def services(candidates: list[LoadableBundle]) -> list[ServedBundle]:
    return [ServedBundle(source=candidate, runtime=candidate.load()) for candidate in candidates]


def test_the_former_one_is_served_until_nobody_asks_for_it(services: list[ServedBundle]) -> None:
    first, second, _ = services
    served = ServedBundles(30.0)
    assert served.retires_s() == float("inf")
    served.install(first, now_s=0.0)
    assert served.retire(now_s=1e9) is None, "the only one is never taken down"
    served.install(second, now_s=100.0)
    assert served.retires_s() == 130.0
    served.bundle_for(first.digest, now_s=120.0)
    served.bundle_for(second.digest, now_s=140.0)
    assert served.retire(now_s=149.9) is None
    assert served.retire(now_s=150.0) is first
    assert served.all == [second]
    assert served.retires_s() == float("inf")


def test_requests_keep_no_bundle_longer_than_its_grace_if_a_third_is_to_come(
    services: list[ServedBundle],
) -> None:
    first, second, third = services
    served = ServedBundles(30.0)
    served.install(first, now_s=0.0)
    served.install(second, now_s=100.0)
    assert served.bundle_for(first.digest, now_s=120.0) is first
    assert served.make_room(now_s=120.0) == 10.0
    assert served.all == [second, first], "as before"
    assert served.bundle_for(first.digest, now_s=129.0) is first
    assert served.make_room(now_s=130.0) == 0.0
    assert served.make_room(now_s=130.0) == 0.0
    assert served.bundle_for(first.digest, now_s=131.0) is None
    assert served.bundle_for(second.digest, now_s=131.0) is second
    assert served.all == [second]
    # What was accepted may still be computed; whoever asked decides when it is retired.
    assert served.previous is first
    assert served.retires_s() < 131.0
    assert served.retire(now_s=131.0) is first
    served.install(third, now_s=140.0)
    assert served.bundle_for(second.digest, now_s=141.0) is second
    assert served.make_room(now_s=170.0) == 0.0
    # Where the current one fails, the leaving one is taken back.
    assert served.withdraw(third) is second
    assert served.bundle_for(second.digest, now_s=171.0) is second


def test_one_that_fails_is_taken_down(services: list[ServedBundle]) -> None:
    first, second, _ = services
    served = ServedBundles(30.0)
    served.install(first, now_s=0.0)
    served.install(second, now_s=10.0)
    assert served.withdraw(second) is first
    assert served.all == [first]
    served.install(second, now_s=20.0)
    assert served.withdraw(first) is second
    assert served.all == [second]
    assert served.withdraw(second) is None
    assert served.all == []
    served.install(first, now_s=30.0)
    assert served.all == [first]


def asking(service: ServedBundle, **changes: object) -> Infer:
    infer = Infer(
        request_id=1, digest=service.digest, k=0, budget_ms=1.0, image_size=SIZES[0], encoding="raw"
    )
    return msgspec.structs.replace(infer, **changes)


def test_what_a_request_has_to_agree_with(services: list[ServedBundle]) -> None:
    service = services[0]
    assert service.refusal(asking(service)) is None
    assert service.refusal(asking(service, k=2)) == (
        "wrong_submodel",
        "alpha serves sub-model 0, asked for 2",
    )
    assert service.refusal(asking(service, image_size=12)) == (
        "bad_message",
        "expected a crop of 16 pixels, got 12",
    )
    look = FrameRequest(
        request_id=1, digest=service.digest, k=0, budget_ms=1.0, ago_ms=0.0, within_ms=1.0
    )
    assert service.refusal(look) is None
    assert service.refusal(msgspec.structs.replace(look, wants_map=True)) == (
        "bad_message",
        "was asked for a map: the bundle has no anomaly heads",
    )


def test_batches_are_measured_once_they_have_run() -> None:
    runtime = Pretending()
    measured = measure_batches(runtime, 4, 3, runtime.clock)
    assert measured == pytest.approx({1: 1.1, 2: 1.2, 3: 1.3})
    assert runtime.sizes == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(2, [1, 2]), (4, [1, 2, 3, 4]), (6, [1, 2, 3, 4, 6]), (64, [1, 2, 3, 4, 8, 16, 32, 64])],
)
def test_of_large_batches_only_some_are_measured(most: int, sizes: list[int]) -> None:
    runtime = Pretending()
    assert list(measure_batches(runtime, 4, most, runtime.clock)) == sizes


def test_one_at_a_time_needs_no_measuring() -> None:
    runtime = Pretending()
    assert measure_batches(runtime, 4, 1, runtime.clock) == {}
    assert runtime.sizes == []


Prepare = Callable[..., object]


def not_needed() -> None:
    pytest.fail("there is room")


@pytest.fixture
def prepare() -> Prepare:
    def prepare(candidate: LoadableBundle, served: ServedBundles) -> object:
        return prepare_bundle(
            candidate,
            served,
            available_bytes=lambda: 1000 * MB,
            make_room=not_needed,
            clock=lambda: 0.0,
        )

    return prepare


def test_another_bundle_is_loaded_and_warmed(
    candidates: list[LoadableBundle], services: list[ServedBundle], prepare: Prepare
) -> None:
    served = ServedBundles(30.0)
    served.install(services[0], now_s=0.0)
    found = prepare(candidates[1], served)
    assert isinstance(found, NewBundle)
    assert isinstance(found.served.runtime, Pretending)
    assert found.served.runtime.warm
    assert found.served.digest == services[1].digest
    assert served.all == [services[0]], "whoever asked decides when"


def test_the_same_bundle_is_left_alone_unless_it_was_taken_down(
    candidates: list[LoadableBundle], services: list[ServedBundle], prepare: Prepare
) -> None:
    served = ServedBundles(30.0)
    served.install(services[0], now_s=0.0)
    assert prepare(candidates[0], served) == Unchanged()
    served.withdraw(services[0])
    again = prepare(candidates[0], served)
    assert isinstance(again, NewBundle)
    assert again.served is not services[0]


def finish(reloader: Reloader, served: ServedBundles) -> object:
    """Outcome of a reloader that is asked for."""
    done: list[None] = []
    reloader.request()
    reloader.start(served, make_room=not_needed, done=lambda: done.append(None))
    reloader.join(60.0)
    assert done == [None]
    outcome = reloader.outcome()
    assert reloader.outcome() is None, "once"
    return outcome


def test_nothing_begins_unless_it_was_asked_for(services: list[ServedBundle]) -> None:
    reloader = Reloader(lambda: services[1].source, clock=lambda: 0.0)
    reloader.start(ServedBundles(), make_room=not_needed, done=lambda: pytest.fail("begun"))
    reloader.join(60.0)
    assert reloader.outcome() is None


@pytest.mark.parametrize(
    "error",
    [AgentError("not finite"), MemoryError(), OSError(28, "No space left on device")],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_bundle_does_is_an_answer(
    error: Exception, candidates: list[LoadableBundle], services: list[ServedBundle]
) -> None:
    broken = dataclasses.replace(candidates[1], load=lambda: Pretending(error))
    served = ServedBundles()
    served.install(services[0], now_s=0.0)
    reloader = Reloader(lambda: broken, clock=lambda: 0.0, available_bytes=lambda: None)
    assert finish(reloader, served) == Rejected(error)
    whole = Reloader(lambda: candidates[1], clock=lambda: 0.0, available_bytes=lambda: None)
    assert isinstance(finish(whole, served), NewBundle)


def test_too_little_memory(candidates: list[LoadableBundle], services: list[ServedBundle]) -> None:
    served, needed = ServedBundles(), candidates[1].assignment.memory_bytes
    served.install(services[0], now_s=0.0)

    def load() -> Pretending:
        pytest.fail("loaded")

    hungry = dataclasses.replace(candidates[1], load=load)
    expected = r"^second [0-9a-f]{12} needs 1 MB beside what is served, 1 MB are free$"
    with pytest.raises(AgentError, match=expected):
        prepare_bundle(
            hungry,
            served,
            available_bytes=lambda: needed - 1,
            make_room=not_needed,
            clock=lambda: 0.0,
        )
    enough = prepare_bundle(
        candidates[1],
        served,
        available_bytes=lambda: needed,
        make_room=not_needed,
        clock=lambda: 0.0,
    )
    assert isinstance(enough, NewBundle)


def test_a_third_is_loaded_once_there_is_room(
    candidates: list[LoadableBundle], services: list[ServedBundle]
) -> None:
    served, loaded = ServedBundles(), list[str]()
    served.install(services[0], now_s=0.0)
    served.install(services[1], now_s=0.0)

    def load() -> Pretending:
        loaded.append("third")
        return Pretending()

    third = dataclasses.replace(candidates[2], load=load)

    def refuse() -> None:
        raise AgentError("two bundles are served")

    with pytest.raises(AgentError, match="two bundles are served"):
        prepare_bundle(
            third, served, available_bytes=lambda: None, make_room=refuse, clock=lambda: 0.0
        )
    assert loaded == []
    room = prepare_bundle(
        third,
        served,
        available_bytes=lambda: None,
        make_room=lambda: loaded.append("room"),
        clock=lambda: 0.0,
    )
    assert isinstance(room, NewBundle)
    assert loaded == ["room", "third"]


class Slow(Pretending):
    """A runtime whose clock is another's, and that has so many heads."""

    def __init__(self, ticks: list[float], takes_s: float, heads: int = 2) -> None:
        super().__init__()
        self._ticks, self._takes_s, self._heads = ticks, takes_s, heads

    def run(self, pixels: Pixels) -> Contribution:
        self._ticks[0] += self._takes_s * len(pixels)
        logits = np.zeros((len(pixels), 3), np.float32)
        return Contribution(logits if self._heads == 2 else None, logits)


def ladder(bundle: Bundle, *lower: Callable[[], Slow], batch: int = 1) -> LoadableBundle:
    return LoadableBundle(
        bundle=bundle,
        assignment=bundle.assignment("alpha"),
        load=Pretending,
        load_lower=lower,
        batch=batch,
    )


def test_rungs_are_measured_and_those_that_are_no_quicker_are_not_used(
    bundles: list[Bundle],
) -> None:
    ticks = [0.0]
    source = ladder(
        bundles[0], lambda: Slow(ticks, 4.0), lambda: Slow(ticks, 2.0), lambda: Slow(ticks, 1.0)
    )
    served = warm_up(source, Slow(ticks, 3.0), lambda: ticks[0])
    assert [(rung.number, rung.measured_s) for rung in served.rungs] == [
        (0, {1: 3.0}), (2, {1: 2.0}), (3, {1: 1.0}),
    ]  # fmt: skip
    assert served.speeds == (
        "1 pictures at once take 3000.0 ms, at rung 2 2000.0, at rung 3 1000.0; "
        "1 rungs are no quicker here and not used"
    )


def test_a_rung_with_other_heads_is_refused(bundles: list[Bundle]) -> None:
    ticks = [0.0]
    source = ladder(bundles[0], lambda: Slow(ticks, 1.0, heads=1))
    with pytest.raises(AgentError, match="rung 1: expected 2 heads as at the top, got 1"):
        warm_up(source, Slow(ticks, 3.0), lambda: ticks[0])


def test_a_bundle_takes_the_memory_of_all_its_rungs(tmp_path: Path) -> None:
    bundle = Bundle.open(write_bundle(tmp_path / "bundle", rungs=3))
    source = LoadableBundle(bundle=bundle, assignment=bundle.assignment("alpha"), load=Pretending)
    assert source.memory_bytes == 3 * source.assignment.memory_bytes
