"""Changed files of clients are noticed once, and not while they are being written."""

from pathlib import Path

from devices.access.allowed import AllowedClients
from mdp.formats.keys import LIMITS, new_keys
from mdp.transport import new_pair


def test_files_are_read_again_once_they_stay_as_they_are(tmp_path: Path) -> None:
    new_keys(tmp_path, "office", new_pair)
    clients = AllowedClients(tmp_path)
    assert not clients.have_changed()
    new_keys(tmp_path, "phone", new_pair)
    # Perhaps still being copied.
    assert not clients.have_changed()
    (tmp_path / "phone.public").chmod(0o600)
    assert not clients.have_changed()
    assert clients.have_changed()
    assert clients.reload() == "2 clients allowed"
    assert not clients.have_changed()
    for change in (
        (tmp_path / f"office{LIMITS}").touch,
        (tmp_path / "phone.public").unlink,
        lambda: (tmp_path / "office.public").rename(tmp_path / "desk.public"),
    ):
        change()
        assert [clients.have_changed(), clients.have_changed()] == [False, True]
        clients.reload()
    assert len(clients.limits()) == 1
    # Neither folder nor file counts that has nothing to do with clients.
    (tmp_path / "notes.txt").write_text("?")
    assert [clients.have_changed(), clients.have_changed()] == [False, False]


def test_a_single_file_is_watched_too(tmp_path: Path) -> None:
    new_keys(tmp_path, "office", new_pair)
    clients = AllowedClients(tmp_path / "office.public")
    (tmp_path / "office.public").unlink()
    assert [clients.have_changed(), clients.have_changed()] == [False, True]
    assert clients.reload().startswith("0 clients allowed, no new ones: ")


def test_rights_are_those_of_the_limits_file(tmp_path: Path) -> None:
    pair = new_keys(tmp_path, "office", new_pair)
    clients = AllowedClients(tmp_path)
    assert not clients.may_record(pair.public)
    (tmp_path / f"office{LIMITS}").write_text("record = true\n")
    clients.reload()
    assert clients.may_record(pair.public)
    assert not clients.may_push(pair.public)
    assert not clients.may_record("of nobody")


def test_a_removed_client_has_its_name_until_its_connections_have_ended(tmp_path: Path) -> None:
    for name in ("office", "phone"):
        new_keys(tmp_path, name, new_pair)
    clients = AllowedClients(tmp_path)
    keys = {clients.name(key): key for key in clients.limits()}
    (tmp_path / "phone.public").unlink()
    clients.reload()
    assert clients.name(keys["phone"]) == "phone"
    assert keys["phone"] not in clients.limits()
    clients.forget_leaving()
    assert (clients.name(keys["phone"]), clients.name(keys["office"])) == ("", "office")
