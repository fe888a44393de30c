"""The endpoint where ranks meet, and the network interface of this machine that leads there.

Without further settings gloo and c10d look up the machine's own name and bind its address: often
127.0.0.1, which no other node can reach.  So the launcher sets the interface and the address.
"""

import errno
import ipaddress
import os
import re
import socket
import time
from dataclasses import dataclass

import psutil

DEFAULT_PORT = 29500
"""The port that PyTorch, torchrun and DeepSpeed use."""

_IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_RETRY_SECONDS = 0.5
_ATTEMPT_SECONDS = 5.0


@dataclass(frozen=True)
class Endpoint:
    """The meeting point of ranks: a host, by name or address, and a port open to all nodes."""

    host: str
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """Return an endpoint from ``HOST``, ``HOST:PORT``, an IPv6 address or ``[IPv6]:PORT``.

    Raises:
        ValueError: for other text.
    """
    if re.fullmatch(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*", text):
        return Endpoint(text)
    found = re.fullmatch(r"(?:\[([^\]]+)\]|([\w.-]+))(?::(\d+))?", text)
    if not found:
        raise ValueError(f"--head {text}: needs HOST or HOST:PORT, as in node0:29500")
    port = int(found[3] or DEFAULT_PORT)
    if not 0 < port < 2**16:
        raise ValueError(f"--head {text}: the port must lie between 1 and 65535")
    return Endpoint(found[1] or found[2], port)


def wait_for_port(endpoint: Endpoint, seconds: float) -> str | None:
    """Wait until a server listens at an endpoint.

    Args:
        endpoint: the host and port.
        seconds: the longest time to wait; 0 tries once.

    Returns:
        None as soon as a server listens, else the reason of the last failure in one line.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        reason = _try_to_connect(endpoint, min(_ATTEMPT_SECONDS, max(left, 1.0)))
        if reason is None or left <= _RETRY_SECONDS:
            return reason
        time.sleep(_RETRY_SECONDS)


def port_is_taken(address: str, port: int) -> bool:
    """Return whether another program on this machine listens at ``port`` of ``address``."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port is not taken for a minute by connections that were closed.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _try_to_connect(endpoint: Endpoint, seconds: float) -> str | None:
    try:
        socket.create_connection((endpoint.host, endpoint.port), timeout=seconds).close()
    except socket.gaierror:
        return "its name does not resolve"
    except TimeoutError:
        return "no answer (a firewall, or the wrong address)"
    except ConnectionRefusedError:
        return "connection refused (nothing listens there yet)"
    except OSError as error:
        return os.strerror(error.errno).lower() if error.errno else str(error)
    return None


def is_loopback(address: str) -> bool:
    """Return whether an IP address is a loopback address; an empty text is not."""
    return bool(address) and ipaddress.ip_address(address).is_loopback


def loopback_interface() -> str | None:
    """Return the name of the loopback interface, if there is one.

    Gloo on this interface does not look up the machine's name, which can fail or take seconds.
    """
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if name.startswith("lo")), None)


@dataclass(frozen=True)
class Route:
    """The way from this machine to the head, the machine where ranks meet.

    Attributes:
        interface: the name of the network interface, for GLOO_SOCKET_IFNAME.
        address: the address of this machine on that interface.
        head: the address of the head.
        is_head: whether the head is this machine.
    """

    interface: str
    address: str
    head: str
    is_head: bool


def find_route(host: str, interface: str | None = None) -> Route:
    """Return the route from this machine to a host.

    1. resolve the name, IPv4 before IPv6;
    2. let the kernel choose the source address (no packet is sent), or take ``interface``'s first;
    3. look up the interface of that address.

    Args:
        host: the host's name or address.
        interface: the interface to use; by default that of the routing table.

    Raises:
        ValueError: if the name does not resolve, there is no route or no such interface, or the
            name resolves to 127.0.0.1 (as Debian's /etc/hosts has it for the machine's own name),
            which other nodes cannot reach.
    """
    head = _resolve(host)
    own = _addresses()
    if interface is not None:
        address = next((other for name, other in own if name == interface), "")
        if not address:
            raise ValueError(
                f"--interface {interface}: this machine has no such interface with an address; it "
                f"has {_listed(own)}"
            )
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
        raise ValueError(
            f"no interface of this machine has the address {address}: name one with --interface"
        )
    return Route(name, address, head, is_head)


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
    """Return pairs (interface, address) of this machine, IPv4 first."""
    return [
        (name, entry.address.partition("%")[0])
        for family in _IP_FAMILIES
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == family
    ]


def _listed(addresses: list[tuple[str, str]]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in addresses) or "none"
