"""What the commands take and print, one picture at a time: files in, lines and JSON out."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from mdp import console
from mdp.errors import InferenceError, InputError, MDPError
from mdp.requests.prediction import Prediction


def picture_files(paths: Sequence[Path]) -> Iterator[tuple[Path, InputError | None]]:
    """`paths` with every folder replaced by the files in it, and what is wrong with each."""
    for path in paths:
        try:
            if path.is_dir():
                inside = sorted(file for file in path.rglob("*") if not file.is_dir())
                if not inside:
                    text = f"{path}: expected a folder with pictures, it holds no file"
                    yield path, InputError(text)
                for file in inside:
                    # Opening a pipe that happens to be there would wait for its writer.
                    usable = file.is_file() or not file.exists()
                    yield file, _absent(file) if usable else InputError(f"{file}: expected a file")
            else:
                yield path, _absent(path)
        except OSError as error:
            yield path, InputError(f"{path}: {error.strerror or error}")


def _absent(path: Path) -> InputError | None:
    return None if path.exists() else InputError(f"{path}: no such file")


def shown(path: Path) -> str:
    """A path as text: bytes of its name that are no UTF-8 become `?`."""
    return str(path).encode(errors="replace").decode()


def named(path: Path) -> dict[str, object]:
    """The keys that name a picture in JSON; `path_bytes`, in base64, if its name is no UTF-8."""
    text = shown(path)
    return {"path": text} if text == str(path) else {"path": text, "path_bytes": os.fsencode(path)}


def failure(error: MDPError) -> dict[str, object]:
    """The keys that take the place of an answer in JSON."""
    told: dict[str, object] = {"error": console.one_line(error)}
    return (
        {**told, "outcomes": error.outcomes, "codes": error.codes}
        if isinstance(error, InferenceError)
        else told
    )


#: What is said of a cascade's answers.
STAGES = {"all": "", "first": " (first stage, sure)", "escalated": " (escalated)"}


def describe(name: str, prediction: Prediction) -> str:
    """One picture's answer for people."""
    expected, pictures = prediction.expected_accuracy, prediction.expected_accuracy_pictures
    worth = "accuracy never measured"
    if expected is not None:
        worth = f"{expected:.1%} accurate on {pictures} test pictures"
    lines = [
        f"{console.printable(name)}: {prediction.label} ({prediction.probability:.0%}), "
        f"{prediction.mode} from {' + '.join(prediction.used)}{STAGES[prediction.stage]}, {worth}, "
        f"{prediction.latency_ms:.1f} ms"
    ]
    if prediction.frame_spread_ms is not None:
        seen = ", ".join(
            f"{m.device} {m.frame} ({m.frame_age_ms:.0f} ms old)" for m in prediction.members
        )
        lines.append(f"  frames {seen}; {prediction.frame_spread_ms:.0f} ms apart")
    lines += [f"  without {device}: {reason}" for device, reason in prediction.missing.items()]
    return "\n".join(lines)
