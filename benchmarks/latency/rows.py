"""Measured latencies of sub-models, as benchmarks/results/latency-rows.json keeps them."""

from typing import Any

from benchmarks.harness.results import RESULTS
from mdp.files import Record
from mdp.formats.plan import SubModelSpec
from mdp.formats.profile import NonNegativeFloat, PositiveFloat, PositiveInt, Precision

ROWS = RESULTS / "latency-rows.json"


class Case(Record, frozen=True):
    spec: SubModelSpec
    num_classes: PositiveInt


class Row(Record, frozen=True):
    """One model run one way: the median over rounds of each round's median."""

    case: Case
    precision: Precision
    threads: PositiveInt
    latency_ms: PositiveFloat
    #: 10th and 90th percentile of all runs.
    p10_ms: PositiveFloat
    p90_ms: PositiveFloat
    rounds: PositiveInt
    runs: PositiveInt
    #: Processor cores that other processes kept busy.
    others_cores: NonNegativeFloat


class Rows(Record, frozen=True):
    """`unseen` are random shapes, `plannable` shapes that a plan may hold; no fit sees either."""

    machine: dict[str, Any]
    unseen: list[Row]
    plannable: list[Row]
