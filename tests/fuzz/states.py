"""Checkpoints: valid states in which something was changed, and files with flipped bits."""

import contextlib
import copy
import functools
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from comm_hooks import (
    ConfigMismatchError,
    CountSketch,
    Differences,
    ErrorFeedback,
    Exchange,
    MomentumCorrection,
    Sign,
    TopK,
)
from comm_hooks.checkpoints.rank_files import load_rank_files
from comm_hooks.checkpoints.sealing import sealed
from comm_hooks.collectives import Simulated
from comm_hooks.memory import Memory
from comm_hooks.optim import LocalRounds, Participation
from tests.fuzz.fuzzing import Draw, Finding
from tests.fuzz.trees import PLAIN, TENSORS, mutated

_VALUES = (*PLAIN, *TENSORS)
_SHAPES = {"weight": (8, 10), "bias": (3,)}


def exchange_states(data: bytes) -> None:
    """``Exchange.load_state_dict`` and ``load_state_dicts``, on any number of ranks; a round."""
    draw = Draw(data)
    make = draw.choice(_EXCHANGES)
    world, exchanges = make(ranks=draw.choice([2, 2, 4]))
    states = mutated(draw, copy.deepcopy(_saved(make)), _VALUES)
    if draw.below(2) and isinstance(states, list):  # as after an edit by hand
        states = [_sealed_again(state) for state in states]
    if draw.below(2):
        for exchange in exchanges:
            _unchanged_or_loaded(exchange, exchange.load_state_dicts, states)
    else:
        own = states if isinstance(states, list) else []
        for exchange, state in zip(exchanges, own, strict=False):
            _unchanged_or_loaded(exchange, exchange.load_state_dict, state)
    with contextlib.suppress(ConfigMismatchError):  # one of them loaded, the other did not
        _average(world, exchanges)


def local_rounds_states(data: bytes) -> None:
    """``LocalRounds.load_state_dict``."""
    draw = Draw(data)
    with_clients = bool(draw.below(2))
    state = mutated(draw, copy.deepcopy(_saved_rounds(with_clients)), _VALUES)
    rounds = _rounds(with_clients)
    _unchanged_or_loaded(rounds, rounds.load_state_dict, state)


def rank_files(data: bytes) -> None:
    """A file of one rank, with other bytes in it or cut off, or another file."""
    draw = Draw(data)
    octets = bytearray(draw.choice(_files()))
    for _ in range(draw.below(4)):
        place = draw.below(max(1, len(octets)))
        how = draw.below(3)
        if how == 0 and octets:
            octets[place] ^= 1 << draw.below(8)
        elif how == 1:
            del octets[place:]
        else:
            octets[place : place + 8] = draw.octets(8)
    exchange = Exchange(TopK(0.3), ErrorFeedback(), min_numel=1, transport=_world()[0])
    (Path(_folder().name) / "rank0.pt").write_bytes(octets)
    _unchanged_or_loaded(exchange, load_rank_files, exchange, _folder().name)


def _sealed_again(state: Any) -> Any:
    """Return a state with a seal that fits it, where there can be one."""
    with contextlib.suppress(Exception):
        return sealed(state)
    return state


def _unchanged_or_loaded(owner: Any, load: Callable[..., Any], *arguments: Any) -> None:
    """Load, or see that nothing was loaded."""
    before = copy.deepcopy(owner.state_dict())
    try:
        load(*arguments)
    except ValueError:
        if not _same(owner.state_dict(), before):
            raise Finding(f"{type(owner).__name__} refused a state and kept some of it") from None
        raise


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


def _make(
    compressor: Any, memory: Callable[[], Memory | None], collective: str = "auto", ranks: int = 2
) -> tuple[Simulated, list[Exchange]]:
    world = Simulated(ranks)
    exchanges = [
        Exchange(
            compressor,
            memory(),
            collective,  # type: ignore[arg-type]
            min_numel=1,
            ranks_per_node=2 if collective == "hierarchical" else None,
            transport=transport,
        )
        for transport in world
    ]
    return world, exchanges


_EXCHANGES = (
    functools.partial(_make, TopK(0.3, block_size=16), ErrorFeedback, "all_gather"),
    functools.partial(_make, Sign(16), functools.partial(ErrorFeedback, 4), "sharded"),
    functools.partial(_make, TopK(0.3), MomentumCorrection),
    functools.partial(_make, TopK(0.3), Differences, "all_gather"),
    functools.partial(_make, TopK(0.3), ErrorFeedback, "hierarchical"),
    functools.partial(_make, CountSketch(0.5), lambda: None),
)


def _average(world: Simulated, exchanges: list[Exchange]) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        {name: torch.randn(shape, generator=generator) for name, shape in _SHAPES.items()}
        for _ in exchanges
    ]
    with _quiet():
        world.run([e.round(t) for e, t in zip(exchanges, tensors, strict=True)])


@functools.cache
def _saved(make: Callable[..., tuple[Simulated, list[Exchange]]]) -> list[dict[str, Any]]:
    world, exchanges = make()
    for _ in range(2):
        _average(world, exchanges)
    return [exchange.state_dict() for exchange in exchanges]


@functools.cache
def _world() -> Simulated:
    return Simulated(1)


def _rounds(with_clients: bool) -> LocalRounds:
    parameters = [(n, nn.Parameter(torch.ones(shape))) for n, shape in _SHAPES.items()]
    inner = torch.optim.AdamW(parameters, lr=0.01)
    server = torch.optim.SGD([p for _, p in parameters], lr=1.0, momentum=0.9)
    exchange = Exchange(TopK(0.3), ErrorFeedback(), min_numel=1, transport=_world()[0])
    how: dict[str, Any] = {"local_steps": 2, "fragments": 2}
    if with_clients:
        how = {"participation": Participation(clients=2)}
    return LocalRounds(inner, exchange, server, **how)


def _play(rounds: LocalRounds, count: int) -> None:
    with _quiet():
        for _ in range(count):
            for _ in rounds.clients() if rounds.participation else range(1):
                for group in rounds.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.ones_like(parameter)
                rounds.step()


@functools.cache
def _saved_rounds(with_clients: bool) -> dict[str, Any]:
    rounds = _rounds(with_clients)
    _play(rounds, 3)
    return rounds.state_dict()


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    shared = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None)


@functools.cache
def _files() -> list[bytes]:
    world, exchanges = _make(TopK(0.3), ErrorFeedback, ranks=1)
    _average(world, exchanges)
    foreign: list[Any] = [
        sealed({"state": exchanges[0].state_dict()}),
        {"step": 1},
        torch.ones(3),
        [1],
    ]
    files = [b"", b"text"]
    for content in foreign:
        file = io.BytesIO()
        torch.save(content, file)
        files.append(file.getvalue())
    return files


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
