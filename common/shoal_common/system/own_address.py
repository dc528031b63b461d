"""Addresses of this machine: the address that it announces to other machines, and the address that
its processes listen on.

By default both are the local address of connections to the coordinator. The machine's own name is
not resolved, since this often gives 127.0.1.1, or nothing. Users choose another address with
`--local-addr` or SHOAL_LOCAL_ADDR, as an address, an interface or a host name. If processes must
listen on a different address than the announced one (NAT), users also set `--listen-addr` or
SHOAL_LISTEN_ADDR. Announced addresses are numeric, so that other machines need not resolve names.
Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final

from shoal_common.errors import ConfigurationError

LOCAL_ADDR: Final = "--local-addr (SHOAL_LOCAL_ADDR)"
"""Name of the setting of the local address, used in errors."""
LISTEN_ADDR: Final = "--listen-addr (SHOAL_LISTEN_ADDR)"
"""Name of the setting of the listen address, used in errors."""
REACHED_ELSEWHERE: Final = (
    "each worker reports its own machine's address; if others reach the machine at a different "
    "address, start its launcher with " + LOCAL_ADDR
)
"""Explanation of the addresses that were tried, for errors about connections to other workers."""
ELSEWHERE: Final = (("192.0.2.1", 9), ("2001:db8::1", 9))
"""Addresses that belong to no host (RFC 5737, RFC 3849). The local address of a connection to them
is the address used to reach other machines."""
_REASON: Final = "ADDRESS_UNUSABLE"
_UNSPECIFIED: Final = ("0.0.0.0", "::")  # noqa: S104 - compared with


@dataclass(frozen=True, kw_only=True)
class OwnAddress:
    """Address that other machines use to reach this machine, and the address that its processes
    listen on. Both are numeric."""

    announced: str
    bound: str
    """Address to listen on; 0.0.0.0 or :: means all addresses."""

    @classmethod
    def find(cls, local: str | None, listen: str | None, *, towards: tuple[str, int]) -> OwnAddress:
        """Resolves the values of `--local-addr` (`local`) and `--listen-addr` (`listen`); None
        means that the flag was not given.

        `towards`: host and port of the coordinator. By default, both addresses are the local
        address of connections to the coordinator.

        Raises:
            ConfigurationError: this machine does not have such an address, or others cannot reach
                it; or neither was given and there is no route to the coordinator's host.
        """
        preferred = route_towards(*towards)
        bound = (
            None
            if not listen
            else listen
            if is_unspecified(listen)
            else _own(listen, LISTEN_ADDR, preferred)
        )
        if local:
            announced = (
                _own(local, LOCAL_ADDR, preferred)
                if bound is None
                else _announced(local, preferred)
            )
        elif bound is not None and not is_unspecified(bound):
            announced = bound
        elif preferred is not None:
            announced = preferred
        else:
            raise ConfigurationError(
                f"cannot resolve or reach the coordinator's host {towards[0]!r}; {_have()}. "
                f"Correct the host, or set {LOCAL_ADDR} to the address at which other machines "
                "reach this one",
                reason="NO_ROUTE",
            )
        return cls(announced=announced, bound=bound or announced)


def route_towards(host: str, port: int) -> str | None:
    """Returns the local address of connections from this machine to `host`; None if there is no
    route or no such host. Sends nothing, because connecting a datagram socket only selects the
    route."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    return None


def is_unspecified(host: str) -> bool:
    """Returns whether `host`, as a listen address, means all addresses."""
    return host in _UNSPECIFIED


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach `host`, a numeric address."""
    parsed = _parsed(host)
    return parsed is not None and parsed.is_loopback


def is_own(address: str) -> bool:
    """Returns whether a numeric address belongs to this machine. Processes can listen only on such
    an address."""
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EINVAL, errno.EAFNOSUPPORT):
            return False
        raise
    return True


def interfaces() -> Mapping[str, list[str]]:
    """Returns this machine's addresses by interface, IPv4 before IPv6, without link-local ones."""
    found: dict[str, list[str]] = {}
    for name, address in sorted(_assigned(), key=lambda each: ":" in each[1]):
        parsed = ip_address(address)
        if parsed.is_loopback or not parsed.is_link_local:
            found.setdefault(name, []).append(address)
    return found


def of_interface(name: str) -> str | None:
    """Returns the first address of one of this machine's interfaces; None if there is no such
    interface or it has no address."""
    return next(iter(interfaces().get(name, ())), None)


def interface_of(address: str) -> str | None:
    """Returns the interface with a numeric address; None if this machine does not have the
    address."""
    return next((name for name, addresses in interfaces().items() if address in addresses), None)


def resolved(name: str) -> list[str]:
    """Returns the numeric addresses of `name`; empty if it cannot be resolved."""
    try:
        return list(
            dict.fromkeys(
                str(entry[4][0])
                for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            )
        )
    except (OSError, UnicodeError):
        return []


def name_for_others() -> str | None:
    """Returns this machine's name if other machines may be able to use it; None if it cannot be
    resolved or resolves only to loopback addresses."""
    name = socket.gethostname()
    return name if any(not is_loopback(address) for address in resolved(name)) else None


def own_host(given: str) -> str:
    """Returns the host that other machines use to reach a service on this machine.

    `given`: an interface, whose address is returned, or a host, which is returned unchanged. If it
    is empty, returns this machine's name or, if that is unusable, the local address of connections
    to other machines.
    """
    if given:
        return of_interface(given) or given
    return (
        name_for_others()
        or next(filter(None, (route_towards(*each) for each in ELSEWHERE)), None)
        or socket.gethostname()
    )


def _own(given: str, flag: str, preferred: str | None) -> str:
    """Resolves `given` to an address of this machine. Raises ConfigurationError if there is
    none."""
    candidates = _candidates(given, flag)
    own = [address for address in candidates if is_own(address)]
    if not own:
        means = (
            "" if candidates == [given] else f", which resolves to {', '.join(candidates)} here,"
        )
        by_nat = (
            f"; if other machines reach this one at that address (NAT), set {LISTEN_ADDR} too, for "
            "example to 0.0.0.0"
        )
        raise ConfigurationError(
            f"{flag} {given!r}{means} is not an address of this machine, which has {_described()}; "
            "use one of these addresses or its interface" + (by_nat if flag == LOCAL_ADDR else ""),
            reason=_REASON,
        )
    return _chosen(own, preferred)


def _announced(given: str, preferred: str | None) -> str:
    """Resolves `given` to an address, which may belong to a different machine that forwards its
    traffic to this one (NAT)."""
    return _chosen(_candidates(given, LOCAL_ADDR), preferred)


def _candidates(given: str, flag: str) -> list[str]:
    """Returns the numeric addresses of `given`: an address, an interface or a host name. Raises
    ConfigurationError if it is none of these, or if other machines could not use it."""
    given = given[1:-1] if given.startswith("[") and given.endswith("]") else given
    parsed = _parsed(given)
    if parsed is not None:
        if parsed.is_unspecified or parsed.is_link_local:
            why = "means all addresses" if parsed.is_unspecified else "is valid only on one link"
            raise ConfigurationError(
                f"{flag} {given!r} {why}; {_have()}. Use an address that other machines can reach",
                reason=_REASON,
            )
        return [str(parsed)]
    names = [name for _, name in socket.if_nameindex()]
    if given in names:
        if found := interfaces().get(given):
            return found
        raise ConfigurationError(
            f"{flag} {given!r}: this interface has no address; {_have()}", reason=_REASON
        )
    if not (found := resolved(given)):
        raise ConfigurationError(
            f"{flag} {given!r} is not an address, an interface or a host name that resolves here; "
            f"{_have()}. Use one of these addresses or an interface",
            reason=_REASON,
        )
    usable = [address for address in found if given == "localhost" or not is_loopback(address)]
    if not usable:
        raise ConfigurationError(
            f"{flag} {given!r} resolves to {', '.join(found)} here, which only this machine can "
            f"reach; {_have()}. Use one of these addresses or an interface",
            reason=_REASON,
        )
    return usable


def _chosen(addresses: list[str], preferred: str | None) -> str:
    """Returns `preferred` if it is among the addresses; otherwise the first address of the same
    family as `preferred`, since all machines must use the same family; if there is none, the first
    address."""
    if preferred is None or preferred in addresses:
        return preferred or addresses[0]
    return next(
        (address for address in addresses if _family(address) == _family(preferred)), addresses[0]
    )


def _have() -> str:
    return f"this machine has {_described()}"


def _described() -> str:
    return (
        "; ".join(f"{name} {', '.join(addresses)}" for name, addresses in interfaces().items())
        or "no addresses"
    )


def _parsed(address: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(address)
    except ValueError:
        return None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


# --------------------------------------------------------------------- interfaces, by the C library


class _InterfaceAddress(ctypes.Structure):
    """First fields of C's struct ifaddrs."""


_InterfaceAddress._fields_ = [
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]
_ADDRESS_AT: Final = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""Offset and length of the address in struct sockaddr_in and sockaddr_in6."""


def _assigned() -> Iterator[tuple[str, str]]:
    """Yields interfaces and their addresses as listed by the kernel. Raises OSError."""
    library: Any = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if library.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        each = first
        while each:
            entry, each = each.contents, each.contents.next
            if entry.address is None:
                continue
            family = ctypes.c_ushort.from_address(entry.address).value
            if family in _ADDRESS_AT:
                offset, length = _ADDRESS_AT[socket.AddressFamily(family)]
                yield (
                    entry.name.decode(),
                    socket.inet_ntop(family, ctypes.string_at(entry.address + offset, length)),
                )
    finally:
        library.freeifaddrs(first)
