"""Modules that an import loads, and names that the package shows, each in a new interpreter."""

import ast
import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from inspect import signature
from pathlib import Path

import pytest

import mdp
from mdp.cli.main import COMMANDS
from mdp.client.base import Connecting, Options

ROOT = Path(__file__).parents[3]
HEAVY = {"torch", "torchvision", "timm", "onnx", "onnxscript", "sklearn", "scipy", "safetensors"}


def modules_after(statement: str) -> set[str]:
    """Top-level packages in `sys.modules` after `statement`."""
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_the_client_needs_neither_torch_nor_onnxruntime_nor_a_command_line() -> None:
    loaded = modules_after("import mdp; mdp.Client")
    assert "zmq" in loaded
    assert not loaded & (
        HEAVY | {"onnxruntime", "cryptography", "typer", "rich", "click", "devices"}
    )


def test_neither_command_line_nor_agent_load_torch_or_onnxruntime() -> None:
    commands = {where.partition(":")[0] for where, _ in COMMANDS.values()}
    others = ("mdp.testing", "devices.agent.options", "devices.cli.main", "devices.probe.child")
    loaded = modules_after(f"import {', '.join([*sorted(commands), *others])}")
    assert not loaded & (HEAVY | {"onnxruntime", "openvino", "partitioner"})
    assert not loaded & {"starlette", "uvicorn", "prometheus_client"}


def test_the_help_imports_no_command() -> None:
    program = "from mdp.cli.main import app\ntry: app(['--help'])\nexcept SystemExit: pass"
    assert not modules_after(program) & {"zmq", "numpy", "PIL", "rich"}


def test_the_package_imports_its_exports_at_their_first_use() -> None:
    assert not modules_after("import mdp") & {"zmq", "numpy", "PIL", "msgspec"}
    modules_after("import sys, mdp; mdp.Client; assert 'mdp.testing' not in sys.modules")


def test_all_is_what_the_package_shows() -> None:
    block = next(
        node for node in ast.parse(Path(mdp.__file__).read_text()).body if isinstance(node, ast.If)
    )
    # What type checkers see is what is imported.
    assert {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    } == mdp._MODULES
    assert {*mdp._MODULES, "__version__"} == set(mdp.__all__)
    for name in mdp._MODULES:
        assert getattr(mdp, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        getattr(mdp, "Nothing")  # noqa: B009
    assert list(mdp.__all__) == sorted(mdp.__all__)


def test_both_clients_and_the_single_call_take_the_same_arguments() -> None:
    def arguments(function: Callable[..., object]) -> list[tuple[str, object, object]]:
        return [(p.name, p.kind, p.default) for p in signature(function).parameters.values()]

    calls = ("classify", "classify_many", "look", "reload", "status", "stream", "watch")
    for name in ("__init__", "close", "connect", *calls):
        assert arguments(getattr(mdp.Client, name)) == arguments(getattr(mdp.AsyncClient, name))
    assert arguments(mdp.classify)[-1] == arguments(mdp.Client.connect)[-1]
    record = {field.name for field in dataclasses.fields(Options)}
    assert record == {"fleet", *Connecting.__annotations__}


def test_every_name_shown_says_what_it_is() -> None:
    for name in mdp.__all__:
        if name != "__version__":
            assert getattr(mdp, name).__doc__, name


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.search(
        r"^## \[(?!Unreleased)([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert newest is not None
    assert project["version"] == mdp.__version__ == newest.group(1)
