"""The state of a compressed reduction of an FSDP2 model."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import AllGatherObject, AllReduce
from comm_hooks.compressors.base import Compressor
from comm_hooks.exchange import Exchange, ExchangeSettings
from comm_hooks.exchange.routes.route import fill_nan_
from comm_hooks.exchange.settings import require_gradients
from comm_hooks.frameworks.fsdp.units import Unit, warn_of_unsharded
from comm_hooks.requirements import first_of
from comm_hooks.warnings import warn_at_first_step
from comm_hooks.wire.checksum import fingerprint


class CompressedReduction:
    """The exchange of an FSDP2 model's gradients, and the state that every rank saves.

    Args:
        exchange: the exchange that averages shards of gradients.
        units: the FSDP modules of the model.
        shards: the indices of the shards with residuals on this rank.
        loss_scale: see :class:`~comm_hooks.CompressionState`.
        others: connects this rank to those that end a step with it, besides the ranks of the
            exchange; None if there are none.
        model_parallel_groups: groups of ranks with other parts of a model, which exchange nothing:
            that of ``others`` if the exchange is between replicas; [] if it is between shards.

    Attributes:
        exchange: the exchange, with its settings, residuals and counts of steps and bytes.
    """

    def __init__(
        self,
        exchange: Exchange,
        units: Sequence[Unit],
        shards: Sequence[int],
        loss_scale: Callable[[], float] | None,
        others: Transport | None,
        model_parallel_groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.exchange = exchange
        self.model_parallel_groups = list(model_parallel_groups)
        self._units = units
        self._shards = shards
        self._loss_scale = loss_scale
        self._others = others
        self._compared_at: int | None = None

    def stats(self) -> dict[str, float]:
        """Return the traffic of this rank; see :meth:`~comm_hooks.Exchange.stats`.

        FSDP's own traffic, to gather parameters and to reduce inside a node, is not counted.
        """
        return self.exchange.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, plain numbers and tensors, to be saved on every rank.

        Save between steps: waiting gradients (``set_requires_all_reduce(False)``) are not in it.
        """
        return self.exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the :meth:`state_dict` of this rank.

        Raises:
            ValueError: if it is another rank's, or of another number of shards; nothing is changed.
        """
        self._check_names([state])
        self.exchange.load_state_dict(state)

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the states of a run with another number of nodes and as many shards.

        Args:
            states: the states of all ranks that held this rank's shard, in the order of the nodes;
                see :meth:`~comm_hooks.Exchange.load_state_dicts`.

        Raises:
            ValueError: if states are of other shards or another number of them; nothing is changed.
        """
        self._check_names(states)
        self.exchange.load_state_dicts(states)

    def begin(self) -> float:
        """Compare the weights of replicas, if that is due, and return the present loss scale."""
        if self._others:
            self._compare_replicas(self._others)
        return float(self._loss_scale()) if self._loss_scale else 1.0

    def end(self) -> None:
        """Count a step of the exchange at the end of the backward pass that is running."""
        exchange, step = self.exchange, self.exchange.step

        def end_step() -> None:
            # Every module's reduction registers one; the first one ends the step.
            if exchange.step == step:
                health = exchange.end_step(self._agree if self._others else None)
                for unit in self._units:
                    for gradient in unit.gradients():
                        fill_nan_(gradient, health.to(gradient.device))

        torch.autograd.Variable._execution_engine.queue_callback(end_step)

    def _agree(self, health: torch.Tensor) -> torch.Tensor:
        """Return 0 if the gradients of all ranks that end a step together are finite, else NaN."""
        assert self._others is not None
        total = self._others.perform(AllReduce(health.view(1)))
        return total.squeeze(0)

    def _compare_replicas(self, others: Transport) -> None:
        """Raise ``ValueError`` on all ranks if replicas of any shard hold different weights.

        Compares at the first exchange, and then as often as its ``verify_every`` says.
        """
        exchange, is_first = self.exchange, self._compared_at is None
        if self._compared_at == exchange.step or not (is_first or exchange.verifies()):
            return
        self._compared_at = exchange.step
        parameters = {n: p for unit in self._units for n, p in unit.parameters().items()}
        digests = {name: int(fingerprint([p])) for name, p in parameters.items()}
        replicas, shards = exchange.transport, others
        if not self.model_parallel_groups:
            replicas, shards = shards, replicas
        found = replicas.perform(AllGatherObject(digests))
        differing = [n for n in digests if any(each[n] != digests[n] for each in found)]
        # A difference may lie in one shard only, but all ranks must stop together.
        names = dict.fromkeys(
            name for part in shards.perform(AllGatherObject(differing)) for name in part
        )
        if names:
            raise ValueError(
                f"replicas {'start from' if is_first else 'have come to'} different weights, in "
                f"{first_of(list(names))}: initialize them alike (torch.manual_seed) or load the "
                "same checkpoint everywhere, and let nothing but the optimizer change them"
            )

    def _check_names(self, states: Sequence[Mapping[str, Any]]) -> None:
        memory = self.exchange.memory
        if memory is None:
            return
        pieces = [piece for unit in self._units for piece in unit.pieces(frozen=True)]
        known = {piece.shard_name(shard) for piece in pieces for shard in self._shards}
        saved = {name for s in states for name in memory.parameters_in(s.get("memory", {}))}
        if strangers := sorted(saved - known):
            raise ValueError(
                "the state has residuals of shards that this rank does not have: "
                f"{', '.join(strangers[:3])} (parameter[shard/shards]): use the model and the "
                "number of shards of the run that saved it"
            )


def new_exchange(
    model: nn.Module,
    units: Sequence[Unit],
    compressor: Compressor | str,
    caller: str,
    group: dist.ProcessGroup,
    settings: Mapping[str, Any],
) -> Exchange:
    """Return an exchange that also compares parameter names and shapes between ranks.

    Raises:
        ValueError: for invalid settings, or a ``memory`` that sends changes of gradients.
    """
    exchange = Exchange(ExchangeSettings.of(compressor, **settings), process_group=group)
    require_gradients(exchange.settings, caller)
    shapes = [(unit.name, p.name, p.shape) for unit in units for p in unit.pieces()]
    exchange.agree_on(
        {
            "model": hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest(),
            "shards": units[0].group.mesh_info.shard_mesh_size,
        }
    )
    warn_of_unsharded(model, units)
    warn_at_first_step(exchange.compressor, model.parameters())
    return exchange
