"""A command ``torchrun`` for tests: the real one, in forked processes.

An agent or a rank that starts from nothing imports torch for seconds.  Here both are forked from
one process that has imported it; all else is as ever: torchrun's own options, its agent, and a
script or module that is run as ``__main__``.  Not for tests of how processes start and end.

No rank is forked from its agent, which has threads: what one of them has locked at that moment
would stay locked in the rank for ever.
"""

import faulthandler
import importlib
import json
import os
import runpy
import shlex
import signal
import site
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed.run
from torch.distributed.launcher.api import elastic_launch

from tests.ranks import CONTEXT

_MESSAGE_BYTES = 1 << 17
# What takes long to import and is the same on all ranks (Lightning itself asks for the rank).
_SHARED = {
    "lightning": "torchmetrics",
    "accelerate": "accelerate",
    "transformers": "transformers.trainer",
}
# The command that stands for an agent or a rank: it passes on what it was given, and ends as what
# was started for it does, which in turn ends with it.
_COMMAND = """
import json, os, signal, socket, sys
role, *arguments = sys.argv[1:]
if "--no-python" in arguments:
    os.execv({python!r}, [{python!r}, "-m", "torch.distributed.run", *arguments])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    def end(number, _):
        server.send({terminated!r})
        os._exit(128 + number)
    server.connect({address!r})
    message = json.dumps([role, arguments, dict(os.environ), os.getcwd()]).encode()
    signal.signal(signal.SIGTERM, end)
    socket.send_fds(server, [message], [0, 1, 2])
    os._exit(int(server.recv(16) or b"1"))
"""
_TERMINATED = b"terminated"


class Torchrun:
    """The command, as ``torchrun`` in a folder, and the process that serves it."""

    def __init__(self, folder: Path) -> None:
        address = str(folder / "socket")
        self.command = folder / "torchrun"
        script = folder / "command.py"
        script.write_text(
            _COMMAND.format(python=sys.executable, address=address, terminated=_TERMINATED)
        )
        start = [sys.executable, "-IS", str(script)]
        self.command.write_text(f'#!/bin/sh\nexec {shlex.join(start)} agent "$@"\n')
        self.command.chmod(0o755)
        self._connection, remote = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(address, start, remote))
        self._process.start()
        remote.close()
        self._connection.recv()  # it listens

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(address: str, start: list[str], parent: Connection) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what is forked leaves no zombies
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        parent.send(None)
        # The other end of ``parent`` is closed when the tests end, however they end.
        while parent not in wait([listener, parent]):
            command, _ = listener.accept()
            message, standard, _, _ = socket.recv_fds(command, _MESSAGE_BYTES, 3)
            role, arguments, environment, folder = json.loads(message)
            if role == "agent":
                _import_shared(arguments, Path(folder))
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _become(command, standard, environment, folder)
                main = partial(_launch, start) if role == "agent" else _run
                _answer(command, partial(main, *arguments))
            for file in [command.detach(), *standard]:
                os.close(file)


def _import_shared(arguments: list[str], folder: Path) -> None:
    """Import what a script will: forked processes then have it."""
    scripts = [folder / argument for argument in arguments if argument.endswith(".py")]
    texts = [script.read_text() for script in scripts if script.is_file()]
    for package, module in _SHARED.items():
        if any(package in text for text in texts):
            importlib.import_module(module)


def _become(
    command: socket.socket, standard: list[int], environment: dict[str, str], folder: str
) -> None:
    """Take over what the command was given, and end with it."""
    os.setsid()
    for number, file in enumerate(standard):
        os.dup2(file, number)
        os.close(file)
    faulthandler.register(signal.SIGUSR1, file=2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with, args=(command,), daemon=True).start()


def _end_with(command: socket.socket) -> None:
    """End when the command was ended; where it was killed, say where this process was."""
    told = command.recv(16)
    time.sleep(0.5)  # unless all is done
    if not told:
        os.killpg(0, signal.SIGUSR1)
        time.sleep(1)
    os.killpg(0, signal.SIGTERM)  # at which an agent ends its ranks
    time.sleep(10)
    os.killpg(0, signal.SIGKILL)


def _answer(command: socket.socket, run: Callable[[], Any]) -> None:
    """Do what the command is for; does not return."""
    status = 0
    try:
        run()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    command.send(str(status).encode())
    os._exit(status)


def _launch(start: list[str], *arguments: str) -> None:
    """Be an agent, whose ranks are further commands."""
    options = torch.distributed.run.parse_args(list(arguments))
    if options.standalone:
        options.rdzv_backend, options.rdzv_endpoint = "c10d", "localhost:0"
    config, _, _ = torch.distributed.run.config_from_args(options)
    kind = "module" if options.module else "script"
    command = [*start, "rank", kind, options.training_script, *options.training_script_args]
    elastic_launch(config, command[0])(*command[1:])


def _run(kind: str, target: str, *arguments: str) -> None:
    """Be a rank."""
    torch.set_num_threads(1)
    sys.stdin = open(0)  # noqa: SIM115 - multiprocessing has put nothing in its place
    sys.argv = [target, *arguments]
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    if kind == "module":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target).parent.resolve()))
        runpy.run_path(target, run_name="__main__")
