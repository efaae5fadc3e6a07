"""`mdp gateway`: fleets over HTTP, with a page and metrics."""

import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mdp import console
from mdp.cli.answers import Certificate, PrivateKey, TokenFile, say
from mdp.client.base import DEFAULT_DEADLINE_MS
from mdp.errors import ConfigError, InputError, InsecureWarning
from mdp.extras import GATEWAY, install, missing
from mdp.formats.fleet import (
    FLEET_NAME_FORM,
    PLAIN_TEXT,
    is_fleet_name,
    plain_text_entries,
    read_devices,
    read_fleet,
)
from mdp.fusion.fuse import Fusion
from mdp.logs import quiet_libraries
from mdp.requests.deadline import check_deadline_ms
from mdp.tracing import set_up

#: What a fleet without a bundle is served as, once it has one, and what that is called.
TAUGHT = "taught"
#: Worker processes: the one that listens keeps no more busy.
MAX_WORKERS = 8


def gateway(
    fleet: Annotated[
        list[str],
        typer.Option(help="fleet.toml, or NAME=fleet.toml; by default named as its bundle."),
    ],
    bind: Annotated[str, typer.Option(help="HOST:PORT to listen on.")] = "127.0.0.1:8080",
    tokens: TokenFile = None,
    certificate: Certificate = None,
    private_key: PrivateKey = None,
    deadline_ms: Annotated[
        float, typer.Option(help="Milliseconds for a picture whose request names none.")
    ] = DEFAULT_DEADLINE_MS,
    fusion: Annotated[Fusion, typer.Option(help="How to combine what arrived.")] = "stacked",
    cascade: Annotated[
        bool,
        typer.Option(
            "--cascade", help="Ask few members first, the others only where these are unsure."
        ),
    ] = False,
    key: Annotated[
        Path | None,
        typer.Option(help="This gateway's secret key file, instead of fleet.toml's `key`."),
    ] = None,
    teach: Annotated[
        Path | None,
        typer.Option(
            help="Teach in the page: folder of scenes to record into and build from; needs "
            "--teach-tokens."
        ),
    ] = None,
    teach_tokens: Annotated[
        Path | None,
        typer.Option(
            help="File of bearer tokens that may teach and see the cameras' pictures, one a line; "
            "those of --tokens may not."
        ),
    ] = None,
    teach_kept: Annotated[
        Path | None,
        typer.Option(help="Folder that `mdp watch --keep` fills, to look through in the page."),
    ] = None,
    teach_config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of settings for the page's builds (`mdp-partition build --config`)."
        ),
    ] = None,
    teach_inspect: Annotated[
        Path | None,
        typer.Option(
            help="Folder with good/, and defects/ if there are any: kept items that the page calls "
            "good are learnt by anomaly heads."
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            help="Processes that answer pictures, where cores are there; 1: the gateway's own.",
            min=1,
            max=MAX_WORKERS,
        ),
    ] = 1,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Plain text over a network: to agents without a key, and to others than this "
            "machine without TLS and tokens.",
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Machine-readable on stdout, nothing else.")
    ] = False,
) -> None:
    """Serve fleets over HTTP: the Open Inference Protocol, uploads, metrics and a page.

    Only this machine can connect, unless --tokens, --certificate and --private-key are given, or
    --insecure, in a container for instance, of which only this machine reaches the port.

    Example: mdp gateway --fleet fleet.toml

    Exit codes: 0 told to end, 2 bad input, 130 interrupted, 1 unforeseen.
    """
    quiet_libraries()
    if module := missing(GATEWAY):
        raise InputError(f"{module} is not installed; the gateway needs it: {install('gateway')}")
    # Loading starlette and uvicorn takes a third of a second, which no other command needs.
    from mdp.gateway.access import FollowedTokens, Tokens, check_exposure
    from mdp.gateway.fleets import ServedFleet
    from mdp.gateway.handover import WorkerFleet
    from mdp.gateway.server import Listening, serve
    from mdp.gateway.workers import Workers
    from mdp.teach.teacher import FleetTeacher, TeachOptions

    check_deadline_ms(deadline_ms, "--deadline-ms")
    set_up("mdp-gateway")
    if (certificate is None) != (private_key is None):
        raise InputError("--certificate and --private-key: expected both, or neither for HTTP")
    with_tls, with_tokens = certificate is not None, tokens is not None
    if risk := check_exposure(bind, tokens=with_tokens, encrypted=with_tls, insecure=insecure):
        print(f"mdp: WARNING: {risk}", file=sys.stderr)
    allowed = Tokens([]) if tokens is None else FollowedTokens(tokens)
    teachers = Tokens([]) if teach_tokens is None else FollowedTokens(teach_tokens)
    listening = Listening(bind, allowed, certificate, private_key, teachers)
    for name, given in (
        ("--teach-tokens", teach_tokens),
        ("--teach-kept", teach_kept),
        ("--teach-config", teach_config),
        ("--teach-inspect", teach_inspect),
    ):
        if given is not None and teach is None:
            raise InputError(f"{name}: expected --teach FOLDER beside it")
    if teach_config is not None and not teach_config.is_file():
        raise InputError(f"--teach-config {teach_config}: expected a file of settings")
    for name, given in (
        ("--teach", teach),
        ("--teach-kept", teach_kept),
        ("--teach-inspect", teach_inspect),
    ):
        if given is not None and given.exists() and not given.is_dir():
            raise InputError(f"{name} {given}: expected a folder or nothing, found a file")
    if teach is not None and workers > 1:
        raise InputError(
            "--teach: expected no --workers beside it: what is taught may have no bundle yet"
        )
    named, teacher = parse_fleets(fleet, taught=teach is not None), None
    if teach is not None:
        if not teachers:
            raise InputError(
                "--teach: expected --teach-tokens: a file of tokens for those who may teach"
            )
        if len(named) > 1:
            raise InputError(f"--teach: expected one --fleet, got {len(named)}")
        ((name, file),) = named.items()
        teacher = FleetTeacher(
            TeachOptions(
                fleet=file,
                scenes=teach,
                kept=teach_kept,
                config=teach_config,
                inspect=teach_inspect,
                key=key,
                name=name,
            )
        )

    def open_fleet(name: str, path: Path) -> ServedFleet:
        return ServedFleet(
            name, path, report=say, fusion=fusion, key=key, insecure=insecure, cascade=cascade
        )

    served: dict[str, ServedFleet] = {}
    first: Callable[[], ServedFleet] | None = None
    with warnings.catch_warnings(), ExitStack() as stack:
        # Said below, in one line each.
        warnings.simplefilter("ignore", InsecureWarning)
        for name, path in named.items():
            if teacher is not None and not read_devices(path).bundle:
                first = partial(open_fleet, name, path)
                continue
            served[name] = open_fleet(name, path)
            for entry in plain_text_entries(read_fleet(path)[0]):
                text = f"device {entry.device!r} at {entry.address} is {PLAIN_TEXT}"
                print(f"mdp: WARNING: {text}", file=sys.stderr)

        def on_start(url: str) -> None:
            if json:
                console.print_json({"event": "listening", "url": url, "models": list(served)})
            else:
                what = f"serves {', '.join(served)}" if served else "serves no bundle yet"
                print(f"{url} {what}; Ctrl-C ends it", flush=True)

        pool = None
        if workers > 1:
            handed = {
                name: WorkerFleet(
                    path=str(path),
                    fusion=fusion,
                    key=None if key is None else str(key),
                    insecure=insecure,
                    cascade=cascade,
                )
                for name, path in named.items()
            }
            pool = stack.enter_context(Workers(workers, handed, say))
        serve(
            served,
            listening,
            deadline_ms=deadline_ms,
            started=on_start,
            teacher=teacher,
            first=first,
            workers=pool,
        )


def parse_fleets(words: list[str], *, taught: bool = False) -> dict[str, Path]:
    """Model -> fleet file, from `FILE` or `NAME=FILE` each; raises InputError or ConfigError.

    A fleet that is to be `taught` needs no bundle.
    """
    found: dict[str, Path] = {}
    for word in words:
        name, separator, file = word.partition("=")
        path = Path(file if separator else word)
        if not separator and taught and not read_devices(path).bundle:
            name = TAUGHT
        elif not separator:
            name = read_fleet(path)[1].manifest.name
        elif not is_fleet_name(name):
            raise InputError(f"--fleet {word}: expected NAME=FILE, NAME being {FLEET_NAME_FORM}")
        if name in found:
            raise ConfigError(
                f"{path}: another fleet is called {name!r} already: expected --fleet NAME=FILE"
            )
        found[name] = path
    return found
