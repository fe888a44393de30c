"""How a study goes: bars on a terminal, a line per method elsewhere."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from benchmarks.studies.runs import Method, Outcome


def _error(outcome: Outcome) -> str:
    return f"error {100 * statistics.mean(outcome.errors):.2f} %"


class Display:
    """Is told of every method and run in turn."""

    def __init__(
        self,
        console: Console,
        progress: Progress,
        methods: int,
        reached: Callable[[Outcome], str] = _error,
    ) -> None:
        self._console = console
        self._progress = progress
        self._study = progress.add_task("study", total=methods, state="")
        self._run = progress.add_task("run", total=None, state="")
        self._count = methods
        self._reached = reached
        self._begun = 0
        self._started = 0.0

    def begin_method(self, method: Method) -> None:
        """Tell that a method is about to be tuned and run."""
        self._started = time.monotonic()
        self._begun += 1
        self._progress.update(self._study, state=describe(method.name, method.labels))

    def begin_run(self, description: str, rounds: int) -> None:
        """Tell that a run of so many rounds begins."""
        self._progress.reset(self._run, total=rounds, state=description)

    def advance(self) -> None:
        """Tell that a round is over."""
        self._progress.advance(self._run)

    def end_method(self, outcome: Outcome) -> None:
        """Tell what became of the method."""
        self._progress.advance(self._study)
        seconds = time.monotonic() - self._started
        reached = "diverged" if outcome.diverged else self._reached(outcome)
        self._console.print(
            Text(
                f"[{self._begun}/{self._count}] {describe(outcome.name, outcome.labels)}: "
                f"{reached}, lr {outcome.settings['lr']:.3g}, {seconds:.0f} s"
            ),
            soft_wrap=True,
        )


def describe(name: str, labels: dict[str, object]) -> str:
    """Return a method's name with what sets it apart."""
    shown = ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in labels.items()
        if value is not None
    )
    return f"{name} ({shown})" if shown else name


@contextmanager
def open_display(
    console: Console, methods: int, reached: Callable[[Outcome], str] = _error
) -> Iterator[Display]:
    """Open a display for so many methods; ``reached`` says what a method has come to."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}", markup=False),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield Display(console, progress, methods, reached)
