"""Where ranks meet: a host and a port, and whether something listens there."""

import errno
import ipaddress
import os
import re
import socket
import time
from dataclasses import dataclass

DEFAULT_PORT = 29500
"""The port that PyTorch, torchrun and DeepSpeed use."""

_RETRY_SECONDS = 0.5
_ATTEMPT_SECONDS = 5.0


@dataclass(frozen=True)
class Endpoint:
    """Where ranks meet: a host, by name or address, and a port that is open to all nodes."""

    host: str
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """Return an endpoint from ``HOST``, ``HOST:PORT``, an IPv6 address or ``[IPv6]:PORT``.

    Raises:
        ValueError: for anything else.

    Example::

        >>> parse_endpoint("node0"), parse_endpoint("[fd00::2]:29400")
        (Endpoint(host='node0', port=29500), Endpoint(host='fd00::2', port=29400))
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
    """Wait until something listens at an endpoint.

    Args:
        endpoint: where.
        seconds: how long; 0 asks once.

    Returns:
        None as soon as it does, else one line that says why not.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        reason = _try_to_connect(endpoint, min(_ATTEMPT_SECONDS, max(left, 1.0)))
        if reason is None or left <= _RETRY_SECONDS:
            return reason
        time.sleep(_RETRY_SECONDS)


def port_is_taken(address: str, port: int) -> bool:
    """Return whether something on this machine listens at that port already."""
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


def free_port() -> int:
    """Return a port of this machine that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def is_loopback(address: str) -> bool:
    """Return whether an address is of this machine alone; an empty one is not."""
    return bool(address) and ipaddress.ip_address(address).is_loopback


def loopback_interface() -> str | None:
    """Return the name of the interface of this machine alone, if it has one.

    Told to use it, gloo does not look up the machine's name, which fails or takes seconds in
    places.
    """
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if name.startswith("lo")), None)
