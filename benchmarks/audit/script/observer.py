"""Records a running script: its releases, its model, and each change of the model."""

import hashlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from benchmarks.audit.events import observing
from benchmarks.audit.script.clients import Clients
from benchmarks.audit.script.draws import Draws, Plant
from benchmarks.audit.script.library import functions, replaced
from benchmarks.audit.script.sources import Sources
from benchmarks.audit.script.watched import Places, Watched, digest, flat
from comm_hooks.compressors.identity import Identity
from comm_hooks.optim.private.accounting import GaussianEvent
from comm_hooks.optim.private.accounting.ledger import Ledger
from comm_hooks.optim.private.dp_optimizer import DPOptimizer
from comm_hooks.optim.private.engine import PrivacyEngine
from comm_hooks.optim.private.noise.mechanism import GaussianMechanism
from comm_hooks.optim.rounds.local_rounds import LocalRounds

_SEED = 20_240_229


@dataclass(frozen=True)
class Variant:
    """The difference between one run and the others.

    Attributes:
        name: for messages.
        draws, noise: numbers that stand for the secrets of the draws and of the noise.
        plant: the change of one sample; None for none.
        varied_source: the number of the source with changed rows; None for none.
    """

    name: str
    draws: int = 0
    noise: int = 0
    plant: Plant | None = None
    varied_source: int | None = None


class Stopped(BaseException):
    """Ends a script after its last observed step."""


class Observer:
    """Records a script in this process, and makes it one of several comparable runs.

    While it records, the library's draws from the operating system are replaced by numbers that
    follow from the variant.  Each release is recorded, and the script continues with the release of
    the followed run: given the earlier releases, nothing else may depend on a sample.  Generators
    are seeded again after each step, so that augmentation and dropout are the same after a batch
    with one row less.

    Args:
        script: its path.
        variant: the difference between this run and the others.
        steps: private steps until :class:`Stopped` is raised.
        folder: for the releases, and copies of ledgers.
        rank: of this process.
        released: the folder of the followed run.
    """

    def __init__(
        self,
        script: Path,
        variant: Variant,
        steps: int,
        folder: Path,
        rank: int,
        released: Path | None,
    ) -> None:
        self._variant, self._steps = variant, steps
        self._folder, self._rank = folder, rank
        self._followed: list[torch.Tensor] = []
        if released is not None:
            self._followed = torch.load(released / f"released{rank}.pt")
        self._releases: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._entries: list[tuple[float, float]] = []
        self.places = Places(script)
        self._watched = Watched()
        self._draws = Draws(variant.plant, _seed)
        self._clients = Clients(variant.plant, rank, self._release, self._after_round)
        self._noise: list[tuple[float, torch.Tensor]] = []
        self._taken = 0
        self._randomness: dict[str, int] = {}
        self._first_seed: int | None = None
        self._ledgers: dict[str, str] = {}
        self._engines: list[PrivacyEngine] = []
        self._units: list[tuple[int, float]] = []
        self._sources = Sources(variant.varied_source, self.places.now, _seed)
        self._stepping: DPOptimizer | None = None
        self._replaced: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the actions of this process."""
        _seed(_SEED)
        observers: dict[str, Callable[..., Any]] = {
            "training": self._make_private,
            "participation": self._private_participation,
            "release": self._round,
            "noise": self._add_noise,
            "ledger": self._open_ledger,
            "entry": self._record_entry,
            **self._draws.observers,
            **self._clients.observers,
        }
        hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        draw = partial(self._draw, os.urandom)
        with mock.patch.object(os, "urandom", draw), observing(observers):
            self._sources.start()
            library = functions()
            try:
                yield
            finally:
                self._replaced = replaced(library)
                self._sources.stop()
                for hook in hooks:
                    hook.remove()
        self._event("end", "", after=self._watched.state(), where="")

    def record(self) -> dict[str, Any]:
        """Return the record, and leave the releases in the folder."""
        released = [release["released"] for release in self._releases]
        torch.save(released, self._folder / f"released{self._rank}.pt")
        histories = [engine.state_dict()["events"] for engine in self._engines]
        return {
            "releases": self._releases,
            "events": self._events,
            "entries": len(self._entries),
            "in ledger": sum(event["steps"] for history in histories for event in history),
            "steps": self._taken,
            "engines": len(self._engines),
            "units": self._units,
            "sources": self._sources.found,
            "replaced": self._replaced,
        }

    # Randomness

    def _draw(self, urandom: Callable[[int], bytes], size: int) -> bytes:
        """Return bytes of the operating system; for the library, those of the variant."""
        frame: FrameType | None = sys._getframe(1)
        modules: list[str] = []
        while frame is not None and len(modules) < 3:
            modules.append(frame.f_globals.get("__name__", ""))
            frame = frame.f_back
        if not modules[0].startswith("comm_hooks."):
            return urandom(size)
        is_noise = GaussianMechanism.__module__ in modules
        secret = ("noise", self._variant.noise) if is_noise else ("draws", self._variant.draws)
        self._randomness[secret[0]] = count = self._randomness.get(secret[0], 0) + 1
        label = f"{secret} {count} {self._rank}"
        return hashlib.blake2b(label.encode(), digest_size=64).digest()[:size]

    def _start_generators(self) -> str:
        """Seed all generators by the number of the step; return a digest of their states before."""
        _, keys, *rest = np.random.get_state()
        others = repr((rest, hash(random.getstate()))).encode()
        before = digest([torch.get_rng_state(), keys, others])
        if self._first_seed is None:
            self._first_seed = torch.initial_seed()
        _seed((self._first_seed + 1_000_003 * (self._taken + 1)) % (1 << 31))
        return before

    # Steps

    def _event(self, kind: str, who: str, *, where: str | None = None, **facts: Any) -> None:
        where = self.places.now() if where is None else where
        self._events.append({"kind": kind, "who": who, "where": where, **facts})

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_part_of_a_step(optimizer):
            return
        kind, inner = "other", optimizer
        if isinstance(optimizer, DPOptimizer):
            kind, inner, self._stepping = "private", optimizer.inner, optimizer
        self._watched.add_optimizer(inner)
        before, releases = self._watched.state(), len(self._releases)
        self._event(kind, type(optimizer).__name__, before=before, releases=releases)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_part_of_a_step(optimizer) or not self._events:
            return
        self._events[-1]["after"] = self._watched.state()
        if isinstance(optimizer, DPOptimizer):
            self._stepping = None
            self._end_step()

    def _is_part_of_a_step(self, optimizer: Optimizer) -> bool:
        """Return whether a step is a client's, or one inside of a private step."""
        stepping = self._stepping
        return self._clients.playing or (stepping is not None and optimizer is stepping.inner)

    def _after_round(self, rounds: LocalRounds) -> None:
        parameters = (p for group in rounds.inner.param_groups for p in group["params"])
        names = (f"parameter {name}" for name in rounds.names())
        self._watched.add(zip(names, parameters, strict=True))
        after, releases = self._watched.state(), len(self._releases) - 1
        self._event("private", type(rounds).__name__, before={}, after=after, releases=releases)
        self._end_step()

    def _end_step(self) -> None:
        self._events[-1]["randomness"] = self._start_generators()
        self._taken += 1
        if self._taken >= self._steps:
            raise Stopped

    # Releases

    def _round(
        self, method: Callable[..., Any], mechanism: GaussianMechanism, sums: Any
    ) -> Iterator[Any]:
        exchange = mechanism.exchange
        self._noise = []
        clean = flat(sums.values())
        released = yield from method(mechanism, sums)
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
            dense=not exchange.memory
            and all(
                isinstance(c, Identity) and c.bits >= 32
                for c in (exchange.compressor, exchange.settings.exempt)
            ),
            ranks=exchange.transport.world_size,
            noise=self._noise,
            drawn=self._draws.take(),
            left_out=self._stepping.not_finite if self._stepping else 0,
        )
        return released

    def _release(self, clean: torch.Tensor, tensors: list[torch.Tensor], **facts: Any) -> None:
        """Record a release, and replace it by that of the followed run."""
        number, own = len(self._releases), flat(tensors)
        unknown = {"names": [], "dense": False, "left_out": 0}
        self._releases.append(
            {
                "sums": clean,
                "released": own,
                "where": self.places.now(),
                "entries": len(self._entries),
                "entry": self._entries[-1] if self._entries else None,
                **unknown,
                **facts,
            }
        )
        if number < len(self._followed) and len(self._followed[number]) == len(own):
            parts = self._followed[number].split([t.numel() for t in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def _add_noise(
        self,
        method: Callable[..., None],
        mechanism: GaussianMechanism,
        tensors: Any,
        sensitivity: float,
        *args: Any,
    ) -> None:
        before = flat(tensors).double()
        method(mechanism, tensors, sensitivity, *args)
        self._noise.append((sensitivity, (flat(tensors).double() - before).float()))

    # The ledger

    def _open_ledger(
        self, method: Callable[..., None], ledger: Ledger, path: Any = None, **options: Any
    ) -> None:
        """Open a copy: the releases of this run are not published."""
        if path is not None and os.fspath(path):
            place = os.path.abspath(os.fsdecode(path))
            if place not in self._ledgers:
                copy = self._folder / f"ledger{self._rank}-{len(self._ledgers)}.jsonl"
                if os.path.exists(place):
                    copy.write_bytes(Path(place).read_bytes())
                self._ledgers[place] = str(copy)
            path = self._ledgers[place]
        method(ledger, path, **options)

    def _record_entry(
        self, method: Callable[..., None], engine: PrivacyEngine, event: GaussianEvent
    ) -> None:
        method(engine, event)
        self._entries += [event.mechanism] * event.steps

    # Samples

    def _make_private(
        self, method: Callable[..., Any], engine: PrivacyEngine, **arguments: Any
    ) -> Any:
        self._sources.stop()
        dataset: Any = getattr(arguments.get("data_loader"), "dataset", None)
        if hasattr(dataset, "__len__"):
            given = map(arguments.get, ("module", "loss_function", "optimizer"))
            self._sources.read(dataset, *given)
        if self._variant.varied_source is not None:
            raise Stopped
        model, optimizer, loader = method(engine, **arguments)
        self._begin(engine, len(dataset), arguments["sample_rate"])
        self._watched.add_model(model)
        self._watched.add_optimizer(optimizer.inner)
        return model, optimizer, loader

    def _private_participation(
        self, method: Callable[..., Any], engine: PrivacyEngine, **arguments: Any
    ) -> Any:
        self._sources.stop()
        self._begin(engine, arguments["clients"], arguments["sample_rate"])
        return method(engine, **arguments)

    def _begin(self, engine: PrivacyEngine, units: int, sample_rate: float) -> None:
        if engine not in self._engines:
            self._engines.append(engine)
        self._units.append((units, sample_rate))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
