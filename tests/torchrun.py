"""A command ``torchrun`` for tests: the real one, in forked processes.

An agent or a rank that starts from nothing imports torch for seconds.  Here both are forked from
one process that has imported it; all else is as ever: torchrun's own options, its agent, and a
script or module that is run as ``__main__``.  Not for tests of how processes start and end.
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
from multiprocessing.connection import Connection, wait
from pathlib import Path

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
# The command: it passes on what it was given, and ends as what was started for it did.
_COMMAND = """
import json, os, socket, sys
arguments = sys.argv[1:]
if "--no-python" in arguments:
    os.execv({python!r}, [{python!r}, "-m", "torch.distributed.run", *arguments])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    message = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(server, [message], [0, 1, 2])
    sys.exit(int(server.recv(16) or b"1"))
"""


class Torchrun:
    """The command, as ``torchrun`` in a folder, and the process that serves it."""

    def __init__(self, folder: Path) -> None:
        address = str(folder / "socket")
        self.command = folder / "torchrun"
        script = folder / "command.py"
        script.write_text(_COMMAND.format(python=sys.executable, address=address))
        start = shlex.join([sys.executable, "-IS", str(script)])
        self.command.write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        self.command.chmod(0o755)
        self._connection, remote = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(address, remote))
        self._process.start()
        remote.close()
        self._connection.recv()  # it listens

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(address: str, parent: Connection) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # agents leave no zombies
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        parent.send(None)
        # The other end of ``parent`` is closed when the tests end, however they end.
        while parent not in wait([listener, parent]):
            command, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer(command)
            command.close()


def _answer(command: socket.socket) -> None:
    """Be the agent of one command; does not return."""
    os.setsid()
    message, standard, _, _ = socket.recv_fds(command, _MESSAGE_BYTES, 3)
    for number, file in enumerate(standard):
        os.dup2(file, number)
        os.close(file)
    arguments, environment, folder = json.loads(message)
    faulthandler.register(signal.SIGUSR1, file=2)  # of ranks, too, which are forked
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with, args=(command,), daemon=True).start()
    status = 0
    try:
        _launch(arguments)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    command.send(str(status).encode())
    os._exit(status)


def _end_with(command: socket.socket) -> None:
    """End this agent and its ranks when the command was ended; they say where they were."""
    command.recv(1)
    time.sleep(0.5)  # unless all is done
    os.killpg(0, signal.SIGUSR1)
    time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _launch(arguments: list[str]) -> None:
    options = torch.distributed.run.parse_args(arguments)
    if options.standalone:
        options.rdzv_backend, options.rdzv_endpoint = "c10d", "localhost:0"
    config, _, _ = torch.distributed.run.config_from_args(options)
    config.start_method = "fork"
    torch.set_num_threads(1)
    target = options.training_script
    script = "" if options.module else Path(target).read_text()
    for package, module in _SHARED.items():
        if package in script:
            importlib.import_module(module)
    elastic_launch(config, _run)(options.module, target, options.training_script_args)


def _run(is_module: bool, target: str, arguments: list[str]) -> None:
    sys.stdin = open(0)  # noqa: SIM115 - multiprocessing has put nothing in its place
    sys.argv = [target, *arguments]
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(target).parent.resolve()))
            runpy.run_path(target, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
