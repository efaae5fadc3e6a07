"""fleet.toml: read strictly, checked against its bundle, written by `mdp fleet new`."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from mdp.errors import ConfigError, InputError
from mdp.files import write_json
from mdp.formats.bundle import MANIFEST, Bundle
from mdp.formats.fleet import (
    Fleet,
    FleetEntry,
    agent_keys,
    fleet_toml,
    new_fleet,
    plain_text_entries,
    read_fleet,
)
from mdp.formats.plan import PredictedMs, Replica
from mdp.testing.bundles import write_bundle

ALPHA = '{ device = "alpha", address = "tcp://10.0.0.7:7500", k = 0 }'
HERE, AWAY = "tcp://127.0.0.1:7500", "tcp://10.0.0.8:7500"
KEY = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle.open(write_bundle(tmp_path / "bundle"))


def write(folder: Path, *entries: str, bundle: str = "bundle", more: str = "") -> Path:
    path = folder / "fleet.toml"
    path.write_text(f'bundle = "{bundle}"\n{more}devices = [{", ".join(entries)}]\n')
    return path


def entry(device: str = "beta", address: str = "tcp://10.0.0.8:7500", k: object = 1) -> str:
    return f'{{ device = "{device}", address = "{address}", k = {k} }}'


def test_a_fleet_and_its_bundle(tmp_path: Path, bundle: Bundle) -> None:
    replica = entry("alpha/attic", "tcp://10.0.0.9:7500", 0)
    fleet, read = read_fleet(write(tmp_path, entry(), ALPHA, replica))
    assert read.digest == bundle.digest
    assert fleet.members() == {0: ["alpha", "alpha/attic"], 1: ["beta"]}
    assert list(fleet.members()) == [0, 1]


def test_a_replica_of_the_plan_has_a_name_of_its_own(tmp_path: Path, bundle: Bundle) -> None:
    replica = Replica(
        k=1,
        device="spare",
        predicted_ms=PredictedMs(compute=1.0, network=1.0, total=2.0),
        memory_bytes=1,
        provider="CPUExecutionProvider",
        threads=1,
        why="",
    )
    plan = replace(bundle.manifest.plan, replicas=[replica])
    write_json(bundle.path / MANIFEST, replace(bundle.manifest, plan=plan))
    entries = (ALPHA, entry("spare"), entry("spare/attic", "tcp://10.0.0.9:7500"))
    fleet, _ = read_fleet(write(tmp_path, *entries))
    assert fleet.members() == {0: ["alpha"], 1: ["spare", "spare/attic"]}
    with pytest.raises(ConfigError, match="of sub-model 0 by the bundle's plan: alpha, or one of"):
        read_fleet(write(tmp_path, entry("spare", k=0)))


@pytest.mark.usefixtures("bundle")
@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (entry("alpha", k=1), "`devices` list the device alpha twice"),
        (
            entry(address="tcp://10.0.0.7:7500"),
            "`devices` list the address tcp://10.0.0.7:7500 twice",
        ),
        (entry(k=5), r"device 'beta': key `k`: expected one of 0, 1, 2, got 5"),
        (
            entry("bet"),
            r"device 'bet': expected a device of sub-model 1 by the bundle's plan: beta, or one of "
            "these with a /LABEL",
        ),
        (entry("gamma"), "device 'gamma': expected a device of sub-model 1 by the bundle's plan"),
        (entry("bet/attic"), "device 'bet/attic': expected a device of sub-model 1"),
        (entry(k=64), r"Expected `int` <= 63 - at `\$\.devices\[1\]\.k`"),
        (entry(address="10.0.0.8:7500"), r"expected tcp:.* - at `\$\.devices\[1\]\.address`"),
        (entry(address="http://10.0.0.8:7500"), "expected tcp://HOST:PORT"),
        (entry(address="tcp://10.0.0.8"), "expected tcp://HOST:PORT"),
        (entry(address="tcp://:7500"), "expected tcp://HOST:PORT"),
        (entry(address="tcp://*:7500"), "expected tcp://HOST:PORT"),
        (entry(address="tcp://a:7500;tcp://b:1"), "expected tcp://HOST:PORT"),
        (entry(address="tcp://10.0.0.8:0"), "needs a port from 1 to 65535, got 0"),
        (entry(address="tcp://10.0.0.8:65536"), "needs a port from 1 to 65535, got 65536"),
        (entry("Beta"), r"expected NAME or NAME/LABEL.* - at `\$\.devices\[1\]\.device`"),
        (entry("beta/"), "expected NAME or NAME/LABEL"),
        (entry("beta\\n"), "expected NAME or NAME/LABEL"),
        (entry(address="tcp://10.0.0.8:7500\\n"), "expected tcp://HOST:PORT"),
        (entry("beta/attic/left"), "expected NAME or NAME/LABEL"),
        (
            '{ device = "beta", address = "tcp://h:1", k = 1, key = "short" }',
            r"`key`: expected a key of 40 characters, got 5 - at `\$\.devices\[1\]`",
        ),
        (
            f'{{ device = "beta", address = "tcp://h:1", k = 1, key = "{"#" * 40}" }}',
            "`key`: expected a key in Z85, this is none",
        ),
        (
            '{ device = "beta", address = "tcp://h:1", k = 1, key = 7 }',
            r"Expected `str \| array \| null`, got `int` - at `\$\.devices\[1\]\.key`",
        ),
        ('{ device = "b", address = "tcp://h:1", k = 1, x = 1 }', "unknown field `x`"),
    ],
)
def test_what_an_entry_may_not_say(tmp_path: Path, second: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"fleet\.toml: .*{expected}"):
        read_fleet(write(tmp_path, ALPHA, second))


@pytest.mark.usefixtures("bundle")
@pytest.mark.parametrize(
    ("entries", "more", "expected"),
    [
        ((), "", r"length >= 1 - at `\$\.devices`"),
        ((ALPHA,), 'key = ""\n', r"length >= 1 - at `\$\.key`"),
        ((ALPHA,), "surprise = 1\n", "unknown field `surprise`"),
        ((ALPHA,), "format_version = 2\n", "Invalid enum value 2"),
    ],
)
def test_what_a_fleet_may_not_say(
    tmp_path: Path, entries: tuple[str, ...], more: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=rf"fleet\.toml: .*{expected}"):
        read_fleet(write(tmp_path, *entries, more=more))


def test_a_fleet_without_its_bundle(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="elsewhere: expected a bundle folder"):
        read_fleet(write(tmp_path, ALPHA, bundle="elsewhere"))
    with pytest.raises(ConfigError, match="aaa: cannot be read: File name too long"):
        read_fleet(write(tmp_path, ALPHA, bundle="a" * 300))
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        read_fleet(tmp_path / "none.toml")


@pytest.mark.usefixtures("bundle")
@pytest.mark.parametrize(
    "address", ["tcp://localhost:1", "tcp://[fe80::1]:65535", "tcp://n-1.lan:7"]
)
def test_addresses_that_are_fine(tmp_path: Path, address: str) -> None:
    fleet, _ = read_fleet(write(tmp_path, entry(address=address)))
    assert fleet.devices[0].address == address


def test_new_fleet_writes_what_read_fleet_reads(tmp_path: Path, bundle: Bundle) -> None:
    out = tmp_path / "fleets" / "home.toml"
    devices = [
        "beta=tcp://10.0.0.8:7500",
        "alpha/attic=tcp://10.0.0.9:7500",
        "alpha=tcp://10.0.0.7:7500",
    ]
    written = new_fleet(
        bundle, devices, out, public_key={"beta": KEY}.get, key=tmp_path / "keys" / "me.secret"
    )
    fleet, read = read_fleet(out)
    assert fleet == written
    assert (fleet.bundle, fleet.key) == ("../bundle", "../keys/me.secret")
    assert [entry.key for entry in fleet.devices] == [KEY, None, None]
    assert read.digest == bundle.digest
    # Replicas are asked in the order in which they were given.
    assert fleet.members() == {0: ["alpha/attic", "alpha"], 1: ["beta"]}


def test_fleet_and_bundle_can_move_together(tmp_path: Path, bundle: Bundle) -> None:
    new_fleet(bundle, ["alpha=tcp://10.0.0.7:7500"], tmp_path / "fleet.toml")
    moved = tmp_path / "moved"
    moved.mkdir()
    (tmp_path / "bundle").rename(moved / "bundle")
    (tmp_path / "fleet.toml").rename(moved / "fleet.toml")
    _, read = read_fleet(moved / "fleet.toml")
    assert read.path == moved / "bundle"


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("alpha", "--device alpha: expected NAME=tcp://HOST:PORT"),
        ("alpha=", "--device alpha=: expected NAME=tcp://HOST:PORT"),
        ("delta=tcp://h:1", "--device delta=tcp://h:1: expected one of alpha, beta, gamma, got "),
        ("=tcp://h:1", "expected one of alpha, beta, gamma, got ''"),
        ("alpha=h:1", "--device alpha=h:1: expected tcp://HOST:PORT, HOST being [^`$]*$"),
        (
            "alpha=tcp://h:99999",
            "--device alpha=tcp://h:99999: `address` needs a port from 1 to 65535, got ",
        ),
        ("alpha/A B=tcp://h:1", "--device alpha/A B=tcp://h:1: expected NAME or NAME/LABEL, each "),
        ("alpha=tcp://h:1, alpha=tcp://h:2", "list the device alpha twice"),
        ("alpha=tcp://h:1, beta=tcp://h:1", "list the address tcp://h:1 twice"),
    ],
)
def test_new_fleet_refuses(tmp_path: Path, bundle: Bundle, devices: str, expected: str) -> None:
    out = tmp_path / "fleet.toml"
    with pytest.raises(InputError, match=expected):
        new_fleet(bundle, devices.split(", "), out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("address", "key", "has_key", "insecure", "refusal"),
    [
        (HERE, None, False, False, ""),
        (HERE, None, True, False, ""),
        (HERE, KEY, True, False, ""),
        (AWAY, KEY, True, False, ""),
        (AWAY, KEY, True, True, ""),
        (AWAY, None, False, True, ""),
        (AWAY, None, True, True, ""),
        (AWAY, None, True, False, "'beta': tcp://10.0.0.8:7500 is not on this machine: expected"),
        (AWAY, None, False, False, "or --insecure for plain text"),
        (AWAY, KEY, False, True, "'beta' has a key, this client has none: expected --key, or"),
        (HERE, KEY, False, False, "'beta' has a key, this client has none"),
    ],
)
def test_who_is_spoken_to_encrypted_in_plain_text_or_not_at_all(
    address: str, key: str | None, has_key: bool, insecure: bool, refusal: str
) -> None:
    fleet = Fleet(bundle="b", devices=[FleetEntry(device="beta", address=address, k=1, key=key)])
    if refusal:
        with pytest.raises(ConfigError, match=refusal):
            agent_keys(fleet, has_key=has_key, insecure=insecure)
        return
    found = agent_keys(fleet, has_key=has_key, insecure=insecure)
    assert found == ({"beta": key} if key else {})
    assert len(plain_text_entries(fleet)) == (address == AWAY and key is None)


def test_how_far_apart_frames_may_be(tmp_path: Path, bundle: Bundle) -> None:
    assert bundle.path == tmp_path / "bundle"
    assert read_fleet(write(tmp_path, ALPHA))[0].max_spread_ms == 500.0
    fleet, _ = read_fleet(write(tmp_path, ALPHA, more="max_spread_ms = 1500\n"))
    assert fleet.max_spread_ms == 1500.0
    (tmp_path / "again.toml").write_bytes(fleet_toml(fleet))
    assert read_fleet(tmp_path / "again.toml")[0] == fleet
    for bad in ("0", "-1", "nan", "inf"):
        text = "`max_spread_ms`: expected more than 0, up to 1e9, got "
        with pytest.raises(ConfigError, match=text):
            read_fleet(write(tmp_path, ALPHA, more=f"max_spread_ms = {bad}\n"))


def test_a_fleet_may_say_how_many_known_items_are_rejected(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle")
    assert read_fleet(write(tmp_path, ALPHA))[0].reject is None
    fleet, _ = read_fleet(write(tmp_path, ALPHA, more="reject = 0.01\n"))
    assert fleet.reject == 0.01
    assert b"reject = 0.01" in fleet_toml(fleet)
    for bad in ("0", "1", "-0.1", "nan"):
        with pytest.raises(ConfigError, match=r"`reject`: expected more than 0, less than 1, got "):
            read_fleet(write(tmp_path, ALPHA, more=f"reject = {bad}\n"))
