"""Target: what anybody on the local network may announce, and the fleet that is proposed of it."""

from collections.abc import Mapping
from functools import cache

import msgspec

from mdp.discovery.announcements import Found, fleet_text, propose, read_announcement, texts_of
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet
from mdp.testing.bundles import DEVICES, write_bundle
from tests.fuzz.messages import frames_of, join_bytes, join_frames
from tests.fuzz.target import Structure, Target, scratch

#: A key that the user has of `beta`: any 40 characters serve, as nothing connects.
KEYS = {DEVICES[1]: "0" * 40}
#: Frames of one announcement: its name, addresses, port, and texts.
_PARTS = 4


@cache
def _bundle() -> Bundle:
    return Bundle.open(write_bundle(scratch("announcements") / "bundle"))


def parse_found(data: bytes) -> list[Found]:
    """Up to four announcements; any bytes are some."""
    frames = frames_of(data, 4 * _PARTS)
    found = []
    for start in range(0, len(frames) - _PARTS + 1, _PARTS):
        name, addresses, port, texts = frames[start : start + _PARTS]
        pairs = [pair.partition(b"=") for pair in texts.split(b";")]
        found.append(
            Found(
                name=name.decode(errors="replace"),
                addresses=tuple(addresses.decode(errors="replace").split(",")),
                port=int.from_bytes(port[:2], "big"),
                texts={key: value if equals else None for key, equals, value in pairs},
            )
        )
    return found


def read_announcements(data: bytes) -> bool:
    """Whatever is announced: nothing of it is trusted, and what is shown is harmless."""
    found = parse_found(data)
    for on_loopback in (True, False):
        proposal = propose(_bundle(), found, keys=KEYS, on_loopback=on_loopback)
        for left in proposal.left_out:
            shown = (left.device, left.address, left.reason)
            assert all(text.isprintable() for text in shown), shown
        for entry in proposal.entries:
            assert _bundle().assignment(entry.device.partition("/")[0]).k == entry.k
            if entry.key is None:
                assert on_loopback
                assert not entry.is_exposed
            else:
                assert entry.key in KEYS.values()
        names = {entry.device for entry in proposal.entries}
        addresses = {entry.address for entry in proposal.entries}
        assert len(names) == len(addresses) == len(proposal.entries)
        distinct = {read_announcement(one) for one in found}
        assert len(proposal.entries) + len(proposal.left_out) == len(distinct)
        if proposal.entries:
            fleet = Fleet(bundle="bundle", devices=list(proposal.entries))
            assert msgspec.toml.decode(fleet_text(fleet, proposal.left_out), type=Fleet) == fleet
    return bool(propose(_bundle(), found, keys=KEYS, on_loopback=True).entries)


def _announcements() -> Mapping[str, bytes]:
    announced = []
    for k, device in enumerate(DEVICES[:2]):
        texts = texts_of(device=device, digest=_bundle().digest, k=k, public_key=KEYS.get(device))
        pairs = b";".join(f"{key}={value}".encode() for key, value in texts.items())
        port = (7500 + k).to_bytes(2, "big")
        announced.append([device.encode(), b"127.0.0.1,10.0.0.9", port, pairs])
    both = [frame for frames in announced for frame in frames]
    return {
        "plain": join_frames(announced[0]),
        "key": join_frames(announced[1]),
        "both": join_frames(both),
    }


TARGETS = (
    Target(
        name="announcements",
        read=read_announcements,
        seeds=_announcements,
        share=0.005,
        structure=Structure(parse=frames_of, render=join_bytes),
        words=(b"v=1;", b"device=", b"bundle=", b"k=", b"key=", b"10.0.0.9", b"224.0.0.1"),
    ),
)
