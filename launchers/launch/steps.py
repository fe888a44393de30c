"""The steps of a launch, one line of shell each: the printed line is the one that runs."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType


@dataclass(frozen=True)
class Command:
    """A program with its arguments, and environment variables to add."""

    arguments: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*assignments, shlex.join(self.arguments)])

    def run(self) -> int:
        """Run the program to its end, passing SIGTERM on to it, and return its exit code."""
        with subprocess.Popen(self.arguments, env={**os.environ, **self.variables}) as process:

            def pass_on(number: int, frame: FrameType | None) -> None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()

            before = signal.signal(signal.SIGTERM, pass_on)
            try:
                while True:
                    # Ctrl-C reaches the process, too, which may need time to end its ranks.
                    with contextlib.suppress(KeyboardInterrupt):
                        return process.wait()
            finally:
                signal.signal(signal.SIGTERM, before)

    def become(self) -> None:
        """Replace this process by the program, which then gets signals and sets the exit code."""
        os.execvpe(self.arguments[0], self.arguments, {**os.environ, **self.variables})


def options(values: Mapping[str, object]) -> list[str]:
    """Return command-line words for options, without options that are None, False or 0."""
    words = []
    for name, value in values.items():
        if value:
            words += [name] if value is True else [name, str(value)]
    return words


def program(script: str, module: str) -> tuple[str, ...]:
    """Return the command of a console script: its name if on PATH, else ``python -m module``."""
    found = shutil.which(script)
    if found and Path(found).parent == Path(sys.executable).parent:
        return (script,)
    return (sys.executable, "-m", module)


def comm_hooks(command: str) -> list[str]:
    """Return the command-line words that start a subcommand of ``comm-hooks``."""
    return [*program("comm-hooks", "comm_hooks.launchers.main"), command]
