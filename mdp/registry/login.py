"""Logins for registries, from the files in which `podman login` and `docker login` keep them.

containers-auth.json(5), and Docker's config.json with its helpers of credentials. Challenges are
those of RFC 7235, tokens those of Docker's token specification.
"""

import base64
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import msgspec

from mdp.errors import ConfigError, TransferError
from mdp.files import MAX_TOML_BYTES, decode_content, read_regular

#: A program that asks a keyring, or a cloud, for a short-lived password.
HELPER_S = 60.0
_PARAMETER = re.compile(r'([a-zA-Z_]+)=(?:"([^"]*)"|([^\s,"]+))')


class _RegistryEntry(msgspec.Struct, frozen=True, rename={"identity_token": "identitytoken"}):
    """Beside `auth`, Docker keeps a token of some clouds."""

    auth: str = ""
    identity_token: str = ""


class _LoginFile(msgspec.Struct, frozen=True, rename="camel"):
    """Fields that are read of `auth.json` and `config.json`."""

    auths: dict[str, _RegistryEntry] = msgspec.field(default_factory=dict)
    creds_store: str = ""
    cred_helpers: dict[str, str] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryLogin:
    """A user of a registry."""

    user: str
    password: str = field(repr=False)
    #: The file that it is from, for messages.
    source: Path

    @property
    def basic(self) -> str:
        """The value of `Authorization`."""
        return f"Basic {base64.b64encode(f'{self.user}:{self.password}'.encode()).decode()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """A registry's demand, as WWW-Authenticate has it."""

    #: In lower case: `basic` or `bearer`.
    scheme: str
    parameters: Mapping[str, str]


#: The answer of the program `docker-credential-NAME` for a host; None where it knows none.
AskHelper = Callable[[str, str], bytes | None]


def login_files(environment: Mapping[str, str], user_id: int) -> list[Path]:
    """The files that may have a login, in the order in which they are asked."""
    if named := environment.get("REGISTRY_AUTH_FILE"):
        return [Path(named)]
    home = environment.get("HOME")
    # podman's, where it is logged in until the machine's end, and for good; Docker's.
    if running := environment.get("XDG_RUNTIME_DIR"):
        files = [Path(running, "containers", "auth.json")]
    else:
        files = [Path("/run/containers", str(user_id), "auth.json")]
    if config := environment.get("XDG_CONFIG_HOME") or (home and f"{home}/.config"):
        files.append(Path(config, "containers", "auth.json"))
    if docker := environment.get("DOCKER_CONFIG") or (home and f"{home}/.docker"):
        files.append(Path(docker, "config.json"))
    return files


def find_login(host: str, name: str, files: Sequence[Path], ask: AskHelper) -> RegistryLogin | None:
    """The login for repository `name` of `host`, of the first file that has one.

    Raises ConfigError for a file that is there and is none of logins.
    """
    for path in files:
        if not path.exists():
            continue
        content, _ = read_regular(path, MAX_TOML_BYTES)
        try:
            known = decode_content(path, content, _LoginFile, msgspec.json.decode)
        except ConfigError as error:
            # Without the content, which is secret.
            raise ConfigError(
                f"{path}: expected logins as `podman login` and `docker login` write them"
            ) from error
        hosts = {_host_of(key): key for key in known.auths}
        key = next((hosts[place] for place in _places(host, name) if place in hosts), None)
        entry = _RegistryEntry() if key is None else known.auths[key]
        helper = known.cred_helpers.get(host) or known.creds_store
        if entry.auth:
            return _decode_login(path, host, entry.auth)
        if helper and (answer := ask(helper, host)) is not None:
            return _parse_helper(path, helper, answer)
        if entry.identity_token:
            raise ConfigError(
                f"{path}: {host}: has an identity token, which is not supported: expected `auth`"
            )
    return None


def _places(host: str, name: str) -> Iterator[str]:
    """Keys that speak for a repository, the most specific first."""
    parts = [host, *name.split("/")]
    for end in range(len(parts), 0, -1):
        yield "/".join(parts[:end])


def _host_of(key: str) -> str:
    """A key without the scheme and path that Docker's older ones have."""
    return urlsplit(key).netloc if "://" in key else key.rstrip("/")


def _decode_login(path: Path, host: str, auth: str) -> RegistryLogin:
    try:
        user, separator, password = base64.b64decode(auth, validate=True).decode().partition(":")
    except ValueError:
        separator = ""
    if not separator:
        # Without the content, which is secret.
        raise ConfigError(f"{path}: {host}: `auth`: expected USER:PASSWORD in base64")
    return RegistryLogin(user=user, password=password, source=path)


def _parse_helper(path: Path, helper: str, answer: bytes) -> RegistryLogin:
    try:
        given = msgspec.json.decode(answer, type=dict[str, str])
        return RegistryLogin(user=given["Username"], password=given["Secret"], source=path)
    except (msgspec.MsgspecError, KeyError) as error:
        raise ConfigError(
            f"{path}: docker-credential-{helper}: expected Username and Secret in JSON"
        ) from error


def ask_program(helper: str, host: str) -> bytes | None:
    """Ask `docker-credential-HELPER`; None where it knows no login. Raises ConfigError."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", helper):
        raise ConfigError(f"{helper!r}: expected the name of a helper of credentials")
    command = [f"docker-credential-{helper}", "get"]
    try:
        done = subprocess.run(command, input=host.encode(), capture_output=True, timeout=HELPER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", None) or f"says nothing within {HELPER_S:g} s"
        raise ConfigError(f"{command[0]}: {reason}") from error
    return done.stdout if done.returncode == 0 else None


def parse_challenge(header: str) -> Challenge | None:
    """The demand in WWW-Authenticate; None where it is no known one."""
    scheme, _, rest = header.partition(" ")
    if scheme.lower() not in ("basic", "bearer"):
        return None
    parameters = {key.lower(): quoted or bare for key, quoted, bare in _PARAMETER.findall(rest)}
    return Challenge(scheme=scheme.lower(), parameters=parameters)


def token_address(challenge: Challenge, *, insecure: bool) -> str:
    """The address at which a token is to be had; raises TransferError for an unsafe one."""
    realm = challenge.parameters.get("realm", "")
    allowed = ("https", "http") if insecure else ("https",)
    try:
        parts = urlsplit(realm)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in allowed or not parts.netloc:
        raise TransferError(f"tokens are at {realm!r}: expected an address with {allowed[0]}")
    asked = [(key, challenge.parameters[key]) for key in ("service", "scope")
             if challenge.parameters.get(key)]  # fmt: skip
    return f"{realm}{'&' if parts.query else '?'}{urlencode(asked)}"
