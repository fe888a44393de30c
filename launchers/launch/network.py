"""Which interface of this machine leads to the head node.

Gloo and c10d look up the machine's own name where nobody tells them, and bind what they find: often
127.0.0.1, which no other node can reach.  So the launcher says which interface and which address.
"""

import socket
from dataclasses import dataclass

import psutil

from comm_hooks.launchers.endpoint import is_loopback

_IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True)
class Route:
    """How this machine reaches the head.

    Args:
        interface: the name of the interface, for GLOO_SOCKET_IFNAME.
        address: the address of this machine in that network.
        head: the address of the head.
        is_head: whether the head is this machine.
    """

    interface: str
    address: str
    head: str
    is_head: bool


def find_route(host: str, interface: str | None = None) -> Route:
    """Find out how this machine reaches a host.

    1. resolve the name, IPv4 before IPv6;
    2. let the kernel choose the address to come from (no packet is sent), or take the first one of
       ``interface``;
    3. look up the interface of that address.

    Args:
        host: a name or an address.
        interface: the interface to use instead of the one that the routing table names.

    Raises:
        ValueError: if the name does not resolve, nothing leads there, there is no such interface,
            or the name stands for 127.0.0.1 (as Debian writes it into /etc/hosts for the machine's
            own name), which the other nodes cannot use.

    Example::

        >>> find_route("127.0.0.1")
        Route(interface='lo', address='127.0.0.1', head='127.0.0.1', is_head=True)
    """
    head = _resolve(host)
    own = _addresses()
    if interface is not None:
        address = interface_address(interface)
    else:
        address = _source_address(head, host)
        if is_loopback(head) and host not in ("localhost", head):
            raise ValueError(
                f"--head {host} is {head} on this machine, where no other node can reach it: give "
                f"its address in the nodes' network, or --interface (there are {_listed(own)})"
            )
    is_head = any(head == other for _, other in own)
    if is_head and is_loopback(head) and interface is not None:
        head = address
    name = next((name for name, other in own if other == address), None)
    if name is None:
        raise ValueError(f"no interface of this machine has the address {address}: --interface")
    return Route(name, address, head, is_head)


def interface_address(name: str) -> str:
    """Return the first address of an interface.

    Raises:
        ValueError: if there is no such interface, or it has no address.
    """
    own = _addresses()
    for other, address in own:
        if other == name:
            return address
    raise ValueError(
        f"--interface {name}: this machine has no such interface with an address; it has "
        f"{_listed(own)}"
    )


def _resolve(host: str) -> str:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise ValueError(
            f"--head {host}: this machine cannot resolve that name: check it, or give an address"
        ) from None
    # IPv4 first: that is what gloo looks for on an interface first, too.
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def _source_address(head: str, host: str) -> str:
    family = socket.AF_INET6 if ":" in head else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((head, 9))  # sends nothing: UDP
        except OSError as error:
            raise ValueError(
                f"--head {host}: no route from this machine ({error.strerror}); it has "
                f"{_listed(_addresses())}"
            ) from None
        return str(probe.getsockname()[0])


def _addresses() -> list[tuple[str, str]]:
    """Return (interface, address) of this machine, IPv4 first."""
    return [
        (name, entry.address.partition("%")[0])
        for family in _IP_FAMILIES
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == family
    ]


def _listed(addresses: list[tuple[str, str]]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in addresses) or "none"
