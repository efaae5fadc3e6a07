"""`mdp-agent install` and `uninstall`: an agent that systemd starts with the machine."""

import grp
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from devices import service
from devices.agent.bundles import LoadableBundle
from devices.agent.options import ServeOptions
from devices.build import check
from devices.cli.options import add_serve_options, serve_options
from devices.service import Service
from mdp import console
from mdp.cameras import Source, parse_source
from mdp.errors import AgentError, ConfigError, InputError
from mdp.files import read_regular, write_bytes
from mdp.formats.bundle import MANIFEST
from mdp.formats.keys import load_pair
from mdp.runtimes.base import CPU
from mdp.transport import public_key_of

#: A unit has about 2 kB.
MAX_UNIT_BYTES = 2**16
#: There while systemd runs (sd_booted(3)).
_BOOTED = Path("/run/systemd/system")
#: Where a service's folders are; below `private` those of a user that exists only while it runs.
_STATE = (Path("var/lib"), Path("var/log"), Path("var/cache"))
#: No manifest or key is larger.
_MAX_INPUT_BYTES = 64 * 2**20
#: The project, as its packages are installed.
_PROJECT = "mdp-edge"
#: Groups that may open accelerators, where they exist.
_ACCELERATOR_GROUPS = ("video", "render")
Root = Annotated[
    Path, typer.Option(help="Write to the system below this folder, and start nothing.")
]
ROOT = Path("/")


def add_to(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("install")(install)
    app.command("uninstall")(uninstall)


@add_serve_options
def install(
    ctx: typer.Context,
    *,
    given: Mapping[str, Any],
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the unit, and write nothing; warn of what the service could not read.",
        ),
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace another unit of this name.")
    ] = False,
    memory_max: Annotated[
        str | None,
        typer.Option(
            help="Most memory, as systemd's MemoryMax=: 600M, 50%, infinity; by default what the "
            f"plan predicts with room for a reload, or {service.MEMORY_SHARE} where bundles are "
            "pushed or computed on an accelerator."
        ),
    ] = None,
    root: Root = ROOT,
) -> None:
    """Let systemd run an agent, now and whenever the machine starts.

    The options are those of `mdp-agent run`, and are checked as it does. The service has a user of
    its own: bundle, clients' keys and this program have to be readable by all; --key is not.
    `systemctl reload` is SIGHUP. An --audit log is in /var/log/mdp-agent-DEVICE/,
    and --allow-push is /var/lib/mdp-agent-DEVICE.

    An agent that runs is restarted only if an option, the bundle, a key, MDP_SOURCE's file or the
    installed packages are others than before. One that does not start ends this command with its
    own last line, and the unit is as before.

    Example: mdp-agent install --bundle /srv/bundle --device n100 --bind tcp://0.0.0.0:7500
    --key /etc/mdp/n100.secret --clients /etc/mdp/clients/

    Exit codes: 0 fine, 2 bad input, or another unit exists,
    or the agent does not start, 1 unforeseen.
    """
    options = serve_options(given)
    source = None if options.source is None else parse_source(options.source)
    loadable = check(options)
    if memory_max is not None:
        service.check_memory(memory_max)
    described = _service(ctx, given, options, source, loadable, memory_max)
    text = service.unit_text(described)
    if loadable is not None:
        # The runtime is there and has the planned provider.
        loadable.load()
    try:
        if root == ROOT:
            service.check_readable(described.reads)
    except InputError as error:
        if not dry_run:
            raise
        print(f"mdp-agent: WARNING: to be installed: {error}", file=sys.stderr)
    if dry_run:
        print(text, end="")
        return
    name = service.name_of(options.device)
    path = root / service.UNITS / f"{name}.service"
    there = _content(path)
    if there is not None and not service.is_same(there, text) and not replace:
        raise InputError(f"{path}: another unit exists: expected --replace to write over it")
    if there != text:
        write_bytes(path, text.encode())
    said = "as before" if there == text else "written"
    print(f"mdp-agent: {path}: {said}", file=sys.stderr)
    if _from(ctx, "source") == "ENVIRONMENT":
        print(f"mdp-agent: MDP_SOURCE: copy it to /etc/default/{name}", file=sys.stderr)
    _start(root, path, before=there, changed=there != text)


def _start(root: Path, path: Path, *, before: str | None, changed: bool) -> None:
    """Have the unit at `path` run now and at each start of the machine; raises AgentError.

    `before` is what was in the file; a unit that does not start is taken back for it.
    """
    name = path.stem
    systemctl = _systemctl_here(root)
    if systemctl is None:
        _print_commands(root, [["daemon-reload"], ["enable", name], ["restart", name]])
        return
    _systemctl(systemctl, ["daemon-reload"])
    _systemctl(systemctl, ["enable", name])
    ran = _does(systemctl, "is-active", name)
    # Else systemd remembers how often it has failed, and does not try.
    _does(systemctl, "reset-failed", name)
    before_start, _ = _last_entry(name)
    try:
        if changed and ran:
            # Apart, so that the last words of the former process are not those of the new one.
            _systemctl(systemctl, ["stop", name])
            before_start, _ = _last_entry(name)
        # One that is just starting, by the unit before, starts anew.
        _systemctl(systemctl, ["restart" if changed else "start", name])
    except AgentError as error:
        place, line = _last_entry(name)
        said = console.one_line(Exception(line)).removeprefix("mdp-agent: ")
        why = said if place != before_start and said else console.one_line(error)
        taken_back = _take_back(systemctl, path, before, changed=changed, ran=ran)
        raise AgentError(f"{name} does not start: {why}{taken_back}") from error
    said = "started" if not ran else "restarted" if changed else "runs as before"
    print(f"mdp-agent: {name}: {said}", file=sys.stderr)


def _take_back(systemctl: str, path: Path, before: str | None, *, changed: bool, ran: bool) -> str:
    """Undo what made a unit fail to start; what was done, for an error's message."""
    name = path.stem
    if before is None:
        _does(systemctl, "disable", "--now", name)
        path.unlink(missing_ok=True)
        _does(systemctl, "daemon-reload")
        _does(systemctl, "reset-failed", name)
        return "; the unit is removed"
    if not changed:
        return ""
    write_bytes(path, before.encode())
    _does(systemctl, "daemon-reload")
    _does(systemctl, "reset-failed", name)
    again = ran and _does(systemctl, "restart", name)
    return f"; the former unit is back{' and runs' if again else ''}"


def _last_entry(name: str) -> tuple[str, str]:
    """Place and text of the last line that the unit's program has written; empty without one."""
    program = shutil.which("journalctl")
    if program is None:
        return "", ""
    subprocess.run([program, "--sync"], capture_output=True)
    # By the unit: of a process that has ended, the journal may know no more.
    words = ["--quiet", "--output=json", "--lines=1", f"_SYSTEMD_UNIT={name}.service"]
    found = subprocess.run([program, *words], capture_output=True, text=True).stdout
    try:
        entry = json.loads(found)
        return str(entry["__CURSOR"]), str(entry["MESSAGE"])
    except (ValueError, KeyError, TypeError):
        return "", ""


def uninstall(
    device: Annotated[str, typer.Option(help="The device's name, as for `install`.")],
    purge: Annotated[
        bool,
        typer.Option(
            "--purge",
            help="Remove pushed bundles, its mask, a phone's token, audit log, caches and "
            "settings, too.",
        ),
    ] = False,
    root: Root = ROOT,
) -> None:
    """Stop the agent that `mdp-agent install` has installed, and remove its unit.

    Pushed bundles, a mask and a phone's token that it keeps, the audit log, caches,
    /etc/default/mdp-agent-DEVICE and drop-ins stay, and are named.

    Example: mdp-agent uninstall --device n100

    Exit codes: 0 fine, 2 no such unit, or one that `install` did not write,
    or systemctl fails, 1 unforeseen.
    """
    name = service.name_of(device)
    path = root / service.UNITS / f"{name}.service"
    there = _content(path)
    kept = list(_leftovers(root, name))
    if there is None and not (purge and kept):
        raise InputError(f"{path}: expected a unit that `mdp-agent install` wrote, there is none")
    if there is not None:
        if not there.startswith(f"{service.MARK}\n"):
            raise InputError(f"{path}: `mdp-agent install` did not write it: it stays")
        _remove_unit(root, path)
    for one in kept:
        if purge:
            _remove(one)
        print(f"mdp-agent: {one}: {'removed' if purge else 'stays'}", file=sys.stderr)
    if kept and not purge:
        print("mdp-agent: --purge removes what stays", file=sys.stderr)


def _remove_unit(root: Path, path: Path) -> None:
    name = path.stem
    systemctl = _systemctl_here(root)
    if systemctl is None:
        _print_commands(root, [["disable", "--now", name]])
    else:
        _systemctl(systemctl, ["disable", "--now", name])
    _remove(path)
    print(f"mdp-agent: {path}: removed", file=sys.stderr)
    if systemctl is None:
        _print_commands(root, [["daemon-reload"]])
    else:
        _systemctl(systemctl, ["daemon-reload"])
        _does(systemctl, "reset-failed", name)


def _leftovers(root: Path, name: str) -> Iterator[Path]:
    """Folders that a unit leaves behind, and its settings; a link comes before what it leads to."""
    folders = [root / place for place in _STATE]
    candidates = [one for folder in folders for one in (folder / name, folder / "private" / name)]
    candidates += [root / "etc/default" / name, root / service.UNITS / f"{name}.service.d"]
    for path in candidates:
        if path.is_symlink() or path.exists():
            yield path


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder; raises InputError."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        raise InputError(f"{path}: cannot be removed: {error.strerror}") from error


def _service(
    ctx: typer.Context,
    given: Mapping[str, Any],
    options: ServeOptions,
    source: Source | None,
    loadable: LoadableBundle | None,
    memory_max: str | None,
) -> Service:
    """The facts that the unit depends on; raises InputError for what a service cannot do."""
    name = service.name_of(options.device)
    service.check_port(options.bind)
    if options.audit is not None and options.audit.absolute().parent != Path(f"/var/log/{name}"):
        raise InputError(f"--audit {options.audit}: expected a file in /var/log/{name}/")
    pushed, state = options.allow_push, Path(f"/var/lib/{name}")
    if pushed is not None and not pushed.absolute().is_relative_to(state):
        raise InputError(f"--allow-push {pushed}: expected {state} or a folder in it")
    changed_mask = options.mask if options.allow_mask else None
    if changed_mask is not None and not changed_mask.absolute().is_relative_to(state):
        raise InputError(f"--mask {changed_mask}: expected a file in {state}/ with --allow-mask")
    phone = source is not None and source.kind == "phone"
    if source is not None and phone:
        service.check_port(str(source), "--source")
    # Whatever a first pushed bundle needs is allowed.
    part = None if loadable is None else loadable.assignment
    plain_cpu = part is not None and (part.runtime, part.provider) == ("onnxruntime", CPU)
    camera = source is not None and source.kind == "camera"
    groups = {"video"} if camera else set()
    if not plain_cpu:
        groups |= {group.gr_name for group in grp.getgrall()} & set(_ACCELERATOR_GROUPS)
    program = _program()
    # The program itself, its interpreter and its packages are read, too.
    used: dict[str, Path | None] = {
        "this program": program,
        "Python": Path(sys.executable),
        "MDP's packages": Path(console.__file__),
        "--bundle": options.bundle,
        "--clients": options.clients,
        "--bundle-key": given["bundle_key"],
        "--source-key": options.source_key,
        "--mask": None if options.allow_mask else options.mask,
    }
    if source is not None and source.kind in ("folder", "video"):
        used["--source"] = Path(source.place)
    reads = {path.absolute(): what for what, path in used.items() if path is not None}
    opencv = source is not None and source.kind not in ("folder", "mdp")
    planned_bytes = None
    if loadable is not None and plain_cpu and pushed is None:
        planned_bytes = loadable.memory_bytes
    batch = 1 if loadable is None else loadable.batch
    memory = service.memory_of(planned_bytes, batch=batch, opencv=opencv)
    return Service(
        device=options.device,
        program=program,
        words=tuple(_words(ctx, given, source)),
        key=None if options.key is None else _absolute(options.key),
        reads={path.resolve(): what for path, what in reads.items()} | reads,
        plain_cpu=plain_cpu,
        camera=camera,
        opencv=opencv,
        audited=options.audit is not None,
        keeps=pushed is not None or changed_mask is not None or phone,
        groups=tuple(sorted(groups)),
        memory=memory_max or memory,
        pinned=given["cpus"] is not None,
        inputs=service.digest_of(_inputs(name, options, given)),
    )


def _inputs(
    name: str, options: ServeOptions, given: Mapping[str, Any]
) -> Iterator[tuple[str, bytes]]:
    """Files that the agent reads when it starts, and not again by itself, as its clients' keys.

    Not what was pushed to it. Raises ConfigError.
    """
    if options.bundle is not None:
        content, _ = read_regular(options.bundle / MANIFEST, _MAX_INPUT_BYTES)
        yield "bundle", content
    if options.key is not None:
        # The unit can be read by all.
        yield "key", load_pair(options.key, public_key_of).public.encode()
    for option, path in (("bundle-key", given["bundle_key"]), ("source-key", options.source_key)):
        if path is not None:
            content, _ = read_regular(path, _MAX_INPUT_BYTES)
            yield option, content
    if options.mask is not None and not options.allow_mask:
        content, _ = read_regular(options.mask, _MAX_INPUT_BYTES)
        yield "mask", content
    settings = ROOT / "etc/default" / name
    if settings.exists():
        # It may hold a password.
        yield "settings", str(settings.stat().st_mtime_ns).encode()
    yield "Python", sys.version.encode()
    for package in metadata.distributions():
        yield f"package {package.name}", str(package.version).encode()
    with suppress(metadata.PackageNotFoundError):
        # Also one of the same version that was built anew.
        files = metadata.distribution(_PROJECT).read_text("RECORD") or ""
        yield "files", files.encode()


def _words(ctx: typer.Context, given: Mapping[str, Any], source: Source | None) -> list[str]:
    """The options of `mdp-agent run` as they were given, with absolute paths."""
    words: list[str] = []
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if name not in given or _from(ctx, name) != "COMMANDLINE":
            continue
        value = given[name]
        if isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
            continue
        if name == "key":
            value = service.KEY_WORD
        elif name == "source" and source is not None:
            value = _format_source(source)
        elif isinstance(value, Path):
            value = _absolute(value)
        words += [parameter.opts[0], str(value)]
    return words


def _format_source(source: Source) -> str:
    """`source` for a file that everybody reads; raises InputError for a password."""
    if source.kind in ("folder", "video"):
        return f"{source.kind}:{_absolute(Path(source.place))}"
    if source.kind == "rtsp" and str(source) != source.place:
        raise InputError(
            f"--source {source}: everybody can read a unit: expected a password only in the "
            "variable MDP_SOURCE"
        )
    return str(source)


def _from(ctx: typer.Context, name: str) -> str:
    """Source of a parameter's value: COMMANDLINE, ENVIRONMENT, DEFAULT."""
    found = ctx.get_parameter_source(name)
    return "" if found is None else found.name


def _absolute(path: Path) -> Path:
    """`path` from the root; links stay, as a reload follows them again."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - without `..`, and links are not followed


def _program() -> Path:
    """This program; raises AgentError."""
    beside = Path(sys.executable).parent / "mdp-agent"
    found = str(beside) if beside.exists() else shutil.which("mdp-agent")
    if found is None:
        raise AgentError("mdp-agent: not found beside Python nor in PATH")
    return _absolute(Path(found))


def _content(path: Path) -> str | None:
    """The unit at `path`; None if there is none. Raises ConfigError."""
    if not path.is_symlink() and not path.exists():
        return None
    content, _ = read_regular(path, MAX_UNIT_BYTES)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8") from error


def _systemctl_here(root: Path) -> str | None:
    """The program, where systemd runs this system; None where it does not."""
    program = shutil.which("systemctl")
    return program if root == ROOT and _BOOTED.is_dir() else None


def _print_commands(root: Path, commands: list[list[str]]) -> None:
    """Print what is to be run of systemctl; below a root, what works there."""
    where = "" if root == ROOT else f" --root={root}"
    offline = [one for one in commands if root == ROOT or one[0] in ("enable", "disable")]
    for command in offline:
        words = [word for word in command if root == ROOT or word != "--now"]
        print(f"mdp-agent: run: systemctl{where} {' '.join(words)}", file=sys.stderr)


def _systemctl(program: str, words: list[str]) -> None:
    """Run systemctl; raises AgentError if it fails."""
    done = subprocess.run([program, *words], capture_output=True, text=True)
    if done.returncode:
        raise AgentError(f"systemctl {' '.join(words)}: {console.one_line(Exception(done.stderr))}")


def _does(program: str, *words: str) -> bool:
    """Run systemctl, and tell whether it says yes."""
    return subprocess.run([program, *words], capture_output=True).returncode == 0
