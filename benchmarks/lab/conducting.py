"""What ``python -m benchmarks.compare`` and ``python -m benchmarks.bench`` do alike: check, run in turn, end."""

import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import typer
from rich.console import Console
from rich.text import Text

from benchmarks.lab.corpus import Corpus, check_length, load_corpus
from benchmarks.lab.events import Event
from benchmarks.lab.methods import Method
from benchmarks.lab.output import INTERRUPTED
from benchmarks.lab.progress import open_display
from benchmarks.lab.runs import Run, Settings
from benchmarks.lab.tables import format_bytes
from comm_hooks.launchers.output import FAILED

Result = TypeVar("Result")
Watch = Callable[[Event], None]


@dataclass(frozen=True)
class Comparison:
    """What is to be run, all of it checked.

    Args:
        command: its name.
        methods: in this order.
        settings: what they share.
        corpus: the text.
        timeout: seconds without progress after which a method is given up.
    """

    command: str
    methods: list[Method]
    settings: Settings
    corpus: Corpus
    timeout: float

    @classmethod
    def check(
        cls,
        command: str,
        methods: list[Method],
        settings: Settings,
        data: Path | None,
        timeout: float,
    ) -> "Comparison":
        """Return the comparison; raise ``ValueError`` for what cannot be run."""
        for method in methods:
            method.check(settings)
        if timeout <= 0:
            raise ValueError(f"--timeout must be positive, got {timeout:g}")
        corpus = load_corpus(data)
        check_length(corpus, settings.nproc, settings.window)
        return cls(command, methods, settings, corpus, timeout)

    @property
    def hooks(self) -> str:
        """The methods, as ``--hooks`` takes them."""
        return ",".join(method.spec for method in self.methods)

    def command_line(self, data: Path | None, quick: bool, **options: object) -> list[str]:
        """Return the command that repeats it, with these options in their order."""
        command = ["comm-hooks", self.command]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        return [*command, *["--quick"] * quick, *(["--data", str(data)] if data else [])]

    def run_each(
        self,
        run: Callable[[Method, Path, Path, Watch], Result],
        record: Callable[[Result], Run],
        out: Path,
        console: Console,
    ) -> Iterator[Result]:
        """Run the methods in turn and yield the result of each.

        Args:
            run: runs a method, given the file with the text, that of the log, and who is told of
                events.
            record: finds the record in a result.
            out: the folder of the results, with one for logs.
            console: where the progress is shown.
        """
        with (
            tempfile.TemporaryDirectory(prefix="comm-hooks-") as scratch,
            open_display(console, len(self.methods)) as display,
        ):

            def watch(event: Event) -> None:
                if event["event"] == "step":
                    sent = format_bytes(event["bytes_sent"])
                    display.update(f"loss {event['loss']:.3f}  sent {sent}", event["step"])
                elif event["event"] == "rate":
                    display.update(f"timing steps, rate {event['rate']}")

            # A copy, so that every method reads what was checked, whatever happens to the original.
            corpus = Path(scratch, "corpus")
            corpus.write_bytes(self.corpus.content)
            for index, method in enumerate(self.methods):
                display.begin_method(method.spec)
                display.begin_run("starting", self.settings.steps)
                slug = re.sub(r"[^\w.=+-]", "_", method.spec)
                result = run(method, corpus, out / "logs" / f"{index + 1}-{slug}.log", watch)
                display.end_method(_outcome(record(result)))
                yield result

    def end(self, runs: list[Run], *, interrupted: bool) -> None:
        """End the command with what these runs mean."""
        if interrupted:
            typer.echo(
                f"comm-hooks {self.command}: interrupted, {len(runs)} of {len(self.methods)} "
                "methods finished",
                err=True,
            )
            raise typer.Exit(INTERRUPTED)
        if any(run.failure for run in runs):
            raise typer.Exit(FAILED)


def print_facts(facts: dict[str, str], console: Console) -> None:
    """Print what is about to be trained, on what, and where."""
    for name in ("Model", "Text", "Machine"):
        console.print(Text(f"{name}: {facts[name]}"), soft_wrap=True)


def _outcome(run: Run) -> str:
    if run.figures is None:
        return f"failed: {run.failure}"
    sent = format_bytes(run.figures.bytes_sent)
    return f"loss {run.figures.loss:.3f} on all data, sent {sent}"
