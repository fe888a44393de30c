"""Shared parts of the commands ``compare`` and ``bench``: options, checks, runs in turn."""

import platform
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from rich.console import Console

import comm_hooks
from benchmarks.lab.clock import processor
from benchmarks.lab.corpus import Corpus, check_length, load_corpus
from benchmarks.lab.events import Event
from benchmarks.lab.methods import Pair, parse_methods
from benchmarks.lab.model import GPT, GPTConfig, count
from benchmarks.lab.output import INTERRUPTED, prepare_folder
from benchmarks.lab.processes import Watch, available_cores, threads_per_rank
from benchmarks.lab.progress import Display
from benchmarks.lab.runs import Run, Settings
from benchmarks.lab.tables import format_bytes
from comm_hooks.launchers.output import FAILED, say

QUICK_STEPS = 60
"""Fewer steps compare nothing: most of them would be warm-up."""

Steps = Annotated[
    int | None, typer.Option(help="Training steps per method. [default: 150, quick: 60]")
]
Hooks = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Methods, separated by commas: COMMUNICATION[:option=value...][+OPTIMIZER], for "
        "example topk:density=1/64+local_variance_adam.",
    ),
]
Seed = Annotated[int, typer.Option(help="Of weights, batches and compressors.")]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Text to train on: a file, or a directory of UTF-8 files. "
        "[default: the source of Python's standard library]",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="A smaller model and fewer steps.")]
Timeout = Annotated[
    float, typer.Option(help="Seconds without progress after which a method is given up.")
]

Result = TypeVar("Result")


def make_settings(
    nproc: int, steps: int | None, seed: int, eval_every: int | None, quick: bool
) -> Settings:
    """Return the settings of these options.

    Raises:
        ValueError: for a number out of range; the message names the option.
    """
    if steps is None:
        steps = QUICK_STEPS if quick else Settings.steps
    for option, value in {"--nproc": nproc, "--steps": steps, "--eval-every": eval_every}.items():
        if value is not None and value < 1:
            raise ValueError(f"{option} must be at least 1, got {value}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed must lie between 0 and 2**32 - 1, got {seed}")
    return Settings(
        nproc=nproc,
        steps=steps,
        seed=seed,
        eval_every=eval_every or max(1, steps // 5),
        # A short run needs steps after the warm-up, too: some methods only then compress.
        warmup=min(Settings.warmup, max(1, steps // 2)),
        model=GPTConfig(layers=2) if quick else GPTConfig(),
    )


def count_parameters(model: GPTConfig) -> int:
    """Return the number of parameters of a GPT, without making it."""
    return count(lambda: GPT(model))


@dataclass(frozen=True)
class Comparison:
    """Methods that run in turn, all of them checked.

    Args:
        command: its name.
        pairs: the methods, in this order.
        settings: shared by the methods.
        corpus: the text.
        timeout: seconds without progress after which a method is given up.
    """

    command: str
    pairs: list[Pair]
    settings: Settings
    corpus: Corpus
    timeout: float

    @classmethod
    def check(
        cls,
        command: str,
        hooks: str,
        settings: Settings,
        data: Path | None,
        timeout: float,
        out: Path,
    ) -> "Comparison":
        """Return the comparison; raise ``ValueError`` for options that cannot be run."""
        pairs = parse_methods(hooks)
        for pair in pairs:
            pair.check(settings)
        if timeout <= 0:
            raise ValueError(f"--timeout must be positive, got {timeout:g}")
        corpus = load_corpus(data)
        check_length(corpus, settings.nproc, settings.window)
        prepare_folder(out, "logs")
        return cls(command, pairs, settings, corpus, timeout)

    def facts(self, network: str) -> dict[str, str]:
        """Return what a reader needs to judge the figures, or to repeat them, by name."""
        settings, model = self.settings, self.settings.model
        return {
            "Command": shlex.join(["python", "-m", f"benchmarks.{self.command}", *sys.argv[1:]]),
            "Text": self.corpus.description,
            "Model": f"GPT over bytes, {count_parameters(model) / 1e6:.2f} M parameters: "
            f"{model.layers} layers, width {model.width}, {model.heads} heads, "
            f"context {model.context}",
            "Training": f"{settings.steps} steps, batch {settings.batch} per rank, learning rate "
            f"{settings.learning_rate:g} after {settings.warmup} steps of warm-up, then "
            f"{settings.schedule}, betas {settings.betas}, weight decay {settings.weight_decay:g}",
            "Machine": f"{settings.nproc} ranks, {threads_per_rank(settings.nproc)} threads each, "
            f"on {available_cores()} cores ({processor()}, {platform.system()}); gloo, {network}",
            "Versions": f"comm-hooks {comm_hooks.__version__}, torch {torch.__version__}, Python "
            f"{platform.python_version()}",
        }

    def run_each(
        self,
        run: Callable[[Pair, Path, Path, Watch], Result],
        record: Callable[[Result], Run],
        out: Path,
        console: Console,
    ) -> Iterator[Result]:
        """Run the methods in turn and yield the result of each.

        Args:
            run: runs a method, given the file with the text, the file for the output, and a
                function that is told of events.
            record: finds the record in a result.
            out: the folder of the results, with one for logs.
            console: shows the progress.
        """
        with (
            tempfile.TemporaryDirectory(prefix="comm-hooks-") as scratch,
            Display(console, len(self.pairs)) as display,
        ):

            def watch(event: Event) -> None:
                if event["event"] == "step":
                    sent = format_bytes(event["bytes_sent"])
                    display.update_run(f"loss {event['loss']:.3f}  sent {sent}", event["step"])
                elif event["event"] == "rate":
                    display.update_run(f"timing steps, rate {event['rate']}")

            # A copy, so that every method reads what was checked, whatever happens to the original.
            corpus = Path(scratch, "corpus")
            corpus.write_bytes(self.corpus.content)
            for index, pair in enumerate(self.pairs):
                display.begin_method(pair.spec)
                display.begin_run("starting", self.settings.steps)
                slug = re.sub(r"[^\w.=+-]", "_", pair.spec)
                result = run(pair, corpus, out / "logs" / f"{index + 1}-{slug}.log", watch)
                display.end_method(_outcome(record(result)))
                yield result

    def end(self, runs: Sequence[Run], *, interrupted: bool) -> None:
        """End the command with the exit code that follows from the runs."""
        if interrupted:
            typer.echo(
                f"python -m benchmarks.{self.command}: interrupted, {len(runs)} of "
                f"{len(self.pairs)} methods finished",
                err=True,
            )
            raise typer.Exit(INTERRUPTED)
        if any(run.failure for run in runs):
            raise typer.Exit(FAILED)


def print_facts(facts: dict[str, str], console: Console) -> None:
    """Print model, text and machine."""
    for name in ("Model", "Text", "Machine"):
        say(f"{name}: {facts[name]}", console)


def _outcome(run: Run) -> str:
    if run.figures is None:
        return f"failed: {run.failure}"
    sent = format_bytes(run.figures.bytes_sent)
    return f"loss {run.figures.loss:.3f} on all data, sent {sent}"
