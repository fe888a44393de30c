"""Rounds of local work: several steps on each rank, then one exchange of how far each has come."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, overload, runtime_checkable

import torch
from torch.optim import SGD, Optimizer

from comm_hooks.checks import checksum
from comm_hooks.compressors.base import require_choice
from comm_hooks.exchange import Exchange
from comm_hooks.optim.rounds.checks import check_rounds
from comm_hooks.optim.rounds.clients import ClientStates
from comm_hooks.optim.rounds.collecting import (
    Aggregate,
    Collection,
    Contribution,
    PlainCollection,
)
from comm_hooks.optim.rounds.fragments import cut
from comm_hooks.optim.rounds.participation import ClientSampling
from comm_hooks.optim.rounds.server_model import ServerModel


@runtime_checkable
class SharesStatistics(Protocol):
    """An inner optimizer that wants more averaged at the end of a round than the parameters."""

    def statistics(self) -> dict[str, torch.Tensor]:
        """Return this client's tensors; the same names and shapes on all clients."""

    def set_statistics(self, mean: Mapping[str, torch.Tensor]) -> None:
        """Take the mean over the round's clients."""


class LocalRounds:
    """Several local steps on every rank, then an exchange of the deltas and a server step.

    Local SGD (Stich, ICLR 2019), FedAvg (McMahan et al., AISTATS 2017) and, with an adaptive
    server, FedOPT (Reddi et al., ICLR 2021) and SAFL.  x is the server's model, the same on all
    ranks.  A round:

    1. every rank (client) i starts at x_i = x and takes K = ``local_steps`` steps with ``inner``;
    2. delta_i = x - x_i goes through ``exchange``, error feedback included: D = mean_i C(delta_i);
    3. ``server`` takes a step at x with D for a gradient, identically on every rank.

    This is also the remedy for compressors that send few coordinates under adaptive methods.  An
    adaptive server that sees a coordinate once in 64 steps mistakes the pulse for noise; one whose
    second moment is frozen gets stale.  Here each client's second moment sees every one of its own
    dense gradients and stays alive, and what arrives is a displacement in units of the learning
    rate, which the server only has to add.

    **Fragments** (Streaming DiLoCo, Douillard et al., 2025).  With ``fragments=F`` the parameters
    are dealt into F parts; part f is exchanged at the steps t with t mod K = floor(f K / F), every
    K steps still.  The link is used evenly, with F = K at every step, and progress elsewhere
    goes on while one part is averaged.

    **Many clients.**  With ``participation`` each rank plays several clients in turn::

        for _ in range(number_of_rounds):
            for client in rounds.clients():
                for batch in batches[client]:  # the client's K steps
                    loss = loss_function(model, batch)
                    loss.backward()
                    rounds.step()
                    rounds.zero_grad()

    Every client has a residual of its own, kept while it is absent, and with
    ``client_state="keep"`` its own inner state.  Without a memory and with a linear compressor a
    rank adds its clients' deltas up before it compresses; otherwise every client's payload crosses.

    A client whose delta is not finite is left out of the round: the others are averaged by the
    right divisor, all ranks warn and name it, its residual stays and its inner state is forgotten.

    Args:
        inner: the optimizer of the local steps.
        exchange: how deltas are averaged.
        server: an optimizer over the same parameters that sees D as their gradient; by default
            x = x - D, plain averaging.
        local_steps: K.  With ``participation`` the loop above decides.
        fragments: F, at most K.
        participation: the clients, if there are more than ranks.
        client_state: with ``participation``: ``"keep"`` each client's inner state until it is drawn
            again, or ``"reset"`` it at the start of every turn.

    State: one copy of the parameters (x) beside the inner and the server's state; with
    ``participation`` a residual, and unless reset an inner state, for every client played here.
    Every rank saves its own :meth:`state_dict`.

    Between exchanges replicas differ.  Evaluate and save within :meth:`server_parameters`, and end
    with :meth:`synchronize`.

    Raises:
        ValueError: for settings that cannot work; nothing has been sent.

    Not supported: weights for clients of different size; ``fragments`` with ``participation``;
    buffers (batch norm statistics stay each rank's own); parameters added later.

    Example::

        >>> from comm_hooks import ErrorFeedback, Exchange, TopK
        >>> from comm_hooks.optim import LocalRounds
        >>> inner = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
        >>> exchange = Exchange(TopK(density=1 / 16, value_bits=1), memory=ErrorFeedback())
        >>> rounds = LocalRounds(inner, exchange, local_steps=8, fragments=2)
        >>> for _ in range(16):
        ...     model(torch.ones(1, 8)).square().sum().backward()
        ...     rounds.step()
        ...     rounds.zero_grad()
        >>> rounds.synchronize()
    """

    # GradScaler then calls step() on every rank, also on one that overflowed: its step does not
    # count for the parameters, but it does for when to exchange.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        inner: Optimizer,
        exchange: Exchange,
        server: Optimizer | None = None,
        *,
        local_steps: int | None = None,
        fragments: int = 1,
        participation: ClientSampling | None = None,
        client_state: str = "keep",
    ) -> None:
        check_rounds(self, inner, exchange, server, local_steps, fragments, participation)
        require_choice(self, "client_state", client_state, ("keep", "reset"))
        self.inner = inner
        self.exchange = exchange
        self._parameters = [p for group in inner.param_groups for p in group["params"]]
        self.server = SGD(self._parameters, lr=1.0) if server is None else server
        self.local_steps = local_steps
        self.participation = participation
        self.client_state = client_state
        self.steps = 0
        self.round_index = 0
        names = [name for group in inner.param_groups for name in group.get("param_names", ())]
        self._names = names or [str(index) for index in range(len(self._parameters))]
        self._fragments = cut([p.numel() for p in self._parameters], fragments)
        self._exchanged_at = [0] * fragments
        self._model = ServerModel(self._parameters, self.server)
        self._clients = ClientStates(inner, exchange.memory, keep_inner=client_state == "keep")
        exchange.owner_settings = {
            "rounds": type(self).__name__,
            "inner": type(inner).__name__,
            "server": type(self.server).__name__,
            "local_steps": local_steps,
            "fragments": fragments,
            "participation": repr(participation),
            "client_state": client_state,
            "checksum of the initial model": checksum(self._parameters),
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's, for gradient clipping and scalers; schedule ``inner`` itself."""
        return self.inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        self.inner.zero_grad(set_to_none)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one local step and, where one is due, exchange: then all ranks must be here.

        Args:
            closure: re-evaluates the model and returns the loss.

        Raises:
            ConfigMismatchError: in the first exchange, if ranks are configured differently or start
                from different models.
        """
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if grad_scale is not None:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            torch._foreach_div_(gradients, grad_scale)
        if found_inf is None or not found_inf:
            self.inner.step()
        self.steps += 1
        if self.participation is None:
            assert self.local_steps
            count = len(self._fragments)
            for index, fragment in enumerate(self._fragments):
                if self.steps % self.local_steps == index * self.local_steps // count:
                    self._exchange_own(fragment)
                    self._exchanged_at[index] = self.steps
        return loss

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange now what has not been, so that replicas agree; all ranks must call it."""
        outstanding = [
            place
            for fragment, step in zip(self._fragments, self._exchanged_at, strict=True)
            for place in fragment
            if step != self.steps
        ]
        if self.participation is None and outstanding:
            self._exchange_own(sorted(outstanding))
            self._exchanged_at = [self.steps] * len(self._fragments)

    def server_parameters(self) -> AbstractContextManager[None]:
        """Put the server's model, the same on all ranks, in place of this rank's for a while.

        Local progress comes back afterwards.  Sends nothing.
        """
        return self._model.shown()

    def clients(self) -> Iterator[int]:
        """Play one round: yield, in turn, each client of this rank, whose steps are to be taken.

        The model is the server's at the start of each turn.  When the loop is over the round's
        deltas have been exchanged and the server has taken its step.  All ranks must run the loop
        to its end; should all leave it early, the model is the server's of before the round.

        Raises:
            ValueError: without ``participation``.
        """
        if self.participation is None:
            raise ValueError(
                "LocalRounds: clients() needs participation=Participation(clients=...); without, "
                "every rank is one client and step() exchanges by itself"
            )
        own_rank = self.exchange.transport.rank
        everything = range(len(self._parameters))
        turns = self.participation.turns(self.round_index, self.exchange.transport)
        collection = self._collection(everything)
        for turn in turns:
            client = turn[own_rank]
            contribution, memory = None, None
            if client is not None:
                self._model.restore()
                self._clients.enter(client)
                try:
                    yield client
                except GeneratorExit:
                    self._model.restore()
                    raise
                self._clients.leave(client)
                memory = self._clients.memory(client)
                contribution = self._contribution(client, everything)
                if contribution is None:
                    self._clients.forget_inner(client)
            collection.add(turn, contribution, memory)
        self._conclude(everything, collection.finish())

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save beside the model: safe for ``weights_only``."""
        values = self._model.values
        return {
            "steps": self.steps,
            "round_index": self.round_index,
            "exchanged_at": list(self._exchanged_at),
            "shared": dict(zip(self._names, (v.clone() for v in values), strict=True)),
            "inner": self.inner.state_dict(),
            "server": self.server.state_dict(),
            "exchange": self.exchange.state_dict(),
            "clients": self._clients.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank; the model is loaded apart.

        Raises:
            ValueError: if the state is another rank's or another model's; nothing is changed.
        """
        shapes = {n: tuple(s.shape) for n, s in zip(self._names, self._model.values, strict=True)}
        if {name: tuple(tensor.shape) for name, tensor in state["shared"].items()} != shapes:
            raise ValueError(
                f"{type(self).__name__}: the state has other parameters than this model: it was "
                f"saved with {len(state['shared'])}, here are {len(shapes)}, and all names and "
                "shapes must be the same"
            )
        self.exchange.load_state_dict(state["exchange"])
        self._clients.load_state_dict(state["clients"])
        self.inner.load_state_dict(state["inner"])
        self.server.load_state_dict(state["server"])
        torch._foreach_copy_(self._model.values, [state["shared"][name] for name in self._names])
        self.steps = state["steps"]
        self.round_index = state["round_index"]
        self._exchanged_at = list(state["exchanged_at"])

    def _exchange_own(self, fragment: Sequence[int]) -> None:
        """Exchange this rank's progress on a fragment and let the server take its step there."""
        contribution = self._contribution(self.exchange.transport.rank, fragment)
        if contribution is None:
            # What spoiled this fragment has reached the others or soon will.
            self.inner.state.clear()
            self._model.restore()
        collection = self._collection(fragment)
        ranks = range(self.exchange.transport.world_size)
        collection.add(ranks, contribution, self.exchange.memory)
        self._conclude(fragment, collection.finish())

    def _contribution(self, client: int, fragment: Sequence[int]) -> Contribution | None:
        """Return what a client has done since the last exchange; None if it is not finite."""
        delta = self._model.progress(fragment)
        if not is_finite(delta):
            return None
        statistics = {}
        if isinstance(self.inner, SharesStatistics):
            statistics = self.inner.statistics()
        return Contribution(client, delta, statistics)

    def _collection(self, fragment: Sequence[int]) -> Collection:
        delta = {self._names[i]: torch.zeros_like(self._model.values[i]) for i in fragment}
        statistics = {}
        if isinstance(self.inner, SharesStatistics):
            statistics = {n: torch.zeros_like(t) for n, t in self.inner.statistics().items()}
        if self.participation is None:
            return PlainCollection(self.exchange, delta, statistics)
        return self.participation.collection(self.exchange, delta, statistics)

    def _conclude(self, fragment: Sequence[int], aggregate: Aggregate) -> None:
        """Name the clients that are missing, and let the server take its step with the mean."""
        if aggregate.missing:
            warnings.warn(
                f"round {self.round_index}: left out, having returned values that are not finite: "
                f"client {', '.join(map(str, aggregate.missing))}; the mean is over the other "
                f"{aggregate.contributors} of {aggregate.contributors + len(aggregate.missing)}",
                stacklevel=4,
            )
        if aggregate.delta is None:
            self._model.restore(fragment)
        else:
            self._model.step(fragment, aggregate.delta)
            if isinstance(self.inner, SharesStatistics):
                self.inner.set_statistics(aggregate.statistics)
        self.round_index += 1


def is_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all elements are finite; reads one number back from the device."""
    return bool(torch.isfinite(torch.stack(torch._foreach_norm(list(tensors))).sum()))
