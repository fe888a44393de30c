"""Show how a comparison goes: a bar per method on a terminal, two lines per method elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from comm_hooks.launchers.compare.events import Event
from comm_hooks.launchers.compare.methods import Method
from comm_hooks.launchers.compare.runs import Run
from comm_hooks.launchers.compare.table import format_bytes


class Display(Protocol):
    """Is told of each method in turn: its start, its events, its end."""

    def start(self, index: int) -> None:
        """The method at ``index`` is about to run."""

    def watch(self, event: Event) -> None:
        """The running method told something."""

    def finish(self, run: Run) -> None:
        """The running method has ended."""


@contextmanager
def open_display(methods: list[Method], steps: int, console: Console) -> Iterator[Display]:
    """Open the display that suits the console."""
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}", markup=False),
        )
        with Progress(*columns, console=console) as progress:
            yield _Bars(methods, steps, progress)
    else:
        yield _Lines(methods, console)


class _Bars:
    """One live bar per method, with the last loss and the bytes sent, or the rate being timed."""

    def __init__(self, methods: list[Method], steps: int, progress: Progress) -> None:
        self._progress = progress
        self._tasks = [
            progress.add_task(method.spec, total=steps, start=False, state="") for method in methods
        ]
        self._task = self._tasks[0]

    def start(self, index: int) -> None:
        self._task = self._tasks[index]
        self._progress.start_task(self._task)
        self._progress.update(self._task, state="starting")

    def watch(self, event: Event) -> None:
        if event["event"] == "step":
            state = f"loss {event['loss']:.3f}  sent {format_bytes(event['bytes_sent'])}"
            self._progress.update(self._task, completed=event["step"], state=state)
        elif event["event"] == "rate":
            self._progress.update(self._task, state=f"timing steps, rate {event['rate']}")

    def finish(self, run: Run) -> None:
        self._progress.stop_task(self._task)
        self._progress.update(self._task, state=_outcome(run))


class _Lines:
    """A line when a method starts and one when it ends: for logs and pipes."""

    def __init__(self, methods: list[Method], console: Console) -> None:
        self._methods = methods
        self._console = console
        self._started = 0.0

    def start(self, index: int) -> None:
        self._started = time.monotonic()
        count = len(self._methods)
        self._print(f"[{index + 1}/{count}] {self._methods[index].spec} ...")

    def watch(self, event: Event) -> None:
        """Ignore it: a log has no use for it."""

    def finish(self, run: Run) -> None:
        seconds = time.monotonic() - self._started
        self._print(f"      {_outcome(run)}, after {seconds:.0f} s")

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


def _outcome(run: Run) -> str:
    if run.figures is None:
        return f"failed: {run.failure}"
    sent = format_bytes(run.figures.bytes_sent)
    return f"loss {run.figures.loss:.3f} on all data, sent {sent}"
