"""What the commands of all studies share: options, checks, and how they end."""

import importlib.util
import math
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

_missing = [
    n for n in ("typer", "rich", "matplotlib", "sklearn") if not importlib.util.find_spec(n)
]
if _missing:
    print(
        f"benchmarks.studies: needs {', '.join(_missing)}: pip install 'comm-hooks[studies]'",
        file=sys.stderr,
    )
    raise SystemExit(2)

import torch  # noqa: E402
import typer  # noqa: E402

from benchmarks.studies.tasks import TASKS, Task, build_task  # noqa: E402
from comm_hooks.config import unknown  # noqa: E402
from comm_hooks.launchers.machine import processor  # noqa: E402
from comm_hooks.launchers.output import prepare_folder  # noqa: E402

Number = TypeVar("Number", int, float)
Choice = TypeVar("Choice", bound=str)

_BAD_INPUT = 2

TaskName = Annotated[str, typer.Option("--task", help=f"What to learn: {', '.join(TASKS)}.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Where the task's data lies, if it does not come with Python.")
]
TaskOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--task-option",
        metavar="NAME=VALUE",
        help="An argument of the task, such as width=32 (see benchmarks/studies/tasks). May be "
        "given several times.",
    ),
]
Clients = Annotated[int, typer.Option(help="Clients that share the training data.")]
Batch = Annotated[int, typer.Option(help="Samples per step and client.")]
Seeds = Annotated[int | None, typer.Option(help="Runs per method: seeds 0, 1, ...")]
Tries = Annotated[
    int | None, typer.Option(help="Learning rates tried per method, on the first seed.")
]
Points = Annotated[int, typer.Option(help="Points of each curve.")]
Device = Annotated[str, typer.Option(help="Where to train: cpu, or cuda.")]
Threads = Annotated[int, typer.Option(help="Threads of torch. Small models are slower on several.")]
Quick = Annotated[bool, typer.Option("--quick", help="A small version: a minute or so.")]


@contextmanager
def bad_input(study: str) -> Iterator[None]:
    """End with one line and exit code 2 if there is a ``ValueError``."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"{study}: {error}", err=True)
        raise typer.Exit(_BAD_INPUT) from None


def parse_numbers(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """Return the numbers of a list separated by commas; those like 1/64, too.

    Raises:
        ValueError: for what is no number, and where there is none.
    """
    numbers = []
    for part in (part.strip() for part in text.split(",")):
        numerator, slash, denominator = part.partition("/")
        try:
            number = kind(numerator)
            if slash:
                number = kind(numerator) / kind(denominator)  # type: ignore[assignment]
        except (ValueError, ZeroDivisionError):
            what = "an integer" if kind is int else "a number"
            raise ValueError(f"{option}: {part!r} is not {what}; write them as 1,2,3") from None
        numbers.append(number)
    return numbers


def parse_names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Return the names of a list separated by commas, which may be empty.

    Raises:
        ValueError: for a name that is not known, with the nearest that is.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: {unknown('name', name, known)}")
    return names


def require_at_least(minimum: float, **options: float | None) -> None:
    """Raise ``ValueError`` for options below a minimum; their names as in Python."""
    for name, value in options.items():
        if value is not None and not minimum <= value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {minimum}, got {value}")


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


def build_tasks(
    name: str, data_dir: Path | None, *, clients: int, seeds: int, **options: Any
) -> list[Task]:
    """Return the task for each seed; see :func:`~benchmarks.studies.tasks.build_task`."""
    return [
        build_task(name, clients=clients, seed=seed, data_dir=data_dir, **options)
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
    require_at_least(1, threads=threads)
    torch.set_num_threads(threads)
    prepare_folder(out)


def describe_machine() -> dict[str, str]:
    """Return what a reader must know to repeat the figures, beside the settings."""
    return {
        "command": shlex.join(["python", "-m", *_module(), *sys.argv[1:]]),
        "machine": f"{processor()}, {platform.system()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
    }


def _module() -> list[str]:
    specification = getattr(sys.modules["__main__"], "__spec__", None)
    return [specification.name.removesuffix(".__main__")] if specification else [sys.argv[0]]
