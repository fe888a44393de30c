"""How an experiment goes: live bars on a terminal, lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text


class Display:
    """Is told of each method in turn: its start, its runs with their steps, its end."""

    def __init__(self, console: Console, progress: Progress, methods: int) -> None:
        self._console = console
        self._progress = progress
        self._methods = progress.add_task("methods", total=methods, state="")
        self._run = progress.add_task("run", total=None, state="")
        self._count = methods
        self._begun = 0
        self._started = 0.0

    def begin_method(self, name: str) -> None:
        """Tell that a method is about to run."""
        self._started = time.monotonic()
        self._begun += 1
        self._progress.update(self._methods, state=name)
        self._print(f"[{self._begun}/{self._count}] {name} ...")

    def begin_run(self, state: str, steps: int) -> None:
        """Tell that a run of so many steps begins."""
        self._progress.reset(self._run, total=steps, state=state)

    def advance(self) -> None:
        """Tell that a step is over."""
        self._progress.advance(self._run)

    def update(self, state: str, step: int | None = None) -> None:
        """Tell what the run is about, and how many steps are over."""
        self._progress.update(self._run, state=state, completed=step)

    def end_method(self, outcome: str) -> None:
        """Tell what became of the method."""
        self._progress.advance(self._methods)
        self._print(f"      {outcome}, after {time.monotonic() - self._started:.0f} s")

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


@contextmanager
def open_display(console: Console, methods: int) -> Iterator[Display]:
    """Open a display for so many methods."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}", markup=False),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield Display(console, progress, methods)
