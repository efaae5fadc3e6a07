"""The table of what excludes what: each rule refuses, and nothing else that is legal."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from partitioner.crew.planning.rules import (
    EXACT,
    GIVEN,
    MISSING,
    RULES,
    Rule,
    gives_weights_of_one,
    refusals,
)
from partitioner.crew.planning.syncplan import (
    KfacOwner,
    MeanOwner,
    MuonOwner,
    Neighbourhood,
    NetworkSync,
    OuterOwner,
    RequestedGroups,
    ShuffledGroups,
    Stage,
    WholeGroup,
    is_exact,
)

PAGE = Path(__file__).parents[5] / "docs" / "reference" / "crew.md"
#: Values of keys by their words.
VALUES: dict[tuple[str, str], Any] = {
    ("every_pictures", GIVEN): 64,
    ("moments", GIVEN): 2,
    ("owner", "outer"): OuterOwner(),
    ("owner", "kfac"): KfacOwner(),
    ("owner", "muon"): MuonOwner(),
    ("owner", "mean"): MeanOwner(),
    ("mask", GIVEN): 0.1,
    ("meet", "everyone"): WholeGroup(),
    ("meet", "shuffled"): ShuffledGroups(),
    ("meet", "on_request"): RequestedGroups(),
    ("meet", "neighbours"): Neighbourhood(),
    ("moments", MISSING): None,
    ("bucket_bytes", GIVEN): 64,
    ("bucket_bytes", MISSING): None,
    ("micro_batches", GIVEN): 2,
    ("stage", GIVEN): (Stage(blocks=1, by="coordinator"), Stage(blocks=1, by="nuc")),
    ("by", GIVEN): ("coordinator",),
    ("by", MISSING): (),
    ("stage", MISSING): (),
    ("micro_batches", MISSING): None,
}
#: Words that are not allowed, by the key that a rule asks for.
OTHERS = {
    "what": ("gradients", "parameters"),
    "codec": ("fp32", "fp16", "int8", "top4", "factors"),
    "route": ("ring", "two_phase", "two_tier"),
    "stage": (GIVEN, MISSING),
    "meet": ("everyone", "shuffled", "on_request", "neighbours"),
    "name": ("teacher", "member-0"),
    "shares": ("equal", "pace"),
    "bucket_bytes": (GIVEN, MISSING),
    "by": (GIVEN, MISSING),
    "owner": ("mean", "outer"),
    "when": ("at_once", "background", "next_forward"),
    "moments": (GIVEN, MISSING),
    "micro_batches": (GIVEN, MISSING),
}


def having(sync: NetworkSync, key: str, word: str) -> NetworkSync:
    return replace(sync, **{key: VALUES.get((key, word), word)})


CASES = [
    (rule, value, other) for rule in RULES for value in rule.values for other in OTHERS[rule.other]
]


@pytest.mark.parametrize(("rule", "value", "other"), CASES)
def test_a_key_is_refused_where_its_rule_says_so(rule: Rule, value: str, other: str) -> None:
    sync = having(NetworkSync(name="member-0"), rule.other, other)
    allowed = other in rule.allowed
    if rule.key == EXACT:
        # Of the two rules the other one is kept.
        assert is_exact(sync) == allowed
        return
    sync = having(sync, rule.key, value)
    sentence = rule.sentence(sync.words)
    assert (sentence in refusals(sync.words)) != allowed
    if not allowed:
        assert sentence.startswith(f"{rule.key}`: expected ")
        assert sentence.endswith(rule.because)
        assert "\n" not in sentence


def test_what_no_rule_names_is_legal() -> None:
    plain = NetworkSync(name="member-0")
    rounds = NetworkSync(
        name="member-0",
        what="parameters",
        codec="int8",
        every_pictures=64,
        period="grows",
        step_size="auto",
        moments=2,
        owner=OuterOwner(step=1.5),
    )
    cocktail = NetworkSync(
        name="member-0", what="parameters", codec="top4", mask=0.1, keep=0.3, when="background"
    )
    for sync, exact in ((plain, True), (rounds, False), (cocktail, False)):
        assert not any(refusals(sync.words))
        assert gives_weights_of_one(sync.words) == exact


def test_the_page_has_the_table() -> None:
    rows = [
        f"| {rule.key if rule.key == EXACT else f'`{rule.key}`'} | {rule.when} | {rule.because} |"
        for rule in RULES
    ]
    assert "\n".join(["| key | | because |", "|---|---|---|", *rows]) in PAGE.read_text()
