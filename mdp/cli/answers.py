"""Parts that commands share: options, a client, picture files, lines and JSON."""

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from mdp import console
from mdp.client.sync import Client
from mdp.errors import InferenceError, InputError, InsecureWarning, MDPError
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import PLAIN_TEXT, plain_text_entries
from mdp.formats.keys import PUBLIC, SECRET
from mdp.fusion.anomaly_table import MAP_SIDE
from mdp.fusion.fuse import Fusion
from mdp.requests.prediction import MemberTiming, Prediction
from mdp.requests.reason import SUSPECT

FLEET_OPTION = typer.Option(
    "--fleet", envvar="MDP_FLEET", help="fleet.toml, as `mdp fleet new` makes it."
)
FleetFile = Annotated[Path, FLEET_OPTION]
KeyFile = Annotated[
    Path | None,
    typer.Option("--key", help="This client's secret key file, instead of fleet.toml's `key`."),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable on stdout, nothing else.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Plain text over a network, to agents without a key.")
]
TokenFile = Annotated[
    Path | None, typer.Option(help="File of bearer tokens that are let in over HTTP, one a line.")
]
Certificate = Annotated[
    Path | None, typer.Option(help="PEM file with the certificate and its chain, for HTTPS.")
]
PrivateKey = Annotated[
    Path | None, typer.Option(help="PEM file with the certificate's private key.")
]
DeadlineMs = Annotated[float, typer.Option(help="Milliseconds for each answer.")]
FusionChoice = Annotated[Fusion, typer.Option(help="Fusion rule.")]
Cascade = Annotated[
    bool,
    typer.Option("--cascade", help="Ask few members first, and the others where these are unsure."),
]


def say(text: str) -> None:
    """Print a line for people, beside the output."""
    print(f"mdp: {console.printable(text)}", file=sys.stderr, flush=True)


@contextmanager
def open_client(
    fleet: Path,
    key: Path | None,
    insecure: bool,
    fusion: Fusion = "stacked",
    cascade: bool = False,
    opinions: bool = False,
) -> Iterator[Client]:
    """A client of `fleet`; warns on stderr of plain text over a network."""
    with warnings.catch_warnings():
        # Printed below, in one line each.
        warnings.simplefilter("ignore", InsecureWarning)
        client = Client.connect(
            fleet, fusion=fusion, key=key, insecure=insecure, cascade=cascade, opinions=opinions
        )
    with client:
        for entry in plain_text_entries(client.fleet):
            text = f"device {entry.device!r} at {entry.address} is {PLAIN_TEXT}"
            print(f"mdp: WARNING: {text}", file=sys.stderr)
        yield client


def picture_files(paths: Sequence[Path]) -> Iterator[tuple[Path, InputError | None]]:
    """`paths` with every folder replaced by its files, and the error of each."""
    for path in paths:
        try:
            if path.is_dir():
                inside = sorted(file for file in path.rglob("*") if not file.is_dir())
                if not inside:
                    text = f"{path}: expected a folder with pictures, it holds no file"
                    yield path, InputError(text)
                for file in inside:
                    # Opening a pipe would wait for its writer.
                    usable = file.is_file() or not file.exists()
                    yield file, _absent(file) if usable else InputError(f"{file}: expected a file")
            else:
                yield path, _absent(path)
        except OSError as error:
            yield path, InputError(f"{path}: {error.strerror or error}")


def _absent(path: Path) -> InputError | None:
    return None if path.exists() else InputError(f"{path}: no such file")


def printable_path(path: Path) -> str:
    """A path as text: bytes of its name that are no UTF-8 become `?`."""
    return str(path).encode(errors="replace").decode()


def path_keys(path: Path) -> dict[str, object]:
    """The keys that name a picture in JSON; `path_bytes`, in base64, if its name is no UTF-8."""
    text = printable_path(path)
    return {"path": text} if text == str(path) else {"path": text, "path_bytes": os.fsencode(path)}


def utc_now() -> str:
    """The time to a millisecond, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def failure(error: MDPError) -> dict[str, object]:
    """The keys that take the place of an answer in JSON."""
    told: dict[str, object] = {"error": console.one_line(error)}
    return (
        {**told, "outcomes": error.outcomes, "codes": error.codes}
        if isinstance(error, InferenceError)
        else told
    )


#: What accuracies are measured on, mostly.
PICTURES = "test pictures"
#: The stage of a cascade's answer, for people.
STAGES = {"all": "", "first": " (first stage, sure)", "escalated": " (escalated)"}


def evaluation_items(bundle: Bundle) -> str:
    """The kind of items that the accuracies of a look were measured on."""
    return "test scenes" if bundle.manifest.plan.cameras else PICTURES


def summary(prediction: Prediction, on: str = PICTURES) -> str:
    """An answer for people, in one line."""
    expected, pictures = prediction.expected_accuracy, prediction.expected_accuracy_pictures
    worth, rejected = "accuracy never measured, ", prediction.known_rejected
    if prediction.uses_suspect:
        worth = "accuracy unknown with a suspected camera, "
    elif prediction.known is False:
        worth = (
            "" if rejected is None else f"as are {rejected:.1%} of {pictures} {on} of its classes, "
        )
    elif expected is not None:
        worth = f"{expected:.1%} accurate on {pictures} {on}, "
        if prediction.holds is not None:
            worth = f"every label right on {expected:.1%} of {pictures} {on}, "
    elif any(member.rung for member in prediction.members):
        worth = "accuracy never measured at these rungs, "
    return (
        f"{prediction.verdict}, {prediction.mode} from "
        f"{' + '.join(prediction.used)}{STAGES[prediction.stage]}, {worth}"
        f"{prediction.latency_ms:.1f} ms"
    )


def describe_inspection(prediction: Prediction) -> str:
    """Summary of the anomaly scores for people: `differs from the good ones ...`."""
    blind = prediction.blind_sides
    if prediction.normal is None:
        return f"nobody can tell if it differs from the good ones: blind to {', '.join(blind)}"
    above = prediction.anomaly or 0.0
    how = "like the good ones" if prediction.normal else "differs from the good ones"
    most = ""
    if not prediction.normal and len(prediction.used) > 1:
        # A side that does not count, as of a camera that was moved, did not decide.
        counted = [one for one in prediction.members if one.device not in blind]
        most = f", most at {max(counted, key=lambda one: one.anomaly or 0.0).device}"
    text = (
        f"{how} ({above:+.2f} decades{most}; {prediction.good_rejected or 0:.2%} of good ones do)"
    )
    if not blind:
        return text
    low, high = prediction.defects_missed_least, prediction.defects_missed_most
    pass_by = ""
    if low is not None and high is not None:
        pass_by = f": {low:.0%} to {high:.0%} of defects like the measured ones pass"
    return f"{text}; blind to {', '.join(blind)}{pass_by}"


#: Characters for cells of a map, from like good ones to far beyond all of them.
_SHADES = " .:-=+*#%@"


def draw_map(member: MemberTiming) -> str:
    """The map of a member, 16 rows of 16 characters below its score."""
    cells = member.anomaly_map or b""
    rows = [cells[start : start + MAP_SIDE] for start in range(0, len(cells), MAP_SIDE)]
    # From the strangest cell of a good picture in a hundred on, half of the shades are left.
    lines = ["".join(_SHADES[cell * len(_SHADES) // 256] * 2 for cell in row) for row in rows]
    return "\n    |".join([f"{member.anomaly or 0.0:+.2f} decades", *(f"{one}|" for one in lines)])


def describe(name: str, prediction: Prediction, on: str = PICTURES) -> str:
    """One picture's answer for people, and what it lacks."""
    lines = [f"{console.printable(name)}: {summary(prediction, on)}"]
    if prediction.frame_spread_ms is not None:
        seen = ", ".join(
            f"{m.device} {m.frame} ({m.frame_age_ms:.0f} ms old)" for m in prediction.members
        )
        lines.append(f"  frames {seen}; {prediction.frame_spread_ms:.0f} ms apart")
    if prediction.normal is not None or prediction.blind_sides:
        lines.append(f"  {describe_inspection(prediction)}")
    lines += [f"  {one.device}: {draw_map(one)}" for one in prediction.members if one.anomaly_map]
    lines += [f"  {device}: {SUSPECT[why]}" for device, why in prediction.suspects.items()]
    lines += [f"  without {device}: {reason}" for device, reason in prediction.missing.items()]
    return "\n".join(lines)


def show_pair(folder: Path, name: str, public_key: str, label: str, json: bool) -> None:
    """Print the files of a new key pair, and a label of the public key."""
    secret, public = folder / f"{name}{SECRET}", folder / f"{name}{PUBLIC}"
    if json:
        console.print_json(
            {
                "secret_file": printable_path(secret),
                "public_file": printable_path(public),
                "public": public_key,
            }
        )
        return
    print(f"{printable_path(secret)}: stays on this machine, readable by its owner only")
    print(f"{printable_path(public)}: {label}")
