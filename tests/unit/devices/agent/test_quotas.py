"""Quotas of limited clients, and how often an audit log writes. No clocks, no files."""

from devices.access.audit import Rate
from devices.agent.quotas import Quotas
from mdp.formats.keys import ClientLimits


def test_a_client_without_limits_uses_what_it_likes() -> None:
    quotas = Quotas()
    quotas.limit({"office": ClientLimits(), "phone": ClientLimits(bytes_per_s=1.0)})
    quotas.charge(["office"], 0.0, 1e6)
    assert quotas.refusal("office", 10**9, 1e6) == quotas.refusal("other", 10**9, 1e6) == ""


def test_bytes_are_bounded_in_the_long_run() -> None:
    quotas = Quotas()
    quotas.limit({"phone": ClientLimits(bytes_per_s=1000.0)})
    let_through = sum(not quotas.refusal("phone", 100, now / 100) for now in range(1000))
    # Ten seconds' worth, and what may be used at once.
    assert 100 <= let_through <= 111
    said = quotas.refusal("phone", 100, 9.99)
    assert said == "this client's 1,000 bytes a second are used up"


def test_computing_time_is_bounded_in_the_long_run() -> None:
    quotas = Quotas()
    quotas.limit({"phone": ClientLimits(computing_share=0.25)})
    now_s = used_s = 0.0
    while now_s < 100.0:
        if quotas.refusal("phone", 1, now_s):
            now_s += 0.01
            continue
        # Computed together with another client's, which has half of the time.
        quotas.charge(["phone", "office"], now_s, now_s + 0.2)
        now_s, used_s = now_s + 0.2, used_s + 0.1
    assert 25.0 <= used_s <= 25.0 + 0.5
    said = quotas.refusal("phone", 1, now_s - 0.2)
    assert said == "this client's 25% of the computing time are used up"
    quotas.limit({})
    assert quotas.refusal("phone", 1, now_s) == ""


def test_lines_are_bounded_and_those_left_out_counted() -> None:
    rate = Rate(per_s=2.0, at_once=3)
    assert [rate.allows(0.0) for _ in range(5)] == [True, True, True, False, False]
    assert (rate.left_out, rate.allows(0.5), rate.allows(0.5)) == (2, True, False)
