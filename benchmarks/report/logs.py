"""The log of a training of one's own: JSON lines, as ``StatsLogger`` writes them to a file.

One line per record, each an object with these fields:

======================  =====================================================================
``step``                integer from 0: the training loop's own count
``loss``                number; a record without one is left out, and the page says how many
``bytes_sent``          integer: what this rank has sent since the run started
``bytes_received``      integer: what it has received since then
``seconds``             number: since the run started
``bytes_uncompressed``  optional integer: what an uncompressed all-reduce would have sent
``method``              optional string: what the run is called; else the file's name without its
                        ending, and without ``.seedN`` before that
``seed``                optional integer: runs of one method with several seeds are averaged; else
                        N of a file named ``NAME.seedN.jsonl``
======================  =====================================================================

Other fields are allowed and not read. One file may hold several runs where ``method`` or ``seed``
tells them apart.

A run that was resumed may go on in the same file. Steps that it repeats replace the earlier ones;
counters that start again from 0 go on from where they were, so that what was lost still counts.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.lab.runs import Figures, LogSettings, Point, Run

LAST_SHARE = 0.05
"""The loss of a log is the mean over the records of this last share of its steps."""

_LARGEST_LOSS = 3.4e38  # of float32: what is beyond it has diverged
_LARGEST_COUNT = 2**63
_REQUIRED = ("step", "bytes_sent", "bytes_received", "seconds")
_COUNTERS = ("bytes_sent", "bytes_received", "bytes_uncompressed", "seconds")


class Log:
    """Collects the records of one run, and sums them up.

    Example::

        >>> from benchmarks.report.logs import Log
        >>> log = Log("topk", seed=0)
        >>> counted = {"bytes_sent": 2048, "bytes_received": 2048, "seconds": 1.5}
        >>> log.add({"step": 10, "loss": 2.5, **counted})
        >>> log.run().figures.sent_per_step
        204.8
    """

    def __init__(self, method: str, seed: int | None) -> None:
        self.method = method
        self.seed = seed
        self.remarks: list[str] = []
        self._curve: list[Point] = []
        self._uncompressed = 0.0
        self._began: object = None
        self._last = dict.fromkeys(_COUNTERS, 0.0)
        self._offsets = dict.fromkeys(_COUNTERS, 0.0)
        self._without_loss = 0
        self._diverged: tuple[int, float] | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record.

        Raises:
            ValueError: for a field that is missing or of the wrong type.
        """
        step = _checked(record)
        if (began := record.get("began")) != self._began:
            # Whatever the new counters are by now, the old ones have ended.
            self._offsets = {name: self._offsets[name] + self._last[name] for name in _COUNTERS}
            self._last = dict.fromkeys(_COUNTERS, 0.0)
            self._began = began
        totals = {name: self._total(name, record) for name in _COUNTERS if name in record}
        self._uncompressed = totals.pop("bytes_uncompressed", 0.0)
        seconds = totals.pop("seconds")
        counted = {name: int(total) for name, total in totals.items()}
        loss = record.get("loss")
        if loss is None:
            self._without_loss += 1
            return
        if self._curve and step < self._curve[-1].step:
            self.remarks.append(f"went back to step {step}: resumed there")
        self._curve = [point for point in self._curve if point.step < step]
        if abs(loss) <= _LARGEST_LOSS:
            self._curve.append(Point(step=step, loss=loss, seconds=seconds, **counted))
            self._diverged = None
        else:
            self._diverged = self._diverged or (step, loss)

    def run(self) -> Run:
        """Return the run.

        Raises:
            ValueError: if no record has a loss.
        """
        run = Run(self.method, "", LogSettings(self.seed), self._curve)
        if self._diverged:
            step, loss = self._diverged
            run.failure = f"diverged: the loss is {loss} since step {step}"
        elif self._curve:
            run.figures = _figures(self._curve)
        else:
            raise ValueError(
                f"no record of {self.method!r} has a loss: give it, "
                "for instance StatsLogger.log(step, loss=...)"
            )
        run.note = "; ".join([*self.remarks, *self._facts()])
        return run

    def _facts(self) -> list[str]:
        """Return what the figures do not tell, one remark each."""
        facts = []
        sent = self._last["bytes_sent"] + self._offsets["bytes_sent"]
        if self._uncompressed and sent:
            facts.append(f"sent 1/{self._uncompressed / sent:.3g} of uncompressed")
        if self._without_loss:
            facts.append(f"{self._without_loss} records without a loss are left out")
        return facts

    def _total(self, name: str, record: Mapping[str, Any]) -> float:
        """Return a counter as it would be if it had never started again."""
        value: float = record[name]
        if value < self._last[name]:
            self._offsets[name] += self._last[name]
        self._last[name] = value
        return value + self._offsets[name]


def _checked(record: Mapping[str, Any]) -> int:
    """Return the step of a record that has all it needs."""
    if missing := [name for name in _REQUIRED if name not in record]:
        raise ValueError(
            f"no {missing[0]!r}: a record of a training needs step, loss, bytes_sent, "
            "bytes_received and seconds"
        )
    for name in (*_REQUIRED, "bytes_uncompressed"):
        value = record.get(name, 0)
        number = int if name == "step" else (int, float)
        if (
            isinstance(value, bool)
            or not isinstance(value, number)
            or not 0 <= value < _LARGEST_COUNT
        ):
            kind = "an integer" if name == "step" else "a number"
            raise ValueError(f"{name} must be {kind} from 0 to 2^63, got {value!r}")
    loss = record.get("loss")
    if isinstance(loss, bool) or not isinstance(loss, (int, float, type(None))):
        raise ValueError(f"loss must be a number, got {loss!r}")
    step: int = record["step"]
    return step


def _figures(curve: list[Point]) -> Figures:
    first, last = curve[0], curve[-1]
    steps = last.step - first.step
    if not steps:  # the only record: since the run started
        first, steps = Point(0, 0.0, 0, 0, 0.0), max(1, last.step)
    end = last.step - LAST_SHARE * steps
    return Figures(
        loss=statistics.fmean(point.loss for point in curve if point.step >= end),
        drift=None,
        step_ms=1e3 * (last.seconds - first.seconds) / steps,
        sent_per_step=(last.bytes_sent - first.bytes_sent) / steps,
        received_per_step=(last.bytes_received - first.bytes_received) / steps,
        bytes_sent=last.bytes_sent,
        bytes_received=last.bytes_received,
    )
