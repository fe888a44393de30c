"""Rates of links: a token bucket (tbf) on each end of a virtual cable."""

import subprocess

from comm_hooks.launchers.rates import parse_rate

_FRAME_BYTES = 1514
_QUEUE_SECONDS = 0.2
_MIN_QUEUE_BYTES = 256_000


class NetnsError(RuntimeError):
    """The network cannot be made here; the text says why in one line."""


def burst_bytes(rate: str) -> int:
    """Return the bucket's size: what a link may send at once after it was idle.

    One millisecond's worth, and two frames at least.  Every idle gap fills the bucket, and what is
    in it passes free of charge: with the usual 64 kB a compressed gradient would cost nothing.
    """
    return int(max(2 * _FRAME_BYTES, parse_rate(rate) / 8 * 1e-3))


def shape(namespace: str, device: str, rate: str | None) -> None:
    """Cap what leaves ``device`` at ``rate``; None removes the cap.  Works while data flows.

    Raises:
        NetnsError: if the kernel refuses.
    """
    if rate is None:
        if "tbf" in call("tc", "-n", namespace, "qdisc", "show", "dev", device):
            call("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
        return
    burst = burst_bytes(rate)
    # Slow links get a queue of whole windows: dropping those measures TCP's recovery, not the rate.
    limit = int(max(_MIN_QUEUE_BYTES, parse_rate(rate) / 8 * _QUEUE_SECONDS)) + burst
    # fmt: off
    call("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root",
         "tbf", "rate", rate, "burst", str(burst), "limit", str(limit))
    # fmt: on


def call(*command: str, check: bool = True) -> str:
    """Run a command and return its output.

    Raises:
        NetnsError: if it fails, with the last line that it wrote.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        reason = lines[-1] if lines else f"exit status {done.returncode}"
        raise NetnsError(f"{' '.join(command)}: {reason}")
    return done.stdout
