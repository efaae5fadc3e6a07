"""crew.toml: what is read, refused, exact, and the same."""

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdp.errors import ConfigError
from mdp.files import decode_content, toml_bytes
from partitioner.crew.planning.facts import Facts
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
    SyncPlan,
    WholeGroup,
    contradictions,
    is_exact,
    is_exact_plan,
    read_plan,
    write_plan,
)
from partitioner.crew.planning.work import FrozenPasses, NetworkWork, Work
from tests.unit.partitioner.crew.planning.fleets import three, two_sites

WORK = Work(
    networks=tuple(
        NetworkWork(name=f"member-{k}", size_bytes=23e6, pictures=20_000, epochs=20)
        for k in range(2)
    )
)
BOTH = (
    '[[network]]\nname = "member-0"\nby = ["coordinator", "tower"]\n'
    '[[network]]\nname = "member-1"\n'
)


def read(tmp_path: Path, text: str, facts: Facts | None = None, work: Work | None = None) -> Any:
    path = tmp_path / "crew.toml"
    path.write_text(text)
    return read_plan(path, facts, work)


def network(text: str, name: str = "member-0") -> str:
    return f'[[network]]\nname = "{name}"\n{text}\n'


def meeting(text: str, what: str = "parameters") -> str:
    return network(f"what = '{what}'\nmeet = {{{text}}}")


def neighbours(text: str) -> str:
    """Of member-1, which all train."""
    return f"{BOTH}what = 'parameters'\nmeet = {{kind = 'neighbours', {text}}}"


def masked(text: str) -> str:
    return network(f"what = 'parameters'\ncodec = 'top4'\n{text}")


STAGES = 'micro_batches = 4\nstage = [{blocks = 7, by = "coordinator"}, {blocks = 5, by = "nuc"}]'
FACTORED = 'tensor = [{match = "*head.weight", codec = "factors"}]'


def in_flight(*limits: int) -> str:
    """Stages of three trainers; 0 is no limit of its own."""
    stages = [
        f'{{blocks = 4, by = "{by}"{f", in_flight = {limit}" if limit else ""}}}'
        for by, limit in zip(("coordinator", "nuc", "tower"), limits, strict=True)
    ]
    return f"micro_batches = 4\nstage = [{', '.join(stages)}]"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((0, 0, 0), (3, 2, 1)),
        ((1, 0, 0), (1, 1, 1)),
        ((2, 2, 9), (2, 2, 1)),
        ((9, 0, 0), (3, 2, 1)),
    ],
)
def test_no_stage_has_more_in_flight_than_the_one_before(
    tmp_path: Path, limits: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert read(tmp_path, network(in_flight(*limits), "teacher")).network[0].in_flight == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour = 1", "unknown field `colour`"),
        ("format_version = 2", "Expected|Invalid"),
        (network("meets = 'shuffled'"), r"unknown field `meets` - at `\$.network\[0\]`"),
        (network("meet = 'shuffled'"), r"Expected `object`, got `str` - at `.*meet`"),
        (meeting("kind = 'random'"), r"Invalid value 'random' - at `.*meet.kind`"),
        (meeting("kind = 'shuffled', size = 1"), r"Expected `int` >= 2 - at `.*meet.size`"),
        (meeting("kind = 'shuffled', cross_every = 0"), r"`int` >= 1 - at `.*meet.cross_every`"),
        (meeting("kind = 'shuffled', gap = 8"), "unknown field `gap` - at `.*meet`"),
        (meeting("kind = 'on_request', gap = 0"), r"Expected `int` >= 1 - at `.*meet.gap`"),
        (meeting("kind = 'on_request', reach = -0.1"), r"Expected `float` >= 0.0 - at `.*reach`"),
        (meeting("kind = 'on_request', reach = nan"), r"`float` >= 0.0 - at `.*reach`, found nan"),
        (meeting("kind = 'neighbours', gap = 0"), r"Expected `int` >= 1 - at `.*meet.gap`"),
        (meeting("kind = 'neighbours', backup = -1"), r"Expected `int` >= 0 - at `.*meet.backup`"),
        (meeting("kind = 'neighbours', stale = -1"), r"Expected `int` >= 0 - at `.*meet.stale`"),
        (meeting("kind = 'neighbours', skip = 0"), r"Expected `int` >= 1 - at `.*meet.skip`"),
        (meeting("kind = 'neighbours', skip = true"), r"Expected `int`, got `bool` - at `.*skip`"),
        (meeting("kind = 'neighbours', size = 2"), "unknown field `size` - at `.*meet`"),
        (meeting("kind = 'neighbours', pairs = [['a']]"), r"length 2, got 1 - at `.*pairs\[0\]`"),
        (
            meeting("kind = 'neighbours'") + "moments = 2\n",
            'meet`: expected "neighbours" only without moments: neighbours send parameters alone',
        ),
        (meeting("kind = 'everyone', size = 2"), "unknown field `size`"),
        (
            meeting("kind = 'shuffled'", "gradients"),
            'meet`: expected "shuffled" or .* or "neighbours" only with what = "parameters", found',
        ),
        (
            meeting("kind = 'on_request'") + "when = 'background'\n",
            'meet`: expected .* only with when = "at_once", found "background"',
        ),
        (
            meeting("kind = 'on_request'") + "owner = {kind = 'outer'}\n",
            'meet`: expected .* only with owner = "mean", found "outer"',
        ),
        (network("codec = 'cocktail'"), r"Invalid enum value 'cocktail' - at `.*codec`"),
        (masked("mask = 0.0"), r"Expected `float` >= 0.001 - at `.*mask`"),
        (masked("mask = 1.5"), r"Expected `float` <= 1.0 - at `.*mask`"),
        (masked("mask = nan"), "mask"),
        (masked("mask = '0.1'"), r"Expected `float \| null`, got `str` - at `.*mask`"),
        (masked("mask = 0.7"), "mask`: expected one over a whole number, such as 0.1, found 0.7"),
        (masked("keep = 0.0"), r"Expected `float` >= 0.001 - at `.*keep`"),
        (masked("keep = 1.01"), r"Expected `float` <= 1.0 - at `.*keep`"),
        (masked("keep = nan"), "keep"),
        (
            network("what = 'parameters'\ncodec = 'int8'\nkeep = 0.2"),
            'keep`: expected only with codec = "top4": no other codec leaves numbers out',
        ),
        (
            network("codec = 'top4'"),
            'codec`: expected "top4" only with what = "parameters", found "gradients": it leaves',
        ),
        (network("mask = 0.1"), 'mask`: expected only with what = "parameters", found "gradients"'),
        (
            masked("route = 'ring'"),
            'codec`: expected "top4" only with route = "two_phase", found "ring": ',
        ),
        (
            masked("route = 'two_tier'"),
            'codec`: expected "top4" only with route = "two_phase", found "two_tier": ',
        ),
        (
            network("what = 'parameters'\nmask = 0.5\nroute = 'ring'"),
            'mask`: expected only with route = "two_phase", found "ring"',
        ),
        (
            masked("meet = {kind = 'shuffled'}"),
            'codec`: expected "top4" only with meet = "everyone", found "shuffled": its reference',
        ),
        (
            network("what = 'parameters'\nmask = 0.5\nmeet = {kind = 'on_request'}"),
            'mask`: expected only with meet = "everyone", found "on_request": its reference',
        ),
        (
            masked("owner = {kind = 'outer'}"),
            'codec`: expected "top4" only with owner = "mean", found "outer"',
        ),
        (
            network("what = 'parameters'\nmask = 0.5\nowner = {kind = 'outer'}"),
            'mask`: expected only with owner = "mean", found "outer"',
        ),
        (network("", "member-x"), "expected `teacher` or `member-K`"),
        (network("tensor = [{match = 'a', colour = 1}]"), "unknown field `colour`"),
        ("[answers]\nwho = []", r"unknown field `who` - at `\$.answers`"),
        ("chain = 'lead'", r"Invalid enum value 'lead' - at `\$.chain`"),
        (network("") + network(""), "`network`: expected each network once, found member-0"),
        ("[answers]\nkeep = 0", r"Expected `int` >= 1 - at `\$.answers.keep`"),
        ("[answers]\nkeep = 70000", "Expected `int` <= 65536"),
        ("[answers]\nby = ['a', 'a']", "`answers.by`: expected each trainer once, found a"),
        (network("by = ['a', 'a']"), r"`network\[0\].by`: expected each trainer once"),
        (network("every_pictures = 64"), r"`network\[0\].every_pictures`: expected only with"),
        (network("what = 'parameters'\nbucket_bytes = 64"), "bucket_bytes`: expected only with"),
        (network("what = 'parameters'\nshares = 'pace'"), 'shares`: expected "pace" only with'),
        (
            network("route = 'ring'\ncodec = 'int8'"),
            'route`: expected "ring" .*, found "int8": sums of its codes overflow',
        ),
        (
            network("route = 'ring'\ntensor = [{match = '*', codec = 'int8'}]"),
            "sums of its codes overflow",
        ),
        (network("period = 'grows'"), r"`network\[0\].period`: expected .*, found .gradients."),
        (
            network("step_size = 'auto'"),
            'step_size`: expected "auto" only with what = "parameters"',
        ),
        (network("when = 'background'"), 'when`: expected "background" only with what = "param'),
        (
            network("what = 'parameters'\nwhen = 'background'\nmoments = 2"),
            'when`: expected "background" only without moments',
        ),
        (
            network("what = 'parameters'\nwhen = 'background'\nowner = {kind = 'outer'}"),
            'when`: expected "background" only with owner = "mean", found "outer"',
        ),
        (network("moments = 2"), 'moments`: expected only with what = "parameters", found'),
        (network("owner = {kind = 'outer'}"), 'owner`: expected "outer" only with what = "param'),
        (
            network("what = 'parameters'\nowner = {kind = 'push'}"),
            "Invalid value 'push' - at .*owner",
        ),
        (network("what = 'parameters'\nowner = {step = 1.5}"), "missing required field `kind`"),
        (
            network("what = 'parameters'\nowner = {kind = 'outer', step = 0.0}"),
            r"Expected `float` > 0.0 - at `\$.network\[0\].owner.step`",
        ),
        (
            network("what = 'parameters'\nowner = {kind = 'outer', momentum = 1.0}"),
            r"Expected `float` < 1.0 - at `.*owner.momentum`",
        ),
        (network("what = 'parameters'\nmoments = 0"), r"Expected `int` >= 1 - at `.*moments`"),
        (
            network("what = 'parameters'\nperiod = 'long'"),
            "Invalid enum value 'long' - at .*period",
        ),
        (
            network("what = 'parameters'\nstep_size = 2.0"),
            r"Expected `str`, got `float` - at `.*step_size`",
        ),
        (network("codec = 'factors'"), r"Invalid enum value 'factors' - at `\$.network\[0\].codec"),
        (
            network(FACTORED + "\nwhat = 'parameters'"),
            'codec`: expected "factors" only with what = "gradients", found "parameters"',
        ),
        (
            network(FACTORED + "\nroute = 'two_tier'"),
            'codec`: expected "factors" only with route = "ring" or "two_phase", found "two_tier"',
        ),
        (
            network(STAGES + "\n" + FACTORED, "teacher"),
            'stage`: expected only with codec = "fp32", found "factors"',
        ),
        (network("shards = 'link'"), 'shards`: expected "link" only .*, found "ring"'),
        (network("micro_batches = 4"), "micro_batches`: expected only with stage: "),
        (network(STAGES), 'stage`: expected only with name = "teacher", found "member-0"'),
        (network(STAGES + "\ncodec = 'fp16'", "teacher"), 'codec = "fp32"'),
        (network(STAGES + "\nwhat = 'parameters'", "teacher"), 'stage`: .* what = "gradients"'),
        (
            network(STAGES + "\nby = ['coordinator']", "teacher"),
            "stage`: expected only without by: stages name their trainers",
        ),
        (
            network("stage = [{blocks = 7, by = 'a'}, {blocks = 5, by = 'b'}]", "teacher"),
            "stage`: expected only with micro_batches",
        ),
        (
            network("micro_batches = 4\nstage = [{blocks = 7, by = 'a'}]", "teacher"),
            "stage`: expected at least 2",
        ),
        (
            network(STAGES.replace("= 4", "= 1"), "teacher"),
            "micro_batches`: expected at least as many as stages",
        ),
        (
            network(STAGES.replace("nuc", "coordinator"), "teacher"),
            "stage`: expected each trainer once",
        ),
        (
            network(
                "micro_batches = 4\nstage = "
                "[{blocks = 7, by = ['a', 'b']}, {blocks = 5, by = 'c'}]",
                "teacher",
            ),
            "stage`: expected as many trainers at each stage, found 2, 1",
        ),
        (
            network(
                "micro_batches = 4\nstage = "
                "[{blocks = 7, by = ['a', 'b']}, {blocks = 5, by = ['c', 'b']}]",
                "teacher",
            ),
            "stage`: expected each trainer once, found b twice",
        ),
        (
            network(
                "micro_batches = 4\nstage = [{blocks = 7, by = []}, {blocks = 5, by = []}]",
                "teacher",
            ),
            r"stage\[0\]\.by",
        ),
        (
            network(in_flight(1, 2, 1), "teacher"),
            r"`network\[0\].stage\[1\].in_flight`: expected at most 1, as many as at the stage "
            "before, found 2: nuc would wait for ever",
        ),
    ],
)
def test_wrong_plans_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        read(tmp_path, text)
    assert str(refused.value).startswith(f"{tmp_path / 'crew.toml'}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[answers]\nby = ['nas']", r"`answers.by`: .* \(coordinator, tower, nuc\), found nas"),
        (BOTH.replace("tower", "nas"), r"`network\[0\].by`: expected trainers of the facts"),
        (network(""), "`network`: expected all networks that are trained, member-1 is missing"),
        (BOTH + network("", "teacher"), "`network`: expected only .* found teacher"),
        (
            BOTH + "what = 'parameters'\nmeet = {kind = 'shuffled', size = 4}",
            r"`network\[1\].meet.size`: expected at most 3 trainers, found 4",
        ),
        (
            meeting("kind = 'on_request'") + "by = ['nuc']\n" + network("", "member-1"),
            r"`network\[0\].meet`: expected everyone: nuc trains member-0 alone",
        ),
        (
            neighbours("backup = 3"),
            r"`network\[1\].meet.backup`: expected at most 2, "
            r"as many neighbours as coordinator has, fou",
        ),
        (
            neighbours("pairs = [['coordinator', 'tower'], ['tower', 'nuc']], backup = 2"),
            r"`network\[1\].meet.backup`: expected at most 1, "
            r"as many neighbours as coordinator has, fou",
        ),
        (
            neighbours("pairs = [['coordinator', 'tower']]"),
            r"meet.pairs`: expected to connect all trainers: "
            r"nuc cannot be reached from coordinator",
        ),
        (
            neighbours("pairs = [['coordinator', 'nas']]"),
            r"meet.pairs`: expected trainers of the network \(coordinator, tower, nuc\), found nas",
        ),
        (
            neighbours("pairs = [['nuc', 'nuc']]"),
            r"meet.pairs`: expected two trainers in each, found nuc twice",
        ),
        (
            meeting("kind = 'neighbours'") + "by = ['nuc']\n" + network("", "member-1"),
            r"`network\[0\].meet`: expected everyone: nuc trains member-0 alone",
        ),
        (BOTH + "route = 'two_tier'", r"`network\[1\].route`: .* two_tier needs two sites"),
    ],
)
def test_plans_that_contradict_facts_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text, three(), WORK)


def test_what_was_not_measured_is_refused(tmp_path: Path) -> None:
    unmeasured = Facts(
        trainer=tuple(
            msgspec.structs.replace(trainer, pictures_per_s={}) for trainer in three().trainer
        )
    )
    by_link = BOTH + "codec = 'int8'\nshards = 'link'"
    with pytest.raises(ConfigError, match=r"\[1\].shards`: .* not all links of its trainers"):
        read(tmp_path, by_link, unmeasured, WORK)
    shuffled = BOTH + "what = 'parameters'\nmeet = {kind = 'shuffled'}"
    with pytest.raises(ConfigError, match=r"\[1\].meet`: .* shuffled needs a site with several"):
        read(tmp_path, shuffled, unmeasured, WORK)
    assert read(tmp_path, shuffled, three(), WORK).of("member-1").meet == ShuffledGroups()
    with pytest.raises(ConfigError, match=r"\[1\].shares`: .* no pace of coordinator was measured"):
        read(tmp_path, BOTH + "shares = 'pace'", unmeasured, WORK)
    assert read(tmp_path, by_link, three(), WORK).of("member-1").shards == "link"
    assert read(tmp_path, BOTH + "shares = 'pace'", three(), WORK).of("member-1").shares == "pace"
    ways = network("route = 'two_tier'")
    assert contradictions(read(tmp_path, ways), two_sites()) == []


def test_a_network_has_to_fit_in_memory(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"by`: member-0 needs about 0.1 GB, coordinator has 0.1 GB"
    ):
        read(tmp_path, BOTH, three(memory_bytes=91_000_000), WORK)
    assert contradictions(read(tmp_path, BOTH), three(memory_bytes=92_000_000), WORK) == []


def test_what_neighbours_send_has_to_fit_too(tmp_path: Path) -> None:
    """Of each of two, ten networks of 22.7 MB."""
    text = neighbours("gap = 4")
    with pytest.raises(
        ConfigError, match=r"\[1\].by`: member-1 needs about 0.6 GB, coordinator has"
    ):
        read(tmp_path, text, three(memory_bytes=500_000_000), WORK)
    assert contradictions(read(tmp_path, text), three(memory_bytes=580_000_000), WORK) == []


def test_the_empty_plan_is_training_without_one(tmp_path: Path) -> None:
    plan = read(tmp_path, "", three(), WORK)
    assert plan == SyncPlan()
    sync = plan.of("member-3")
    assert (sync.what, sync.way, sync.codec, sync.shares, sync.crew) == (
        "gradients", "ring", "fp32", "equal", (),
    )  # fmt: skip
    assert plan.chain == "strict"
    assert is_exact(sync)
    assert is_exact_plan(plan)


def test_the_first_rule_that_matches_a_tensor_counts() -> None:
    sync = decode_content(
        "crew.toml",
        b'name = "member-0"\ncodec = "int8"\n'
        b'tensor = [{match = "head.*", codec = "fp32"}, {match = "*", codec = "fp16"}]',
        NetworkSync,
        msgspec.toml.decode,
    )
    assert [sync.codec_of(t) for t in ("head.bias", "blocks.0.weight")] == ["fp32", "fp16"]
    assert sync.way == "two_phase"
    assert not is_exact(sync)


def test_heads_travel_by_factors_where_they_are_named(tmp_path: Path) -> None:
    plan = read(tmp_path, network(FACTORED))
    (sync,) = plan.network
    head, trunk = "network.head.weight", "network.blocks.0.mlp.fc1.weight"
    assert (sync.is_factored(head), sync.is_factored(trunk)) == (True, False)
    assert (sync.codec_of(head), sync.codec_of(trunk)) == ("fp32", "fp32")
    assert sync.way == "ring"
    # Up to rounding the weights of one process: run folders go on with it and without.
    assert is_exact_plan(plan)
    assert plan.digest == SyncPlan().digest


SYNC = st.builds(
    NetworkSync,
    name=st.just("member-0"),
    by=st.sampled_from([(), ("coordinator",), ("coordinator", "tower")]),
    what=st.sampled_from(["gradients", "parameters"]),
    every_pictures=st.none() | st.integers(1, 10**6),
    shares=st.sampled_from(["equal", "pace"]),
    route=st.sampled_from([None, "ring", "two_phase", "two_tier"]),
    shards=st.sampled_from(["equal", "link"]),
    codec=st.sampled_from(["fp32", "fp16", "int8", "top4"]),
    mask=st.sampled_from([None, 0.5, 0.1, 1.0]),
    keep=st.sampled_from([None, 0.3]),
    bucket_bytes=st.none() | st.integers(1, 10**9),
    period=st.sampled_from(["same", "grows"]),
    step_size=st.sampled_from(["given", "auto"]),
    moments=st.none() | st.integers(1, 9),
    when=st.sampled_from(["at_once", "background"]),
    owner=st.sampled_from(
        [MeanOwner(), OuterOwner(), OuterOwner(step=0.7, momentum=0.9), KfacOwner(), MuonOwner()]
    ),
    meet=st.sampled_from(
        [
            WholeGroup(),
            ShuffledGroups(size=3, cross_every=2),
            RequestedGroups(reach=math.inf, divide=True),
            Neighbourhood(stale=2),
            Neighbourhood(pairs=(("a", "b"), ("b", "c"))),
        ]
    ),
)


@settings(max_examples=40)
@given(SYNC, st.sampled_from(["strict", "star"]))
def test_plans_are_written_and_read(sync: NetworkSync, chain: str) -> None:
    plan = SyncPlan(chain=chain, network=(sync,))  # type: ignore[arg-type]
    again = decode_content("crew.toml", toml_bytes(plan), SyncPlan, msgspec.toml.decode)
    assert again == plan
    assert again.digest == plan.digest
    assert contradictions(again) == contradictions(plan)
    # Exact plans may replace each other within one run folder.
    assert is_exact_plan(plan) == (plan.digest == SyncPlan().digest)


def test_a_written_plan_is_complete(tmp_path: Path) -> None:
    plan = read(tmp_path, BOTH + 'what = "parameters"\ncodec = "int8"')
    path = tmp_path / "again.toml"
    write_plan(path, plan)
    assert read_plan(path, three(), WORK) == plan
    assert "[]" not in path.read_text()
    write_plan(path, SyncPlan())
    assert path.read_text() == 'format_version = 1\nfacts = ""\nchain = "strict"\n'
    assert read_plan(path) == SyncPlan()
    longer = msgspec.structs.replace(plan.network[1], every_pictures=8192)
    changed = msgspec.structs.replace(plan, network=(plan.network[0], longer))
    moved = msgspec.structs.replace(plan.network[1], by=("nuc",), every_pictures=4096)
    assert changed.digest != plan.digest
    assert msgspec.structs.replace(plan, network=(moved,)).digest == plan.digest


@pytest.mark.parametrize(
    ("more", "digest"),
    [
        ({}, "e6a49be6ed7047b046f826e56f6acb3c0a57f37581896df6315108e810822cf4"),
        (
            {"codec": "int8", "every_pictures": 8192, "by": ("a",)},
            "e84f247c4a263f1a35b7679574bc18b325460a095bac82094273d1a8cb8d650f",
        ),
    ],
)
def test_run_folders_of_before_go_on(more: dict[str, Any], digest: str) -> None:
    sync = NetworkSync(name="member-0", what="parameters", **more)
    assert SyncPlan(network=(sync,)).digest == digest
    for later in (
        {"period": "grows"},
        {"step_size": "auto"},
        {"moments": 3},
        {"when": "background"},
        {"owner": OuterOwner(step=1.5)},
        {"meet": ShuffledGroups()},
        {"meet": RequestedGroups(reach=math.inf)},
        {"meet": Neighbourhood(gap=8)},
        {"codec": "top4"},
        {"mask": 0.1},
        {"codec": "top4", "keep": 0.3},
    ):
        changed = msgspec.structs.replace(sync, **later)
        assert SyncPlan(network=(changed,)).digest != digest


def test_a_part_of_the_numbers_travels(tmp_path: Path) -> None:
    plan = read(tmp_path, masked("mask = 0.1"))
    sync = plan.network[0]
    assert (sync.way, sync.stride, sync.keep_share) == ("two_phase", 10, 0.2)
    assert not is_exact(sync)
    # What comes to the same is the same: it may change within a run folder.
    for text in ("mask = 0.1\nkeep = 0.2", "mask = 0.0999", "mask = 0.1\nroute = 'two_phase'"):
        assert read(tmp_path, masked(text)).digest == plan.digest
    for text in ("mask = 0.1\nkeep = 0.25", "mask = 0.2", ""):
        assert read(tmp_path, masked(text)).digest != plan.digest
    third = read(tmp_path, network("what = 'parameters'\nmask = 0.33")).network[0]
    assert (third.way, third.stride, third.codec) == ("two_phase", 3, "fp32")
    plain = read(tmp_path, network("what = 'parameters'\nroute = 'two_phase'"))
    whole = read(tmp_path, network("what = 'parameters'\nmask = 1.0"))
    assert whole.digest == plain.digest


def test_what_travels_in_parts_needs_memory_for_its_reference(tmp_path: Path) -> None:
    plan = read(tmp_path, BOTH + "what = 'parameters'\nmask = 0.1\ncodec = 'top4'")
    # 7 x 23 MB; the other network's gradients need 4 x 23.
    assert contradictions(plan, three(memory_bytes=162_000_000), WORK) == []
    found = contradictions(plan, three(memory_bytes=160_000_000), WORK)
    assert found
    assert all("by`: member-1 needs about 0.2 GB" in sentence for sentence in found)


def test_no_more_logits_are_kept_than_classes(tmp_path: Path) -> None:
    def work(classes: int) -> Work:
        return Work(networks=WORK.networks, answers=FrozenPasses(pictures=1, numbers=classes))

    text = f"[answers]\nkeep = 11\n{BOTH}"
    plan = read(tmp_path, text, work=work(11))
    assert plan.answers.keep == 11
    assert not is_exact_plan(plan)
    with pytest.raises(
        ConfigError, match=r"`answers\.keep`: expected at most 10, as many as classes, found 11"
    ):
        read(tmp_path, text, work=work(10))


def test_a_later_stage_keeps_fewer_micro_batches() -> None:
    """Blocks of 1 GB a batch, in 4 micro-batches: coordinator keeps three of them, nuc one."""
    teacher = NetworkWork(
        name="teacher", size_bytes=12, pictures=1, epochs=1, batch=64,
        activation_bytes=12e9 / 64, blocks=12,
    )  # fmt: skip
    work = Work(networks=(teacher,))
    stages = (
        Stage(blocks=4, by="coordinator"),
        Stage(blocks=4, by="tower"),
        Stage(blocks=4, by="nuc"),
    )
    sync = NetworkSync(name="teacher", micro_batches=4, stage=stages)
    for gb, lacking in ((3.1, set()), (2.9, {"coordinator"}), (1.9, {"coordinator", "tower"})):
        found = contradictions(SyncPlan(network=(sync,)), three(memory_bytes=int(gb * 1e9)), work)
        named = {
            name
            for name in ("coordinator", "tower", "nuc")
            if f"stage of {name} " in "".join(found)
        }
        assert named == lacking
    short = tuple(msgspec.structs.replace(stage, in_flight=1) for stage in stages)
    one = msgspec.structs.replace(sync, stage=short)
    assert contradictions(SyncPlan(network=(one,)), three(memory_bytes=1_100_000_000), work) == []


def test_pipelines_are_of_the_trainers_at_one_place_of_each_stage(tmp_path: Path) -> None:
    stages = (Stage(blocks=7, by=("coordinator", "den")), Stage(blocks=5, by=("tower", "nuc")))
    plan = SyncPlan(network=(NetworkSync(name="teacher", micro_batches=4, stage=stages),))
    write_plan(tmp_path / "crew.toml", plan)
    (sync,) = read_plan(tmp_path / "crew.toml").network
    assert sync == plan.network[0]
    assert sync.pipelines == (("coordinator", "tower"), ("den", "nuc"))
    assert sync.crew == ("coordinator", "tower", "den", "nuc")
    assert is_exact(sync)


def test_a_pipeline_keeps_its_part_of_a_batch() -> None:
    """Blocks of 1 GB a batch: half of it in each pipeline, of which a stage keeps it all."""
    teacher = NetworkWork(
        name="teacher", size_bytes=12, pictures=1, epochs=1, batch=64,
        activation_bytes=12e9 / 64, blocks=12,
    )  # fmt: skip
    work = Work(networks=(teacher,))
    one = (Stage(blocks=6, by="coordinator"), Stage(blocks=6, by="nuc", in_flight=1))
    two = (
        Stage(blocks=6, by=("coordinator", "tower")),
        Stage(blocks=6, by=("nuc", "den"), in_flight=1),
    )
    names = ("coordinator", "tower", "nuc", "den")
    for stages, gb, lacking in ((one, 5.9, True), (one, 6.1, False), (two, 2.9, True),
                                (two, 3.1, False)):  # fmt: skip
        facts = Facts(
            trainer=tuple(
                msgspec.structs.replace(three().trainer[0], name=name, memory_bytes=int(gb * 1e9))
                for name in names
            )
        )
        sync = NetworkSync(name="teacher", micro_batches=2, stage=stages)
        found = contradictions(SyncPlan(network=(sync,)), facts, work)
        assert any("the stage of coordinator " in one for one in found) == lacking


@pytest.mark.parametrize(
    ("blocks", "size_gb", "nuc_gb", "message"),
    [
        (13, 1.2, 3.0, r"stage`: expected 13 blocks together, found 12"),
        (12, 1.2, 1.9, r"stage`: the stage of nuc needs about 2.1 GB, nuc has 1.9 GB"),
        (12, 1.2, 2.1, ""),
        (12, 4.0, 7.0, r"stage`: the coordinator, .* weights whole: 4.0 GB, tower has 3.0 GB"),
    ],
)
def test_stages_have_to_fit(blocks: int, size_gb: float, nuc_gb: float, message: str) -> None:
    teacher = NetworkWork(
        name="teacher", size_bytes=size_gb * 1e9, pictures=1, epochs=1, blocks=blocks
    )
    plan = SyncPlan(
        network=(
            NetworkSync(
                name="teacher",
                micro_batches=4,
                stage=(Stage(blocks=7, by="coordinator"), Stage(blocks=5, by="nuc")),
            ),
        )
    )
    memory = {"coordinator": 16.0, "tower": 3.0, "nuc": nuc_gb}
    facts = Facts(
        trainer=tuple(
            msgspec.structs.replace(trainer, memory_bytes=int(memory[trainer.name] * 1e9))
            for trainer in three().trainer
        )
    )
    found = contradictions(plan, facts, Work(networks=(teacher,)))
    assert [bool(re.search(message, one)) for one in found] == [True] * bool(message)
