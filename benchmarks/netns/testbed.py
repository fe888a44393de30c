"""N network namespaces on one switch, and the programs in them."""

import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.netns.links import NetnsError, call, shape
from comm_hooks.launchers.environment import LauncherEnvironment
from comm_hooks.launchers.network import Endpoint
from comm_hooks.launchers.rates import parse_rate

_GUARD = Path(__file__).with_name("guard.py")
# torchrun, asked to end, gives its workers this long.
_GRACE_SECONDS = 10.0
# How long ranks may outlive one that failed; their own messages are often what explains it.
_AFTER_FAILURE_SECONDS = 15.0
_beds_of_this_process = itertools.count()


class Counters(NamedTuple):
    """Bytes that crossed one rank's interface since the bed was made, headers included."""

    sent: int
    received: int


class Testbed:
    """``ranks`` network namespaces joined by a bridge, each on a full-duplex link of its own.

    ::

        [rank 0] eth0 ==== port0 |         |
        [rank 1] eth0 ==== port1 |  bridge |     each box in [] is a namespace,
        ...                      |         |     and so is the switch with the bridge

    1. every rank gets the address ``10.77.0.<rank + 1>`` and knows the others as ``rank<r>``;
    2. a token bucket caps each direction: on ``eth0`` what a rank sends, on the switch's port what
       it receives.  The bucket is small (1 ms), so that no transfer passes for free; the queue
       before it holds 200 ms at the link's rate (but at least 256 kB), what is more is dropped;
    3. nothing is made in the caller's own namespace but ``/etc/netns/<namespace>/``;
    4. on leaving, a guard process ends what still runs in the bed and removes it, also if the
       process that made the bed is killed.

    Names contain the process's id: any number of beds can exist at once.

    Args:
        ranks: from 1 to 200.
        rate: of each direction of each link, as ``tc`` writes it (``"100mbit"``); None: no cap.

    Raises:
        ValueError: for a number of ranks or a rate that cannot be.
        NetnsError: on entry, where there can be no bed; see :func:`why_not`.

    Not supported: delay (many kernels lack netem), so the round trip is that of the machine, some
    0.1 ms; half duplex; IPv6.

    Example::

        >>> from benchmarks.netns import Testbed, why_not
        >>> if why_not() is None:
        ...     with Testbed(2, rate="100mbit") as bed:
        ...         codes = bed.wait([bed.start(rank, ["true"]) for rank in range(2)])
        ...         bed.set_rate("10mbit")
        ...         sent = [counters.sent for counters in bed.counters()]
    """

    def __init__(
        self,
        ranks: int = 2,
        *,
        rate: str | None = None,
    ) -> None:
        if not 1 <= ranks <= 200:
            raise ValueError(f"Testbed: ranks must lie between 1 and 200, got {ranks}")
        if rate is not None:
            parse_rate(rate)
        self.ranks = ranks
        name = f"comm-hooks-{os.getpid()}-{next(_beds_of_this_process)}"
        self.switch = f"{name}-switch"
        self.namespaces = [f"{name}-rank{rank}" for rank in range(ranks)]
        self.addresses = [f"10.77.0.{rank + 1}" for rank in range(ranks)]
        self._first_rate = rate
        self._guard: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> "Testbed":
        for tool in ("ip", "tc"):
            if not shutil.which(tool):
                raise NetnsError(f"there is no `{tool}` here (install iproute2)")
        self._guard = subprocess.Popen(
            [
                *(sys.executable, "-I", str(_GUARD), str(_GRACE_SECONDS)),
                *(self.switch, *self.namespaces),
            ],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs in the bed and remove it."""
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        # A process that nobody waits for stays in the process table.
        for process in self._processes:
            process.wait()
        self._guard.wait()
        self._guard = None

    def set_rate(
        self,
        rate: str | None,
        *,
        ranks: Sequence[int] | None = None,
        direction: Literal["up", "down", "both"] = "both",
    ) -> None:
        """Cap links anew, also while programs use them; None removes the cap.

        Args:
            rate: as ``tc`` writes it, such as ``"10mbit"``.
            ranks: whose links; all by default.
            direction: ``"up"`` what those ranks send, ``"down"`` what they receive, or ``"both"``.

        Raises:
            ValueError: for a rate that cannot be.
        """
        if rate is not None:
            parse_rate(rate)
        for rank in range(self.ranks) if ranks is None else ranks:
            ends = {"up": (self.namespaces[rank], "eth0"), "down": (self.switch, f"port{rank}")}
            for way, (namespace, device) in ends.items():
                if direction in (way, "both"):
                    shape(namespace, device, rate)

    def counters(self) -> list[Counters]:
        """Return what crossed each rank's interface so far, in rank order.

        Ethernet, IP and TCP headers are included; they add 6 to 7 % to large transfers on links
        up to 100 Mbit.  On faster links the kernel counts one header per 64 kB.
        """
        found = []
        for namespace in self.namespaces:
            shown = call("ip", "-j", "-s", "-n", namespace, "link", "show", "dev", "eth0")
            statistics = json.loads(shown)[0]["stats64"]
            found.append(Counters(statistics["tx"]["bytes"], statistics["rx"]["bytes"]))
        return found

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment in which programs of this rank find the others.

        That of this process, and: what ``torch.distributed``'s ``env://`` reads (``RANK``,
        ``WORLD_SIZE``, ``MASTER_ADDR`` ...), what ``torchrun`` reads in place of its options
        (``PET_NNODES``, ``PET_NODE_RANK`` ...), the interface for gloo and NCCL, and a fair share
        of the cores in ``OMP_NUM_THREADS`` unless it is set.
        """
        inherited = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        interface = dict.fromkeys(
            ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "eth0"
        )
        own = LauncherEnvironment(rank=rank, world_size=self.ranks).variables(
            Endpoint(self.addresses[0])
        )
        cores = len(os.sched_getaffinity(0))
        return {
            "OMP_NUM_THREADS": str(max(1, cores // self.ranks)),
            **inherited,
            **interface,
            **own,
            "GROUP_RANK": str(rank),
            "PET_NNODES": str(self.ranks),
            "PET_NODE_RANK": str(rank),
            "PET_NPROC_PER_NODE": "1",
            **{f"PET_{name}": own[name] for name in ("MASTER_ADDR", "MASTER_PORT")},
        }

    def start(
        self,
        rank: int,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> "subprocess.Popen[Any]":
        """Start a command in a rank's namespace, in a session of its own, and return at once.

        Args:
            environment: by default :meth:`environment` of the rank.
            options: of ``subprocess.Popen``, such as ``stdout``.
        """
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespaces[rank], *command],
            env=dict(self.environment(rank) if environment is None else environment),
            start_new_session=True,
            **options,
        )
        self._processes.append(process)
        return process

    def wait(
        self, processes: Sequence["subprocess.Popen[Any]"], *, timeout: float = 600.0
    ) -> list[int]:
        """Wait for processes from :meth:`start` and return their exit codes.

        The others are ended 15 s after one has failed, and all after ``timeout`` seconds: ranks
        wait for each other without end.
        """
        deadline = time.monotonic() + timeout
        failed = False
        while any(process.poll() is None for process in processes):
            if not failed and any(process.poll() for process in processes):
                failed = True
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_SECONDS)
            if time.monotonic() > deadline:
                for process in processes:
                    _end(process)
            time.sleep(0.05)
        return [process.wait() for process in processes]

    def _make(self) -> None:
        for namespace in (self.switch, *self.namespaces):
            call("ip", "netns", "add", namespace)
            call("ip", "-n", namespace, "link", "set", "lo", "up")
            # Neighbour discovery would add to the counters.
            _set(namespace, "net/ipv6/conf/all/disable_ipv6", "1")
        # fmt: off
        call("ip", "-n", self.switch, "link", "add", "bridge0", "type", "bridge",
             "forward_delay", "0", "stp_state", "0")
        # fmt: on
        call("ip", "-n", self.switch, "link", "set", "bridge0", "up")
        for rank, namespace in enumerate(self.namespaces):
            self._name_hosts(rank)
            port = f"port{rank}"
            # fmt: off
            call("ip", "link", "add", "name", "eth0", "netns", namespace,
                 "type", "veth", "peer", "name", port, "netns", self.switch)
            # fmt: on
            call("ip", "-n", self.switch, "link", "set", port, "master", "bridge0")
            call("ip", "-n", self.switch, "link", "set", port, "up")
            call("ip", "-n", namespace, "addr", "add", f"{self.addresses[rank]}/24", "dev", "eth0")
            call("ip", "-n", namespace, "link", "set", "eth0", "up")
            # Not whatever this machine happens to prefer: rates should not depend on it.
            _set(namespace, "net/ipv4/tcp_congestion_control", "cubic")
        self.set_rate(self._first_rate)

    def _name_hosts(self, rank: int) -> None:
        """Let names resolve: without, each connection waits seconds for a DNS that is not there.

        ``ip netns exec`` mounts these files over those in /etc.
        """
        own = f"127.0.0.1 localhost\n{self.addresses[rank]} {socket.gethostname()}\n"
        # c10d listens on IPv6 sockets, which see the mapped addresses.
        peers = "".join(
            f"{address} rank{peer}\n::ffff:{address} rank{peer}\n"
            for peer, address in enumerate(self.addresses)
        )
        folder = Path("/etc/netns", self.namespaces[rank])
        with contextlib.suppress(OSError):  # a read-only /etc costs seconds at the start, no more
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(own + peers)
            resolver = "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"
            (folder / "resolv.conf").write_text(resolver)


@functools.cache
def why_not() -> str | None:
    """Return one line that says why there can be no bed here, or None if there can.

    Makes a bed of two ranks to find out, once per process.
    """
    if not sys.platform.startswith("linux"):
        return "no network namespaces: this is not Linux"
    if os.geteuid():
        return "no network namespaces: making them needs root (or CAP_NET_ADMIN and CAP_SYS_ADMIN)"
    try:
        with Testbed(2, rate="100mbit"):
            return None
    except NetnsError as error:
        return f"no network namespaces: {error}"


def _set(namespace: str, path: str, value: str) -> None:
    """Write a kernel setting of a namespace; what the kernel does not have stays as it is."""
    write = f"echo {value} > /proc/sys/{path}"
    call("ip", "netns", "exec", namespace, "sh", "-c", write, check=False)


def _end(process: "subprocess.Popen[Any]") -> None:
    """End a process and its session: TERM first, because only torchrun can end its workers."""
    for number, patience in ((signal.SIGTERM, 8.0), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(patience)
