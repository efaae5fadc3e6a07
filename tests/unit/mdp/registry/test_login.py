"""Logins, from the files of podman and Docker; challenges of registries."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from mdp.errors import ConfigError, TransferError
from mdp.registry.login import (
    Challenge,
    RegistryLogin,
    find_login,
    login_files,
    parse_challenge,
    token_address,
)


def auth(user: str, password: str = "secret") -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def nobody(helper: str, host: str) -> bytes | None:
    raise AssertionError("no helper is named")


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_files_are_asked_in_the_order_of_podman_and_docker() -> None:
    assert login_files({"REGISTRY_AUTH_FILE": "/a", "HOME": "/h"}, 7) == [Path("/a")]
    assert login_files({"HOME": "/h"}, 7) == [
        Path("/run/containers/7/auth.json"),
        Path("/h/.config/containers/auth.json"),
        Path("/h/.docker/config.json"),
    ]
    places = {"XDG_RUNTIME_DIR": "/r", "XDG_CONFIG_HOME": "/c", "DOCKER_CONFIG": "/d"}
    assert login_files(places, 7) == [
        Path("/r/containers/auth.json"),
        Path("/c/containers/auth.json"),
        Path("/d/config.json"),
    ]
    assert login_files({}, 7) == [Path("/run/containers/7/auth.json")]


def test_the_most_specific_place_speaks(tmp_path: Path) -> None:
    places = {
        "h:5000": auth("host"),
        "h:5000/a/b": auth("b"),
        "https://old/v1/": auth("old", "p:q"),
    }
    files = [
        tmp_path / "none",
        written(tmp_path / "first.json", {"auths": {"other": auth("other")}}),
        written(tmp_path / "second.json", {"auths": places, "psFormat": "x"}),
    ]
    for host, name, user in (
        ("h:5000", "a/b", "b"),
        ("h:5000", "a/b/c", "b"),
        ("h:5000", "a/bc", "host"),
        ("h:5000", "a", "host"),
        ("other", "x", "other"),
    ):
        found = find_login(host, name, files, nobody)
        assert found == RegistryLogin(
            user=user, password="secret", source=found.source if found else Path()
        )
    old = find_login("old", "x", files, nobody)
    assert old is not None
    assert (old.user, old.password) == ("old", "p:q")
    assert old.basic == f"Basic {auth('old', 'p:q')['auth']}"
    assert "p:q" not in repr(old)
    assert find_login("h", "a", files, nobody) is None


def test_helpers_of_credentials(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    def ask(helper: str, host: str) -> bytes | None:
        asked.append((helper, host))
        return None if host == "unknown" else b'{"ServerURL": "x", "Username": "u", "Secret": "p"}'

    content = {"credsStore": "keyring", "credHelpers": {"cloud": "cloud-login"}, "auths": {"h": {}}}
    files = [written(tmp_path / "config.json", content)]
    for host in ("h", "cloud"):
        found = find_login(host, "n", files, ask)
        assert found is not None
        assert (found.user, found.password) == ("u", "p")
    assert find_login("unknown", "n", files, ask) is None
    assert asked == [("keyring", "h"), ("cloud-login", "cloud"), ("keyring", "unknown")]
    with pytest.raises(
        ConfigError, match="docker-credential-keyring: expected Username and Secret"
    ):
        find_login("h", "n", files, lambda helper, host: b"{}")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "expected logins as `podman login` and `docker login` write them"),
        ({"auths": []}, "expected logins as"),
        ({"auths": {"h": {"auth": "hunter2"}}}, "h: `auth`: expected USER:PASSWORD in base64"),
        ({"auths": {"h": {"auth": "aHVudGVyMg=="}}}, "expected USER:PASSWORD in base64"),
        ({"auths": {"h": {"identitytoken": "hunter2"}}}, "identity token, which is not supported"),
    ],
)
def test_files_that_are_no_logins(tmp_path: Path, content: Any, expected: str) -> None:
    path = written(tmp_path / "auth.json", content)
    with pytest.raises(ConfigError, match=expected) as caught:
        find_login("h", "n", [path], nobody)
    assert str(caught.value).startswith(str(path))
    assert "hunter2" not in str(caught.value)


def test_challenges() -> None:
    assert parse_challenge('Basic realm="x y"') == Challenge(
        scheme="basic", parameters={"realm": "x y"}
    )
    header = 'Bearer realm="https://t.example/token",service=r,scope="repository:a/b:pull,push"'
    challenge = parse_challenge(header)
    assert challenge is not None
    assert token_address(challenge, insecure=False) == (
        "https://t.example/token?service=r&scope=repository%3Aa%2Fb%3Apull%2Cpush"
    )
    assert parse_challenge("Negotiate") is None
    assert parse_challenge("") is None


@pytest.mark.parametrize(
    "realm", ["http://t.example/token", "file:///etc/passwd", "https://[", "t", ""]
)
def test_a_login_is_sent_by_tls_alone(realm: str) -> None:
    challenge = Challenge(scheme="bearer", parameters={"realm": realm})
    with pytest.raises(TransferError, match="expected an address with https"):
        token_address(challenge, insecure=False)
