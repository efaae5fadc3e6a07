"""fleet.toml: the served bundle, and each device's address and public key."""

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from mdp.errors import ConfigError, InputError
from mdp.files import (
    NAME_FORM,
    Record,
    explain,
    pattern,
    read_toml,
    toml_bytes,
    write_bytes,
    write_new,
)
from mdp.formats.bundle import MANIFEST, Bundle
from mdp.formats.keys import check_key, is_loopback
from mdp.formats.plan import MAX_MEMBERS

#: A plan's device, or one of its replicas: `n100` or `n100/kitchen`.
EntryName = Annotated[
    str,
    pattern(
        r"^[a-z0-9][a-z0-9._-]{0,63}(/[a-z0-9][a-z0-9._-]{0,63})?\Z",
        f"NAME or NAME/LABEL, each {NAME_FORM}",
    ),
]
Address = Annotated[
    str,
    pattern(
        r"^tcp://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}\Z",
        "tcp://HOST:PORT, HOST being a name, an IPv4 address or an [IPv6] address",
    ),
]

#: What a fleet is called in addresses and topics; a bundle's name is one.
_FLEET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FLEET_NAME_FORM = "1 to 64 letters, digits, `.`, `_` or `-`"

#: How far apart the frames of one answer may have been taken, in milliseconds, unless a fleet file
#: says otherwise: five frames of a source at its default rate.
MAX_SPREAD_MS = 500.0

R = TypeVar("R", bound=Record)

#: What a fleet file without a bundle can be used for.
NO_BUNDLE = (
    "a fleet without one is for `mdp record`, `mdp status`, `mdp doctor` and `mdp bundle push`, "
    "which names one"
)

#: The risk of a connection without keys that leaves this machine.
PLAIN_TEXT = "plain text: anyone on the network path can read and forge messages"


class FleetEntry(Record, frozen=True):
    """One agent. Two entries with the same `k` are replicas of that sub-model."""

    device: EntryName
    address: Address
    k: Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]
    #: The agent's public key; without one, the connection is plain text. Two while it is being
    #: replaced: either is accepted.
    key: str | Annotated[list[str], Meta(min_length=1, max_length=2)] | None = None

    def __post_init__(self) -> None:
        for key in self.keys:
            check_key("key", key)
        port = self.address.rpartition(":")[2]
        if not 0 < int(port) < 65536:
            raise ValueError(f"`address` needs a port from 1 to 65535, got {port}")

    @property
    def keys(self) -> list[str]:
        """The agent's public keys; none for plain text."""
        if self.key is None:
            return []
        return [self.key] if isinstance(self.key, str) else self.key

    @property
    def plan_device(self) -> str:
        """The device of the bundle's plan: `n100` for a replica `n100/attic`, too."""
        return self.device.partition("/")[0]

    @property
    def is_exposed(self) -> bool:
        """Tell whether the connection is plain text over a network."""
        return self.key is None and not is_loopback(self.address)


class Fleet(Record, frozen=True):
    """The content of `fleet.toml`; `bundle` and `key` are relative to the file's own folder."""

    devices: Annotated[list[FleetEntry], Meta(min_length=1)]
    #: Empty while there is none: then only cameras can be recorded.
    bundle: str = ""
    #: The client's secret key file.
    key: Annotated[str, Meta(min_length=1)] | None = None
    #: Camera frames that were taken further apart are not fused.
    max_spread_ms: float = MAX_SPREAD_MS
    #: At most this share of items of the classes is called unknown; None: as the bundle says.
    reject: float | None = None
    format_version: Literal[1] = 1

    def __post_init__(self) -> None:
        # False for NaN too.
        if not 0 < self.max_spread_ms <= 1e9:
            got = f"{self.max_spread_ms:g}"
            raise ValueError(f"`max_spread_ms`: expected more than 0, up to 1e9, got {got}")
        if self.reject is not None and not 0 < self.reject < 1:
            raise ValueError(f"`reject`: expected more than 0, less than 1, got {self.reject:g}")
        for what in ("device", "address"):
            values = [getattr(entry, what) for entry in self.devices]
            twice = sorted(value for value, count in Counter(values).items() if count > 1)
            if twice:
                raise ValueError(f"`devices` list the {what} {', '.join(twice)} twice")

    def members(self) -> dict[int, list[str]]:
        """Index k -> names of the entries that serve it, in the file's order."""
        members: dict[int, list[str]] = {}
        for entry in self.devices:
            members.setdefault(entry.k, []).append(entry.device)
        return dict(sorted(members.items()))


def read_devices(path: Path) -> Fleet:
    """A fleet, whether its bundle is there or not; raises ConfigError."""
    return read_toml(path, Fleet)


def read_fleet(path: str | os.PathLike[str]) -> tuple[Fleet, Bundle]:
    """A fleet and the bundle it names, checked against each other; raises ConfigError."""
    path = Path(path)
    fleet = read_devices(path)
    if not fleet.bundle:
        raise ConfigError(f"{path}: key `bundle`: expected a bundle folder: {NO_BUNDLE}")
    bundle = Bundle.open(path.parent / fleet.bundle)
    plan = bundle.manifest.plan
    planned = {a.k: [a.device] for a in plan.assignments}
    for replica in plan.replicas:
        planned[replica.k].append(replica.device)
    for entry in fleet.devices:
        wanted = planned.get(entry.k)
        if wanted is None:
            raise ConfigError(
                f"{path}: device {entry.device!r}: key `k`: expected one of "
                f"{', '.join(map(str, planned))}, got {entry.k}"
            )
        if entry.plan_device not in wanted:
            raise ConfigError(
                f"{path}: device {entry.device!r}: expected a device of sub-model {entry.k} by the "
                f"bundle's plan: {', '.join(wanted)}, or one of these with a /LABEL"
            )
    return fleet, bundle


def is_fleet_name(name: str) -> bool:
    """Tell whether a fleet may be called `name` (`FLEET_NAME_FORM`)."""
    return _FLEET_NAME.fullmatch(name) is not None


def files_stamp(path: Path, fleet: Fleet) -> list[tuple[int, int]]:
    """Changes whenever the fleet file, which held `fleet`, or its bundle does.

    Raises OSError for a fleet file that cannot be read. A bundle may be gone: the file may name
    another one by now.
    """
    found = [path.stat()]
    with suppress(OSError):
        found.append((path.parent / fleet.bundle / MANIFEST).stat())
    return [(stat.st_mtime_ns, stat.st_size) for stat in found]


def agent_keys(fleet: Fleet, *, has_key: bool, insecure: bool) -> dict[str, str]:
    """Device -> public key of every agent with an encrypted connection.

    `has_key` is whether the client has a key; `insecure` allows plain text off loopback. Raises
    ConfigError for a device that is neither encrypted nor allowed in plain text.
    """
    for entry in fleet.devices:
        if entry.key is not None and not has_key:
            raise ConfigError(
                f"device {entry.device!r} has a key, this client has none: expected --key, or "
                "`key` in the fleet file (`mdp keys new` makes one)"
            )
        if entry.is_exposed and not insecure:
            raise ConfigError(
                f"device {entry.device!r}: {entry.address} is not on this machine: expected the "
                "agent's public key as its `key`, or --insecure for plain text"
            )
    return {entry.device: entry.keys[0] for entry in fleet.devices if entry.keys}


def plain_text_entries(fleet: Fleet) -> list[FleetEntry]:
    """Entries with plain text over a network."""
    return [entry for entry in fleet.devices if entry.is_exposed]


def absent_devices(bundle: Bundle, fleet: Fleet) -> list[str]:
    """Devices of the bundle's plan without an entry, which every answer lacks."""
    members = fleet.members()
    return [a.device for a in bundle.manifest.plan.assignments if a.k not in members]


def new_fleet(
    bundle: Bundle | None,
    devices: Sequence[str],
    out: Path,
    *,
    public_key: Callable[[str], str | None] = lambda device: None,
    key: Path | None = None,
    overwrite: bool = True,
) -> Fleet:
    """Write a fleet for `devices`, each `NAME=ADDRESS` or, for a replica, `NAME/LABEL=ADDRESS`.

    `public_key` maps an entry's name to its key, `key` is the client's key file. Without a bundle
    the fleet can only be recorded. Raises InputError for a malformed or unknown device, and for a
    file that is there already, unless `overwrite`.
    """
    entries = [
        new_entry(bundle, text, public_key(text.partition("=")[0]), k)
        for k, text in enumerate(devices)
    ]
    content = {
        "bundle": "" if bundle is None else relative_to(bundle.path, out),
        "key": None if key is None else relative_to(key, out),
        "devices": entries,
    }
    fleet = _convert("--device", content, Fleet)
    if overwrite:
        write_bytes(out, fleet_toml(fleet))
    else:
        write_new(out, fleet_toml(fleet), 0o666)
    return fleet


def new_entry(bundle: Bundle | None, text: str, key: str | None, k: int = 0) -> FleetEntry:
    """The entry of `NAME=ADDRESS` or `NAME/LABEL=ADDRESS`; raises InputError.

    `k` is the device's without a bundle.
    """
    name, separator, address = text.partition("=")
    if not separator or not address:
        raise InputError(f"--device {text}: expected NAME=tcp://HOST:PORT")
    if bundle is not None:
        plan = bundle.manifest.plan
        assignment = plan.assignment_of(name.partition("/")[0])
        if assignment is None:
            known = [a.device for a in plan.assignments] + [r.device for r in plan.replicas]
            raise InputError(f"--device {text}: expected one of {', '.join(known)}, got {name!r}")
        k = assignment.k
    entry = {"device": name, "address": address, "k": k, "key": key}
    return _convert(f"--device {text}", entry, FleetEntry)


def fleet_toml(fleet: Fleet) -> bytes:
    """The file's content, a `[[devices]]` table for each device."""
    whole = msgspec.to_builtins(fleet)
    top = {name: whole[name] for name in ("bundle", "key", "format_version") if whole[name]}
    if fleet.max_spread_ms != MAX_SPREAD_MS:
        top["max_spread_ms"] = fleet.max_spread_ms
    if fleet.reject is not None:
        top["reject"] = fleet.reject
    blocks = [msgspec.toml.encode(top), *map(entry_toml, fleet.devices)]
    return b"\n".join(blocks)


def entry_toml(entry: FleetEntry) -> bytes:
    """The table of one device."""
    return b"[[devices]]\n" + toml_bytes(entry)


def relative_to(path: Path, out: Path) -> str:
    """`path` as a file at `out` names it: relative to its own folder."""
    # Where `out` is a link, paths in it are relative to the link's folder.
    return Path(os.path.relpath(path.resolve(), out.parent.resolve())).as_posix()


def _convert(what: str, content: Mapping[str, object], kind: type[R]) -> R:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        # Without the place in the record, which is not the option's.
        raise InputError(f"{what}: {explain(error).partition(' - at ')[0]}") from error
