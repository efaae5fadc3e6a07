"""`mdp bundle`: sign bundles, verify signatures, and change the bundles of agents."""

from pathlib import Path
from typing import Annotated

import typer

from mdp import console
from mdp.cli import push
from mdp.cli.answers import Json, show_pair
from mdp.formats.bundle import MANIFEST, Bundle, model_path
from mdp.formats.signing import fingerprint, load_bundle_key, load_signing_key, new_bundle_key, sign

bundle_app = console.new_app("Sign and verify bundles, and change those of agents.")

BundleFolder = Annotated[Path, typer.Option("--bundle", help="Bundle folder.")]


@bundle_app.callback()
def _group() -> None:
    """Sign and verify bundles, and change those of agents."""


@bundle_app.command("key")
def bundle_key(
    name: Annotated[str, typer.Option(help="Name of the key.")],
    out: Annotated[Path, typer.Option(help="Folder for both files.")] = Path("keys"),
    json: Json = False,
) -> None:
    """Write NAME.secret, which signs and stays on this machine, and NAME.public, which verifies.

    Example: mdp bundle key --out keys --name release

    Exit codes: 0 fine, 2 bad input (also if the files exist), 1 unforeseen.
    """
    made = new_bundle_key(out, name)
    label = f"key {fingerprint(made.public)}, to be copied to every device"
    show_pair(out, name, made.public, label, json)


@bundle_app.command("sign")
def bundle_sign(
    bundle: BundleFolder,
    key: Annotated[Path, typer.Option(help="Secret key file, made by `mdp bundle key`.")],
    json: Json = False,
) -> None:
    """Sign a whole bundle: its plan, models, fusion weights and measurements.

    Example: mdp bundle sign --bundle bundle/ --key keys/release.secret

    Exit codes: 0 fine, 2 bad input (also if a file is not as listed), 1 unforeseen.
    """
    signing = load_signing_key(key)
    opened = Bundle.open(bundle)
    for name in opened.manifest.files:
        _check_file(opened, name)
    path = sign(bundle / MANIFEST, opened.manifest_content, signing)
    if json:
        console.print_json({"path": str(path), "digest": opened.digest, "key": str(signing.key)})
        return
    print(f"{path}: bundle {opened.manifest.name} {opened.digest[:12]}, key {signing.key}")


@bundle_app.command("verify")
def bundle_verify(
    bundle: BundleFolder,
    key: Annotated[Path, typer.Option(help="Public key file of the signer.")],
    json: Json = False,
) -> None:
    """Verify a bundle's signature, and every file of it that is here.

    A device may have only its own model of a bundle, and a client none.

    Example: mdp bundle verify --bundle bundle/ --key keys/release.public

    Exit codes: 0 as it was signed, 2 not so, or bad input, 1 unforeseen.
    """
    trusted = load_bundle_key(key)
    opened = Bundle.open(bundle, signed_by=trusted)
    here = [name for name in opened.manifest.files if (bundle / name).exists()]
    for name in here:
        _check_file(opened, name)
    absent = sorted(opened.manifest.files.keys() - set(here))
    if json:
        content = {"digest": opened.digest, "key": str(trusted), "files": here, "absent": absent}
        console.print_json(content)
        return
    named = f"{opened.manifest.name} {opened.digest[:12]}"
    print(f"{bundle}: bundle {named}, signed with key {trusted}")
    print(f"  as it was signed: {', '.join([MANIFEST, *here])}")
    if absent:
        print(f"  not here: {', '.join(absent)}")


def _check_file(bundle: Bundle, name: str) -> None:
    """Raise ConfigError unless a file is as listed and, for a model, complete in itself."""
    for assignment in bundle.manifest.plan.assignments:
        for rung in range(1 + len(assignment.lower)):
            if name == model_path(assignment.k, rung):
                bundle.model(assignment.k, rung)
                return
    bundle.content(name)


push.add_to(bundle_app)
