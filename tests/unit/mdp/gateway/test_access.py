"""Users that a gateway lets in, and addresses that it may listen on."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from mdp.errors import ConfigError, InputError
from mdp.formats.keys import host_and_port, is_local
from mdp.gateway.access import FollowedTokens, Tokens, caller_of, check_exposure, check_request
from mdp.gateway.refusals import Refusal

TOKEN = "0123456789abcdef"
ANYONE = Tokens([])


@pytest.mark.parametrize("bind", ["127.0.0.1:8080", "[::1]:0", "localhost:80", "127.9.9.9:1"])
def test_loopback_needs_nothing(bind: str) -> None:
    check_exposure(bind, tokens=False, encrypted=False)


@pytest.mark.parametrize("bind", ["0.0.0.0:8080", "[::]:8080", "10.0.0.1:80", "gateway.lan:443"])
def test_other_addresses_need_tokens_and_tls(bind: str) -> None:
    for tokens, encrypted, said in (
        (False, False, "--tokens, --certificate and --private-key"),
        (True, False, "expected --certificate"),
        (False, True, "expected --tokens"),
    ):
        with pytest.raises(InputError, match=said):
            check_exposure(bind, tokens=tokens, encrypted=encrypted)
        warning = check_exposure(bind, tokens=tokens, encrypted=encrypted, insecure=True)
        assert said.removeprefix("expected ") in warning
        assert ("whoever connects may ask and switch devices off" in warning) != tokens
        assert ("on the network path can read and forge" in warning) != encrypted
    assert not check_exposure(bind, tokens=True, encrypted=True, insecure=True)


@pytest.mark.parametrize("bind", ["8080", ":8080", "::1:8080", "host:99999", "host:", "host:x"])
def test_addresses_that_are_none(bind: str) -> None:
    with pytest.raises(InputError, match="expected HOST:PORT"):
        host_and_port(bind)


def test_only_who_has_a_token_is_let_in() -> None:
    tokens = Tokens([TOKEN, "another-token-of-16"])
    for allowed in (f"Bearer {TOKEN}", "bearer another-token-of-16"):
        check_request("POST", "/v2/models/m/infer", {"authorization": allowed}, tokens)
    for wrong in ("", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer", "Bearer \udcff"):
        with pytest.raises(Refusal, match="Bearer") as refused:
            check_request("GET", "/metrics", {"authorization": wrong}, tokens)
        assert refused.value.status == 401
    for path in ("/", "/page.js", "/v2/health/live"):
        check_request("GET", path, {}, tokens)


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "[::1]:8080"])
def test_without_tokens_this_machine_is_let_in(host: str) -> None:
    check_request("GET", "/fleets", {"host": host}, ANYONE)
    check_request("POST", "/x", {"host": host, "origin": f"http://{host}"}, ANYONE)


def test_another_page_in_the_same_browser_is_not_let_in() -> None:
    for host in (
        "evil.example:8080", "", "127.0.0.1.evil.example", "[::1].evil.example", "[::1]:80x",
        "127.0.0.1:80.evil.example", "127.0.0.1:", "[::1", "::1", "[127.0.0.1]x", "user@[::1]:80",
    ):  # fmt: skip
        with pytest.raises(Refusal, match="Host"):
            check_request("GET", "/fleets", {"host": host}, ANYONE)
    for origin in (
        "http://evil.example", "null", "http://127.0.0.1:8081", "ftp://127.0.0.1:8080",
        "chrome-extension://127.0.0.1:8080", "127.0.0.1:8080", "http://127.0.0.1:8080/",
    ):  # fmt: skip
        with pytest.raises(Refusal, match="own page"):
            check_request("POST", "/x", {"host": "127.0.0.1:8080", "origin": origin}, ANYONE)
    asked = {"host": "127.0.0.1:8080"}
    with pytest.raises(Refusal, match="own page"):
        check_request("POST", "/x", asked | {"origin": "http://127.0.0.1:8080"}, ANYONE, "https")
    # HTTPS may end at a proxy in front.
    for scheme in ("http", "https"):
        check_request("POST", "/x", asked | {"origin": "https://127.0.0.1:8080"}, ANYONE, scheme)
    for site in ("cross-site", "same-site", "same-origin", "none"):
        headers = {"host": "127.0.0.1:8080", "sec-fetch-site": site}
        check_request("GET", "/", headers, ANYONE)
        with nullcontext() if site in ("same-origin", "none") else pytest.raises(Refusal):
            check_request("GET", "/v2/models/x/look", headers, ANYONE)
    assert not is_local("127.0.0.1.evil.example")


def test_a_caller_is_its_token_or_the_network_of_its_address() -> None:
    tokens = Tokens([TOKEN, "another-token-of-16"])

    def caller(token: str, host: str = "10.0.0.1", path: str = "/fleets") -> str:
        return caller_of(path, {"authorization": f"Bearer {token}"}, tokens, host)

    assert caller(TOKEN) == caller(f" {TOKEN} ", "10.0.0.2")
    assert caller(TOKEN) != caller("another-token-of-16")
    assert TOKEN not in caller(TOKEN)
    assert caller(TOKEN, path="/page.js") == "", "anybody gets it"
    hosts = ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", "2001:db8::2:1", "2001:db8:0:1::1")
    v4, mapped, first, second, third = (caller_of("/", {}, ANYONE, host) for host in hosts)
    assert (v4, first) == (mapped, second)
    assert len({v4, first, third}) == 3


def test_a_file_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text(f"# the doorbell\n{TOKEN}\n\n")
    tokens = FollowedTokens(path)
    assert tokens.allow(f"Bearer {TOKEN}")
    assert not tokens.allow("Bearer # the doorbell")


def test_tokens_that_a_group_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokens"
    path.write_text(TOKEN)
    path.chmod(0o440)
    with pytest.raises(ConfigError, match="only its owner can read"):
        FollowedTokens(path)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert FollowedTokens(path)


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        ("# none\n", 0o600, "expected a token on a line of its own"),
        ("short\n", 0o600, "line 1: expected a token of 16 or more"),
        ("0123456789 abcdef\n", 0o600, "line 1: expected a token of 16 or more"),
        (TOKEN, 0o644, "only its owner can read"),
        (None, 0, "cannot be read: No such file"),
    ],
)
def test_refused_token_files(tmp_path: Path, content: str | None, mode: int, said: str) -> None:
    path = tmp_path / "tokens"
    if content is not None:
        path.touch(mode)
        path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        FollowedTokens(path)


TEACHER = "fedcba9876543210"


def status_of(path: str, token: str, tokens: Tokens, teachers: Tokens | None, **more: str) -> int:
    """The status of the refusal; 200 if it is let in."""
    headers = {"host": "localhost", **more}
    if token:
        headers["authorization"] = f"Bearer {token}"
    try:
        check_request("PUT", path, headers, tokens, "http", teachers)
    except Refusal as refusal:
        return refusal.status
    return 200


@pytest.mark.parametrize("tokens", [ANYONE, Tokens([TOKEN])])
def test_only_who_may_teach_does(tokens: Tokens) -> None:
    teachers = Tokens([TEACHER])
    path = "/teach/recording"
    assert status_of(path, TEACHER, tokens, teachers) == 200
    # On loopback neither: any local process could watch.
    assert status_of(path, "", tokens, teachers) == 401
    assert status_of(path, "0" * 16, tokens, teachers) == 401
    assert status_of(path, TOKEN, tokens, teachers) == (403 if tokens else 401)
    for without in (None, Tokens([])):
        assert status_of(path, TEACHER, tokens, without) == 401
    # A page of another site has no token, and could not use one.
    assert status_of(path, TEACHER, tokens, teachers, origin="http://elsewhere") == 403
    assert (
        status_of("/teach", "", tokens, teachers) == status_of("/teach.js", "", tokens, None) == 200
    )
    assert status_of("/v2", TEACHER, tokens, teachers) == 200


def test_a_teacher_is_a_caller_of_its_own() -> None:
    headers = {"authorization": f"Bearer {TEACHER}"}
    teachers = Tokens([TEACHER])
    for tokens in (ANYONE, Tokens([TOKEN])):
        caller = caller_of("/teach/state", headers, tokens, "127.0.0.1", teachers)
        assert caller == teachers.caller(headers["authorization"])
    assert caller_of("/v2", {}, ANYONE, "127.0.0.1", teachers) == "127.0.0.1/32"


def test_tokens_follow_their_file_and_fail_closed(tmp_path: Path) -> None:
    file = tmp_path / "tokens"

    def write(text: str) -> None:
        new = tmp_path / "new"
        new.write_text(text)
        new.chmod(0o600)
        new.replace(file)

    first, second = "0123456789abcdef", "fedcba9876543210"
    write(f"{first}\n")
    tokens = FollowedTokens(file)

    def allowed() -> list[bool]:
        assert tokens
        return [tokens.allow(f"Bearer {token}") for token in (first, second)]

    assert allowed() == [True, False]
    write(f"{second}\n")
    assert allowed() == [False, True]
    for wrong in ("short\n", "# none any more\n"):
        write(wrong)
        assert allowed() == [False, False]
    write(f"{first}\n{second}\n")
    assert allowed() == [True, True]
    file.unlink()
    assert allowed() == [False, False]
