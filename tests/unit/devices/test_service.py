"""The text of an agent's unit, and what a service's user could not read."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.service import (
    KEY_WORD,
    MARK,
    MOST_STARTS,
    RESTART_S,
    STARTS_WITHIN_S,
    WATCHDOG_S,
    Service,
    check_memory,
    check_port,
    check_readable,
    digest_of,
    is_same,
    memory_of,
    quote,
    unit_text,
)
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


UNITS = Path(__file__).parents[3] / "deploy" / "systemd"


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
    assert settings(replace(PLAIN, keeps=True))["StateDirectory"] == "mdp-agent-n100"
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
    assert quote(word) == written


def test_a_word_that_no_unit_can_hold() -> None:
    with pytest.raises(InputError, match="printable"):
        quote("a\nExecStartPre=/bin/false")


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


def test_a_unit_that_cannot_work_ends() -> None:
    unit = settings(PLAIN)
    # Bad input; an address that is taken, or not there yet, has exit code 5.
    assert unit["RestartPreventExitStatus"] == "2"
    assert int(unit["StartLimitBurst"]) == MOST_STARTS
    # Reached by starts that fail within 10 s, but not by restarts of the watchdog.
    assert MOST_STARTS * (RESTART_S + 10) < STARTS_WITHIN_S < MOST_STARTS * WATCHDOG_S


def test_memory_and_tasks_are_bounded() -> None:
    unit = settings(replace(PLAIN, memory="600M"))
    assert (unit["MemoryMax"], unit["OOMPolicy"], unit["TasksMax"]) == ("600M", "kill", "512")
    assert settings(PLAIN)["MemoryMax"] == "80%"
    assert memory_of(None, batch=1, opencv=False) == "80%"
    # Agents of the examples, planned at 18 to 26 MB, took at most 125 MB after a reload.
    assert memory_of(26_000_000, batch=1, opencv=False) == "395M"
    assert memory_of(26_000_000, batch=1, opencv=True) == "651M"


@given(st.integers(1, 2**40), st.integers(1, 64))
def test_a_limit_has_room_for_two_models_and_a_batch(planned: int, batch: int) -> None:
    limit = int(memory_of(planned, batch=batch, opencv=False).removesuffix("M")) * 2**20
    assert limit > 2 * planned + batch * planned + 80_000_000
    assert check_memory(memory_of(planned, batch=batch, opencv=False))


@pytest.mark.parametrize("text", ["600M", "1G", "123456", "50%", "100%", "infinity"])
def test_a_limit_as_systemd_writes_it(text: str) -> None:
    assert check_memory(text) == text


@pytest.mark.parametrize("text", ["", "0", "-1M", "1.5G", "600 MB", "101%", "600M\nUser=root"])
def test_a_limit_that_is_none(text: str) -> None:
    with pytest.raises(InputError, match=r"--memory-max .*: expected bytes with K, M, G or T"):
        check_memory(text)


def test_priorities_are_set_only_where_a_library_needs_it() -> None:
    def filters(service: Service) -> list[str]:
        lines = unit_text(service).splitlines()
        return [line.partition("=")[2] for line in lines if line.startswith("SystemCallFilter=")]

    # ZeroMQ aborts where it may not set its thread's policy.
    denied = ["@system-service", "~@privileged @resources", "sched_setscheduler"]
    assert filters(PLAIN) == denied
    accelerated, streamed = replace(PLAIN, plain_cpu=False), replace(PLAIN, opencv=True)
    for service in (accelerated, streamed, replace(PLAIN, pinned=True)):
        assert filters(service) == ["@system-service", "~@privileged"]


def test_units_of_the_same_options_may_read_other_things() -> None:
    first = replace(PLAIN, inputs=digest_of([("bundle", b"1")]), memory="400M")
    second = replace(PLAIN, inputs=digest_of([("bundle", b"2")]), memory="500M")
    assert unit_text(first) != unit_text(second)
    assert is_same(unit_text(first), unit_text(second))
    assert not is_same(unit_text(first), unit_text(replace(first, words=("--threads", "1"))))
    assert not is_same(unit_text(first), "[Service]\n")


NAMED = st.lists(st.tuples(st.text(), st.binary()), max_size=5)


@given(NAMED, NAMED)
def test_a_digest_is_of_names_and_contents(
    some: list[tuple[str, bytes]], others: list[tuple[str, bytes]]
) -> None:
    assert digest_of(some) == digest_of(reversed(some))
    assert (digest_of(some) == digest_of(others)) == (sorted(some) == sorted(others))
    assert re.fullmatch("[0-9a-f]{64}", digest_of(some))


@pytest.mark.parametrize("name", ["gateway", "mqtt", "watch"])
def test_units_of_clients_are_as_confined_as_an_agent_s(name: str) -> None:
    lines = (UNITS / f"mdp-{name}.service").read_text().splitlines()
    own = {
        *("Type=notify", "ExecReload=/bin/kill -HUP $MAINPID", "TimeoutStartSec=900"),
        "WatchdogSec=60",
    }
    agent = [line for line in unit_text(PLAIN).splitlines() if line and not line.startswith("#")]
    differ: tuple[str, ...] = ("Description=", "ExecStart=", "EnvironmentFile=", "MemoryMax=")
    if name == "mqtt":
        # A broker that starts at the same time refuses logins for a while.
        differ += ("RestartSec=",)
    assert [line for line in agent if not line.startswith(differ) and line not in own] == [
        line
        for line in lines
        if line
        and not line.startswith(
            (*differ, "#", "Type=exec", "LoadCredential=client.secret:", "LogsDirectory=mdp-watch")
        )
    ]
