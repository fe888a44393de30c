"""Hostfiles: which machines, and how many ranks on each."""

import re
from dataclasses import dataclass
from pathlib import Path

DEEPSPEED_HOSTFILE = Path("/job/hostfile")
"""Where the deepspeed launcher looks by itself."""

# More may follow: Open MPI knows max_slots=.
_LINE = re.compile(
    r"(?P<name>[\w.-]+)(?:\s+slots=(?P<slots>\d+)|:(?P<count>\d+))?(?:\s+(?!slots)\S+)*"
)


@dataclass(frozen=True)
class Host:
    """A machine; ``slots`` is None where the file does not say how many ranks it takes."""

    name: str
    slots: int | None


def read_hostfile(path: Path) -> list[Host]:
    """Read a hostfile in the form of DeepSpeed and Open MPI or of MPICH.

    Lines are ``name slots=4``, ``name:4`` or ``name``; empty lines and comments (#) are skipped.

    Raises:
        ValueError: if the file cannot be read, a line is something else, or a host comes twice.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ValueError(f"--hostfile {path}: cannot read it ({reason})") from None
    hosts: dict[str, Host] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        found = _LINE.fullmatch(line)
        slots = found and (found["slots"] or found["count"])
        if not found or slots == "0":
            raise ValueError(
                f"--hostfile {path}, line {number}: {line!r} is none of 'name slots=4', 'name:4', "
                f"'name'"
            )
        if found["name"] in hosts:
            raise ValueError(f"--hostfile {path}, line {number}: {found['name']} comes twice")
        hosts[found["name"]] = Host(found["name"], int(slots) if slots else None)
    if not hosts:
        raise ValueError(f"--hostfile {path}: no host in it")
    return list(hosts.values())


def slots_of(hosts: list[Host], processes: int | None, path: Path) -> list[int]:
    """Return how many ranks each host gets: ``processes`` if given, else what the file says.

    Raises:
        ValueError: if neither says it.
    """
    counts = [processes or host.slots for host in hosts]
    for host, count in zip(hosts, counts, strict=True):
        if count is None:
            raise ValueError(
                f"--hostfile {path}: {host.name} has no slots=N, so give --nproc: ranks per node"
            )
    return [count for count in counts if count]
