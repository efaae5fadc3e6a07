"""Who is left out of a call, and who is asked without being waited for. Pure."""

from collections.abc import Mapping

from mdp.requests.health import Health
from mdp.requests.latency import Lateness
from mdp.requests.session import PROBATION


def left_out(
    k_of: Mapping[str, int],
    gone: Mapping[str, str],
    health: Mapping[str, Health],
    lateness: Lateness,
    tests: Mapping[str, int],
    now_s: float,
    budget_s: float,
) -> tuple[Mapping[str, str], Mapping[str, int]]:
    """Device -> why a call with `budget_s` is not to ask it; device -> k of those it only tries.

    `k_of` has all devices, `gone` those that are not connected, with the reason; `tests` those that
    are being tried. Where nobody else is left, suspects are waited for like any other.
    """
    out = {d: h.reason for d, h in health.items() if h.cause and d not in gone}
    # In order, and each of them once.
    proving = {d: None for d, h in health.items() if h.on_probation and d not in gone}
    late = {d: known for d, known in lateness.late_for(budget_s) if d not in gone}
    if not out and not proving and not late:
        return gone, {}
    suspects = len(out.keys() | proving.keys() | late.keys())
    if len(k_of) == len(gone) + suspects:
        if suspects > len(out):
            return {**gone, **out}, {}
        # Even those that are out are a chance; whoever takes it is not kept waiting for others.
        return gone, {device: k_of[device] for device in out}
    for device, known in late.items():
        if device in out:
            continue
        if now_s < known.paused_until_s:
            proving.pop(device, None)
            out[device] = known.reason(budget_s)
        else:
            proving[device] = None
    unavailable, probing = {**gone, **out}, dict[str, int]()
    for device in proving:
        if device in tests or k_of[device] in probing.values():
            unavailable[device] = PROBATION
        else:
            probing[device] = k_of[device]
    return unavailable, probing
