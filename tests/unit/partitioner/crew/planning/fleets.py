"""Facts for tests: the fleets of which predictions are known."""

from collections.abc import Mapping

from partitioner.crew.planning.facts import Facts, Line, Trainer, Trunk

MBIT = 1e6 / 8


def trainers(
    paces: Mapping[str, Mapping[str, float]],
    memory_bytes: int = 64 * 10**9,
    rates: Mapping[str, float] | None = None,
) -> tuple[Trainer, ...]:
    """Trainers on loopback with their paces, in pictures/s by network, and links in bytes/s."""
    return tuple(
        Trainer(
            name=name,
            address=f"127.0.0.{n}",
            pictures_per_s=dict(by_network),
            memory_bytes=memory_bytes,
            bytes_per_s=(rates or {}).get(name),
        )
        for n, (name, by_network) in enumerate(paces.items(), 1)
    )


def lines(bytes_per_s: Mapping[str, float], latency_s: float = 0.0) -> tuple[Line, ...]:
    """Lines of trainers that are connected to one switch, each at its own rate."""
    names = list(bytes_per_s)
    return tuple(
        Line(
            a=a,
            b=b,
            latency_s=latency_s,
            bytes_per_s=min(bytes_per_s[a], bytes_per_s[b]),
            back_bytes_per_s=min(bytes_per_s[a], bytes_per_s[b]),
        )
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    )


def three(memory_bytes: int = 64 * 10**9) -> Facts:
    """A desktop at 1 Gbit/s, and a server and a mini-PC at 100 Mbit/s."""
    paces = {
        "coordinator": {"member-0": 400.0, "member-1": 900.0},
        "tower": {"member-0": 200.0, "member-1": 450.0},
        "nuc": {"member-0": 100.0, "member-1": 220.0},
    }
    rates = {"coordinator": 1000 * MBIT, "tower": 100 * MBIT, "nuc": 100 * MBIT}
    return Facts(trainer=trainers(paces, memory_bytes, rates), line=lines(rates))


def two_sites() -> Facts:
    """Two sites of two: 400 Mbit/s inside, and a trunk of 40 Mbit/s."""
    site = {"a0": "a", "a1": "a", "b0": "b", "b1": "b"}
    names = list(site)
    found = []
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            rate = (400 if site[a] == site[b] else 40) * MBIT
            found.append(Line(a=a, b=b, latency_s=0.0, bytes_per_s=rate, back_bytes_per_s=rate))
    trunk = Trunk(name="trunk", inside=("b0", "b1"), bytes_per_s=40 * MBIT)
    paces = {name: {"member-0": 100.0} for name in names}
    return Facts(trainer=trainers(paces), line=tuple(found), trunk=(trunk,))
