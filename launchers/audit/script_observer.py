"""What is seen of a script while it runs: releases, all of its model, and who has changed it."""

import hashlib
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import comm_hooks
from comm_hooks.compressors.identity import Identity
from comm_hooks.launchers.audit.script_planting import plant
from comm_hooks.launchers.audit.script_sources import Sources
from comm_hooks.optim.private import client_level, dp_optimizer, poisson
from comm_hooks.optim.private.client_level import PrivateParticipation
from comm_hooks.optim.private.dp_optimizer import DPOptimizer
from comm_hooks.optim.private.engine import PrivacyEngine
from comm_hooks.optim.private.ledger import Ledger
from comm_hooks.optim.private.mechanism import GaussianMechanism
from comm_hooks.optim.private.placement import judge
from comm_hooks.optim.private.poisson import PoissonLoader, PoissonSampler
from comm_hooks.optim.private.tickets import Claim, Tickets
from comm_hooks.optim.rounds.local_rounds import LocalRounds
from comm_hooks.optim.rounds.participation import deal

if TYPE_CHECKING:
    from comm_hooks.launchers.audit.script_run import Variant

_PACKAGE = str(Path(comm_hooks.__file__).parent)
_LIBRARIES = (_PACKAGE, str(Path(_PACKAGE).resolve()), str(Path(torch.__file__).parents[1]))
_SEED = 20_240_229


class Stopped(BaseException):
    """Ends a script that has taken as many private steps as are looked at."""


class Observer:
    """Watches a script in this process, and makes it one of several that are compared.

    While it is entered, this process draws what :mod:`comm_hooks` asks the operating system for
    from numbers that are the same in other runs, or not, as the variant says.  What is released is
    recorded, and the script goes on with what the run that is followed has released: given what
    was released before, all else must not depend on a sample.  So that augmentation and dropout
    are the same after a batch that has one row less, generators start anew after each step.

    Args:
        script: its path.
        variant: how this run differs from others.
        steps: private steps until :class:`Stopped` is raised.
        folder: where what was released is left, and a ledger.
        rank: of this process.
        released: the folder of the run that is followed.
    """

    def __init__(
        self,
        script: Path,
        variant: "Variant",
        steps: int,
        folder: Path,
        rank: int,
        released: Path | None,
    ) -> None:
        self._script, self._variant, self._steps = script, variant, steps
        self._folder, self._rank = folder, rank
        self._followed: list[torch.Tensor] = []
        if released is not None:
            self._followed = torch.load(released / f"released{rank}.pt")
        self._releases: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._entries: list[tuple[float, float]] = []
        self._watched: dict[str, Callable[[], Any]] = {}
        self._known: dict[int, str] = {}
        self._owners: list[object] = []
        self._ticket: Any = None
        self._noise: list[tuple[float, torch.Tensor]] = []
        self._drawn_clients: list[int] = []
        self._messages: list[torch.Tensor] | None = None
        self._in_round = False
        self._taken = 0
        self._randomness: dict[str, int] = {}
        self._first_seed: int | None = None
        self._ledgers: dict[str, str] = {}
        self._engines: list[PrivacyEngine] = []
        self._units: list[tuple[int, float]] = []
        self._edits: dict[int, Callable[[int, Any], Any]] = {}
        self._sources = Sources(variant.varied_source, self.where)
        self._patches: list[Any] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> "Observer":
        random.seed(_SEED)
        np.random.seed(_SEED)
        torch.manual_seed(_SEED)
        urandom = os.urandom
        self._patches = [
            mock.patch.object(os, "urandom", lambda size: self._draw(urandom, size)),
            _around(PrivacyEngine, "make_private", self._make_private),
            _around(PrivacyEngine, "private_participation", self._private_participation),
            _around(GaussianMechanism, "round", self._round),
            _around(GaussianMechanism, "_add_noise_", self._add_noise_),
            _around(Ledger, "__init__", self._open_ledger),
            _around(Ledger, "record", self._record_entry),
            _around(PoissonLoader, "__init__", self._make_loader),
            _around(PoissonSampler, "__iter__", self._sample),
            _around(Tickets, "start", self._start_iteration),
            _around(Tickets, "issue", self._issue),
            _around(Claim, "spend", self._spend),
            _around(PrivateParticipation, "turns", self._turns),
            _around(client_level._ClientGuard, "clip_", self._clip_client),
            _around(client_level._ClientGuard, "add_noise_", self._add_client_noise),
            _around(client_level._PrivateCollection, "finish", self._finish_round),
            _around(LocalRounds, "_conclude", self._conclude),
        ]
        for patch in self._patches:
            patch.start()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._sources.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._sources.stop()
        for hook in self._hooks:
            hook.remove()
        for patch in reversed(self._patches):
            patch.stop()
        if not isinstance(exception[1], Exception):
            self._events.append({"kind": "end", "where": "", "who": "", "after": self._state()})

    def record(self) -> dict[str, Any]:
        """Return all that was seen; what was released is left in the folder, too."""
        torch.save([r["released"] for r in self._releases], self._folder / f"released{self._rank}.pt")
        return {
            "releases": self._releases,
            "events": self._events,
            "entries": len(self._entries),
            "in ledger": sum(e.steps for engine in self._engines for e in engine._history()),
            "steps": self._taken,
            "engines": len(self._engines),
            "units": self._units,
            "sources": self._sources.found,
        }

    def where(self) -> str:
        """Return the line of the script that runs, or of what is beside it."""
        return self._place(sys._getframe(1))

    def place_of(self, error: BaseException) -> str:
        """Return the line of the script at which an exception arose."""
        frames = []
        trace = error.__traceback__
        while trace is not None:
            frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
            trace = trace.tb_next
        own = [(name, line) for name, line in frames if self._is_own(name)]
        return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else self._script.name

    def _place(self, frame: FrameType | None) -> str:
        while frame is not None:
            if self._is_own(frame.f_code.co_filename):
                return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            frame = frame.f_back
        return self._script.name

    def _is_own(self, filename: str) -> bool:
        if filename == str(self._script):
            return True
        beside = filename.startswith(str(self._script.parent) + os.sep)
        return beside and not filename.startswith(_LIBRARIES) and "site-packages" not in filename

    # Randomness

    def _draw(self, urandom: Callable[[int], bytes], size: int) -> bytes:
        """Return what the operating system draws; for the library, what the variant says."""
        frame: FrameType | None = sys._getframe(2)
        modules = []
        while frame is not None and len(modules) < 3:
            modules.append(frame.f_globals.get("__name__", ""))
            frame = frame.f_back
        if not modules[0].startswith("comm_hooks."):
            return urandom(size)
        is_noise = any(name.endswith("private.mechanism") for name in modules)
        secret = ("noise", self._variant.noise) if is_noise else ("draws", self._variant.draws)
        self._randomness[secret[0]] = count = self._randomness.get(secret[0], 0) + 1
        label = f"{secret} {count} {self._rank}"
        return hashlib.blake2b(label.encode(), digest_size=64).digest()[:size]

    def _start_generators(self) -> str:
        """Let generators go on from the number of the step; return a digest of where they were."""
        states = [torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()[1:]).encode()]
        digest = _digest_of(b"".join([*states, repr(random.getstate()).encode()]))
        if self._first_seed is None:
            self._first_seed = torch.initial_seed()
        seed = (self._first_seed + 1_000_003 * (self._taken + 1)) % (1 << 31)
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        return digest

    # What the model is

    def _watch(self, names: Any) -> None:
        for name, tensor in names:
            if id(tensor) not in self._known:
                self._known[id(tensor)] = name
                self._owners.append(tensor)
                self._watched[name] = lambda tensor=tensor: _digest(tensor)

    def _watch_model(self, module: torch.nn.Module) -> None:
        self._watch(("parameter " + n, p) for n, p in module.named_parameters())
        # Looked up each time: a buffer may be another tensor after a step.
        self._owners.append(module)
        for name, _ in module.named_buffers():
            self._watched["buffer " + name] = lambda name=name: _digest(
                dict(module.named_buffers()).get(name)
            )

    def _watch_optimizer(self, optimizer: Optimizer) -> None:
        kind = type(optimizer).__name__
        if id(optimizer) in self._known:
            return
        self._known[id(optimizer)] = kind
        self._owners.append(optimizer)
        number = sum(name.startswith(f"settings of {kind} ") for name in self._watched) + 1
        self._watch(
            (f"parameter {i} of {kind} {number}", p)
            for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
        )
        self._watched[f"settings of {kind} {number}"] = lambda: [
            {key: repr(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    def _state(self) -> dict[str, Any]:
        return {name: look() for name, look in self._watched.items()}

    # Steps

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._in_round or dp_optimizer._stepping.get() is optimizer:
            return
        if isinstance(optimizer, DPOptimizer):
            self._watch_optimizer(optimizer.inner)
            kind = "private"
        else:
            self._watch_optimizer(optimizer)
            kind = "other"
        self._events.append(
            {
                "kind": kind,
                "who": type(optimizer).__name__,
                "where": self.where(),
                "before": self._state(),
                "releases": len(self._releases),
            }
        )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._in_round or dp_optimizer._stepping.get() is optimizer or not self._events:
            return
        self._events[-1]["after"] = self._state()
        if isinstance(optimizer, DPOptimizer):
            self._end_step()

    def _end_step(self) -> None:
        self._events[-1]["randomness"] = self._start_generators()
        self._taken += 1
        if self._taken >= self._steps:
            raise Stopped

    # Releases

    def _round(
        self, original: Callable[..., Any], mechanism: GaussianMechanism, sums: Any
    ) -> Iterator[Any]:
        exchange = mechanism.exchange
        self._noise = []
        clean = _flat(sums.values())
        released = yield from original(mechanism, sums)
        ranks = exchange.transport.world_size
        dense = not exchange.memory and all(
            isinstance(c, Identity) and c.bits >= 32 for c in (exchange.compressor, exchange.exempt)
        )
        self._release(
            clean,
            list(released.tensors.values()),
            names=[(name, tensor.numel()) for name, tensor in sums.items()],
            settings=(
                mechanism.noise_multiplier,
                mechanism.max_grad_norm,
                mechanism.expected_batch_size,
            ),
            place=mechanism.place,
            dense=dense,
            ranks=ranks,
            drawn=self._ticket.drawn if self._ticket is not None else None,
            discrete=mechanism.noise == "discrete",
            share=judge(mechanism.scheme()).std,
        )
        self._ticket = None
        return released

    def _release(self, clean: torch.Tensor, tensors: list[torch.Tensor], **facts: Any) -> None:
        """Record what is released, and put what the run that is followed has released there."""
        number = len(self._releases)
        own = _flat(tensors)
        self._releases.append(
            {
                "sums": clean,
                "released": own,
                "noise": self._noise,
                "where": self.where(),
                "entries": len(self._entries),
                "entry": self._entries[-1] if self._entries else None,
                **facts,
            }
        )
        if number < len(self._followed) and len(self._followed[number]) == len(own):
            parts = self._followed[number].split([t.numel() for t in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def _add_noise_(
        self,
        original: Callable[..., None],
        mechanism: GaussianMechanism,
        tensors: Any,
        sensitivity: float,
        elements: int,
        stream: Any,
    ) -> None:
        before = _flat(tensors).double()
        original(mechanism, tensors, sensitivity, elements, stream)
        self._noise.append((sensitivity, (_flat(tensors).double() - before).float()))

    # The ledger

    def _open_ledger(
        self, original: Callable[..., None], ledger: Ledger, path: Any = None, **options: Any
    ) -> None:
        """Open a copy: what this run releases nobody sees."""
        if path is not None and os.fspath(path):
            place = os.path.abspath(os.fsdecode(path))
            if place not in self._ledgers:
                copy = self._folder / f"ledger{self._rank}-{len(self._ledgers)}.jsonl"
                if os.path.exists(place):
                    copy.write_bytes(Path(place).read_bytes())
                self._ledgers[place] = str(copy)
            path = self._ledgers[place]
        original(ledger, path, **options)

    def _record_entry(self, original: Callable[..., None], ledger: Ledger, event: Any) -> None:
        original(ledger, event)
        # Not what another rank, a checkpoint or a torn line knew.
        if sys._getframe(2).f_code.co_name == "enter":
            self._entries += [event.mechanism] * event.steps

    # Samples

    def _make_private(
        self, original: Callable[..., Any], engine: PrivacyEngine, **arguments: Any
    ) -> Any:
        self._sources.stop()
        dataset = getattr(arguments.get("data_loader"), "dataset", None)
        if hasattr(dataset, "__len__"):
            self._sources.look(dataset)
        if self._variant.varied_source is not None:
            raise Stopped
        model, optimizer, loader = original(engine, **arguments)
        if engine not in self._engines:
            self._engines.append(engine)
        self._watch_model(model)
        self._units.append((len(dataset), arguments["sample_rate"]))
        self._watch_optimizer(optimizer.inner)
        return model, optimizer, loader

    def _private_participation(
        self, original: Callable[..., Any], engine: PrivacyEngine, **arguments: Any
    ) -> Any:
        self._sources.stop()
        if engine not in self._engines:
            self._engines.append(engine)
        self._units.append((arguments["clients"], arguments["sample_rate"]))
        return original(engine, **arguments)

    def _make_loader(
        self,
        original: Callable[..., None],
        loader: PoissonLoader,
        dataset: Any,
        *args: Any,
        rank: int = 0,
        world_size: int = 1,
        **options: Any,
    ) -> None:
        planted = self._variant.plant
        if planted is not None and planted.index < len(dataset):
            if id(dataset) not in self._edits:
                self._owners.append(dataset)
                self._edits[id(dataset)] = plant(dataset, planted)
            dataset = _Edited(dataset, self._edits[id(dataset)])
        original(loader, dataset, *args, rank=rank, world_size=world_size, **options)
        sampler: Any = loader.batch_sampler
        tickets: Any = loader.tickets
        sampler.drawn_by = tickets.drawn_by = _Draws(rank, world_size)

    def _sample(
        self, original: Callable[..., Iterator[list[int]]], sampler: Any
    ) -> Iterator[list[int]]:
        draws: _Draws | None = getattr(sampler, "drawn_by", None)
        planted = self._variant.plant
        for indices in original(sampler):
            if draws is None:
                yield indices
                continue
            drawn = [draws.rank + i * draws.world_size for i in indices]
            draws.waiting.append(drawn)
            absent = planted is not None and planted.kind == "absent"
            yield [
                i
                for i, index in zip(indices, drawn, strict=True)
                if not absent or planted is None or index != planted.index
            ]

    def _start_iteration(self, original: Callable[..., None], tickets: Any) -> None:
        original(tickets)
        if hasattr(tickets, "drawn_by"):
            tickets.drawn_by.waiting.clear()

    def _issue(self, original: Callable[..., None], tickets: Any, batch: Any) -> None:
        original(tickets, batch)
        if hasattr(tickets, "drawn_by"):
            tickets._waiting[-1].drawn = tickets.drawn_by.waiting.popleft()

    def _spend(self, original: Callable[..., None], claim: Any, samples: int) -> None:
        self._ticket = claim._ticket
        original(claim, samples)

    # Clients

    def _turns(
        self,
        original: Callable[..., list[list[int | None]]],
        participation: PrivateParticipation,
        round_index: int,
        transport: Any,
    ) -> list[list[int | None]]:
        turns = original(participation, round_index, transport)
        planted = self._variant.plant
        drawn = sorted(c for turn in turns for c in turn if c is not None)
        self._drawn_clients = drawn
        self._messages = None
        self._noise = []
        self._in_round = True
        if planted is not None and planted.kind == "absent":
            drawn = [client for client in drawn if client != planted.index]
        return deal(drawn, transport.world_size)

    def _clip_client(self, original: Callable[..., None], guard: Any, message: Any) -> None:
        original(guard, message)
        clipped = [tensor.detach().clone() for tensor in message]
        if self._messages is None:
            self._messages = clipped
        else:
            torch._foreach_add_(self._messages, clipped)

    def _add_client_noise(self, original: Callable[..., None], guard: Any, total: Any) -> None:
        before = _flat(total).double()
        original(guard, total)
        if guard._noise_std is not None:
            noise = (_flat(total).double() - before).float()
            self._noise.append((guard._max_norm, noise))

    def _finish_round(self, original: Callable[..., Any], collection: Any) -> Any:
        aggregate = original(collection)
        participation = collection._participation
        sums = self._messages if self._messages is not None else [torch.zeros(1)]
        is_sum = collection._guard.place == "payload"
        self._release(
            # Where messages are clipped on arrival every rank has all of them.
            _flat(sums) * (1.0 if is_sum or self._rank == 0 else 0.0),
            aggregate.delta,
            names=[],
            settings=(participation.noise_multiplier, participation.max_norm, 1.0),
            place="clients",
            dense=False,
            ranks=collection.exchange.transport.world_size,
            drawn=self._drawn_clients if self._rank == 0 else [],
            discrete=False,
            share=1.0,
        )
        return aggregate

    def _conclude(self, original: Callable[..., None], rounds: LocalRounds, *args: Any) -> None:
        original(rounds, *args)
        if not isinstance(rounds.participation, PrivateParticipation):
            return
        self._in_round = False
        self._watch(
            (f"parameter {name}", p)
            for name, p in zip(rounds.names(), rounds._parameters, strict=True)
        )
        state = self._state()
        self._events.append(
            {
                "kind": "private",
                "who": type(rounds).__name__,
                "where": self.where(),
                "before": {},
                "after": state,
                "releases": len(self._releases) - 1,
            }
        )
        self._end_step()


class _Draws:
    """What a sampler has drawn, by indices of the whole data set, and the loader not yet passed."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.waiting: deque[list[int]] = deque()


class _Edited:
    """A data set with one sample changed on its way."""

    def __init__(self, dataset: Any, edit: Callable[[int, Any], Any]) -> None:
        self._dataset, self._edit = dataset, edit

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._edit(index, self._dataset[index])


def _around(owner: type, name: str, wrapper: Callable[..., Any]) -> Any:
    """Return a patch by which a method is called as the first argument of ``wrapper``."""
    original = owner.__dict__[name]

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return mock.patch.object(owner, name, replacement)


def _flat(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().float().cpu().reshape(-1) for t in tensors])


def _digest(tensor: torch.Tensor | None) -> str | None:
    if tensor is None:
        return None
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return _digest_of(flat.view(torch.uint8).numpy().tobytes())


def _digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
