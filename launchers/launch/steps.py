"""What a launch does, one line of shell each: what is printed is what is run."""

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
    """A program, its arguments, and the variables that it gets beside those of the environment."""

    arguments: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*assignments, shlex.join(self.arguments)])

    def run(self) -> int:
        """Run to the end, passing SIGTERM on, and return the exit code."""
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
        """Replace this process, so that signals and the exit code are the program's own."""
        environment = {**os.environ, **self.variables}
        os.execvpe(self.arguments[0], self.arguments, environment)


@dataclass(frozen=True)
class WriteFile:
    """A small text file that a command reads."""

    path: Path
    lines: tuple[str, ...]

    def __str__(self) -> str:
        quoted = " ".join(map(shlex.quote, self.lines))
        return f"printf '%s\\n' {quoted} > {shlex.quote(str(self.path))}"

    def run(self) -> int:
        """Write the file; 0, as a command that succeeded."""
        self.path.write_text("".join(f"{line}\n" for line in self.lines))
        return 0


Step = Command | WriteFile


def options(values: Mapping[str, object]) -> list[str]:
    """Return the words of options: those that are None, False or 0 are left out.

    Example::

        >>> options({"--nproc": 4, "--head": None, "--preflight": True})
        ['--nproc', '4', '--preflight']
    """
    words = []
    for name, value in values.items():
        if value:
            words += [name] if value is True else [name, str(value)]
    return words


def program(script: str, module: str) -> tuple[str, ...]:
    """Return how to call a console script of this environment: by name where PATH finds it."""
    found = shutil.which(script)
    if found and Path(found).parent == Path(sys.executable).parent:
        return (script,)
    return (sys.executable, "-m", module)
