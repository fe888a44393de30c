"""The shared parts of the commands of all studies: options, checks, runs, records."""

import inspect
import json
import math
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.lab.clock import processor
from benchmarks.lab.outcomes import Advance, Method, Outcome
from benchmarks.lab.output import INTERRUPTED, Interruption, prepare_folder
from benchmarks.lab.plots import draw_sections
from benchmarks.lab.progress import Display
from benchmarks.lab.runs import Point, RunStore
from benchmarks.lab.search import FACTOR, Tuning
from benchmarks.lab.tables import Columns, tabulate
from benchmarks.lab.tasks import TASKS, Task, build_task
from comm_hooks.config import unknown
from comm_hooks.launchers.output import make_console, refusing, say


@dataclass(frozen=True)
class Option:
    """An option of a study: what it is, and what it may be.

    Args:
        help: what ``--help`` says.
        full: its value unless it is given.
        quick: the same with ``--quick``; None for ``full``.
        least: the least that a number may be.
        separator: between the values of a list, of int, float (1/64, too) or str.
        known: the names that may be given.
        check: raises ``ValueError`` for a value, given with the option's name.
        metavar: what help calls the value.
        kind: what the command line makes of it, where that is not its type.
        convert: what its value is made with.
    """

    help: str
    full: Any
    quick: Any = None
    least: float | None = None
    separator: str = ","
    known: Sequence[str] | None = None
    check: Callable[[str, Any], None] = lambda name, value: None
    metavar: str | None = None
    kind: Any = None
    convert: Callable[[Any], Any] = lambda value: value

    def parameter(self, name: str, kind: Any) -> inspect.Parameter:
        """Return it as Typer has it, for a function's argument of that type."""
        is_list = get_origin(kind) is list
        kind = self.kind or (str if is_list else kind)
        text, default = self.help, self.full
        if self.quick is not None:
            text += f" [default: {self.full}, quick: {self.quick}]"
            kind, default = kind | None, None
        metavar = "LIST" if is_list else self.metavar
        option = typer.Option(f"--{name.replace('_', '-')}", metavar=metavar, help=text.strip())
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, option],
        )

    def read(self, name: str, kind: Any, given: Any, quick: bool) -> Any:
        """Return the value.

        Raises:
            ValueError: for what it cannot be; the message names the option.
        """
        option = f"--{name.replace('_', '-')}"
        if given is None:
            given = self.quick if quick and self.quick is not None else self.full
        is_list = get_origin(kind) is list
        if is_list:
            (each,) = get_args(kind)
            parts = [part.strip() for part in given.split(self.separator)]
            given = (
                list(filter(None, parts))
                if each is str
                else [_number(option, part, each) for part in parts]
            )
        for value in given if is_list else [given]:
            if self.known is not None and value not in self.known:
                raise ValueError(f"{option}: {unknown('name', value, self.known)}")
            if self.least is not None and value is not None and not self.least <= value < math.inf:
                raise ValueError(f"{option} must be at least {self.least:g}, got {value}")
            self.check(option + ":" * is_list, value)
        return self.convert(given)


def fraction(option: str, value: float) -> None:
    """Raise ``ValueError`` for a number that does not lie in (0, 1]."""
    if not 0 < value <= 1:
        raise ValueError(f"{option} must lie in (0, 1], got {value:g}")


def power_of_two(option: str, value: int) -> None:
    """Raise ``ValueError`` for a number that is no power of 2, or is 1."""
    if value < 2 or value & (value - 1):
        raise ValueError(f"{option} must be a power of 2, got {value}")


def _part(option: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{option} must lie in (0, 1), got {value:g}")


def positive(option: str, value: float | None) -> None:
    """Raise ``ValueError`` for a number that is given and not positive."""
    if value is not None and not value > 0:
        raise ValueError(f"{option} must be positive, got {value:g}")


def _number(option: str, text: str, kind: Callable[[str], Any]) -> Any:
    numerator, slash, denominator = text.partition("/")
    try:
        return kind(numerator) / kind(denominator) if slash else kind(numerator)
    except (ValueError, ZeroDivisionError):
        what = "an integer" if kind is int else "a number"
        raise ValueError(f"{option}: {text!r} is not {what}; write them as 1,2,3") from None


SEEDS = Option("Runs per method: seeds 0, 1, ...", 5, 1, least=1)
TRIES = Option(
    "Learning rates tried per method, on the first seed, one of them with each further setting; "
    "more while the best is the largest or smallest. The best mean over all seeds counts.",
    *(6, 1),
    least=1,
)
VALIDATION = Option(
    "Share of each client's training samples that learning rates are chosen by, and no method is "
    "trained on.",
    0.1,
    check=_part,
)
POINTS = Option("Points of each curve.", 10, least=1)
CLIENTS = Option("Clients that share the training data.", 5, least=1)
BATCH = Option("Samples per step and client.", 16, least=1)

Device = Annotated[str, Option("Where to train: cpu, or cuda.", "cpu")]
TASK = Option(f"What to learn: {', '.join(TASKS)}.", "digits")

TaskName = Annotated[str, TASK]
Validation = Annotated[float, VALIDATION]
DataDir = Annotated[
    Path | None, Option("Where the task's data lies, if it does not come with Python.", None)
]
Quick = Annotated[bool, Option("A small version: a minute or so.", False)]
_ALWAYS: dict[str, Any] = {
    "threads": Annotated[
        int, Option("Threads of torch. Small models are slower on several.", 1, least=1)
    ],
    "out": Annotated[Path, Option("Folder for the results.", None)],
    "quick": Quick,
}
_CHOOSING = ("methods", "seeds", "tries")

_ENDING = (
    "Writes {}.json to --out, a comparison also curves.png; an interrupted comparison goes on "
    "there. Exit codes: 0, 2 for bad input, 130 if interrupted (finished runs are reported)."
)
_UNRECORDED = ("data_dir", "out", "quick", "threads", "points", "task_option")


@dataclass(frozen=True)
class Place:
    """Where a study is run: its name, its own options, and its folder."""

    name: str
    options: dict[str, Any]
    out: Path

    @property
    def settings(self) -> dict[str, Any]:
        """What its record says of its options."""
        return {key: value for key, value in self.options.items() if key not in _UNRECORDED}


Run = Callable[[Place], None]


def study(function: Callable[..., Run]) -> typer.Typer:
    """Return the application of a study's command.

    Args:
        function: gets the values of its arguments, each annotated with an :class:`Option`, checks
            what they make, and returns what runs the study.  Its docstring begins the help.
    """
    name = function.__name__
    default = Path("comm-hooks-report") / name
    hints = get_type_hints(function, include_extras=True)
    hints.pop("return")
    arguments = tuple(hints)
    hints |= _ALWAYS
    options: dict[str, Option] = {key: hint.__metadata__[0] for key, hint in hints.items()}
    options["out"] = replace(options["out"], full=default)

    def command(**given: Any) -> None:
        with refusing(name):
            values = {
                k: o.read(k, hints[k].__origin__, given[k], given["quick"])
                for k, o in options.items()
            }
            own = {key: values[key] for key in arguments}
            run = function(**own)
            prepare(own.get("device", "cpu"), values["threads"], values["out"])
        written = {k: str(v) if isinstance(v, Path) else v for k, v in own.items()}
        run(Place(name, written, values["out"]))

    parameters = [options[key].parameter(key, hint.__origin__) for key, hint in hints.items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__doc__ = f"{inspect.getdoc(function)}\n\n{_ENDING.format(name)}"
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name)(command)
    return app


def parse_task_options(pairs: Sequence[str] | None) -> dict[str, Any]:
    """Return what ``NAME=VALUE`` pairs say, with values as integers, numbers or text.

    Raises:
        ValueError: for what is no pair.
    """
    options: dict[str, Any] = {}
    for pair in pairs or ():
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--task-option: {pair!r} is not of the form NAME=VALUE")
        options[name] = _value(text)
    return options


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


TaskOptions = Annotated[
    dict[str, Any],
    Option(
        "An argument of the task, such as width=32 (see benchmarks/lab/tasks). May be given more "
        "than once.",
        None,
        metavar="NAME=VALUE",
        kind=list[str] | None,
        convert=parse_task_options,
    ),
]


def build_tasks(
    name: str,
    data_dir: Path | None,
    *,
    clients: int,
    seeds: int,
    validation: float,
    **options: Any,
) -> list[Task]:
    """Return the task for each seed; see :func:`~benchmarks.lab.tasks.build_task`."""
    return [
        build_task(name, clients=clients, seed=seed, data_dir=data_dir, **options).with_validation(
            validation, seed
        )
        for seed in range(seeds)
    ]


def prepare(device: str, threads: int, out: Path) -> None:
    """Set up torch and the folder for the results, before anything takes time.

    Raises:
        ValueError: for a device that is not there, and a folder that cannot be written to.
    """
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"--device {device}: cannot be used: {reason}") from None
    torch.set_num_threads(threads)
    prepare_folder(out)


@dataclass(frozen=True)
class Comparison:
    """A study that tunes and runs methods.

    Args:
        methods: the methods.
        rounds: of a run.
        title: of the table.
        columns: of the table, given all outcomes.
        section: the table has a line, and the plot another panel, where its value changes.
        settings: for the record, beside the options.
        curves: the y axis of the plot against rounds, and its name.
        factor: between neighbouring learning rates.

    Raises:
        ValueError: without methods.
    """

    methods: Sequence[Method]
    rounds: int
    title: str
    columns: Callable[[list[Outcome]], Columns]
    section: Callable[[Outcome], object]
    settings: Mapping[str, Any] = field(default_factory=dict)
    curves: tuple[str, Callable[[Point], float]] = (
        "held-out error (%)",
        lambda point: 100 * point.error,
    )
    factor: float = FACTOR

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("there is nothing to compare: a list of names is empty")

    def __call__(self, place: Place) -> None:
        """Run everything; write ``<name>.json`` and the plot, and print the table.

        ``seeds`` are run, and ``tries`` made (one by default), as the settings say. Until all is
        finished, runs are kept in ``runs.jsonl`` and not made again, whichever methods they were
        made for.

        Raises:
            typer.Exit: with code 130, after all that, if the study was interrupted.
        """
        console = make_console()
        settings = {**place.settings, **self.settings}
        finished: list[Outcome] = []
        whole = {**place.options, **self.settings}
        study = {key: value for key, value in whole.items() if key not in _CHOOSING}
        runs = RunStore(place.out / "runs.jsonl", study)
        if len(runs):
            console.print(
                f"Going on after {len(runs)} runs, kept in {runs.file}: remove it to begin anew"
            )
        tries, seeds = settings.get("tries", 1), range(settings["seeds"])
        tuning = Tuning(tries, seeds, self.factor, beside=True)
        with Interruption() as interruption, Display(console, len(self.methods)) as display:
            for method in self.methods:
                finished.append(self._run(method, tuning, runs, display))
        if finished:
            columns = self.columns(finished)
            console.print(tabulate(self.title, columns, finished, self.section))
            record = {
                "seconds": round(sum(run.seconds or 0.0 for run in runs)),
                "complete": not interruption.happened,
                "settings": settings,
                "tuned_on": len(seeds),
                "methods": [outcome.to_dict() for outcome in finished],
            }
            curves = place.out / "curves.png"
            draw_sections(finished, self.section, *self.curves, curves)
            write_record(place, record, console, [curves])
        if not interruption.happened:
            runs.file.unlink(missing_ok=True)
        end(place, interruption, f", {len(finished)} methods finished")

    def _run(self, method: Method, tuning: Tuning, runs: RunStore, display: Display) -> Outcome:
        display.begin_method(method.title)
        while specs := tuning.next(method, runs):
            for spec in specs:
                text = ", ".join(f"{name} {value:.3g}" for name, value in spec.settings.items())
                display.begin_run(f"{text}, seed {spec.seed}", self.rounds)
                runs.add(method.run(spec, display.advance_run))
        outcome = tuning.outcome(method, runs)
        assert outcome is not None
        label, value = self.curves
        ends = [value(run.curve[-1]) for run in outcome.runs if not run.failure]
        end = "diverged" if outcome.diverged else f"{label} {statistics.mean(ends):.4g}"
        display.end_method(f"{end}, lr {outcome.settings['lr']:.3g}")
        return outcome


@dataclass(frozen=True)
class Measurement:
    """A study with a row for each measurement.

    Args:
        work: calls of the function that is given to ``measure``.
        measure: yields rows, dataclasses, and calls the function that it is given on the way.
        make_tables: makes tables of the rows.
        rows: their name in the record.
        settings: for the record, beside the options.
    """

    work: int
    measure: Callable[[Advance], Iterator[Any]]
    make_tables: Callable[[list[Any]], list[Table]]
    rows: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, place: Place) -> None:
        """Measure; write ``<name>.json``, and print the tables.

        Raises:
            typer.Exit: with code 130, after all that, if the study was interrupted.
        """
        console = make_console()
        bars = Progress(console=console, disable=not console.is_terminal)
        rows: list[Any] = []
        with Interruption() as interruption, bars as progress:
            bar = progress.add_task(place.name, total=self.work)
            for row in self.measure(lambda: progress.advance(bar)):
                rows.append(row)
        if rows:
            for table in self.make_tables(rows):
                console.print(table)
            record = {
                "complete": not interruption.happened,
                "settings": {**place.settings, **self.settings},
                self.rows: [asdict(row) for row in rows],
            }
            write_record(place, record, console)
        end(place, interruption)


def end(place: Place, interruption: Interruption, account: str = "") -> None:
    """End the command with code 130 if it was interrupted."""
    if interruption.happened:
        typer.echo(f"{place.name}: interrupted{account}", err=True)
        raise typer.Exit(INTERRUPTED)


def write_record(
    place: Place, record: Mapping[str, Any], console: Console, plots: Iterable[Path] = ()
) -> None:
    """Write ``<name>.json``, with what a reader must know to repeat it, and tell what there is."""
    file = place.out / f"{place.name}.json"
    whole = {
        "study": place.name,
        "command": shlex.join(["python", "-m", f"benchmarks.studies.{place.name}", *sys.argv[1:]]),
        "machine": f"{processor()}, {platform.system()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        **record,
    }
    file.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n")
    for path in [file, *plots]:
        say(f"Wrote {path}", console)
