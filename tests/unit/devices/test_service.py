"""The text of an agent's unit, and what a service's user could not read."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from devices.service import KEY_WORD, MARK, Service, check_port, check_readable, quoted, unit_text
from mdp.errors import InputError

PLAIN = Service(
    device="n100",
    program=Path("/opt/mdp/bin/mdp-agent"),
    words=("--bundle", "/srv/bundle", "--device", "n100"),
    key=None,
    reads={Path("/opt/mdp/bin/mdp-agent"): "this program", Path("/srv/bundle"): "--bundle"},
    plain_cpu=True,
    camera=False,
    opencv=False,
    audited=False,
)


def settings(service: Service) -> dict[str, str]:
    lines = [line for line in unit_text(service).splitlines() if "=" in line]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_a_plain_agent_has_no_devices_and_no_home() -> None:
    assert unit_text(PLAIN).startswith(f"{MARK}\n[Unit]\n")
    unit = settings(PLAIN)
    command = "/opt/mdp/bin/mdp-agent run --bundle /srv/bundle --device n100"
    assert unit["ExecStart"] == command
    assert unit["ProtectHome"] == unit["PrivateDevices"] == "yes"
    assert unit["MemoryDenyWriteExecute"] == "yes"
    assert unit["LimitCORE"] == "0"
    assert unit["RestrictAddressFamilies"] == "AF_INET AF_INET6 AF_NETLINK AF_UNIX"
    assert not {"LoadCredential", "LogsDirectory", "SupplementaryGroups", "DeviceAllow"} & set(unit)


def test_what_an_option_needs_is_allowed() -> None:
    unit = settings(replace(PLAIN, camera=True, opencv=True, groups=("video",)))
    assert unit["DeviceAllow"] == "char-video4linux rw"
    assert unit["SupplementaryGroups"] == "video"
    assert not {"PrivateDevices", "PrivateUsers", "MemoryDenyWriteExecute"} & set(unit)
    unit = settings(replace(PLAIN, plain_cpu=False))
    assert unit["PrivateDevices"] == "no"
    assert "MemoryDenyWriteExecute" not in unit
    assert settings(replace(PLAIN, audited=True))["LogsDirectory"] == "mdp-agent-n100"
    assert settings(replace(PLAIN, pushed=True))["StateDirectory"] == "mdp-agent-n100"
    homes = replace(PLAIN, reads={Path("/home/pi/bundle"): "--bundle"})
    assert settings(homes)["ProtectHome"] == "read-only"


def test_a_secret_key_is_a_credential() -> None:
    unit = settings(replace(PLAIN, key=Path("/etc/mdp/100%.secret"), words=("--key", KEY_WORD)))
    assert unit["LoadCredential"] == "agent.secret:/etc/mdp/100%%.secret"
    assert unit["ExecStart"].endswith("--key ${CREDENTIALS_DIRECTORY}/agent.secret")
    with pytest.raises(InputError, match="without spaces"):
        unit_text(replace(PLAIN, key=Path("/etc/my keys/a.secret")))


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("tcp://[::]:7500", '"tcp://[::]:7500"'),
        ("/srv/my bundle", '"/srv/my bundle"'),
        ("$HOME 50%", '"$$HOME 50%%"'),
        ('a"\\', r'"a\"\\"'),
        ("", '""'),
        ("a;b", '"a;b"'),
    ],
)
def test_words_are_quoted(word: str, written: str) -> None:
    assert quoted(word) == written


def test_a_word_that_no_unit_can_hold() -> None:
    with pytest.raises(InputError, match="printable"):
        quoted("a\nExecStartPre=/bin/false")


def test_ports_that_only_root_may_take() -> None:
    check_port("tcp://0.0.0.0:1024")
    with pytest.raises(InputError, match="expected a port from 1024"):
        check_port("tcp://0.0.0.0:443")


def test_what_another_user_could_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_readable({Path("/usr/bin/env"): "--bundle"})
    with pytest.raises(InputError, match=r"--bundle: /tmp/bundle: .* a /tmp of its own"):
        check_readable({Path("/tmp/bundle"): "--bundle"})
    with pytest.raises(InputError, match=r"--bundle: /usr/none: cannot be read"):
        check_readable({Path("/usr/none"): "--bundle"})
    monkeypatch.setattr("devices.service._PRIVATE", ())
    tmp_path.chmod(0o700)
    python = tmp_path / "python"
    python.touch(0o755)
    # The folder, and what it is on the way to.
    closed = next(path for path in reversed(python.parents) if not path.stat().st_mode & 0o001)
    expected = f"Python: {python}: {closed}: expected rights for others to read it, got mode"
    with pytest.raises(InputError, match=re.escape(expected)):
        check_readable({python: "Python"})
