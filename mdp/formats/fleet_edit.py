"""Changes of an existing fleet.toml that keep its comments and order, and what each is worth.

The file is edited as text. What results is decoded and compared with the wanted record, so that an
edit changes what was asked for and nothing else.
"""

import fcntl
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path

import msgspec
from msgspec.structs import replace

from mdp.errors import ConfigError, InputError
from mdp.files import MAX_TOML_BYTES, decode_content, explain, read_regular, write_bytes
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import (
    Fleet,
    FleetEntry,
    entry_toml,
    fleet_toml,
    read_devices,
    read_fleet,
    relative_to,
)
from mdp.formats.plan import Assignment

_HEADER = re.compile(r"\s*\[\[\s*devices\s*\]\]\s*(#.*)?")
_TEXT = r"""(?:"[^"\n]*"|'[^'\n]*')"""
#: A value of `address`, `key`, `bundle` or `k`: a number, a text, or a list of texts over one or
#: more lines.
_VALUE = rf"(?:\d+|{_TEXT}|\[\s*(?:{_TEXT}\s*,?\s*)*\])"

_CHANGED = "{}: was changed meanwhile: run this again"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFile:
    """A fleet file as it is written, and as it is read."""

    path: Path
    text: str
    #: The file's content when it was read.
    before: bytes
    fleet: Fleet
    bundle: Bundle

    @classmethod
    def read(cls, path: Path) -> "FleetFile":
        """As `read_fleet`, with the text; raises ConfigError."""
        content, _ = read_regular(path, MAX_TOML_BYTES)
        fleet, bundle = read_fleet(path)
        if decode_content(path, content, Fleet, msgspec.toml.decode) != fleet:
            raise InputError(_CHANGED.format(path))
        return cls(path=path, text=content.decode(), before=content, fleet=fleet, bundle=bundle)

    def entry(self, name: str) -> FleetEntry:
        """The entry of this name; raises InputError with the known names."""
        for entry in self.fleet.devices:
            if entry.device == name:
                return entry
        known = ", ".join(entry.device for entry in self.fleet.devices)
        raise InputError(f"--device {name}: {self.path} has no such device (there are: {known})")

    def with_entry(self, entry: FleetEntry) -> "FleetFile":
        """With a further entry at the end; raises InputError for a name or address of another."""
        for other in self.fleet.devices:
            if other.device == entry.device:
                raise InputError(
                    f"--device {entry.device}: {self.path} has it already: expected "
                    "`mdp fleet replace`"
                )
            if other.address == entry.address:
                raise InputError(f"--device {entry.device}: {other.device} is at {entry.address}")
        text = f"{''.join(self._blocks()).rstrip()}\n\n{entry_toml(entry).decode()}"
        return self._replace_text(text, [*self.fleet.devices, entry])

    def without(self, name: str) -> "FleetFile":
        """Without an entry and the comment above it; raises InputError for the last one."""
        entry = self.entry(name)
        others = [other for other in self.fleet.devices if other is not entry]
        if not others:
            raise InputError(f"--device {name}: {self.path} has no other: expected at least one")
        blocks = self._blocks()
        del blocks[1 + self.fleet.devices.index(entry)]
        return self._replace_text("".join(blocks).rstrip() + "\n", others)

    def with_values(self, name: str, values: Mapping[str, str | list[str]]) -> "FleetFile":
        """With other values of an entry's `address` or `key`."""
        entry = self.entry(name)
        place = self.fleet.devices.index(entry)
        blocks = self._blocks()
        for key, value in values.items():
            blocks[1 + place] = _with_value(blocks[1 + place], key, value)
        devices = list(self.fleet.devices)
        try:
            devices[place] = msgspec.convert(
                {**msgspec.to_builtins(entry), **values}, type=FleetEntry
            )
        except msgspec.ValidationError as error:
            text = explain(error).partition(" - at ")[0]
            raise InputError(f"--device {name}: {text}") from error
        return self._replace_text("".join(blocks), devices)

    def with_client_key(self, key: str) -> "FleetFile":
        """With another secret key file of the client, relative to the file's folder."""
        first, *others = self._blocks()
        text = "".join([_with_value(first, "key", key), *others])
        return self._replace_text(text, self.fleet.devices, key=key)

    def with_bundle(self) -> "FleetFile":
        """With the name of the bundle, and each device's sub-model of it; raises ConfigError."""
        first, *blocks = self._blocks()
        named, devices = relative_to(self.bundle.path, self.path), []
        for place, entry in enumerate(self.fleet.devices):
            k = self.bundle.assignment(entry.plan_device).k
            blocks[place] = _with_value(blocks[place], "k", k)
            devices.append(replace(entry, k=k))
        text = "".join([_with_value(first, "bundle", named), *blocks])
        return self._replace_text(text, devices, bundle=named)

    def write(self) -> None:
        """Write the file atomically; its mode stays, and a link to it.

        Raises InputError, also if it was changed since it was read.
        """
        path = self.path.resolve()
        with _lock(path.parent):
            content, found = read_regular(path, MAX_TOML_BYTES)
            if content != self.before:
                raise InputError(_CHANGED.format(self.path))
            write_bytes(path, self.text.encode(), like=found)

    def _blocks(self) -> list[str]:
        """The text before the first entry, then each entry with the comment directly above it."""
        text = self.text
        if not re.search(r"#|\[\[devices]]", re.sub(_TEXT, "", text)):
            # Tables on a line each, as older versions wrote them, and no comment to keep.
            text = fleet_toml(self.fleet).decode()
        lines = text.splitlines(keepends=True)
        starts = []
        for number, line in enumerate(lines):
            if _HEADER.fullmatch(line.strip("\n")):
                while number and lines[number - 1].lstrip().startswith("#"):
                    number -= 1
                starts.append(number)
        if len(starts) != len(self.fleet.devices):
            raise ConfigError(
                f"{self.path}: expected a [[devices]] table for each device, as `mdp fleet new` "
                "writes it"
            )
        ends = [*starts, len(lines)]
        return ["".join(lines[a:b]) for a, b in zip([0, *starts], ends, strict=True)]

    def _replace_text(self, text: str, devices: list[FleetEntry], **top: str) -> "FleetFile":
        """With this text, which is to hold these devices and values at its top."""
        fleet = replace(self.fleet, devices=devices, **top)
        try:
            as_wanted = (
                decode_content(self.path, text.encode(), Fleet, msgspec.toml.decode) == fleet
            )
        except ConfigError:
            as_wanted = False
        if not as_wanted:
            raise ConfigError(
                f"{self.path}: cannot be changed without changing more: edit it by hand"
            )
        return changed(self, text=text, fleet=fleet)


def name_bundle(path: Path, bundle: Bundle) -> FleetFile:
    """A fleet file that names no bundle, with `bundle` named; raises ConfigError."""
    content, _ = read_regular(path, MAX_TOML_BYTES)
    fleet = read_devices(path)
    file = FleetFile(path=path, text=content.decode(), before=content, fleet=fleet, bundle=bundle)
    return file.with_bundle()


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let no other program change fleet files in `folder` this way; waits for one that does."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}") from error
    try:
        # Where the file system has no locks, the comparison has to do.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _with_value(block: str, key: str, value: int | str | list[str]) -> str:
    """A table's text with `key = value`; a comment behind the old value stays."""
    written = msgspec.toml.encode({key: value}).decode()
    line = re.compile(rf"^([ \t]*){key}[ \t]*=[ \t]*{_VALUE}", re.MULTILINE)
    if line.search(block):
        return line.sub(lambda match: match[1] + written.rstrip("\n"), block, count=1)
    body = block.rstrip()
    return f"{body}\n{written}{block[len(body) :].removeprefix(chr(10))}"


def accuracy_with(bundle: Bundle, members: Collection[int]) -> float | None:
    """Measured stacked accuracy of `members`, a fraction; None if never measured or for none."""
    return bundle.expected_accuracy(tuple(sorted(members)), "stacked")


def suggest_member(bundle: Bundle, fleet: Fleet) -> tuple[Assignment, str]:
    """The member that one more device should serve, and why.

    One that no device serves, whose answers add most; else, of the members with the fewest devices,
    the one whose loss costs most accuracy. Among equals and without measurements, the slowest.
    """
    served = fleet.members()
    assignments = bundle.manifest.plan.assignments
    everyone = set(served)

    def rank(assignment: Assignment) -> tuple[float, float, float]:
        count = len(served.get(assignment.k, ()))
        without = accuracy_with(bundle, everyone - {assignment.k})
        gained = accuracy_with(bundle, everyone | {assignment.k})
        worth = -(gained or 0.0) if not count else (without or 0.0)
        return count, worth, -assignment.predicted_ms.total

    best = min(assignments, key=rank)
    if best.k not in served:
        return best, "no device serves its sub-model"
    others = accuracy_with(bundle, everyone - {best.k})
    if others is None:
        return best, "it is the slowest of those with the fewest devices"
    return best, f"without {best.device} answers are right on {others:.1%}"
