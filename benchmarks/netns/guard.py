"""Takes a network down when its maker is done with it, or dead.

    python guard.py SECONDS NAMESPACE...

Waits for the end of standard input, a pipe that only the maker holds; however the maker ends,
SIGKILL included, the pipe ends with it.  Then ends all processes in the namespaces, which have
SECONDS to do so themselves, deletes the namespaces and what lies in /etc/netns for them.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time


def main(grace: float, namespaces: list[str]) -> None:
    # Ctrl-C in a terminal reaches the whole foreground; this process goes last.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    _send(namespaces, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while _processes(namespaces) and time.monotonic() < deadline:
        time.sleep(0.05)
    while _send(namespaces, signal.SIGKILL):
        time.sleep(0.05)
    for name in namespaces:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)


def _processes(namespaces: list[str]) -> list[int]:
    found: list[int] = []
    for name in namespaces:
        listed = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
        )
        found += map(int, listed.stdout.split())
    return found


def _send(namespaces: list[str], number: signal.Signals) -> bool:
    """Send a signal to everything in the namespaces; return whether there was anything."""
    processes = _processes(namespaces)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
    return bool(processes)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
