"""A small training run of every method; a fault changes one of its ranks."""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import (
    CompressionState,
    Exchange,
    compression_hook,
    register,
)
from comm_hooks.checkpoints.rank_files import save_rank_file
from comm_hooks.optim import LocalRounds
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.shards import local_shards

TIMEOUT_SECONDS = 4.0
"""Of the process groups."""
VERIFY_EVERY = 4
SHARDS = 2
"""In how many parts a sharded model is; ranks that are equal modulo this hold the same one."""
HIDDEN = 32
_INPUTS, _OUTPUTS = 24, 4
_BUCKET_MB = 0.002


@dataclass(frozen=True)
class Settings:
    """The settings of a run; a fault gives one rank others."""

    exchange: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the optimizer or the rounds, ``lr`` among them; of a hook, of the Adam behind it."""
    hidden: int = HIDDEN
    model_seed: int = 0
    reverses: bool = False
    """Whether the parameters are given in the opposite order."""
    scales: bool = False
    """Whether a GradScaler scales the loss."""

    def with_exchange(self, **changed: Any) -> "Settings":
        return replace(self, exchange={**self.exchange, **changed})


def make_exchange(settings: Settings) -> Exchange:
    return Exchange(**{"min_numel": 16, "verify_every": VERIFY_EVERY, **settings.exchange})


class Training(ABC):
    """One rank of a run.  Its data are drawn from its rank and the number of the step."""

    exchange: Exchange
    optimizer: Any
    """Has ``param_groups`` and a ``state_dict()``."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        torch.manual_seed(settings.model_seed)
        self.model: nn.Module = self._place(self._make_model())
        self.parameters = list(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if settings.scales else None
        self.poison = 1.0
        """By which the next loss is multiplied."""
        self.store_process = 0
        """The process that keeps the store, in runs whose store is their own."""

    @abstractmethod
    def step(self, index: int) -> None:
        """Take a step with this rank's minibatch of this number."""

    def finish(self) -> None:
        """End the run with the same parameters on all ranks, and save it."""
        with tempfile.TemporaryDirectory() as folder:
            save_rank_file(self.exchange, folder)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the method."""
        return self.exchange.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.exchange.load_state_dict(state)

    @abstractmethod
    def remake(self) -> None:
        """Make the optimizer anew, and the exchange with it."""

    def named(self) -> list[tuple[str, nn.Parameter]]:
        named = list(self.model.named_parameters())
        return named[::-1] if self.settings.reverses else named

    def _place(self, model: nn.Module) -> nn.Module:
        return model

    def shown(self) -> list[torch.Tensor]:
        """Return the parameters as all ranks must have them; after :meth:`finish`."""
        return [parameter.detach() for parameter in self.parameters]

    def _make_model(self) -> nn.Module:
        hidden = self.settings.hidden
        return nn.Sequential(
            nn.Linear(_INPUTS, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden // 2),
            nn.Tanh(),
            nn.Linear(hidden // 2, _OUTPUTS),
        )

    def _minibatch(self, index: int, client: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * index + 10 * client + dist.get_rank())
        return torch.randn(8, _INPUTS, generator=generator)

    def _backward(self, model: nn.Module, minibatch: torch.Tensor) -> torch.Tensor:
        loss = (model(minibatch) - 1).square().mean() * self.poison
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        return loss

    def _update(self, optimizer: Any) -> None:
        if self.scaler:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()


class HookTraining(Training):
    """A DDP model with several buckets, a hook, and Adam."""

    def __init__(self, settings: Settings, *, by_register: bool = False) -> None:
        super().__init__(settings)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=_BUCKET_MB)
        known = {"min_numel": 16, **settings.exchange}
        if by_register:
            state = register(self.ddp, **known)
        else:
            state = CompressionState(**known, named_parameters=self.model.named_parameters())
            self.ddp.register_comm_hook(state, compression_hook)
        if self.scaler:
            state.loss_scale = self.scaler.get_scale
        self.exchange = state.exchange
        self.exchange.settings = replace(self.exchange.settings, verify_every=VERIFY_EVERY)
        self.optimizer = torch.optim.Adam(self.parameters, **{"lr": 0.01, **settings.options})

    def step(self, index: int) -> None:
        self.optimizer.zero_grad()
        self._backward(self.ddp, self._minibatch(index))
        if self.scaler or self._is_finite():
            self._update(self.optimizer)

    def _is_finite(self) -> bool:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return all(bool(g.isfinite().all()) for g in gradients)

    def remake(self) -> None:
        self.optimizer = torch.optim.Adam(self.parameters, lr=0.01)


class OptimizerTraining(Training):
    """A bare model, and an optimizer that owns the exchange."""

    def __init__(
        self, settings: Settings, *, kind: Callable[..., ExchangingOptimizer], closure: bool = False
    ) -> None:
        super().__init__(settings)
        self._kind, self._needs_closure = kind, closure
        self.remake()

    def remake(self) -> None:
        self.exchange = make_exchange(self.settings)
        self.optimizer = self._kind(self.named(), self.exchange, **self.settings.options)

    def step(self, index: int) -> None:
        minibatch = self._minibatch(index)

        def closure() -> float:
            self.optimizer.zero_grad()
            return float(self._backward(self.model, minibatch))

        if self._needs_closure:
            self.optimizer.step(closure)
        else:
            closure()
            self._update(self.optimizer)

    def finish(self) -> None:
        if hasattr(self.optimizer, "synchronize"):
            self.optimizer.synchronize()
        super().finish()

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "exchange": self.exchange.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.exchange.load_state_dict(state["exchange"])


class RoundsTraining(Training):
    """A bare model, and local steps with exchanges now and then."""

    def __init__(
        self, settings: Settings, *, kind: Callable[..., LocalRounds], clients: int = 0
    ) -> None:
        super().__init__(settings)
        self._kind, self._clients = kind, clients
        self.remake()

    def remake(self) -> None:
        self.exchange = make_exchange(self.settings)
        self.rounds = self._kind(self.named(), self.exchange, **self.settings.options)
        self.optimizer = self.rounds.inner

    def step(self, index: int) -> None:
        """Take a local step; with clients, play a round."""
        if not self._clients:
            self._local_step(index)
            return
        for client in self.rounds.clients():
            for local in range(2):
                self._local_step(2 * index + local, client)

    def _local_step(self, index: int, client: int = 0) -> None:
        self.rounds.zero_grad()
        self._backward(self.model, self._minibatch(index, client))
        self._update(self.rounds)

    def finish(self) -> None:
        self.rounds.synchronize()
        super().finish()

    def state_dict(self) -> dict[str, Any]:
        return self.rounds.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rounds.load_state_dict(state)


class ShardedTraining(RoundsTraining):
    """A model that FSDP divides within each of two nodes, which exchange shard by shard.

    A rank that does not come to what FSDP itself sends is waited for by FSDP, as long as by the
    exchange.
    """

    def _place(self, model: nn.Module) -> nn.Module:
        nodes = dist.get_world_size() // SHARDS
        mesh = init_device_mesh("cpu", (nodes, SHARDS), mesh_dim_names=("replicate", "shard"))
        timeout = timedelta(seconds=TIMEOUT_SECONDS)
        dist.distributed_c10d._set_pg_timeout(timeout, mesh["shard"].get_group())
        self._group = mesh["replicate"].get_group()
        for layer in model[::2]:
            fully_shard(layer, mesh=mesh["shard"])
        return fully_shard(model, mesh=mesh["shard"])

    def remake(self) -> None:
        settings = self.settings.with_exchange(process_group=self._group)
        self.exchange = make_exchange(settings)
        named = local_shards(self.named())
        self.rounds = self._kind(named, self.exchange, **self.settings.options)
        self.optimizer = getattr(self.rounds, "inner", self.rounds)
        self._state = register(self.model, self.rounds)

    def state_dict(self) -> dict[str, Any]:
        return self._state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state.load_state_dict(state)

    def finish(self) -> None:
        if hasattr(self.rounds, "synchronize"):
            self.rounds.synchronize()
        Training.finish(self)
        self._shown = [parameter.full_tensor().detach() for parameter in self.parameters]

    def shown(self) -> list[torch.Tensor]:
        return self._shown
