"""Write ``stats()`` of an exchange to an experiment tracker, a file or a progress line."""

import json
import time
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

Write = Callable[[Mapping[str, float], int], object]


class HasStats(Protocol):
    """An object with ``stats()``: a ``CompressionState``, ``Exchange`` or ``LocalRounds``."""

    def stats(self) -> dict[str, float]: ...


class StatsLogger:
    """A logger that writes ``stats()`` of an exchange every few steps.

    A record has the values of ``stats()``; ``sent_per_step``, the bytes that this rank sent per
    step since the last record; and ``seconds`` since the logger was made.  Each record copies one
    number from the device, the norm of the residuals.

    Args:
        state: a :class:`~comm_hooks.CompressionState`, an :class:`~comm_hooks.Exchange` or
            :class:`~comm_hooks.optim.LocalRounds`; load its checkpoint before.
        writer: a TensorBoard ``SummaryWriter``; a W&B run; a Lightning logger, or the module
            ``mlflow``; a function of ``(values, step)``; the path of a file to which a line of JSON
            per record is added; or None, for :meth:`line` alone.  Pass a writer on rank 0 only.
        every: the number of steps between records.
        prefix: the prefix of the names of the values; a file has the names without it.

    Raises:
        ValueError: for a writer of another kind, and for ``every`` below 1.

    Example::

        >>> from comm_hooks import register
        >>> from comm_hooks.tracking import StatsLogger
        >>> state = register(ddp_model, "topk")
        >>> watch = StatsLogger(state, lambda values, step: print(step, sorted(values)[:2]))
        >>> watch.log(step=50, loss=2.5)
        50 ['comm_hooks/bytes_received', 'comm_hooks/bytes_sent']
        >>> watch.line()
        'step 50: 0 B sent per step, 1/1 of uncompressed, residual 0'
    """

    def __init__(
        self, state: HasStats, writer: Any = None, *, every: int = 50, prefix: str = "comm_hooks/"
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"StatsLogger: every must be an integer from 1, got {every!r}")
        self.state = state
        self.every = every
        self.prefix = "" if isinstance(writer, (str, PathLike)) else prefix
        self._write = _writing(writer)
        self._start = time.perf_counter()
        self._last = state.stats()
        self._line = ""

    def log(self, step: int, **metrics: float) -> None:
        """Write a record if ``step`` is a multiple of ``every``.

        Args:
            step: the number of the training step.
            metrics: more values for the record, such as ``loss``.
        """
        if step % self.every == 0:
            self.write(step, **metrics)

    def write(self, step: int, **metrics: float) -> None:
        """Write a record at any step; see :meth:`log`."""
        values = self.collect()
        self._line = (
            f"step {step:,}: {_bytes(values['sent_per_step'])} sent per step, "
            f"1/{values['compression_ratio']:.3g} of uncompressed, "
            f"residual {values['residual_norm']:.3g}"
        )
        self._write({**metrics, **{self.prefix + k: v for k, v in values.items()}}, step)

    def collect(self) -> dict[str, float]:
        """Return the values of a record by name, and begin the interval of the next record."""
        stats = self.state.stats()
        steps = stats["steps"] - self._last["steps"]
        sent = stats["bytes_sent"] - self._last["bytes_sent"]
        self._last = stats
        stats = {**stats, "sent_per_step": sent / steps if steps > 0 else 0.0}
        return {**stats, "seconds": time.perf_counter() - self._start}

    def line(self) -> str:
        """Return the last record as one line, for a progress bar; empty before the first record."""
        return self._line


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.4g} GB"


def _writing(writer: Any) -> Write:
    """Return a function of (values, step) that writes to a writer of any supported kind."""
    if writer is None:
        return lambda values, step: None
    if isinstance(writer, (str, PathLike)):
        # The time tells records of a resumed run from those before: its counters begin anew.
        began = round(time.time(), 3)
        return lambda values, step: _append(Path(writer), {"step": step, **values, "began": began})
    if hasattr(writer, "add_scalar"):
        return lambda values, step: [writer.add_scalar(k, v, step) for k, v in values.items()]
    if hasattr(writer, "log_metrics"):
        return lambda values, step: writer.log_metrics(dict(values), step=step)
    if hasattr(writer, "log"):
        return lambda values, step: writer.log(dict(values), step=step)
    if callable(writer):
        return writer
    raise ValueError(
        "StatsLogger: writer must be a SummaryWriter, a W&B run, a Lightning logger, mlflow, a "
        f"function of (values, step), the path of a file or None, got {writer!r}"
    )


def _append(path: Path, record: Mapping[str, float]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
