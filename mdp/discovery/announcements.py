"""Announcements of agents on the local network, and the fleet that they propose. Pure.

Announcements are untrusted: they give addresses only. Identity is decided by the user's public key
files, and in the end by the handshake.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mdp.files import Record
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet, FleetEntry, fleet_toml
from mdp.formats.keys import FINGERPRINT_DIGITS, fingerprint, is_loopback
from mdp.formats.plan import MAX_MEMBERS
from mdp.protocol.messages import as_line

#: How much of a bundle's digest is announced.
DIGEST_DIGITS = 16
#: Addresses of one announcement that are looked at.
MAX_ADDRESSES = 8
#: Characters of a stranger's text that are shown.
SHOWN_CHARACTERS = 80
_DEVICE = r"^[a-z0-9][a-z0-9._-]{0,63}\Z"


class Announced(Record, frozen=True):
    """The texts of an announcement (TXT, RFC 6763), once they have been checked."""

    v: Literal["1"]
    device: Annotated[str, Meta(pattern=_DEVICE)]
    #: Beginning of the digest of the bundle that is served.
    bundle: Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{DIGEST_DIGITS}}}\Z")]
    k: Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]
    #: Fingerprint of the agent's public key; empty if it speaks plain text.
    key: Annotated[str, Meta(pattern=rf"^([0-9a-f]{{{FINGERPRINT_DIGITS}}})?\Z")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One announcement as it came: anything in it may be a lie, or no text at all."""

    name: str
    addresses: tuple[str, ...]
    port: int
    texts: Mapping[bytes, bytes | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A well-formed announcement."""

    device: str
    address: str
    bundle: str
    k: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """An announcement without an entry, safe to show, and why."""

    device: str
    address: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetProposal:
    """Entries of a fleet file."""

    entries: tuple[FleetEntry, ...]
    left_out: tuple[LeftOut, ...]
    #: Devices of the bundle for which there is no entry.
    absent: tuple[str, ...]


def texts_of(*, device: str, digest: str, k: int, public_key: str | None) -> dict[str, str]:
    """An agent's announcement."""
    return {
        "v": "1",
        "device": device,
        "bundle": digest[:DIGEST_DIGITS],
        "k": str(k),
        "key": "" if public_key is None else fingerprint(public_key),
    }


def printable(text: str) -> str:
    """An untrusted text, shortened and printable."""
    line = as_line(text)
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}..."


def read_announcement(found: Found) -> Announcement | LeftOut:
    """The announcement in `found`, or why it is malformed."""
    name = printable(found.name)
    where = ", ".join(map(printable, found.addresses[:MAX_ADDRESSES])) or "nowhere"
    try:
        texts = {key.decode(): (value or b"").decode() for key, value in found.texts.items()}
        # Unknown keys may be of a later version.
        known = {key: texts[key] for key in Announced.__struct_fields__ if key in texts}
        said = msgspec.convert(known, Announced, strict=False)
        address = _address(found.addresses)
        if not 0 < found.port < 65536:
            raise ValueError(f"expected a port from 1 to 65535, got {found.port}")
    except (ValueError, msgspec.ValidationError) as error:
        reason = "texts that are no UTF-8" if isinstance(error, UnicodeError) else str(error)
        return LeftOut(device=name, address=where, reason=f"malformed: {printable(reason)}")
    return Announcement(
        device=said.device,
        address=f"tcp://{address}:{found.port}",
        bundle=said.bundle,
        k=said.k,
        key=said.key,
    )


def _address(addresses: Sequence[str]) -> str:
    """The first address that a client can connect to; raises ValueError."""
    for text in addresses[:MAX_ADDRESSES]:
        if re.fullmatch(r"[0-9.]{7,15}", text):
            address = ipaddress.IPv4Address(text)
            if not (address.is_unspecified or address.is_multicast or address.is_reserved):
                return str(address)
    raise ValueError("expected an IPv4 address")


def propose(
    bundle: Bundle, found: Sequence[Found], *, keys: Mapping[str, str], on_loopback: bool
) -> FleetProposal:
    """Entries for `found`, and why others were left out.

    `keys` are the user's public keys by their file's stem; `on_loopback` is whether announcements
    came from this machine alone.
    """
    left_out: list[LeftOut] = []
    claims: dict[str, list[Announcement]] = {}
    for read in dict.fromkeys(map(read_announcement, found)):
        if isinstance(read, LeftOut):
            left_out.append(read)
            continue
        try:
            name = _entry_name(bundle, read, keys, on_loopback=on_loopback)
        except ValueError as error:
            left_out.append(_leave_out(read, str(error)))
        else:
            claims.setdefault(name, []).append(read)
    entries: list[FleetEntry] = []
    for name, claimants in sorted(claims.items()):
        if len(claimants) == 1:
            (claim,) = claimants
            # The user's copy of the key, never an announced one.
            key = keys[name.replace("/", "-")] if claim.key else None
            entries.append(FleetEntry(device=name, address=claim.address, k=claim.k, key=key))
        else:
            left_out += [_one_of_many(name, claim, len(claimants)) for claim in claimants]
    entries, shared = _without_shared_addresses(entries)
    there = {entry.k for entry in entries}
    absent = [a.device for a in bundle.manifest.plan.assignments if a.k not in there]
    return FleetProposal(
        entries=tuple(sorted(entries, key=lambda entry: (entry.k, entry.device))),
        left_out=tuple(left_out + shared),
        absent=tuple(absent),
    )


def _leave_out(claim: Announcement, reason: str) -> LeftOut:
    return LeftOut(device=claim.device, address=claim.address, reason=reason)


def _entry_name(
    bundle: Bundle, claim: Announcement, keys: Mapping[str, str], *, on_loopback: bool
) -> str:
    """The name of `claim`'s entry; raises ValueError if it gets none."""
    mine = bundle.digest[:DIGEST_DIGITS]
    if claim.bundle != mine:
        raise ValueError(f"serves another bundle: {claim.bundle}, expected {mine}")
    plan = bundle.manifest.plan
    planned = plan.assignment_of(claim.device)
    if planned is None:
        raise ValueError("is no device of this bundle")
    if planned.k != claim.k:
        raise ValueError(f"announces sub-model {claim.k}, the bundle gives it {planned.k}")
    if not claim.key:
        if on_loopback and is_loopback(claim.address):
            if claim.device in keys:
                raise ValueError(
                    f"announces no key, --keys has {claim.device}.public: expected an "
                    "encrypted agent"
                )
            return claim.device
        raise ValueError("announces no key: plain text over a network is never proposed")
    owners = [stem for stem, key in sorted(keys.items()) if fingerprint(key) == claim.key]
    for stem in owners:
        # NAME.public, or NAME-LABEL.public for a replica.
        label = stem.removeprefix(f"{claim.device}-")
        if stem == claim.device:
            return stem
        if label != stem and plan.assignment_of(stem) is None:
            return f"{claim.device}/{label}"
    if owners:
        raise ValueError(f"announces the key of {printable(owners[0])}")
    if claim.device in keys:
        raise ValueError(
            f"announces key {claim.key}, {claim.device}.public has "
            f"{fingerprint(keys[claim.device])}: another device, or its key was changed"
        )
    raise ValueError(f"announces key {claim.key}, which no file in --keys has")


def _one_of_many(name: str, claim: Announcement, count: int) -> LeftOut:
    reason = f"{count} agents claim to be {name}"
    if claim.key:
        reason += " with the same key: at most one is genuine"
    return LeftOut(device=claim.device, address=claim.address, reason=reason)


def _without_shared_addresses(
    entries: Sequence[FleetEntry],
) -> tuple[list[FleetEntry], list[LeftOut]]:
    """Entries with an address of their own, and the others, of which at most one is genuine."""
    addresses = [entry.address for entry in entries]
    alone = [entry for entry in entries if addresses.count(entry.address) == 1]
    reason = "another device announces the same address"
    shared = [
        LeftOut(device=entry.device, address=entry.address, reason=reason)
        for entry in entries
        if addresses.count(entry.address) > 1
    ]
    return alone, shared


def fleet_text(fleet: Fleet, left_out: Sequence[LeftOut]) -> bytes:
    """`fleet` as a TOML file, with what was left out as comments."""
    lines = ["# Proposed from announcements. Keys are from files, addresses are what was claimed."]
    lines += [f"# Left out: {left.device} at {left.address}: {left.reason}" for left in left_out]
    # Untrusted texts cannot end a comment's line.
    return "\n".join(map(as_line, lines)).encode() + b"\n\n" + fleet_toml(fleet)
