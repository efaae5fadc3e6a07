"""Blocks of documentation pages, run as a reader runs them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
#: A network of its own, so that the addresses of a page are free whatever runs beside.
OWN_NETWORK = ("unshare", "--net", "--map-root-user")


def blocks(page: Path, language: str | None = None) -> list[str]:
    """The fenced blocks of a page, or those of one language, in their order."""
    found = BLOCK.findall(page.read_text())
    return [text for name, text in found if language is None or name == language]


def cells(notebook: Path) -> list[str]:
    """The code of a notebook, a text for each cell; magics are not understood."""
    found = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


@cache
def own_network() -> tuple[str, ...]:
    """Words before a command that give it a network of its own; empty where that is impossible."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        return ()
    tried = subprocess.run([*OWN_NETWORK, "ip", "link", "set", "lo", "up"], capture_output=True)
    return () if tried.returncode else OWN_NETWORK


def follow(page: Path, folder: Path, *, timeout_s: float) -> list[str]:
    """Run the `sh` blocks of `page` word for word, in one shell, in `folder` as in a checkout.

    Returns what each block printed. Fails with the shell's words at the first command that fails.
    """
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    steps = blocks(page, "sh")
    script = ["set -eo pipefail", "trap 'kill -KILL $(jobs -p) 2> /dev/null || true' EXIT"]
    if own_network():
        script.append("ip link set lo up")
    for number, step in enumerate(steps):
        script += [f"exec > {shlex.quote(f'{folder}/{number}.out')}", step]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # A session of its own, so that nothing is left when time is up.
    shell = subprocess.Popen(
        [*own_network(), "bash", "-c", "\n".join(script)],
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, said = shell.communicate(timeout=timeout_s)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, 9)
    outputs = [folder / f"{number}.out" for number in range(len(steps))]
    printed = [output.read_text() for output in outputs if output.exists()]
    assert shell.returncode == 0, f"{printed[-1]}\n{said}"
    return printed
