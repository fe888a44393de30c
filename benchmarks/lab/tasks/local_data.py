"""Where data sets are expected on disk, and what is said where they are not."""

from collections.abc import Sequence
from pathlib import Path


def locate(
    task: str, data_dir: Path | None, *, folder: str, archive: str, contents: Sequence[str]
) -> Path:
    """Return the folder of an unpacked data set.

    Args:
        task: whose data it is, for messages.
        data_dir: what the user gave: the folder itself, or the one it was unpacked in.
        folder: its published name.
        archive: the published file that it comes in.
        contents: paths inside the folder that must be there.

    Raises:
        ValueError: if nothing was given, or something is missing.
    """
    remedy = f"unpack {archive} and pass the folder that then holds {folder} as --data-dir"
    if data_dir is None:
        raise ValueError(f"{task}: no data folder was given: {remedy}")
    if not data_dir.is_dir():
        raise ValueError(f"{task}: there is no folder {data_dir}: {remedy}")
    root = data_dir / folder if (data_dir / folder).is_dir() else data_dir
    missing = [name for name in contents if not (root / name).exists()]
    if missing:
        raise ValueError(f"{task}: {root} has no {', '.join(missing)}: {remedy}")
    return root
