"""Reports of a run about a target, the inputs that it keeps, and changes of inputs."""

import random

import pytest

from tests.fuzz.files import words_of
from tests.fuzz.keep import choose
from tests.fuzz.mutation import mutate
from tests.fuzz.run import summary
from tests.fuzz.target import seeds_of
from tests.fuzz.targets import TARGETS

SAID = """\
#6\tINITED cov: 131 ft: 134 corp: 6/1Kb exec/s: 0 rss: 80Mb
#262144\tpulse  cov: 150 ft: 200 corp: 60/9Kb lim: 4096 exec/s: 9000 rss: 80Mb
#3000\tDONE   cov: 159 ft: 209 corp: 72/9Kb lim: 4096 exec/s: 9000 rss: 80Mb
stat::number_of_executed_units: 3000
"""


def sample(second: int, **changes: float) -> dict[str, float]:
    known = {
        "inputs": 1000 * second, "accepted": 100 * second, "seconds": second, "slowest_s": 0.004,
        "processor_s": second / 2, "rss_bytes": (80 * 1024 + second) * 1024, "peak_bytes": 2**27,
    }  # fmt: skip
    return known | changes


def test_a_summary_holds_the_figures_of_libfuzzer_and_the_child() -> None:
    figures = summary(TARGETS["frames"], [sample(second) for second in range(1, 41)], SAID)
    assert figures["inputs"] == 3000
    assert figures["accepted_share"] == pytest.approx(0.1)
    assert (figures["branches_before"], figures["branches"]) == (131, 159)
    assert (figures["features_before"], figures["features"]) == (134, 209)
    assert (figures["slowest_input_ms"], figures["peak_mib"]) == (4.0, 128.0)
    # One KiB a thousand inputs.
    assert figures["growth_kib_per_million"] == pytest.approx(1000)


def test_a_run_that_ended_early_counts_the_inputs_read() -> None:
    figures = summary(TARGETS["frames"], [sample(1), sample(2)], "")
    assert (figures["inputs"], figures["growth_kib_per_million"]) == (2000, None)


def test_inputs_that_take_no_new_step_are_not_kept() -> None:
    target = TARGETS["greeting"]
    curve, other = (target.seeds()[name] for name in ("curve", "plain"))
    assert choose(target, [curve, other], set()) == [min(curve, other)]
    assert choose(target, [curve, b"x"], set()) == [b"x", curve]


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_changed_inputs_are_others_within_bounds_and_repeatable(target: object) -> None:
    target = TARGETS[getattr(target, "name", "")]
    seeds = list(target.seeds().values())
    changed = [mutate(target, seed, random.Random(n)) for n, seed in enumerate(seeds)]
    assert changed == [mutate(target, seed, random.Random(n)) for n, seed in enumerate(seeds)]
    assert set(changed) - set(seeds)
    grown = seeds[0]
    for number in range(300):
        grown = mutate(target, grown, random.Random(number))
        assert len(grown) <= target.max_bytes


def test_the_words_of_a_file_are_its_keys() -> None:
    words = TARGETS["plan"].words
    for key in (b"assignments = ", b"patch_size = ", b"replicas = ", b"right = "):
        assert key in words
    assert words_of(str, "{}") == ()
    assert seeds_of(TARGETS["plan"])["number-of-5000-digits"].endswith(b"999")
