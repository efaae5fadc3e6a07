"""facts.toml: what was measured of trainers, of the lines between them, and of shared trunks."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mdp.files import NAME, NAME_FORM, Record, pattern, read_toml
from partitioner.crew.coordinator.addresses import is_private

Name = Annotated[str, pattern(NAME, NAME_FORM)]
Positive = Annotated[float, Meta(gt=0, lt=1e15)]
Seconds = Annotated[float, Meta(ge=0, le=600)]
#: Rates of lines within a site differ by less than this from one to the next.
SITE_STEP = 3.0
#: The pace of frozen passes, in `Trainer.pictures_per_s` beside those of networks.
ANSWERS = "answers"


def reason_to_refuse_address(address: str) -> str:
    """The reason that no trainer may listen on `address`, HOST or HOST:PORT; empty where one may.

    A crew's messages are plain text, so its addresses are of loopback or of a private network.
    """
    try:
        allowed = is_private(_host(address))
    except ValueError:
        return f"expected an IP address, got {address!r}"
    return "" if allowed else f"expected a loopback or private address, got {address!r}"


def _host(address: str) -> str:
    """The HOST of HOST or HOST:PORT."""
    host = address.rpartition(":")[0] if address.count(":") == 1 or "]" in address else address
    return host.strip("[]")


class Trainer(Record, frozen=True, kw_only=True):
    """A device that trains."""

    name: Name
    address: str
    #: Network, or `answers`, to pictures trained, or answered, in a second.
    pictures_per_s: dict[str, Positive] = msgspec.field(default_factory=dict)
    memory_bytes: Annotated[int, Meta(gt=0)]
    #: For networks without a measured pace.
    gflops: Positive | None = None
    #: Of its own link, each way, where that is more than its quickest line shows.
    bytes_per_s: Positive | None = None
    #: Instead of the site that rates show.
    site: Name | None = None

    def __post_init__(self) -> None:
        if reason := reason_to_refuse_address(self.address):
            raise ValueError(f"`address`: {reason}")


class Line(Record, frozen=True, kw_only=True):
    """Two trainers, as measured while no other two exchange anything."""

    a: Name
    b: Name
    #: One way.
    latency_s: Seconds
    #: From a to b, and back.
    bytes_per_s: Positive
    back_bytes_per_s: Positive


class Trunk(Record, frozen=True, kw_only=True):
    """A link that the trainers `inside` share on the way to all others."""

    name: Name
    inside: Annotated[tuple[Name, ...], Meta(min_length=1)]
    #: Each way.
    bytes_per_s: Positive


class Facts(Record, frozen=True, kw_only=True):
    """Trainers, the coordinator first, and how they are connected."""

    format_version: Literal[1] = 1
    trainer: Annotated[tuple[Trainer, ...], Meta(min_length=1)]
    line: tuple[Line, ...] = ()
    trunk: tuple[Trunk, ...] = ()

    def __post_init__(self) -> None:
        known = set(self.names)
        for name, count in Counter(self.names).items():
            if count > 1:
                raise ValueError(f"`trainer`: expected each name once, found {name!r} twice")
        for key, names in self._mentions():
            for name in names:
                if name not in known:
                    raise ValueError(f"`{key}`: expected a trainer of this file, got {name!r}")
        pairs = Counter(frozenset((line.a, line.b)) for line in self.line)
        for pair, count in pairs.items():
            if len(pair) == 1 or count > 1:
                named = " and ".join(sorted(pair))
                raise ValueError(f"`line`: expected two trainers, each pair once, got {named}")

    def _mentions(self) -> Iterable[tuple[str, tuple[str, ...]]]:
        for line in self.line:
            yield "line", (line.a, line.b)
        for trunk in self.trunk:
            yield "trunk.inside", trunk.inside

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all trainers."""
        return tuple(trainer.name for trainer in self.trainer)

    def of(self, name: str) -> Trainer:
        """A trainer by its name; raises ValueError."""
        return self.trainer[self.names.index(name)]

    @property
    def digest(self) -> str:
        """Identity of what was measured, as 64 hexadecimal digits."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()

    def is_connected(self, names: Iterable[str]) -> bool:
        """Tell whether the lines between all pairs of `names` were measured."""
        pairs = {frozenset((line.a, line.b)) for line in self.line}
        some = list(names)
        return all(frozenset((a, b)) in pairs for i, a in enumerate(some) for b in some[:i])

    @property
    def machines(self) -> list[tuple[str, ...]]:
        """Trainers by machine, as their addresses show."""
        found: dict[str, list[str]] = {}
        for trainer in self.trainer:
            found.setdefault(_host(trainer.address), []).append(trainer.name)
        return [tuple(names) for names in found.values()]

    @property
    def sites(self) -> list[tuple[str, ...]]:
        """Trainers by site: where no trainer names its site, as their lines' rates show."""
        if not any(trainer.site for trainer in self.trainer):
            return sites_of(self.line, self.names)
        sites: dict[str, list[str]] = {}
        for trainer in self.trainer:
            sites.setdefault(trainer.site or f"of {trainer.name}", []).append(trainer.name)
        return [tuple(names) for names in sites.values()]


def read_facts(path: str | os.PathLike[str]) -> Facts:
    """Read facts.toml; raises ConfigError naming file, key and what was expected."""
    return read_toml(path, Facts)


def sites_of(lines: Sequence[Line], names: Sequence[str]) -> list[tuple[str, ...]]:
    """Trainers by site, by single linkage over rates, in the order of `names`.

    Trainers are joined from the quickest line to the slowest; the first line that is slower than
    the one that joined before by more than `SITE_STEP` lies between sites, as do all after it.
    """
    site = {name: {name} for name in names}
    last = None
    rates = [(min(line.bytes_per_s, line.back_bytes_per_s), line) for line in lines]
    for rate, line in sorted(rates, key=lambda one: -one[0]):
        if site[line.a] is site[line.b]:
            continue
        if last is not None and last > SITE_STEP * rate:
            break
        last = rate
        joined = site[line.a] | site[line.b]
        site.update(dict.fromkeys(joined, joined))
    return list(dict.fromkeys(tuple(n for n in names if n in site[name]) for name in names))


def tournament(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Rounds of disjoint pairs, in which every two of `names` meet once: the circle method.

    n - 1 rounds of n / 2 pairs; with an odd n, n rounds in each of which one trainer waits.
    """
    circle: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds
