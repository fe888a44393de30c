"""Measurements of a bench: one :class:`Result` per method, with a :class:`Timing` per rate."""

import json
import statistics
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.lab.plain import rebuild
from benchmarks.lab.runs import Run, Settings

_VERSION = 1
"""Of ``results.json``; to be raised when a field changes its name or meaning."""


@dataclass(frozen=True)
class Block:
    """Time and bytes of a step, on average over one period of a method.

    A period is the steps from one exchange to the next: one, or the number of local steps.
    """

    milliseconds: float  # of the slowest rank
    interface_bytes: float  # sent per rank, with headers and the bytes of the timing itself
    counted_bytes: float  # sent per rank by the method's own count


@dataclass(frozen=True)
class Candidate:
    """One way of running a method, with one block per period: DDP's buckets are of this size."""

    bucket_mb: int | None  # None: the default of DDP
    blocks: list[Block]

    @property
    def milliseconds(self) -> float:
        """Of a step: the median over periods of their means."""
        return statistics.median(block.milliseconds for block in self.blocks)


@dataclass(frozen=True)
class Timing:
    """A method at one rate. ``control`` took turns with ``candidates`` and exchanges nothing."""

    rate: str
    moved_bits_per_second: float  # by an all-reduce of a large tensor
    period: int
    control: Candidate
    candidates: list[Candidate]

    @property
    def best(self) -> Candidate:
        """The fastest candidate."""
        return min(self.candidates, key=lambda candidate: candidate.milliseconds)

    @property
    def ratio(self) -> float:
        """How many times as long as the control's a step takes."""
        return self.best.milliseconds / self.control.milliseconds

    @property
    def interface_bytes(self) -> float:
        """Bytes that crossed the interface per step and rank, mean over the periods.

        With headers and acknowledgements, without the bytes of the control, which ranks send in
        order to start together.
        """
        own, other = (
            statistics.fmean(block.interface_bytes for block in candidate.blocks)
            for candidate in (self.best, self.control)
        )
        return max(0.0, own - other)

    @property
    def counted_bytes(self) -> float:
        """Bytes per step and rank by the method's own count, mean over the same periods."""
        return statistics.fmean(block.counted_bytes for block in self.best.blocks)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures and the blocks behind them as plain data."""
        return {
            "ms_per_step": self.best.milliseconds,
            "ms_per_step_without_exchange": self.control.milliseconds,
            "ratio": self.ratio,
            "interface_bytes_per_step": self.interface_bytes,
            "counted_bytes_per_step": self.counted_bytes,
            "bucket_mb": self.best.bucket_mb,
            **asdict(self),
        }


@dataclass
class Result:
    """The measurements of a method; fewer than there are rates if it failed."""

    run: Run
    timings: list[Timing] = field(default_factory=list)

    def at(self, rate: str) -> Timing | None:
        """Return the timing at a rate, if it was reached."""
        return next((timing for timing in self.timings if timing.rate == rate), None)


@dataclass(frozen=True)
class Bench:
    """Everything that one command measures."""

    results: list[Result]
    rates: list[str]
    settings: Settings
    facts: dict[str, str]


def write_results(bench: Bench, path: Path) -> None:
    """Write everything as one JSON object."""
    methods = []
    for result in bench.results:
        timings = [timing.to_dict() for timing in result.timings]
        methods.append({**result.run.to_dict(), "timings": timings})
    moved = {rate: moved_at(bench.results, rate) for rate in bench.rates}
    whole = {
        "version": _VERSION,
        "facts": bench.facts,
        "settings": asdict(bench.settings),
        "rates": bench.rates,
        "links_bits_per_second": {rate: bits for rate, bits in moved.items() if bits},
        "methods": methods,
    }
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def read_results(path: Path) -> Bench:
    """Read a file of :func:`write_results`.

    Raises:
        ValueError: if it cannot be read, was written by another version, or a field is missing,
            unknown or of the wrong type.
    """
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    version = whole.get("version") if isinstance(whole, dict) else None
    if version != _VERSION:
        raise ValueError(
            f"{path} is of version {version}, and this comm-hooks reads version {_VERSION}"
        )
    kept = {field.name for field in fields(Timing)}
    results = []
    for method in whole["methods"]:
        timings = method.pop("timings")
        found = [rebuild(Timing, {k: v for k, v in t.items() if k in kept}) for t in timings]
        results.append(Result(rebuild(Run, method), found))
    return Bench(results, whole["rates"], rebuild(Settings, whole["settings"]), whole["facts"])


def moved_at(results: list[Result], rate: str) -> float | None:
    """Return the most bits per second that an all-reduce moved at a rate, if it was measured."""
    timings = (result.at(rate) for result in results)
    return max((timing.moved_bits_per_second for timing in timings if timing), default=None)
