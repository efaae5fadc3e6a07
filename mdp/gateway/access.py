"""Rules of where a gateway listens and whom it lets in. Pure but for reading the tokens' file."""

import hashlib
import hmac
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from mdp.errors import ConfigError, InputError
from mdp.files import read_secret
from mdp.formats.keys import host_and_port, is_local
from mdp.gateway.refusals import Refusal
from mdp.transport import network_of

_LOG = logging.getLogger(__name__)
MIN_TOKEN = 16
_MAX_TOKENS_BYTES = 2**20
#: Answered without a token: probes and the page itself, which asks for one.
OPEN = frozenset(
    (
        "/", "/page.css", "/page.js", "/common.js", "/icon.svg",
        "/teach", "/teach.css", "/teach.js", "/openapi.json",
        "/v2/health/live", "/v2/health/ready",
    )
)  # fmt: skip
#: Below it are pictures of cameras, and what changes a fleet.
TEACHING = "/teach/"
_BEARER = {"www-authenticate": "Bearer"}
#: By it the page tells a token that may not teach from other refusals.
_UNFIT = {"www-authenticate": 'Bearer error="insufficient_scope"'}
_SAFE = ("GET", "HEAD", "OPTIONS")
#: `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`, and nothing else.
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::[0-9]{1,5})?")


def check_exposure(bind: str, *, tokens: bool, encrypted: bool, insecure: bool = False) -> str:
    """A warning, or nothing, about an address beyond this machine.

    Without tokens or TLS, raises InputError unless `insecure`.
    """
    if is_local(host_and_port(bind)[0]) or (tokens and encrypted):
        return ""
    lacking = [
        option
        for option, given in (("--tokens", tokens), ("--certificate and --private-key", encrypted))
        if not given
    ]
    if insecure:
        risks = [
            risk
            for risk, given in (
                ("whoever connects may ask and switch devices off", tokens),
                ("anyone on the network path can read and forge what is sent", encrypted),
            )
            if not given
        ]
        return (
            f"{bind} is not on this machine alone, and without {', '.join(lacking)}: "
            f"{', and '.join(risks)}"
        )
    raise InputError(f"--bind {bind} is not on this machine alone: expected {', '.join(lacking)}")


class Tokens:
    """The bearer tokens that are let in; none: whoever can connect."""

    def __init__(self, tokens: list[str]) -> None:
        self._digests = [_digest(token) for token in tokens]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def caller(self, authorization: str) -> str:
        """A name of whoever sends this `Authorization` header; not the token itself."""
        return f"token {_digest(authorization.partition(' ')[2].strip()).hex()}"

    def allow(self, authorization: str) -> bool:
        """Tell whether a request with this `Authorization` header is let in."""
        scheme, _, token = authorization.partition(" ")
        found = _digest(token.strip())
        # Each is compared in constant time, and all of them are.
        hits = [hmac.compare_digest(found, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(hits)


class FollowedTokens(Tokens):
    """The tokens of a file, one a line, `#` beginning a comment, as they are at each request.

    While the file is wrong or gone nobody is let in.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError."""
        self._path, self._seen = path, stamp_of(path)
        super().__init__(_tokens_in(path))

    def __bool__(self) -> bool:
        """True: without any that is right, nobody may ask."""
        return True

    def allow(self, authorization: str) -> bool:
        """Tell whether a request with this `Authorization` header is let in, by the file of now."""
        if (seen := stamp_of(self._path)) != self._seen:
            self._seen = seen
            try:
                self._digests = [_digest(token) for token in _tokens_in(self._path)]
            except ConfigError as error:
                self._digests = []
                _LOG.error("%s; nobody is let in until it is right", error)
        return super().allow(authorization)


#: What tells a file from the one that was there before: its inode, time of change and size.
Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """The stamp of a file, of its rights too; None where there is none."""
    try:
        there = path.stat()
    except OSError:
        return None
    return there.st_ino, there.st_ctime_ns, there.st_size


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


def _tokens_in(path: Path) -> list[str]:
    content = read_secret(path, _MAX_TOKENS_BYTES)
    tokens = []
    for number, line in enumerate(content.decode("ascii", "replace").splitlines(), 1):
        token = line.strip()
        if not token or token.startswith("#"):
            continue
        if len(token) < MIN_TOKEN or not all("!" <= character <= "~" for character in token):
            raise ConfigError(
                f"{path}: line {number}: expected a token of {MIN_TOKEN} or more ASCII characters "
                "without spaces"
            )
        tokens.append(token)
    if not tokens:
        raise ConfigError(f"{path}: expected a token on a line of its own, found none")
    return tokens


def address_of(host: str) -> str:
    """The network of a client's address that counts as one host: itself, or an IPv6 /64."""
    return str(network_of(host))


def check_request(
    method: str,
    path: str,
    headers: Mapping[str, str],
    tokens: Tokens,
    scheme: str = "http",
    teachers: Tokens | None = None,
) -> None:
    """Raise Refusal for a request that may not be answered.

    `tokens` may ask, `teachers` may ask and teach. Nobody teaches without a token, on loopback
    neither: any local process could watch.

    Without tokens, whoever can connect to loopback is let in; that is also a browser, on behalf of
    any page that it shows. So the name that it asked has to be this machine's, which a page cannot
    bring about by DNS, and what changes or computes anything may not come from another page.
    """
    authorization = headers.get("authorization", "")
    may_teach = teachers is not None and teachers.allow(authorization)
    may_ask = may_teach or tokens.allow(authorization)
    if path.startswith(TEACHING) and not may_teach:
        if may_ask:
            raise Refusal(
                403, "expected a token that may teach (--teach-tokens), got another", _UNFIT
            )
        raise Refusal(401, "expected Authorization: Bearer TOKEN, one of --teach-tokens", _BEARER)
    if tokens:
        if path not in OPEN and not may_ask:
            raise Refusal(401, "expected Authorization: Bearer TOKEN", _BEARER)
    elif not is_local(_host_of(headers.get("host", ""))):
        raise Refusal(403, "expected the Host localhost, 127.0.0.1 or [::1]")
    asked, origin = headers.get("host", ""), headers.get("origin")
    # HTTPS may end in front of this gateway.
    own = (f"{scheme}://{asked}", f"https://{asked}")
    other = method not in _SAFE and origin and origin not in own
    # A GET without CORS has no Origin, and may have the devices look.
    site = headers.get("sec-fetch-site", "none")
    if other or (path not in OPEN and site not in ("none", "same-origin")):
        raise Refusal(403, "expected a request of this gateway's own page")


def caller_of(
    path: str, headers: Mapping[str, str], tokens: Tokens, host: str, teachers: Tokens | None = None
) -> str:
    """The caller of a request that is let in: its token, or without one its `host`'s network.

    Empty for what anybody gets with or without a token.
    """
    authorization = headers.get("authorization", "")
    if path not in OPEN and teachers is not None and teachers.allow(authorization):
        return teachers.caller(authorization)
    if not tokens:
        return address_of(host)
    return "" if path in OPEN else tokens.caller(authorization)


def _host_of(header: str) -> str:
    found = _HOST.fullmatch(header)
    return "" if found is None else found[1] or found[2]
