"""Files and settings that people write, or that a crash has left behind."""

import functools
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from comm_hooks.collectives import Simulated
from comm_hooks.config import build
from comm_hooks.exchange import Exchange, ExchangeSettings
from comm_hooks.optim.private.accounting.ledger import Ledger
from tests.fuzz.fuzzing import Draw
from tests.fuzz.trees import PLAIN, mutated

NUMBERS = (
    *(b"0", b"-1", b"1", b"1.5", b"1e999", b"-1e999", b"1e308", b"1" * 400, b"9" * 5000, b"1e-320"),
    *(b"true", b"null", b'""', b'"x"', b"[]", b"{}", b"[1]", b'{"a": 1}', b"NaN", b"Infinity"),
)
_SYNTAX = (
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"\n",
    b"\r",
    b" ",
    b"\0",
    b"\xff",
    b"\xc3\xa9",
)
_DEEP = (b"[" * 20_000, b'{"a":' * 5_000)
JSON = (*NUMBERS, *_SYNTAX, *_DEEP)


class _File:
    """A file that is written again for every input, in memory where there is such a place."""

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None)
        self.path = Path(self._folder.name) / "input.jsonl"

    def write(self, data: bytes) -> Path:
        self.path.write_bytes(data)
        return self.path


_FILE = _File()


def ledgers(data: bytes) -> None:
    """The ledger: read twice, it has the same events."""
    path = _FILE.write(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Ledger(path) as ledger:
            events = ledger.events()
        with Ledger(path) as ledger:
            assert ledger.events() == events


def exchanges(data: bytes) -> None:
    """A block of JSON becomes an exchange, which then does a round."""
    draw = Draw(data)
    settings = mutated(draw, draw.choice(_examples()), PLAIN)
    exchange = Exchange(ExchangeSettings.from_dict(settings), transport=_WORLD[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _WORLD.run([exchange.round({"weight": torch.ones(4, 8), "bias": torch.ones(3)})])


def compressors(data: bytes) -> None:
    """A name and options become a compressor and a memory."""
    draw = Draw(data)
    settings = mutated(draw, draw.choice(_examples()), PLAIN)
    settings = dict(settings) if isinstance(settings, dict) else {}
    name, memory = settings.pop("compressor", "topk"), settings.pop("memory", "auto")
    options = {str(key): value for key, value in settings.items()}
    if (compressor := build("compressor", name, **options)) is not None:
        build("memory", memory, compressor=compressor)


_WORLD = Simulated(1)


@functools.cache
def _examples() -> list[Any]:
    folder = Path(__file__).parent / "examples"
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
