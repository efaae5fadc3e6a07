"""Choice of who leaves where connections or memory are short: records and times in."""

from functools import partial

from mdp.gateway.places import Claim, ConnectionPlaces, Pool


class Shared:
    """A pool, and who had to leave it."""

    def __init__(self, limit: int) -> None:
        self.pool = Pool(limit)
        self.gone: list[str] = []

    def claim(self, who: str, name: str, moved_s: float = 0.0, *, busy: bool = False) -> Claim:
        return Claim(who, moved_s, busy=busy, leave=lambda: self.gone.append(name))

    def takes(self, who: str, name: str, moved_s: float, amount: int = 1, **kind: bool) -> bool:
        return self.pool.take(self.claim(who, name, moved_s, **kind), amount)


def test_of_whoever_holds_most_leaves_what_has_not_moved_for_longest() -> None:
    shared = Shared(4)
    for name, moved_s in (("a1", 3.0), ("a2", 1.0)):
        assert shared.takes("a", name, moved_s)
    assert shared.takes("b", "b1", 0.0)
    assert shared.takes("c", "c1", 0.5)
    assert shared.takes("d", "d1", 9.0)
    assert shared.gone == ["a2"]
    # Now all hold as much: who has been there longest.
    assert shared.takes("e", "e1", 9.0)
    assert shared.gone == ["a2", "a1"]


def test_nobody_holds_more_than_half() -> None:
    shared = Shared(6)
    for number in range(3):
        assert shared.takes("a", f"a{number}", number)
    assert shared.takes("a", "a3", 3.0)
    assert shared.gone == ["a0"], "there is room, but not for one alone"
    busy = Shared(6)
    for number in range(3):
        assert busy.takes("a", f"a{number}", number, busy=True)
    assert busy.takes("b", "b0", 0.0)
    assert not busy.takes("a", "a3", 3.0)
    assert busy.gone == []


def test_what_is_being_answered_stays() -> None:
    shared = Shared(4)
    for name, busy in (("a1", True), ("a2", False)):
        assert shared.takes("a", name, 0.0, busy=busy)
    assert shared.takes("b", "b1", 0.0, busy=True)
    assert shared.takes("c", "c1", 0.0, busy=True)
    assert shared.takes("d", "d1", 5.0, busy=True)
    assert shared.gone == ["a2"]
    assert not shared.takes("e", "e1", 6.0)
    assert shared.gone == ["a2"]


def test_nobody_makes_those_leave_who_hold_less() -> None:
    shared = Shared(4)
    assert shared.takes("a", "a1", 0.0, busy=True)
    assert shared.takes("b", "b1", 0.0, busy=True)
    assert shared.takes("b", "b2", 0.0, busy=True)
    assert shared.takes("c", "c1", 0.0)
    # All that a and b hold is being answered; with one more, a holds more than c.
    assert not shared.takes("a", "a2", 1.0)
    assert shared.gone == []
    assert shared.takes("d", "d1", 1.0)
    assert shared.gone == ["c1"]


def test_bytes_count_as_they_come() -> None:
    shared = Shared(100)
    large, small = shared.claim("a", "large", 0.0), shared.claim("b", "small", 5.0)
    for _ in range(5):
        assert shared.pool.take(large, 10)
    assert not shared.pool.take(large, 10), "half is the most for one"
    assert large.amount == 50
    assert shared.pool.take(small, 40)
    assert shared.takes("c", "third", 6.0, 10)
    assert shared.takes("c", "fourth", 6.0, 10)
    assert (shared.gone, large.amount, small.amount) == (["large"], 0, 40)
    shared.pool.release(small)
    assert shared.takes("d", "fifth", 7.0, 50)
    assert shared.gone == ["large"]


def test_connections_without_a_request_cost_no_other_a_place() -> None:
    places, gone = ConnectionPlaces(16), list[str]()

    def connection(address: str, name: str, moved_s: float) -> Claim:
        claim = Claim(address, moved_s, leave=lambda: gone.append(name))
        places.arrive(claim)
        return claim

    honest = [connection("10.0.0.1", f"honest {n}", 0.0) for n in range(2)]
    assert all(places.admit(claim, "token") for claim in honest)
    assert places.admit(honest[0], "token"), "its second request"
    # A quarter is for connections that have asked nothing, half of it for one address.
    strangers = [connection("10.0.0.2", f"stranger {n}", float(n)) for n in range(100)]
    assert gone == [f"stranger {n}" for n in range(98)]
    late = connection("10.0.0.1", "late", 200.0)
    gone.clear()
    for address in range(3, 40):
        connection(f"10.0.0.{address}", f"stranger {address}", 100.0 + address)
        if address == 3:
            assert places.admit(late, "token")
    assert all("stranger" in name for name in gone)
    places.leave(honest[0])
    places.leave(strangers[0])
    # Three quarters are for those that were let in, half of them for one caller.
    for number in range(9):
        claim = connection("10.0.0.1", f"more {number}", 300.0 + number)
        claim.busy = places.admit(claim, "token")
    assert places.admit(connection("10.0.0.1", "other", 400.0), "other token")


def test_one_caller_is_told_to_wait_once_it_has_half_of_all_answers_under_way() -> None:
    places, gone = ConnectionPlaces(16), list[int]()
    claims = [Claim("10.0.0.1", float(n), leave=partial(gone.append, n)) for n in range(7)]
    admitted = []
    for claim in claims:
        places.arrive(claim)
        admitted.append(places.admit(claim, "token"))
        claim.busy = True
    assert admitted == [True] * 6 + [False]
    assert gone == []
    claims[0].busy = False
    assert places.admit(claims[6], "token")
    assert gone == [0]
