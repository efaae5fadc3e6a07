"""Bundles on an agent's shelf, and how another one gets there. Pure, with runtimes that pretend."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from devices.agent.bundles import (
    Candidate,
    Service,
    Shelf,
    check_room,
    measure_batches,
    wrong_bundle,
)
from devices.agent.reload import Found, Refused, Renewal, Same, prepared
from mdp.errors import AgentError, ConfigError
from mdp.formats.bundle import Bundle
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.protocol.messages import Infer
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
    folder = tmp_path_factory.mktemp("shelf")
    return [
        Bundle.open(write_bundle(folder / name, name=name, bag_scale=scale))
        for name, scale in (("first", 4.0), ("second", 5.0), ("third", 6.0))
    ]


@pytest.fixture
def candidates(bundles: list[Bundle]) -> list[Candidate]:
    return [
        Candidate(bundle=bundle, assignment=bundle.assignment("alpha"), load=Pretending)
        for bundle in bundles
    ]


@pytest.fixture
def services(candidates: list[Candidate]) -> list[Service]:
    return [Service(candidate=candidate, runtime=candidate.load()) for candidate in candidates]


def test_a_request_finds_the_bundle_that_it_names(services: list[Service]) -> None:
    first, second, third = services
    shelf = Shelf(30.0)
    assert shelf.find(first.digest, now_s=0.0) is None
    shelf.put(first, now_s=0.0)
    shelf.put(second, now_s=10.0)
    assert shelf.services == [second, first]
    assert shelf.find(first.digest, now_s=11.0) is first
    assert shelf.find(second.digest, now_s=11.0) is second
    assert shelf.find(third.digest, now_s=11.0) is None


def test_the_former_one_is_served_until_nobody_asks_for_it(services: list[Service]) -> None:
    first, second, _ = services
    shelf = Shelf(30.0)
    assert shelf.retires_s() == float("inf")
    shelf.put(first, now_s=0.0)
    assert shelf.retire(now_s=1e9) is None, "the only one is never taken down"
    shelf.put(second, now_s=100.0)
    assert shelf.retires_s() == 130.0
    shelf.find(first.digest, now_s=120.0)
    shelf.find(second.digest, now_s=140.0)
    assert shelf.retire(now_s=149.9) is None
    assert shelf.retire(now_s=150.0) is first
    assert shelf.services == [second]
    assert shelf.retires_s() == float("inf")


def test_there_and_back_again(services: list[Service]) -> None:
    first, second, _ = services
    shelf = Shelf(30.0)
    shelf.put(first, now_s=0.0)
    shelf.put(second, now_s=10.0)
    shelf.put(first, now_s=20.0)
    assert shelf.services == [first, second]
    assert shelf.retires_s() == 50.0


def test_one_that_fails_is_taken_down(services: list[Service]) -> None:
    first, second, _ = services
    shelf = Shelf(30.0)
    shelf.put(first, now_s=0.0)
    shelf.put(second, now_s=10.0)
    assert shelf.take_down(second) is first
    assert shelf.services == [first]
    shelf.put(second, now_s=20.0)
    assert shelf.take_down(first) is second
    assert shelf.services == [second]
    assert shelf.take_down(second) is None
    assert shelf.services == []
    shelf.put(first, now_s=30.0)
    assert shelf.services == [first]


def asking(service: Service, **changes: object) -> Infer:
    infer = Infer(
        request_id=1,
        digest=service.digest,
        k=0,
        budget_ms=1.0,
        image_size=SIZES[0],
        encoding="raw",
    )
    return msgspec.structs.replace(infer, **changes)


def test_what_a_request_has_to_agree_with(services: list[Service]) -> None:
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


def test_a_refusal_says_what_is_served_and_what_to_do(services: list[Service]) -> None:
    first, second, third = services
    shelf = Shelf(30.0)
    shelf.put(first, now_s=0.0)
    shelf.put(second, now_s=0.0)
    assert wrong_bundle(shelf, asking(third)) == (
        "wrong_bundle",
        f"serves second {second.digest[:12]} and first {first.digest[:12]}: give client and agent "
        f"the same bundle, and reload whichever had another; asked for {third.digest[:12]}",
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


def test_memory_has_to_suffice_for_one_more(candidates: list[Candidate]) -> None:
    needed = candidates[0].assignment.memory_bytes
    check_room(candidates[0], needed)
    check_room(candidates[0], None)
    expected = r"^first [0-9a-f]{12} needs 1 MB beside what is served, 1 MB are free$"
    with pytest.raises(AgentError, match=expected):
        check_room(candidates[0], needed - 1)


Prepare = Callable[..., object]


@pytest.fixture
def prepare() -> Prepare:
    def prepare(candidate: Candidate, shelf: Shelf) -> object:
        return prepared(candidate, shelf, available_bytes=lambda: 1000 * MB, clock=lambda: 0.0)

    return prepare


def test_another_bundle_is_loaded_and_warmed(
    candidates: list[Candidate], services: list[Service], prepare: Prepare
) -> None:
    shelf = Shelf(30.0)
    shelf.put(services[0], now_s=0.0)
    found = prepare(candidates[1], shelf)
    assert isinstance(found, Found)
    assert isinstance(found.service.runtime, Pretending)
    assert found.service.runtime.warm
    assert found.service.digest == services[1].digest
    assert shelf.services == [services[0]], "whoever asked decides when"


def test_the_same_bundle_is_left_alone_unless_it_was_taken_down(
    candidates: list[Candidate], services: list[Service], prepare: Prepare
) -> None:
    shelf = Shelf(30.0)
    shelf.put(services[0], now_s=0.0)
    assert prepare(candidates[0], shelf) == Same()
    shelf.take_down(services[0])
    again = prepare(candidates[0], shelf)
    assert isinstance(again, Found)
    assert again.service is not services[0]


def test_a_bundle_that_is_still_served_is_not_loaded_twice(
    candidates: list[Candidate], services: list[Service], prepare: Prepare
) -> None:
    shelf = Shelf(30.0)
    shelf.put(services[0], now_s=0.0)
    shelf.put(services[1], now_s=0.0)
    assert prepare(candidates[0], shelf) == Found(services[0])


def test_there_are_never_three(
    candidates: list[Candidate], services: list[Service], prepare: Prepare
) -> None:
    shelf = Shelf(30.0)
    shelf.put(services[0], now_s=0.0)
    shelf.put(services[1], now_s=0.0)
    expected = r"^two bundles are served already, and first [0-9a-f]{12} is still asked for: "
    with pytest.raises(AgentError, match=expected):
        prepare(candidates[2], shelf)


def finished(renewal: Renewal, shelf: Shelf) -> object:
    """What a renewal that is asked for comes to."""
    done: list[None] = []
    renewal.ask()
    renewal.begin(shelf, done=lambda: done.append(None))
    renewal.leave(60.0)
    assert done == [None]
    outcome = renewal.collect()
    assert renewal.collect() is None, "once"
    return outcome


def test_nothing_begins_unless_it_was_asked_for(services: list[Service]) -> None:
    renewal = Renewal(lambda: services[1].candidate, clock=lambda: 0.0)
    renewal.begin(Shelf(), done=lambda: pytest.fail("begun"))
    renewal.leave(60.0)
    assert renewal.collect() is None


@pytest.mark.parametrize(
    "error",
    [AgentError("not finite"), MemoryError(), OSError(28, "No space left on device")],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_bundle_does_is_an_answer(
    error: Exception, candidates: list[Candidate], services: list[Service]
) -> None:
    broken = dataclasses.replace(candidates[1], load=lambda: Pretending(error))
    shelf = Shelf()
    shelf.put(services[0], now_s=0.0)
    renewal = Renewal(lambda: broken, clock=lambda: 0.0, available_bytes=lambda: None)
    assert finished(renewal, shelf) == Refused(error)
    whole = Renewal(lambda: candidates[1], clock=lambda: 0.0, available_bytes=lambda: None)
    assert isinstance(finished(whole, shelf), Found)


def test_a_bundle_that_cannot_be_read_is_an_answer(tmp_path: Path) -> None:
    def read() -> Candidate:
        Bundle.open(tmp_path / "nowhere")
        raise AssertionError

    outcome = finished(Renewal(read, clock=lambda: 0.0), Shelf())
    assert isinstance(outcome, Refused)
    assert isinstance(outcome.error, ConfigError)


def test_too_little_memory_is_found_out_before_loading(
    candidates: list[Candidate], services: list[Service]
) -> None:
    loaded: list[None] = []

    def load() -> Pretending:
        loaded.append(None)
        return Pretending()

    hungry = dataclasses.replace(candidates[1], load=load)
    shelf = Shelf()
    shelf.put(services[0], now_s=0.0)
    renewal = Renewal(lambda: hungry, clock=lambda: 0.0, available_bytes=lambda: 0)
    outcome = finished(renewal, shelf)
    assert isinstance(outcome, Refused)
    assert str(outcome.error).endswith("MB beside what is served, 0 MB are free")
    assert loaded == []
