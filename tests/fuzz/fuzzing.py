"""The shared parts of all targets: inputs of bytes, mutations, findings."""

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"

_OURS = tuple(f"{ROOT / folder}/" for folder in ("comm_hooks", "optim", "launchers", "benchmarks"))
_Choice = TypeVar("_Choice")


class Finding(AssertionError):
    """Something other than a plain refusal came out."""


class Draw:
    """Reads bytes as choices; where they are over it reads zeros.

    Example::

        >>> draw = Draw(bytes([3, 1, 7, 9]))
        >>> draw.below(10), draw.choice("abc"), draw.octets(5)
        (3, 'b', b'\\x07\\t\\x07\\t\\x07')
    """

    def __init__(self, data: bytes) -> None:
        self._rest = data

    def below(self, bound: int) -> int:
        """Return a number from 0 to ``bound`` - 1."""
        size = max(1, ((bound - 1).bit_length() + 7) // 8)
        taken, self._rest = self._rest[:size], self._rest[size:]
        return int.from_bytes(taken, "little") % bound

    def choice(self, choices: Sequence[_Choice]) -> _Choice:
        return choices[self.below(len(choices))]

    def octets(self, count: int) -> bytes:
        """Return the remaining bytes, repeated, without consuming them."""
        rest = self._rest or b"\0"
        return (rest * (count // len(rest) + 1))[:count]


@dataclass(frozen=True)
class Target:
    """A reader of foreign data.

    Args:
        run: reads one input.  Returns, or raises a ``ValueError`` in our own words.
        inputs: how many ``make fuzz`` tries.
        dictionary: pieces of text that mutations put in; empty where inputs are choices.
    """

    run: Callable[[bytes], None]
    inputs: int
    dictionary: Sequence[bytes] = ()

    @property
    def name(self) -> str:
        return self.run.__name__

    def corpus(self) -> list[bytes]:
        """Return the committed inputs."""
        return [path.read_bytes() for path in sorted((CORPUS / self.name).glob("*"))]

    def check(self, data: bytes) -> None:
        """Run on one input.

        Raises:
            Finding: if anything comes out but a ``ValueError`` of one line from our own code.
        """
        try:
            self.run(data)
        except Finding:
            raise
        except ValueError as error:
            message = str(error)
            if not message or "\n" in message:
                raise Finding(f"not one line but {message[:200]!r} at {place_of(error)}") from error
            if not _innermost(error.__traceback__).startswith(_OURS):
                raise Finding(f"not our own words: {message!r} at {place_of(error)}") from error
        except Exception as error:
            kind, text = type(error).__name__, str(error)[:200]
            raise Finding(f"{kind}: {text!r} at {place_of(error)}") from error

    def generate(self, seed: int) -> Iterator[bytes]:
        """Yield inputs without end: mutations of the corpus, and of what came out of those."""
        rng = random.Random(f"{self.name} {seed}")
        corpus = self.corpus() or [b""]
        while True:
            if not self.dictionary and rng.random() < 0.5:
                yield rng.randbytes(rng.randrange(64))
                continue
            data = rng.choice(corpus)
            for _ in range(rng.randint(1, 4)):
                data = _mutated(data, rng, self.dictionary, corpus)
            yield data


def place_of(error: BaseException) -> str:
    """Return the innermost line of ours that an error came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_OURS)]
    if not frames:
        return "no line of ours"
    return f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}"


def _innermost(trace: TracebackType | None) -> str:
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename


def _mutated(
    data: bytes, rng: random.Random, dictionary: Sequence[bytes], corpus: Sequence[bytes]
) -> bytes:
    start = rng.randrange(len(data) + 1)
    stop = min(len(data), start + rng.choice([0, 1, 1, 2, 4, 16]))
    how = rng.randrange(6)
    if how == 0:  # cut off, or cut out
        return data[:start] if rng.random() < 0.3 else data[:start] + data[stop:]
    if how == 1:
        return data[:start] + rng.randbytes(rng.choice([1, 1, 2, 8])) + data[stop:]
    if how == 2 and start < len(data):
        return data[:start] + bytes([data[start] ^ 1 << rng.randrange(8)]) + data[start + 1 :]
    if how == 3:
        piece = rng.choice(dictionary) if dictionary else rng.choice(_EXTREMES)
        return data[:start] + piece + data[stop:]
    if how == 4:  # twice
        return data[:stop] + data[start:]
    other = rng.choice(corpus)
    return data[:start] + other[rng.randrange(len(other) + 1) :]


_EXTREMES = (b"\0" * 8, b"\xff" * 8, b"\x7f\x80\0\0", b"\x01")
