"""The certificate and token that an agent makes for itself."""

import datetime
import ssl
import stat
from pathlib import Path

import pytest

from devices.camera.certificate import own_address, phone_files
from mdp.errors import InputError, MDPError

pytest.importorskip("cryptography")
NOW = datetime.datetime(2026, 11, 26, tzinfo=datetime.UTC)


def test_they_are_made_once_for_their_owner_s_eyes(tmp_path: Path) -> None:
    folder = tmp_path / "phone"
    made = phone_files("10.0.0.8", NOW, folder)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(made.certificate)
    assert stat.S_IMODE(made.certificate.stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    assert len(made.token) >= 20
    before = made.certificate.read_bytes()
    assert phone_files("10.0.0.8", NOW, folder) == made
    assert made.certificate.read_bytes() == before


def test_another_address_or_a_later_year_has_a_new_one(tmp_path: Path) -> None:
    made = phone_files("10.0.0.8", NOW, tmp_path)
    other = phone_files("10.0.0.9", NOW, tmp_path)
    assert other.certificate != made.certificate
    assert other.token == made.token
    before = made.certificate.read_bytes()
    phone_files("10.0.0.8", NOW + datetime.timedelta(days=900), tmp_path)
    assert made.certificate.read_bytes() != before


def test_files_that_are_none_or_readable_by_others_are_refused(tmp_path: Path) -> None:
    made = phone_files("10.0.0.8", NOW, tmp_path)
    made.certificate.chmod(0o644)
    with pytest.raises(MDPError, match="only its owner can read"):
        phone_files("10.0.0.8", NOW, tmp_path)
    made.certificate.chmod(0o600)
    made.certificate.write_text("nothing")
    with pytest.raises(InputError, match="expected a certificate, found none: remove it"):
        phone_files("10.0.0.8", NOW, tmp_path)


def test_an_address_is_one_of_this_machine_s() -> None:
    assert own_address().count(".") == 3
