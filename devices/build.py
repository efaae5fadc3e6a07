"""Assembles an agent from its options: keys, router, audit log, reloads, camera, announcement."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from devices.access.allowed import AllowedClients
from devices.access.announce import announce_agent
from devices.access.audit import AuditLog
from devices.access.watch import ClientWatch, agent_keys, raise_descriptor_limit
from devices.agent.bundles import LoadableBundle
from devices.agent.lifecycle import Report
from devices.agent.masking import MaskAccess
from devices.agent.options import ServeOptions
from devices.agent.push import PushAccess
from devices.agent.quotas import Quotas
from devices.agent.record import RecordAccess
from devices.agent.reload import Reloader
from devices.agent.server import Agent
from devices.agent.store import BundleStore
from devices.bundleless import BundlelessAgent
from devices.camera.frames import FrameBuffer
from devices.events import LOG
from devices.machine import Machine
from mdp.errors import InputError
from mdp.formats.bundle import Bundle
from mdp.protocol.messages import request_frame_bytes
from mdp.transport import Audit, Router, public_key_of

#: Pixels a side of crops of pushed bundles, at most, or as large as at the agent's start.
PUSHED_SIDE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltAgent:
    """An agent whose socket is bound."""

    agent: Agent
    #: Where it listens, with the port that the system has chosen.
    address: str
    #: None for plain text.
    public_key: str | None
    _options: ServeOptions
    _report: Report
    _watch: ClientWatch | None
    _frames: FrameBuffer | None
    _machine: Machine
    _audit: AuditLog | None

    def reload(self) -> None:
        """Read the clients' files and the bundle again."""
        if self._watch is not None:
            self._watch.reload()
        self.agent.reload()

    def serve(self, periodic: Callable[[], None] = lambda: None) -> None:
        """As `Agent.serve`, with the camera open and the agent announced."""

        def tasks() -> None:
            periodic()
            self.agent.temperature_c = self._machine.temperature_c()
            if self._watch is not None:
                self._watch.tend()
            if self.agent.recording is not None:
                self.agent.recording.tend()
            if self._audit is not None:
                self._audit.tend()

        self.agent.temperature_c = self._machine.temperature_c()
        with ExitStack() as stack:
            if self._frames is not None:
                self._frames.report_to(self._report)
                stack.enter_context(self._frames)
            if self._options.announce:
                current = self.agent.lifecycle
                stack.enter_context(
                    announce_agent(
                        self.address, self.public_key, lambda: current.sources[0], self._report
                    )
                )
            if self.agent.recording is not None:
                stack.callback(self.agent.recording.tend, over=True)
            self.agent.serve(tasks)


def check(options: ServeOptions) -> LoadableBundle | None:
    """The bundle that an agent with `options` loads; None where it waits for a first one.

    Nothing is bound, opened or written. Raises InputError, ConfigError or AgentError, as
    `build_agent` does, but for an address in use and an audit log that cannot be written.
    """
    agent_keys(options.bind, options.key, options.clients, insecure=options.insecure)
    _check_rights(options)
    options.check_camera()
    return None if options.awaits_bundle() else options.loadable()


@contextmanager
def build_agent(
    options: ServeOptions,
    *,
    report: Report = LOG.info,
    clock: Callable[[], float] = time.monotonic,
    machine: Machine | None = None,
) -> Iterator[BuiltAgent]:
    """The agent that `options` describe; its socket and audit log close with the block.

    `machine` has its sensors, by default this one. Raises InputError, ConfigError or AgentError.
    """
    access = agent_keys(options.bind, options.key, options.clients, insecure=options.insecure)
    keys, clients = access or (None, None)
    _check_rights(options)
    source = options.loadable()
    frames = options.frame_buffer()
    raise_descriptor_limit()
    max_frame_bytes = request_frame_bytes(source.assignment.spec.image_size)
    if options.allow_push is not None:
        # What is pushed later may have larger crops, within what a stranger may cost.
        max_frame_bytes = max(max_frame_bytes, request_frame_bytes(PUSHED_SIDE))
    with ExitStack() as stack:
        log: AuditLog | None = None
        audit: Audit = _no_audit
        if options.audit is not None:
            name_of = clients.name if clients else lambda key: ""
            log = stack.enter_context(AuditLog(options.audit, name_of))
            audit = log.record
        router = stack.enter_context(
            Router(options.bind, keys=keys, max_frame_bytes=max_frame_bytes, audit=audit)
        )
        push = None
        if options.allow_push is not None and clients is not None:
            push = _push_access(options, options.allow_push, clients, max_frame_bytes, audit)
        record = None
        if options.allow_record and clients is not None:
            record = RecordAccess(may_record=clients.may_record, name_of=clients.name, audit=audit)
        mask = None
        if clients is not None:
            mask = _mask_access(options, clients, audit)
        agent = Agent(
            source,
            router,
            reloader=Reloader(lambda: options.loadable(max_frame_bytes), clock=clock),
            frames=frames,
            push=push,
            record=record,
            mask=mask,
            grace_s=options.grace_s,
            report=report,
            clock=clock,
        )
        watch = None
        if keys is not None and clients is not None:
            watch = ClientWatch(
                clients, keys.allowed, router, agent.quotas, agent.lifecycle, report
            )
        yield BuiltAgent(
            agent=agent,
            address=router.address,
            public_key=None if keys is None else public_key_of(keys.secret),
            _options=options,
            _report=report,
            _watch=watch,
            _frames=frames,
            _machine=machine or Machine(),
            _audit=log,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltBundlelessAgent:
    """An agent without a bundle, whose socket is bound."""

    agent: BundlelessAgent
    #: Where it listens, with the port that the system has chosen.
    address: str
    _watch: ClientWatch
    _audit: AuditLog | None

    def serve(self, periodic: Callable[[], None] = lambda: None) -> bool:
        """As `BundlelessAgent.serve`."""

        def tasks() -> None:
            periodic()
            self._watch.tend()
            if self._audit is not None:
                self._audit.tend()

        return self.agent.serve(tasks)


@contextmanager
def build_bundleless_agent(
    options: ServeOptions, *, report: Report = LOG.info
) -> Iterator[BuiltBundlelessAgent]:
    """An agent with these options, but no bundle; its socket and audit log close with the block.

    One can be pushed with `allow_push`. Raises InputError, ConfigError or AgentError.
    """
    access = agent_keys(options.bind, options.key, options.clients, insecure=options.insecure)
    _check_rights(options)
    if access is None:
        raise InputError("--key and --clients: expected both for an agent without a bundle")
    keys, clients = access
    frames = options.frame_buffer()
    if frames is not None:
        frames.report_to(report)
    raise_descriptor_limit()
    with ExitStack() as stack:
        log: AuditLog | None = None
        audit: Audit = _no_audit
        if options.audit is not None:
            log = stack.enter_context(AuditLog(options.audit, clients.name))
            audit = log.record
        router = stack.enter_context(Router(options.bind, keys=keys, audit=audit))
        push, record = None, None
        if options.allow_push is not None:
            push = _push_access(options, options.allow_push, clients, None, audit)
        if options.allow_record:
            record = RecordAccess(may_record=clients.may_record, name_of=clients.name, audit=audit)
        agent = BundlelessAgent(
            options.device,
            router,
            report,
            frames=frames,
            record=record,
            mask=_mask_access(options, clients, audit),
            push=push,
        )
        watch = ClientWatch(clients, keys.allowed, router, Quotas(), agent, report)
        yield BuiltBundlelessAgent(agent=agent, address=router.address, _watch=watch, _audit=log)


def _no_audit(event: str, key: str, address: str, reason: str) -> None:
    """Without `--audit`."""


def _check_rights(options: ServeOptions) -> None:
    if options.allow_push is not None and options.key is None:
        raise InputError(
            "--allow-push: expected --key and --clients: `push = true` in a client's .limits file "
            "says who may push"
        )
    if options.allow_record and (options.key is None or options.source is None):
        raise InputError(
            "--allow-record: expected --source, --key and --clients: `record = true` in a client's "
            ".limits file says who may record"
        )
    if options.mask is not None and options.source is None:
        raise InputError("--mask: expected --source beside it")
    if options.allow_mask and (options.mask is None or options.key is None):
        raise InputError(
            "--allow-mask: expected --mask FILE, --key and --clients: `mask = true` in a client's "
            ".limits file says who may change it"
        )
    if options.allow_record and (options.source or "").startswith("mdp:"):
        raise InputError("--allow-record: expected a camera of this device's own, got another's")


def _mask_access(options: ServeOptions, clients: AllowedClients, audit: Audit) -> MaskAccess:
    return MaskAccess(
        may_see=lambda key: options.allow_record and clients.may_record(key),
        may_change=clients.may_mask,
        name_of=clients.name,
        file=options.mask if options.allow_mask else None,
        audit=audit,
    )


def _push_access(
    options: ServeOptions,
    folder: Path,
    clients: AllowedClients,
    max_frame_bytes: int | None,
    audit: Audit,
) -> PushAccess:
    """Pushes into `folder`; raises InputError or ConfigError if it cannot be used."""

    def loadable(bundle: Path) -> LoadableBundle:
        return options.loadable(max_frame_bytes, bundle)

    def read(bundle: Path) -> tuple[Bundle, int]:
        part = loadable(bundle)
        return part.bundle, part.assignment.k

    store = BundleStore(folder, options.bundle, max_bytes=int(options.max_push_mb * 1e6), read=read)
    return PushAccess(store=store, may_push=clients.may_push, loadable=loadable, audit=audit)
