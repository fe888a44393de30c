"""Files for schedulers: written for the user to read and keep."""

import re
from pathlib import Path

MARK = "Written by comm-hooks launch"

_FORBIDDEN = re.compile(r"[^a-z0-9-]+")


def write_file(path: Path, text: str, option: str) -> None:
    """Write a file, over an older one of ours but over nothing else.

    Raises:
        ValueError: if something else is there, or nothing can be written.
    """
    try:
        if path.exists() and MARK not in path.read_text(errors="replace"):
            raise ValueError(f"{option} {path}: exists and is not ours: give another name")
        path.write_text(text)
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot write it ({error.strerror})") from None


def job_name(target: str) -> str:
    """Return a name for a job that schedulers accept: a DNS label, made of the script's name.

    Example::

        >>> job_name("experiments/train_GPT.py")
        'train-gpt'
    """
    stem = Path(target).stem if target.endswith(".py") else target.rsplit(".", 1)[-1]
    name = _FORBIDDEN.sub("-", stem.lower()).strip("-")
    return name[:40].rstrip("-") if name[:1].isalpha() else f"job-{name}"[:40].rstrip("-")
