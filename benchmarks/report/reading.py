"""Files of records: lines of ``compare``'s ``runs.jsonl``, or logs of a training of one's own."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.lab.runs import Run, parse_run
from benchmarks.report.logs import Log

_Logs = dict[tuple[str, int | None], Log]


def read_runs(*paths: Path) -> list[Run]:
    """Read all records of the files, in order.

    Args:
        paths: each holds lines of ``compare``'s ``runs.jsonl`` or records of a training
            (:mod:`benchmarks.report.logs`), or both.

    Raises:
        ValueError: for a file that is missing, given twice, empty or no text, and for a line that
            is no record; the message names the file and the line.
    """
    for i, path in enumerate(paths):
        if path.resolve() in (other.resolve() for other in paths[:i]):
            raise ValueError(f"{path}: given twice")
    names = _names(paths)
    return [run for path, name in zip(paths, names, strict=True) for run in _read(path, name)]


def _read(path: Path, name: str) -> list[Run]:
    found: list[Run | Log] = []
    logs: _Logs = {}
    for number, values in _lines(path):
        try:
            if values is None:
                if not logs:
                    raise ValueError("not JSON: the line is cut off")
                for log in logs.values():
                    log.remarks.append(f"line {number} is cut off and left out")
            elif "step" in values:
                log = _log_of(values, name, logs)
                log.add(values)
                if log not in found:
                    found.append(log)
            else:
                found.append(parse_run(values))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{path}: no records in this file")
    try:
        return [each.run() if isinstance(each, Log) else each for each in found]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield each line's number and object; None for a last line whose rest is being written."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot read this file ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file of JSON lines") from None
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            # A training that runs, or was killed while it wrote, leaves half a line.
            if 1 < number == len(lines):
                yield number, None
                return
            why = str(error)  # too deep, or a number of thousands of digits
            if isinstance(error, json.JSONDecodeError):
                why = f"{error.msg} at column {error.colno}"
            raise ValueError(f"{path}, line {number}: not JSON ({why})") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object but {_short(line)}")
        yield number, values


def _log_of(values: dict[str, Any], name: str, logs: _Logs) -> Log:
    """Return the log that a record belongs to."""
    named = re.fullmatch(r"(.+)\.seed(\d+)", name)
    default = (named[1], int(named[2])) if named else (name, None)
    method, seed = values.get("method", default[0]), values.get("seed", default[1])
    if not isinstance(method, str):
        raise ValueError(f"method must be a string, got {method!r}")
    if isinstance(seed, bool) or not isinstance(seed, (int, type(None))):
        raise ValueError(f"seed must be an integer, got {seed!r}")
    return logs.setdefault((method, seed), Log(method, seed))


def _names(paths: tuple[Path, ...]) -> list[str]:
    """Return what to call a log that does not say so itself: its file, as briefly as is clear."""
    stems = [path.stem for path in paths]
    return [
        stem if stems.count(stem) == 1 else str(path.with_suffix(""))
        for path, stem in zip(paths, stems, strict=True)
    ]


def _short(line: str) -> str:
    return line if len(line) <= 40 else line[:37] + "..."
