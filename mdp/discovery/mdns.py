"""Multicast DNS: announce an agent, and listen for announcements. The only user of zeroconf.

zeroconf is the optional extra `discover`. RFC 6762 and RFC 6763.
"""

import asyncio
import contextlib
import ipaddress
import secrets
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Self

from mdp.closing import Closing
from mdp.discovery.announcements import Found
from mdp.errors import AddressUnavailable, AgentError, InputError, MDPError
from mdp.extras import install

SERVICE = "_mdp._tcp.local."
#: Most announcements that are read; more of them are a flood.
MAX_FOUND = 256
#: How long an announcement's details may take.
DETAILS_S = 1.0
WILDCARDS = ("*", "0.0.0.0")


def zeroconf_module(error: type[MDPError], wanted_by: str) -> ModuleType:
    """The zeroconf package; raises `error` where it is not installed."""
    try:
        import zeroconf.asyncio
    except ImportError as missing:
        raise error(
            f"zeroconf is not installed; {wanted_by} needs it: {install('discover')}"
        ) from missing
    return zeroconf


def addresses_behind(bound: str) -> list[str]:
    """IPv4 addresses of an agent bound to `tcp://HOST:PORT`.

    Raises InputError for another kind of address, AddressUnavailable where there is none yet.
    """
    host = bound.removeprefix("tcp://").rpartition(":")[0]
    if host in WILDCARDS:
        own = [address for address in _own_addresses() if not address.is_loopback]
        if not own:
            raise AddressUnavailable("--announce: this machine has no IPv4 address but loopback")
        return list(map(str, own))
    try:
        return [str(ipaddress.IPv4Address(host))]
    except ValueError as error:
        raise InputError(
            f"--announce: expected --bind with an IPv4 address or {WILDCARDS[1]}, got {host!r}"
        ) from error


def _own_addresses() -> list[ipaddress.IPv4Address]:
    import ifaddr  # comes with zeroconf

    return [
        ipaddress.IPv4Address(ip.ip)
        for adapter in ifaddr.get_adapters()
        for ip in adapter.ips
        if ip.is_IPv4
    ]


class Announcer(Closing):
    """Announces an agent on the networks that reach it, until it is closed."""

    def __init__(self, bound: str, texts: Mapping[str, str]) -> None:
        """`bound` is where the agent listens; raises InputError or AgentError.

        AddressUnavailable, an AgentError, where the network is not there yet.
        """
        self._module = zeroconf_module(AgentError, "--announce")
        self._addresses = addresses_behind(bound)
        self._port = int(bound.rpartition(":")[2])
        # Replicas have the same device name.
        self._name = f"{texts['device'][:40]}-{secrets.token_hex(4)}"
        self._texts = dict(texts)
        try:
            self._zeroconf = self._module.Zeroconf(interfaces=self._addresses)
        except OSError as error:
            raise AddressUnavailable(str(_not_working(error))) from error

    def begin(self) -> None:
        """Announce it; takes some tenths of a second. Raises AgentError."""
        try:
            # The name is random, so no probing for conflicts.
            self._zeroconf.register_service(self._info(), cooperating_responders=True)
        except (OSError, self._module.Error) as error:
            raise _not_working(error) from error

    def update(self, texts: Mapping[str, str]) -> None:
        """Announce changed texts. Raises AgentError."""
        if texts == self._texts:
            return
        self._texts = dict(texts)
        try:
            self._zeroconf.update_service(self._info())
        except (OSError, self._module.Error) as error:
            raise _not_working(error) from error

    def _info(self) -> Any:
        return self._module.ServiceInfo(
            SERVICE,
            f"{self._name}.{SERVICE}",
            port=self._port,
            properties=self._texts,
            server=f"{self._name.replace('.', '-')}.local.",
            parsed_addresses=self._addresses,
        )

    def close(self) -> None:
        """Withdraw the announcement."""
        with contextlib.suppress(OSError, self._module.Error):
            self._zeroconf.unregister_all_services()
        self._zeroconf.close()

    def __enter__(self) -> Self:
        self.begin()
        return self


def _not_working(error: Exception) -> AgentError:
    return AgentError(f"--announce: multicast DNS does not work: {error}")


def listen(interface: str | None, *, seconds: float) -> tuple[list[Found], int]:
    """Announcements on the network of `interface`, an address of this machine, or on all networks.

    Also the number of further ones, which are not read. Raises InputError.
    """
    zeroconf = zeroconf_module(InputError, "mdp fleet discover")
    where: Any = zeroconf.InterfaceChoice.All
    if interface is not None:
        try:
            where = [str(ipaddress.IPv4Address(interface))]
        except ValueError as error:
            raise InputError(f"--interface {interface}: expected an IPv4 address") from error
    try:
        return asyncio.run(_listen(zeroconf, where, seconds))
    except (OSError, zeroconf.Error) as error:
        raise InputError(
            f"--interface {interface or 'all'}: multicast DNS does not work: {error}"
        ) from error


async def _listen(zeroconf: Any, where: Any, seconds: float) -> tuple[list[Found], int]:
    names: dict[str, None] = {}
    more = 0

    def on_change(*, name: str, state_change: Any, **_: object) -> None:
        nonlocal more
        if state_change is zeroconf.ServiceStateChange.Removed:
            names.pop(name, None)
        elif name in names or len(names) < MAX_FOUND:
            names[name] = None
        else:
            more += 1

    async with zeroconf.asyncio.AsyncZeroconf(interfaces=where) as shared:
        browser = zeroconf.asyncio.AsyncServiceBrowser(shared.zeroconf, SERVICE, [on_change])
        await asyncio.sleep(seconds)
        await browser.async_cancel()
        asked = [_details(zeroconf, shared.zeroconf, name) for name in sorted(names)]
        return await asyncio.gather(*asked), more


async def _details(zeroconf: Any, shared: Any, name: str) -> Found:
    """The announcement of `name`; without addresses if it does not answer, or is malformed."""
    nothing = Found(name=name, addresses=(), port=0, texts={})
    try:
        info = zeroconf.asyncio.AsyncServiceInfo(SERVICE, name)
        if not await info.async_request(shared, DETAILS_S * 1e3):
            return nothing
        return Found(
            name=name.removesuffix(f".{SERVICE}"),
            addresses=tuple(info.parsed_addresses()),
            port=info.port or 0,
            texts=dict(info.properties),
        )
    except (zeroconf.Error, ValueError):
        return nothing
