"""How an experiment goes: live bars on a terminal, lines elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from comm_hooks.launchers.output import say


class Display(Progress):
    """Is told of each method in turn: its start, its runs with their steps, its end."""

    def __init__(self, console: Console, methods: int) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._methods = self.add_task("methods", total=methods, state="")
        self._run = self.add_task("run", total=None, state="")

    def begin_method(self, name: str) -> None:
        """Tell that a method is about to run."""
        self._started = time.monotonic()
        self.update(self._methods, state=name)
        methods = self.tasks[self._methods]
        say(f"[{methods.completed + 1:.0f}/{methods.total:.0f}] {name} ...", self.console)

    def begin_run(self, state: str, steps: int) -> None:
        """Tell that a run of so many steps begins."""
        self.reset(self._run, total=steps, state=state)

    def advance_run(self) -> None:
        """Tell that a step is over."""
        self.advance(self._run)

    def update_run(self, state: str, step: int | None = None) -> None:
        """Tell what the run is about, and how many steps are over."""
        self.update(self._run, state=state, completed=step)

    def end_method(self, outcome: str) -> None:
        """Tell what became of the method."""
        self.advance(self._methods)
        say(f"      {outcome}, after {time.monotonic() - self._started:.0f} s", self.console)
