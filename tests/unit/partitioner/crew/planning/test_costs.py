"""Bytes, seconds and memory: the tables that the formulas were checked with."""

from itertools import pairwise

import pytest

from partitioner.crew.planning.costs import (
    RATIO,
    Chain,
    CrewJob,
    activation_bytes,
    answers_per_s,
    makespan_s,
    memory_bytes,
    next_forward_s,
    sent_ratio,
    step_s,
    timeline,
)
from tests.unit.partitioner.crew.planning.fleets import MBIT

#: Network: bytes of its parameters, and GFLOP of a step of 64 pictures.
NETWORKS = {
    "96x3": (1.44e6, 2.3),
    "384x3": (22.8e6, 226.0),
    "640x5": (106e6, 1708.0),
    "vit-b16": (349.2e6, 6745.0),
}


@pytest.mark.parametrize(
    ("network", "even_mbit", "hidden_mbit"),
    [
        ("96x3", (216, 880), (1200, 4800)),
        ("384x3", (36, 146), (197, 803)),
        ("640x5", (22, 89), (121, 492)),
        ("vit-b16", (18, 75), (101, 410)),
    ],
)
def test_where_averaging_gradients_breaks_even(
    network: str, even_mbit: tuple[float, float], hidden_mbit: tuple[float, float]
) -> None:
    size, gflop = NETWORKS[network]
    for gflops, even, hidden in zip((27, 110), even_mbit, hidden_mbit, strict=True):
        alone_s = gflop / gflops

        def with_four(mbit: float, alone_s: float = alone_s) -> float:
            return step_s("gradients", alone_s / 4, 1.5 * size / (mbit * MBIT))

        assert with_four(even) == pytest.approx(alone_s, rel=0.03)
        assert with_four(1.03 * hidden) == pytest.approx(alone_s / 4, rel=0.01)
        assert with_four(0.9 * hidden) > 1.02 * alone_s / 4


@pytest.mark.parametrize(
    ("network", "gflops", "gradients", "parameters", "int8"),
    [
        ("384x3", 27, (0.58, 2.4, 4.0), (2.8, 3.7, 4.0), (3.6, 3.9, 4.0)),
        ("384x3", 110, (0.15, 0.70, 4.0), (1.5, 3.0, 3.9), (2.8, 3.7, 4.0)),
        ("640x5", 110, (0.24, 1.1, 4.0), (2.0, 3.3, 3.9), (3.2, 3.8, 4.0)),
        ("640x5", 5000, (0.01, 0.03, 0.26), (0.08, 0.39, 2.1), (0.32, 1.2, 3.2)),
        ("96x3", 110, (0.02, 0.12, 1.1), (0.36, 1.3, 3.3), (1.1, 2.7, 3.8)),
    ],
)
def test_speed_up_of_four_trainers(
    network: str,
    gflops: float,
    gradients: tuple[float, ...],
    parameters: tuple[float, ...],
    int8: tuple[float, ...],
) -> None:
    size, gflop = NETWORKS[network]
    alone_s = gflop / gflops
    for i, mbit in enumerate((20, 100, 1000)):
        mean_s = 1.5 * size / (mbit * MBIT)
        found = (
            step_s("gradients", alone_s / 4, mean_s),
            step_s("parameters", alone_s / 4, mean_s, steps=16),
            step_s("parameters", alone_s / 4, RATIO["int8"] * mean_s, steps=16),
        )
        wanted = (gradients[i], parameters[i], int8[i])
        assert [alone_s / s for s in found] == pytest.approx(wanted, rel=0.03, abs=0.0055)


def test_buckets_hide_all_but_the_first_and_the_last() -> None:
    assert step_s("gradients", 3.0, 2.0) == 3.0
    assert step_s("gradients", 3.0, 2.0, buckets=1) == 5.0
    assert step_s("gradients", 3.0, 2.0, buckets=4) == 3.5
    assert step_s("gradients", 3.0, 6.0, buckets=4) == 7.5
    assert step_s("parameters", 3.0, 2.0, steps=4, wait_s=1.0) == 3.75


@pytest.mark.parametrize(
    ("mean_s", "at_once", "next_forward"),
    [(2, 3, 3), (3, 4, 3.5), (4, 5, 4), (6, 7, 6), (12, 13, 12)],
)
def test_means_beside_both_passes(mean_s: float, at_once: float, next_forward: float) -> None:
    # A forward pass of a second and a backward pass of two.
    assert step_s("gradients", 3.0, mean_s) == pytest.approx(at_once)
    assert next_forward_s(3.0, mean_s) == pytest.approx(next_forward)


def test_the_first_bucket_to_be_used_is_waited_for() -> None:
    assert next_forward_s(3.0, 2.0, buckets=4) == pytest.approx(1.25 + 2.25)
    assert next_forward_s(3.0, 4.0, buckets=1) == pytest.approx(3.0 + 4.0)


def test_bits_of_a_number_in_a_mean() -> None:
    assert 32 * sent_ratio("top4", 10) == pytest.approx(0.1825)
    assert 32 * RATIO["top4"] == pytest.approx(1.825)
    assert 32 * sent_ratio("top4", 10, 1.0) == pytest.approx(0.1 * (4 + 1 + 16 / 128))
    assert sent_ratio("int8", 4) == RATIO["int8"] / 4
    # The last mean of an epoch is of every number, in int8 or as it is; others are so anyway.
    assert 32 * sent_ratio("top4", 10, settling=0.25) == pytest.approx(
        0.75 * 0.1825 + 0.25 * 32 * RATIO["int8"]
    )
    assert sent_ratio("fp32", 4, settling=0.5) == 0.625
    assert sent_ratio("int8", settling=0.5) == RATIO["int8"]


def test_memory_of_a_trainer() -> None:
    size = NETWORKS["640x5"][0]
    assert memory_bytes("parameters", "int8", size) == 742e6
    assert memory_bytes("parameters", "fp32", size) == 5 * size
    assert memory_bytes("gradients", "fp32", size, 1e9) == 4 * size + 1e9
    assert memory_bytes("gradients", "int8", size) == 5 * size
    # An outer step keeps the last mean, which int8 does anyway, and its momentum.
    assert memory_bytes("parameters", "fp32", size, outer=True) == 7 * size
    assert memory_bytes("parameters", "int8", size, outer=True) == 8 * size
    # A mask needs the last mean, which top4 has anyway beside the error fed back.
    assert memory_bytes("parameters", "top4", size, masked=True) == 7 * size
    assert memory_bytes("parameters", "fp32", size, masked=True) == 6 * size
    # Networks of neighbours, as encoded.
    assert memory_bytes("parameters", "fp32", size, received=2.5) == 7.5 * size
    # ViT-B/16 at 224, 64 pictures: 9 GB, and with most products in bf16 6.
    assert activation_bytes(64, 197, 768, 12) == pytest.approx(9.3e9, rel=0.01)
    assert activation_bytes(64, 197, 768, 12, "bf16") == pytest.approx(6.0e9, rel=0.01)


def test_answers_over_a_link() -> None:
    assert answers_per_s(1e6, 20 * MBIT, 1000) == 1250
    assert answers_per_s(3, 20 * MBIT, 1000) == 3


@pytest.mark.parametrize(("chain", "seconds"), [("strict", 3.1), ("star", 1.7)])
def test_makespans_of_four_members_on_four_trainers(chain: Chain, seconds: float) -> None:
    jobs = [CrewJob(f"member-{k}", (f"t{k}",), 0.7 if k else 1.0) for k in range(4)]
    assert makespan_s(timeline(jobs, chain)) == pytest.approx(seconds)


@pytest.mark.parametrize("efficiency", [1.0, 0.5])
def test_star_beats_four_on_each_below_three_quarters(efficiency: float) -> None:
    everyone = tuple(f"t{k}" for k in range(4))
    first = CrewJob("member-0", everyone, 0.25 / efficiency)
    star = [first, *(CrewJob(f"member-{k}", (f"t{k}",), 0.7) for k in range(1, 4))]
    assert makespan_s(timeline(star, "star")) == pytest.approx(0.25 / efficiency + 0.7)
    later = [CrewJob(f"member-{k}", everyone, 0.7 / 4 / efficiency) for k in range(1, 4)]
    assert makespan_s(timeline([first, *later])) == pytest.approx(0.775 / efficiency)
    # All epochs for later members.
    whole = [CrewJob(f"member-{k}", (f"t{k}",), 1.0) for k in range(4)]
    assert makespan_s(timeline(whole, "star")) == pytest.approx(2.0)


@pytest.mark.parametrize(("chain", "seconds"), [("strict", 3.2), ("star", 2.2)])
def test_successors_wait_for_the_outputs_that_they_learn_from(chain: Chain, seconds: float) -> None:
    jobs = [CrewJob("member-0", ("a",), 1.0), CrewJob("outputs of member-0", ("a",), 0.2)]
    jobs += [CrewJob(f"member-{k}", (f"t{k}",), 1.0) for k in (1, 2)]
    assert makespan_s(timeline(jobs, chain)) == pytest.approx(seconds)


def test_one_trainer_does_one_thing_at_a_time() -> None:
    jobs = [
        CrewJob("teacher", ("a", "b"), 2.0),
        CrewJob("answers", ("b",), 3.0),
        CrewJob("member-0", ("a",), 1.0),
        CrewJob("member-1", ("a",), 1.0),
        CrewJob("member-2", ("a", "b"), 1.0),
    ]
    spans = timeline(jobs, "star")
    assert makespan_s(spans) == 8.0
    assert [(s.trainer, s.start_s) for s in spans if s.what == "member-0"] == [("a", 5.0)]
    for name in "ab":
        own = [span for span in spans if span.trainer == name]
        for before, after in pairwise(own):
            assert before.end_s <= after.start_s
    assert makespan_s([]) == 0
