"""Changes of fleet.toml: what is not asked for stays as it was, comments and order included."""

import stat
from pathlib import Path

import pytest

from mdp.errors import ConfigError, InputError
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import FleetEntry, new_fleet, read_fleet, relative_to
from mdp.formats.fleet_edit import FleetFile, name_bundle, suggest_member
from mdp.testing.bundles import write_bundle

# With every character that TOML gives a meaning.
KEY = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
OTHER = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"

WRITTEN = f"""\
# The porch's fleet.
bundle = "bundle"
key = 'client.secret'  # of the gateway

# Wired.
# Under the roof.
[[devices]]  # first
device = "alpha"
address = "tcp://10.0.0.7:7500"  # static
k = 0
key = ["{KEY}",
  '{OTHER}']  # both until Monday

[[devices]]
k = 1
device = "beta"
address = "tcp://10.0.0.8:7500"
# The end.
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "bundle")
    path = tmp_path / "fleet.toml"
    path.write_text(WRITTEN)
    return path


def entry(device: str = "gamma", address: str = "tcp://10.0.0.9:7500", k: int = 2) -> FleetEntry:
    return FleetEntry(device=device, address=address, k=k, key=KEY)


def test_values_change_alone(path: Path) -> None:
    file = FleetFile.read(path)
    changed = file.with_values("alpha", {"address": "tcp://h:1", "key": OTHER})
    wanted = WRITTEN.replace("tcp://10.0.0.7:7500", "tcp://h:1")
    start, end = wanted.index("key = ["), wanted.index("  # both")
    assert changed.text == f'{wanted[:start]}key = "{OTHER}"{wanted[end:]}'
    keyed = file.with_values("beta", {"key": [KEY, OTHER]})
    assert keyed.entry("beta").keys == [KEY, OTHER]
    assert keyed.text.startswith(WRITTEN)
    assert file.with_client_key("k/new.secret").text == WRITTEN.replace(
        "'client.secret'", '"k/new.secret"'
    )
    with pytest.raises(InputError, match=r"expected tcp://HOST:PORT"):
        file.with_values("beta", {"address": "h:1"})


def test_a_device_comes_and_goes_with_its_comment(path: Path) -> None:
    file = FleetFile.read(path)
    more = file.with_entry(entry())
    assert more.text.startswith(WRITTEN)
    assert more.without("gamma").text == WRITTEN
    left = file.without("alpha")
    assert left.text == WRITTEN[: WRITTEN.index("# Wired")] + WRITTEN[WRITTEN.rindex("[[dev") :]
    left.write()
    assert path.read_text() == left.text
    assert read_fleet(path)[0] == left.fleet
    with pytest.raises(InputError, match="has no other: expected at least one"):
        left.without("beta")


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        (entry("beta"), "has it already: expected `mdp fleet replace`"),
        (entry(address="tcp://10.0.0.8:7500"), "beta is at tcp://10.0.0.8:7500"),
    ],
)
def test_a_name_or_address_in_use(path: Path, added: FleetEntry, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        FleetFile.read(path).with_entry(added)


def test_what_cannot_be_kept_is_refused(path: Path) -> None:
    inline = '{ device = "alpha", address = "tcp://h:1", k = 0 }'
    path.write_text(f'bundle = "bundle"\ndevices = [\n    {inline},  # mine\n]\n')
    with pytest.raises(ConfigError, match=r"expected a \[\[devices\]\] table for each device"):
        FleetFile.read(path).with_entry(entry())
    # As `mdp fleet new` once wrote it: no comment is lost.
    path.write_text(f'devices = [\n    {inline},\n]\nbundle = "bundle"\n')
    assert [e.device for e in FleetFile.read(path).with_entry(entry()).fleet.devices] == [
        "alpha",
        "gamma",
    ]
    path.write_text(WRITTEN.replace('address = "tcp://10.0.0.8:7500"', '"address" = "tcp://h:1"'))
    with pytest.raises(ConfigError, match="edit it by hand"):
        FleetFile.read(path).with_values("beta", {"address": "tcp://h:2"})


def test_edits_of_others_mode_and_link_stay(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.toml"
    link.symlink_to(path.name)
    path.chmod(0o640)
    first, second = FleetFile.read(link), FleetFile.read(path)
    first.with_values("beta", {"address": "tcp://h:1"}).write()
    assert (link.is_symlink(), stat.S_IMODE(path.stat().st_mode)) == (True, 0o640)
    written = path.read_text()
    with pytest.raises(InputError, match=r"fleet.toml: was changed meanwhile: run this again"):
        second.with_entry(entry()).write()
    assert path.read_text() == written
    FleetFile.read(path).with_entry(entry()).write()
    assert [one.device for one in read_fleet(path)[0].devices] == ["alpha", "beta", "gamma"]


def test_paths_in_a_linked_file_are_relative_to_the_link(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "there" / "fleet.toml"
    link.parent.mkdir()
    link.symlink_to(path)
    assert relative_to(tmp_path / "client-2.secret", link) == "../client-2.secret"


def test_what_is_written_anew_can_be_edited(tmp_path: Path) -> None:
    bundle = Bundle.open(write_bundle(tmp_path / "bundle"))
    path = tmp_path / "new.toml"
    new_fleet(bundle, ["alpha=tcp://h:1"], path)
    FleetFile.read(path).with_entry(entry("beta", k=1)).write()
    assert read_fleet(path)[0].members() == {0: ["alpha"], 1: ["beta"]}


def test_the_member_that_one_more_device_should_serve(path: Path, tmp_path: Path) -> None:
    file = FleetFile.read(path)
    assert suggest_member(file.bundle, file.fleet)[0].device == "gamma"
    whole = file.with_entry(entry())
    # The made-up accuracies grow with k: losing gamma costs most.
    found, why = suggest_member(whole.bundle, whole.fleet)
    assert (found.device, why) == ("gamma", "without gamma answers are right on 89.0%")
    doubled = whole.with_entry(entry("gamma/attic", "tcp://h:3"))
    assert suggest_member(doubled.bundle, doubled.fleet)[0].device == "beta"
    unmeasured = Bundle.open(write_bundle(tmp_path / "unmeasured", evaluated=False))
    assert "slowest" in suggest_member(unmeasured, whole.fleet)[1]


def test_a_bundle_is_named_and_nothing_else_changes(path: Path) -> None:
    # Without a bundle, devices are numbered in the order of the file.
    before = WRITTEN.replace('bundle = "bundle"\n', "").replace(
        'device = "beta"', 'device = "gamma/attic"'
    )
    path.write_text(before)
    file = name_bundle(path, Bundle.open(path.parent / "bundle"))
    file.write()
    top = "key = 'client.secret'  # of the gateway\n"
    wanted = before.replace(top, f'{top}bundle = "bundle"\n').replace("k = 1", "k = 2")
    assert path.read_text() == wanted
    fleet, _ = read_fleet(path)
    assert [entry.k for entry in fleet.devices] == [0, 2]
    # One that is somebody else's edit since is not written over.
    path.write_text(before + "# mine\n")
    with pytest.raises(InputError, match="was changed meanwhile"):
        file.write()
    path.write_text(before.replace("gamma/attic", "delta"))
    with pytest.raises(ConfigError, match="delta"):
        name_bundle(path, Bundle.open(path.parent / "bundle"))
