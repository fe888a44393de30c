"""Runs of a study that was interrupted, so that it goes on where it was."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from comm_hooks.launchers.lab.outcomes import Advance, Method, Point, Run, Settings


class KeptRuns:
    """Makes runs and keeps each in a file, a line of JSON; those that are there are not made again.

    Args:
        file: where they are kept.  A last line that was cut off is left out.
        study: what all runs depend on; runs of another study in the file do not count.
        point: makes a point of a curve from its fields.

    Example::

        >>> import tempfile
        >>> method = Method("m", {}, lambda s, seed, advance: [Point(1, s["lr"], 0.5, 8)], start=1)
        >>> file = Path(tempfile.mkdtemp()) / "runs.jsonl"
        >>> run = KeptRuns(file, {"steps": 1}, Point).run(method, {"lr": 0.1}, 0, lambda: None)
        >>> KeptRuns(file, {"steps": 1}, Point).count, KeptRuns(file, {"steps": 2}, Point).count
        (1, 0)
    """

    def __init__(self, file: Path, study: Mapping[str, Any], point: Callable[..., Point]) -> None:
        self._file = file
        self._study = study
        self._runs: dict[str, Run] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            try:
                kept = json.loads(line)
            except ValueError:
                continue
            if kept["of"][0] == _as_json(study):
                curve = [point(**each) for each in kept["curve"]]
                _, _, _, settings, seed = kept["of"]
                self._runs[_key(kept["of"])] = Run(seed, settings, curve, kept["diverged"])

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._runs)

    def run(self, method: Method, settings: Settings, seed: int, advance: Advance) -> Run:
        """Return the run, made now or before."""
        of = [self._study, method.name, method.labels, settings, seed]
        key = _key(of)
        if key not in self._runs:
            run = method.run(settings, seed, advance)
            self._runs[key] = run
            kept = {"of": of, "curve": [asdict(p) for p in run.curve], "diverged": run.diverged}
            with self._file.open("a") as lines:
                # On a line of its own, even after one that was cut off.
                lines.write("\n" + json.dumps(kept))
        return self._runs[key]

    def forget(self) -> None:
        """Remove the file."""
        self._file.unlink(missing_ok=True)


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _key(of: list[Any]) -> str:
    return json.dumps(of, sort_keys=True)
