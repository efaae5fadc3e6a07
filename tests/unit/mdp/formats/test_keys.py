"""Key files: made for their owner's eyes only, read strictly, and never confused."""

import datetime
import os
import stat
from pathlib import Path

import pytest

from mdp.errors import ConfigError, InputError
from mdp.formats.keys import (
    AllowedClient,
    ClientLimits,
    KeyFile,
    KeyPair,
    allow,
    check_bind_address,
    check_key,
    fingerprint,
    is_loopback,
    load_allowed,
    load_clients,
    load_pair,
    load_public,
    new_keys,
    next_name,
    revoke,
)
from mdp.transport import AgentKeys, ClientKeys, new_pair, public_key_of

# The keys of RFC 26's example.
PUBLIC = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
SECRET = "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A folder with box.secret and box.public."""
    new_keys(tmp_path, "box", new_pair)
    return tmp_path


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_what_is_written_can_be_read(pair: Path) -> None:
    keys = load_pair(pair / "box.secret", public_key_of)
    assert load_public(pair / "box.public") == keys.public
    assert keys.secret not in (pair / "box.public").read_text()
    assert public_key_of(keys.secret) == keys.public


def test_only_the_owner_may_read_a_secret_or_its_new_folder(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        new_keys(tmp_path / "deep" / "keys", "box", new_pair)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*/*/*")}
    assert modes == {"box.secret": 0o600, "box.public": 0o644}
    assert stat.S_IMODE((tmp_path / "deep" / "keys").stat().st_mode) == 0o700


def test_a_secret_is_private_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = os.open

    def watching(path: str, flags: int, mode: int = 0o777) -> int:
        handle = real(path, flags, mode)
        if ".secret." in str(path) and flags & os.O_CREAT:
            seen.append(stat.S_IMODE(os.fstat(handle).st_mode))
        return handle

    monkeypatch.setattr(os, "open", watching)
    new_keys(tmp_path, "box", new_pair)
    assert seen == [0o600]


@pytest.mark.parametrize("there", ["box.secret", "box.public"])
def test_nothing_is_overwritten(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(InputError, match=rf"{there}: exists already: expected another name"):
        new_keys(tmp_path, "box", new_pair)
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "mine"
    with pytest.raises(InputError, match=r"box\.secret: cannot be written: (Not a dir|File ex)"):
        new_keys(tmp_path / there, "box", new_pair)


def test_half_a_pair_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def full(path: str, flags: int, mode: int = 0o777) -> int:
        if ".public." in str(path):
            raise OSError(28, "No space left on device")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(InputError, match=r"box\.public: cannot be written: No space left"):
        new_keys(tmp_path, "box", new_pair)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "Box", "../box", "a/b", "x" * 65, "b\x00"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"--name .*: expected 1 to 64 of a-z"):
        new_keys(tmp_path, name, new_pair)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610, 0o777])
def test_a_secret_that_others_may_read_is_refused(pair: Path, mode: int) -> None:
    (pair / "box.secret").chmod(0o400)
    assert load_pair(pair / "box.secret", public_key_of)
    (pair / "box.secret").chmod(mode)
    with pytest.raises(ConfigError, match=rf"box\.secret: expected mode 0600, got {mode:04o}: "):
        load_pair(pair / "box.secret", public_key_of)


def test_systemd_credentials_have_an_acl(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = pair / "box.secret"
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(pair))
    secret.chmod(0o440)
    assert load_pair(secret, public_key_of).secret
    secret.chmod(0o444)
    with pytest.raises(ConfigError, match="expected mode 0600, got 0444"):
        load_pair(secret, public_key_of)


def test_the_two_files_are_not_confused(pair: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"box\.public: expected a secret key file, this is a pub"
    ):
        load_pair(pair / "box.public", public_key_of)
    with pytest.raises(
        ConfigError, match=r"box\.secret: expected a public key file, this is a sec"
    ):
        load_public(pair / "box.secret")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "missing required field `name`"),
        (f'name = "box"\nsecret = "{SECRET}"', "missing required field `public`"),
        (f'name = "box"\npublic = "{PUBLIC}"\nx = 1', "unknown field `x`"),
        (
            f'name = "box"\npublic = "{PUBLIC[:-1]}"\nsecret = "{SECRET}"',
            "`public`: expected a key of 40 characters, got 39",
        ),
        (
            f'name = "box"\npublic = "{PUBLIC}"\nsecret = "{SECRET}0"',
            "`secret`: expected a key of 40 characters, got 41",
        ),
        (
            f'name = "box"\npublic = "{PUBLIC}"\nsecret = "{SECRET[:-1]}~"',
            "`secret`: expected a key in Z85, this is none",
        ),
        (
            f'name = "box"\npublic = "{PUBLIC}"\nsecret = "{"#" * 40}"',
            "`secret`: expected a key in Z85, this is none",
        ),
        (
            f'name = "box"\npublic = "{SECRET}"\nsecret = "{PUBLIC}"',
            "`public` and `secret` do not belong together",
        ),
        (
            f'name = "box"\npublic = "{PUBLIC}"\nsecret = "{SECRET}"' + "\n" * 5000,
            "expected at most 4,096 bytes, found more",
        ),
    ],
)
def test_damaged_files(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path / "box.secret", text)
    with pytest.raises(ConfigError, match=r"box\.secret: ") as refusal:
        load_pair(path, public_key_of)
    assert expected in str(refusal.value)
    assert SECRET not in str(refusal.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, expected in (
        ("gone", "cannot be read: No such file or directory"),
        (".", "cannot be read: Is a directory"),
        ("pipe", "expected a regular file, found a pipe or a device"),
    ):
        with pytest.raises(ConfigError, match=expected):
            load_pair(tmp_path / name, public_key_of)


def test_a_folder_of_clients(tmp_path: Path) -> None:
    keys = {new_keys(tmp_path, name, new_pair).public for name in ("office", "phone")}
    (tmp_path / "README").write_text("Our clients.")
    assert set(load_allowed(tmp_path)) == keys
    assert set(load_allowed(tmp_path / "office.public")) < keys


def test_folders_that_allow_nobody_or_nothing_usable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected at least one NAME\.public in this folder"):
        load_allowed(tmp_path)
    with pytest.raises(ConfigError, match=r"gone: cannot be read: No such file"):
        load_allowed(tmp_path / "gone")
    (tmp_path / "odd.public").write_text("?")
    with pytest.raises(ConfigError, match=r"odd\.public: "):
        load_allowed(tmp_path)


def test_a_client_whose_files_are_wrong_is_left_out_alone(tmp_path: Path) -> None:
    office = new_keys(tmp_path, "office", new_pair).public
    new_keys(tmp_path, "phone", new_pair)
    (tmp_path / "office.limits").write_text("expires = 2031-01-31T00:00:00Z\nconnections = 2")
    new_keys(tmp_path, "tablet", new_pair)
    (tmp_path / "phone.limits").write_text("connections = 0")
    (tmp_path / "tablet.limits").write_text("expires = 2031-01-31T00:00:00")
    (tmp_path / "odd.public").write_text("?")
    clients, problems = load_clients(tmp_path)
    expires = datetime.datetime(2031, 1, 31, tzinfo=datetime.UTC)
    limits = ClientLimits(expires=expires, connections=2)
    assert clients == {office: AllowedClient(name="office", limits=limits)}
    odd, phone, tablet = problems
    assert "odd.public: " in odd
    assert "phone.limits: Expected `int` >= 1 - at `$.connections`" in phone
    assert "Expected `datetime` with a timezone component" in tablet


def test_keys_are_made_by_one_of_two_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, others = os.open, list[KeyFile]()
    begun: list[str] = []

    def late(path: str, flags: int, mode: int = 0o777) -> int:
        # Another process does all of it after this one has looked whether the files exist.
        if ".secret." in str(path) and not begun:
            begun.append(path)
            others.append(new_keys(tmp_path, "box", new_pair))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", late)
    with pytest.raises(InputError, match=r"box\.secret: exists already: expected another name"):
        new_keys(tmp_path, "box", new_pair)
    assert load_pair(tmp_path / "box.secret", public_key_of).public == others[0].public
    assert load_public(tmp_path / "box.public") == others[0].public
    assert len(list(tmp_path.iterdir())) == 2


def test_files_that_another_user_may_exchange_are_refused(pair: Path) -> None:
    pair.chmod(0o777)
    expected = r"expected no right to write for others, got mode 0777: everybody may change it"
    with pytest.raises(ConfigError, match=expected):
        load_pair(pair / "box.secret", public_key_of)
    assert load_clients(pair)[0] == {}
    # As /tmp: nobody can exchange what is another's there.
    pair.chmod(0o1777)
    assert load_pair(pair / "box.secret", public_key_of)
    assert len(load_clients(pair)[0]) == 1


def test_a_revoked_key_is_allowed_under_no_name(tmp_path: Path) -> None:
    for name in ("office", "phone"):
        new_keys(tmp_path, name, new_pair)
    (tmp_path / "desk.public").write_bytes((tmp_path / "office.public").read_bytes())
    write(tmp_path / "broken.public", "?")
    with pytest.raises(InputError, match=r"there are: broken, desk, office, phone"):
        revoke(tmp_path, "nobody")
    assert [path.name for path in revoke(tmp_path, "office")] == ["desk.revoked", "office.revoked"]
    assert [client.name for client in load_clients(tmp_path)[0].values()] == ["phone"]
    for again in ("-2", "-3"):
        new_keys(tmp_path / again, "office", new_pair)
        (tmp_path / again / "office.public").rename(tmp_path / "office.public")
        assert [path.name for path in revoke(tmp_path, "office")] == [f"office.revoked{again}"]


def test_a_later_key_of_that_name_has_no_rights_of_the_revoked_one(tmp_path: Path) -> None:
    clients = tmp_path / "clients"
    new_keys(tmp_path / "first", "office", new_pair)
    allow(clients, tmp_path / "first" / "office.public", {"push": True})
    revoke(clients, "office")
    new_keys(tmp_path / "second", "office", new_pair)
    assert not allow(clients, tmp_path / "second" / "office.public", {}).push
    names = sorted(path.name for path in clients.iterdir())
    assert names == ["office.limits.revoked", "office.public", "office.revoked"]


def test_names_of_following_keys() -> None:
    names = ("client", "client-2", "client-9", "n100", "office-pc")
    assert [next_name(Path(f"keys/{name}.secret")) for name in names] == [
        "client-2",
        "client-3",
        "client-10",
        "n100-2",
        "office-pc-2",
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_a_secret_of_another_user_is_refused(pair: Path) -> None:
    os.chown(pair / "box.secret", 12345, -1)
    with pytest.raises(ConfigError, match=r"box\.secret: expected owner 0 or root, got 12345"):
        load_pair(pair / "box.secret", public_key_of)


def test_a_fingerprint_is_the_same_everywhere_and_another_for_every_key() -> None:
    # SHA-256 of the 40 characters, as sha256sum would print it.
    assert fingerprint("a" * 40) == "e33cdf9c7f7120b98e8c78408953e07f"
    assert fingerprint("b" * 40) != fingerprint("a" * 40)


def test_secrets_are_not_shown() -> None:
    shown = [
        repr(KeyPair(public=PUBLIC, secret=SECRET)),
        repr(ClientKeys(public=PUBLIC, secret=SECRET, agents={})),
        repr(AgentKeys(secret=SECRET, allowed=frozenset())),
    ]
    assert not any(SECRET in text for text in shown)


@pytest.mark.parametrize("key", [PUBLIC, SECRET, "0" * 40, "%nSc0" * 8])
def test_keys_that_are_fine(key: str) -> None:
    check_key("key", key)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://127.0.0.1:7500", True),
        ("tcp://127.9.9.9:7500", True),
        ("tcp://localhost:7500", True),
        ("tcp://[::1]:7500", True),
        ("tcp://127.evil.example:7500", False),
        ("tcp://localhost.evil.example:7500", False),
        ("tcp://0.0.0.0:7500", False),
        ("tcp://*:7500", False),
        ("tcp://[::]:7500", False),
        ("tcp://[::ffff:10.0.0.7]:7500", False),
        ("tcp://10.0.0.7:7500", False),
        ("tcp://lo:7500", False),
        ("tcp://127.0.0.1:7500;tcp://10.0.0.7:1", False),
        ("tcp://127.0.0.1:7500\n", False),
        ("ipc:///tmp/x", False),
    ],
)
def test_what_stays_on_this_machine(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_addresses_to_listen_on() -> None:
    for address in ("tcp://*:0", "tcp://0.0.0.0:7500", "tcp://[::1]:65535"):
        check_bind_address(address)
    for wrong in (
        "7500",
        "tcp://h",
        "tcp://h:99999",
        "tcp://h:x",
        "udp://h:1",
        "tcp://a:1;tcp://b:2",
    ):
        with pytest.raises(InputError, match=r"--bind: expected tcp://HOST:PORT, got "):
            check_bind_address(wrong)


def test_a_client_is_let_in_and_keeps_what_it_had(pair: Path) -> None:
    clients, limits = pair / "clients", pair / "clients/box.limits"
    allow(clients, pair / "box.public", {})
    assert not limits.exists()
    write(limits, "expires = 2027-01-31T00:00:00Z\npush = true\n")
    assert allow(clients, pair / "box.public", {"record": True}).push
    until = datetime.datetime(2027, 1, 31, tzinfo=datetime.UTC)
    (client,) = load_allowed(clients).values()
    assert client == AllowedClient(
        name="box", limits=ClientLimits(expires=until, push=True, record=True)
    )
    assert "mask" not in limits.read_text()


def test_another_key_of_that_name_is_not_let_in(pair: Path) -> None:
    clients = pair / "clients"
    allow(clients, pair / "box.public", {})
    new_keys(pair / "other", "box", new_pair)
    with pytest.raises(InputError, match=r"clients/box\.public: expected no other key of this"):
        allow(clients, pair / "other/box.public", {"push": True})
    assert not (clients / "box.limits").exists()
    with pytest.raises(ConfigError, match="expected a public key file, this is a secret one"):
        allow(clients, pair / "box.secret", {})
    (pair / "file").touch()
    with pytest.raises(InputError, match=r"file: cannot be made: File exists"):
        allow(pair / "file", pair / "box.public", {"push": True})
