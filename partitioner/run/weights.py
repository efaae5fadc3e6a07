"""Pretrained weights at hand: a folder of files named after timm's networks. Nothing is fetched."""

from pathlib import Path

from mdp.errors import InputError

#: What torch and safetensors write.
_ENDINGS = (".safetensors", ".pth", ".pt", ".bin")
#: Names of the classes that all weights of the folder tell apart, one a line, in their order.
LABELS = "labels.txt"


def weights_in(folder: Path) -> dict[str, Path]:
    """timm's name of a network -> its file `NAME.safetensors` or `NAME.RECIPE.safetensors`.

    Raises InputError for what is no folder, and for two files of one network.
    """
    if not folder.is_dir():
        raise InputError(f"--weights: expected a folder of weights, got {str(folder)!r}")
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        # Hidden are those that another system has put beside the file.
        if path.name.startswith(".") or path.suffix not in _ENDINGS or not path.is_file():
            continue
        name = path.name.partition(".")[0]
        if name in found:
            raise InputError(
                f"{folder}: expected one file of weights of {name}, "
                f"found {found[name].name} and {path.name}"
            )
        found[name] = path
    return found
