"""Flows on shared links, and what a mean takes on each route."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.crew.coordinator.shares import link_shares
from partitioner.crew.planning.facts import Facts
from partitioner.crew.planning.flows import Links, Route, busiest_s, finish_s, ring, two_phase
from tests.unit.partitioner.crew.planning.fleets import MBIT, lines, three, trainers, two_sites

SIZE = 4e6


def switch(rates: list[float], latency_s: float = 0.0) -> Links:
    """Trainers at one switch."""
    names = {f"t{n}": rate for n, rate in enumerate(rates)}
    return Links(
        Facts(trainer=trainers({n: {} for n in names}, rates=names), line=lines(names, latency_s))
    )


def test_flows_share_a_link_fairly() -> None:
    capacities = {"slow": 1.0, "fast": 10.0}
    assert finish_s([], capacities) == 0
    assert finish_s([(5, ("fast",))], capacities) == 0.5
    # Two on the slow link have a half each; what they leave of the fast one is the third's.
    flows = [(1, ("slow", "fast")), (1, ("slow",)), (19, ("fast",))]
    assert finish_s(flows, capacities) == pytest.approx(2.0)
    # The shorter ends at 2 s, then the longer has the link for itself.
    assert finish_s([(1, ("slow",)), (3, ("slow",))], capacities) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("route", "seconds"), [("ring", 1.20), ("two_phase", 1.60), ("two_tier", 0.96)]
)
def test_means_over_two_sites(route: Route, seconds: float) -> None:
    links = Links(two_sites())
    assert links.mean(route, ["a0", "b0", "a1", "b1"]).of(SIZE) == pytest.approx(seconds)


def test_pairs_over_two_sites() -> None:
    links = Links(two_sites())

    def seconds(*pairs: tuple[str, str]) -> float:
        return SIZE * links.phases_s([[way for pair in pairs for way in ring(pair)]])

    assert seconds(("a0", "a1"), ("b0", "b1")) == pytest.approx(0.08)
    assert seconds(("a0", "b0"), ("a1", "b1")) == pytest.approx(1.60)
    assert seconds(("a0", "b0")) == pytest.approx(0.80)


@pytest.mark.parametrize(
    ("rates", "equal_s", "by_link_s"),
    [
        ([100, 100, 100, 100], 0.0150, 0.0150),
        ([100, 100, 100, 20], 0.0750, 0.0500),
        ([100, 50, 50, 25], 0.0600, 0.0400),
        ([1000, 100, 100, 100, 20], 0.0800, 0.0500),
    ],
)
def test_shards_by_link_pay_where_phases_overlap(
    rates: list[float], equal_s: float, by_link_s: float
) -> None:
    links, crew = switch(rates), [f"t{n}" for n in range(len(rates))]
    equal = two_phase(crew, [1 / len(crew)] * len(crew))
    by_link = two_phase(crew, link_shares(rates))
    assert links.phases_s([equal[0] + equal[1]]) == pytest.approx(equal_s)
    overlapped = [(part, links.paths[a, b]) for a, b, part in by_link[0] + by_link[1]]
    assert busiest_s(overlapped, links.capacities) == pytest.approx(by_link_s)
    # Fair sharing is not the best order of unequal flows.
    assert by_link_s * (1 - 1e-9) <= finish_s(overlapped, links.capacities) <= 1.3 * by_link_s
    # One phase after the other, the slowest link is idle in one direction in each.
    assert links.phases_s(equal) == pytest.approx(equal_s)
    assert links.phases_s(by_link) >= equal_s * (1 - 1e-9)
    assert links.mean("two_phase", crew).of(1) == pytest.approx(equal_s)


def test_latencies_of_routes() -> None:
    links = switch([100, 100, 100, 100], 0.01)
    crew = ["t0", "t1", "t2", "t3"]
    assert links.mean("ring", crew).latency_s == pytest.approx(0.06)
    assert links.mean("two_phase", crew).latency_s == pytest.approx(0.02)
    assert links.mean("ring", ["t0"]).of(1e9) == 0


def test_a_slower_line_is_a_link_of_its_own() -> None:
    facts = three()
    links = Links(facts)
    assert links.paths["coordinator", "nuc"] == ("coordinator up", "nuc down")
    assert links.reach("coordinator") == 1000 * MBIT
    slower = msgspec.structs.replace(facts.line[-1], bytes_per_s=1e6, back_bytes_per_s=2e6)
    changed = Links(Facts(trainer=facts.trainer, line=(*facts.line[:-1], slower)))
    assert changed.paths["tower", "nuc"][-1] == "tower > nuc"
    assert changed.capacities["nuc > tower"] == 2e6


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.floats(0.1, 100), st.sets(st.sampled_from("abcd"), min_size=1)),
        min_size=1,
        max_size=12,
    )
)
def test_no_link_carries_more_than_it_can(flows: list[tuple[float, set[str]]]) -> None:
    capacities = {"a": 1.0, "b": 2.0, "c": 5.0, "d": 0.5}
    listed = [(size, tuple(sorted(links))) for size, links in flows]
    seconds = finish_s(listed, capacities)
    assert seconds >= busiest_s(listed, capacities) * (1 - 1e-9)
    # Never worse than one flow after the other.
    alone = sum(size / min(capacities[link] for link in links) for size, links in listed)
    assert seconds <= alone * (1 + 1e-9)
