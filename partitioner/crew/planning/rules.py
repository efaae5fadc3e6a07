"""Exclusions among the keys of a network's training together, as one table of data. Pure.

From the table come the refusals of crew.toml, the candidates of the planner, tests, and whether a
network gets the weights of one process; docs/reference/crew.md has it as a table, held by a test.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

#: Words of a key that has any value, or none.
GIVEN, MISSING = "given", "missing"
#: Stands for a key in rules of what gives the weights of one process, up to rounding.
EXACT = "weights of one process"
#: Kinds of `meet` in which only some of a network's trainers meet at a time.
PARTIAL = ("shuffled", "on_request", "neighbours")
#: Kinds of `owner` of a layer.
_BY_LAYER = ("kfac", "muon")


class Rule(NamedTuple):
    """A key that may have some values, by default any, only where another has one of `allowed`."""

    key: str
    other: str
    allowed: tuple[str, ...]
    because: str
    values: tuple[str, ...] = (GIVEN,)

    def contradicts(self, words: Mapping[str, frozenset[str]]) -> bool:
        """Tell whether a training, by the words of its keys, breaks this rule."""
        applies = self.key == EXACT or not words[self.key].isdisjoint(self.values)
        return applies and not words[self.other] <= set(self.allowed)

    def sentence(self, words: Mapping[str, frozenset[str]]) -> str:
        """The refusal, which goes on after "`network[i]."."""
        found = sorted(words[self.other] - set(self.allowed))
        shown = "" if found in ([GIVEN], [MISSING]) else f", found {_any_of(found)}"
        return f"{self.key}`: expected {self.when}{shown}: {self.because}"

    @property
    def when(self) -> str:
        """The values and what they need, in words."""
        what = "" if GIVEN in self.values else f"{_any_of(self.values)} "
        if self.allowed == (GIVEN,):
            return f"{what}only with {self.other}"
        if self.allowed == (MISSING,):
            return f"{what}only without {self.other}"
        return f"{what}only with {self.other} = {_any_of(self.allowed)}"


#: Of one network; what depends on counts, on other networks or on what was measured is not here.
RULES = (
    Rule(EXACT, "what", ("gradients",), "each trainer's own steps are others"),
    Rule(EXACT, "codec", ("fp32", "factors"), "other codecs round"),
    Rule(EXACT, "owner", ("mean",), "its steps are not the optimiser's"),
    Rule("every_pictures", "what", ("parameters",), "gradients meet every step"),
    Rule("period", "what", ("parameters",), "gradients meet every step", ("grows",)),
    Rule("step_size", "what", ("parameters",), "gradients are of whole batches", ("auto",)),
    Rule("moments", "what", ("parameters",), "those of averaged gradients are the same on all"),
    Rule("owner", "what", ("parameters",), "an outer step is one of parameters", ("outer",)),
    Rule("owner", "what", ("gradients",), "curvature is that of gradients", ("kfac",)),
    Rule("owner", "codec", ("fp32",), "small eigenvalues make rounding large", ("kfac",)),
    Rule("owner", "what", ("gradients",), "its momentum is that of gradients", ("muon",)),
    Rule("owner", "codec", ("fp32",), "owners get gradients as they are", ("muon",)),
    Rule("owner", "route", ("ring", "two_phase"), "each layer has one owner of all", _BY_LAYER),
    Rule("when", "what", ("parameters",), "a step needs its gradients", ("background",)),
    Rule("when", "owner", ("mean",), "its momentum would be late", ("background",)),
    Rule("when", "moments", (MISSING,), "AdamW's go on meanwhile", ("background",)),
    Rule("when", "what", ("gradients",), "rounds begin with all parameters", ("next_forward",)),
    Rule("when", "route", ("two_phase", "two_tier"), "a ring has one phase", ("next_forward",)),
    Rule("when", "owner", ("mean",), "its steps need all gradients", ("next_forward",)),
    Rule("when", "codec", ("fp32", "fp16", "int8"), "factors have no owner", ("next_forward",)),
    Rule("meet", "what", ("parameters",), "gradients are averaged by all", PARTIAL),
    Rule("meet", "owner", ("mean",), "an outer step is from a mean of all", PARTIAL),
    Rule("meet", "when", ("at_once",), "who meets next has to be known", PARTIAL),
    Rule("meet", "moments", (MISSING,), "neighbours send parameters alone", ("neighbours",)),
    Rule("codec", "what", ("parameters",), "it leaves most of a gradient out", ("top4",)),
    Rule("codec", "route", ("two_phase",), "means of a site have most numbers", ("top4",)),
    Rule("codec", "owner", ("mean",), "most numbers of a mean are not there to step to", ("top4",)),
    Rule("codec", "meet", ("everyone",), "its reference is the same on all", ("top4",)),
    Rule("codec", "what", ("gradients",), "parameters are products of nothing", ("factors",)),
    Rule("codec", "route", ("ring", "two_phase"), "each sends its own to all", ("factors",)),
    Rule("mask", "what", ("parameters",), "a step needs whole gradients"),
    Rule("mask", "route", ("two_phase",), "the other routes send vectors whole"),
    Rule("mask", "owner", ("mean",), "most numbers of a mean are not there to step to"),
    Rule("mask", "meet", ("everyone",), "its reference is the same on all"),
    Rule("bucket_bytes", "what", ("gradients",), "means of parameters are taken at once"),
    Rule("shares", "what", ("gradients",), "rounds follow paces anyway", ("pace",)),
    Rule("route", "codec", ("fp32", "fp16", "factors"), "sums of its codes overflow", ("ring",)),
    Rule("shards", "route", ("two_phase",), "the other routes have no owners to choose", ("link",)),
    Rule("micro_batches", "stage", (GIVEN,), "a pipeline alone has them"),
    Rule("stage", "name", ("teacher",), "members are small"),
    Rule("stage", "what", ("gradients",), "all stages take every step"),
    Rule("stage", "codec", ("fp32",), "a stage's gradients are its own"),
    Rule("stage", "owner", ("mean",), "a stage's layers have no other owner"),
    Rule("stage", "when", ("at_once",), "a stage has its parameters alone"),
    Rule("stage", "shares", ("equal",), "pipelines have equal parts of a batch"),
    Rule("stage", "bucket_bytes", (MISSING,), "a stage's gradients are averaged at once"),
    Rule("stage", "by", (MISSING,), "stages name their trainers"),
    Rule("stage", "micro_batches", (GIVEN,), "a batch is cut into as many"),
)


def refusals(words: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """Sentences on what contradicts itself, by the words of a training's keys."""
    for rule in RULES:
        if rule.key != EXACT and rule.contradicts(words):
            yield rule.sentence(words)


def gives_weights_of_one(words: Mapping[str, frozenset[str]]) -> bool:
    """Tell whether a training gives the weights of one process, up to rounding."""
    return not any(rule.contradicts(words) for rule in RULES if rule.key == EXACT)


def _any_of(words: "tuple[str, ...] | list[str]") -> str:
    return " or ".join(f'"{word}"' for word in words)
