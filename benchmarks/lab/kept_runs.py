"""Runs of a study that was interrupted, so that it goes on where it was."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lab.outcomes import Advance, Method, Point, Run, Settings


class KeptRuns:
    """Makes runs and keeps each in a file, a line of JSON; those that are there are not made again.

    Args:
        file: where they are kept.
        study: what all runs depend on; runs of another study in the file do not count.
        point: makes a point of a curve from its fields.

    Attributes:
        file: see above.
        seconds: what the runs took that were asked for, now or before.

    Example::

        >>> import tempfile
        >>> method = Method("m", {}, lambda s, seed, advance: [Point(1, s["lr"], 0.5, 8)], start=1)
        >>> file = Path(tempfile.mkdtemp()) / "runs.jsonl"
        >>> run = KeptRuns(file, {"steps": 1}, Point).run(method, {"lr": 0.1}, 0, lambda: None)
        >>> KeptRuns(file, {"steps": 1}, Point).count, KeptRuns(file, {"steps": 2}, Point).count
        (1, 0)
    """

    def __init__(self, file: Path, study: Mapping[str, Any], point: Callable[..., Point]) -> None:
        self.file = file
        self.seconds = 0.0
        self._study = study
        self._runs: dict[str, tuple[Run, float]] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            # What was cut off, or is nobody's run, is left out.
            with suppress(ValueError, TypeError, KeyError):
                kept = json.loads(line)
                if kept["of"][0] == _as_json(study):
                    curve = [point(**each) for each in kept["curve"]]
                    _, _, _, settings, seed = kept["of"]
                    run = Run(seed, settings, curve, kept["diverged"])
                    self._runs[_key(kept["of"])] = run, kept["seconds"]

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._runs)

    def run(self, method: Method, settings: Settings, seed: int, advance: Advance) -> Run:
        """Return the run, made now or before."""
        of = [self._study, method.name, method.labels, settings, seed]
        key = _key(of)
        if key not in self._runs:
            started = time.monotonic()
            run = method.run(settings, seed, advance)
            seconds = time.monotonic() - started
            self._runs[key] = run, seconds
            curve = [asdict(point) for point in run.curve]
            kept = {"of": of, "curve": curve, "diverged": run.diverged, "seconds": seconds}
            with self.file.open("a") as lines:
                # On a line of its own, even after one that was cut off.
                lines.write("\n" + json.dumps(kept))
        run, seconds = self._runs[key]
        self.seconds += seconds
        return run

    def forget(self) -> None:
        """Remove the file."""
        self.file.unlink(missing_ok=True)


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _key(of: list[Any]) -> str:
    return json.dumps(of, sort_keys=True)
