"""Rounds of local work: several steps on each rank, then one exchange of how far each has come."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, overload, runtime_checkable

import torch
from torch.optim import SGD, Optimizer

from comm_hooks.compressors.base import require_choice
from comm_hooks.exchange import Exchange
from comm_hooks.memory.base import Memory
from comm_hooks.optim.rounds.checks import check_rounds
from comm_hooks.optim.rounds.clients import ClientStates
from comm_hooks.optim.rounds.fragments import cut
from comm_hooks.optim.rounds.participation import Participation
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
        participation: Participation | None = None,
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
            "participation": participation,
            "client_state": client_state,
            "checksum of the initial model": _checksum(self._parameters),
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
        # Linear payloads of one rank's clients can be added up before they are made.
        adds_up = self.exchange.compressor.linear and self.exchange.memory is None
        own_rank = self.exchange.transport.rank
        turns = self.participation.turns(self.round_index, self.exchange.transport.world_size)
        scheduled = [client for turn in turns for client in turn if client is not None]
        everything = range(len(self._parameters))
        total = [torch.zeros_like(values) for values in self._model.values]
        statistics: dict[str, torch.Tensor] = {}
        played: set[int] = set()
        contributed: list[int] = []
        memory = self.exchange.memory
        for turn in turns:
            client = turn[own_rank]
            delta = [torch.zeros_like(values) for values in total]
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
                delta = self._model.progress(everything)
                if is_finite(delta):
                    played.add(client)
                    self._add_statistics(statistics)
                else:
                    torch._foreach_zero_(delta)
                    self._clients.forget_inner(client)
            if not adds_up:
                # A rank that sits out sends zeros, which leave whatever memory this is alone.
                contributed += self._sum(everything, delta, turn, played, memory)
            torch._foreach_add_(total, delta)
        if adds_up:
            contributed = self._sum(everything, total, scheduled, played, None)
        self._conclude(everything, total, statistics, scheduled, contributed)

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
        own_rank = self.exchange.transport.rank
        ranks = range(self.exchange.transport.world_size)
        delta = self._model.progress(fragment)
        statistics: dict[str, torch.Tensor] = {}
        own = {own_rank}
        if is_finite(delta):
            self._add_statistics(statistics)
        else:
            own = set()
            torch._foreach_zero_(delta)
            # What spoiled this fragment has reached the others or soon will.
            self.inner.state.clear()
            self._model.restore()
        contributed = self._sum(fragment, delta, ranks, own, self.exchange.memory)
        self._conclude(fragment, delta, statistics, ranks, contributed)

    def _sum(
        self,
        fragment: Sequence[int],
        delta: list[torch.Tensor],
        scheduled: Sequence[int | None],
        own: set[int],
        memory: Memory | None,
    ) -> list[int]:
        """Replace ``delta`` by its sum over ranks; return who of ``scheduled`` is in it.

        Args:
            own: the clients that this rank's delta is of, none if it is zero.
        """
        flags = torch.tensor([float(c in own) for c in scheduled], device=delta[0].device)
        names = [self._names[i] for i in fragment]
        # The exchange tells its workspaces apart by the names in them.
        message = {
            **dict(zip(names, delta, strict=True)),
            f"<contributors with {names[0]}>": flags,
        }
        self.exchange.average_(message, memory=memory)
        torch._foreach_mul_(delta, self.exchange.transport.world_size)
        is_in = (flags * self.exchange.transport.world_size > 0.5).tolist()
        return [c for c, here in zip(scheduled, is_in, strict=True) if here and c is not None]

    def _conclude(
        self,
        fragment: Sequence[int],
        total: list[torch.Tensor],
        statistics: dict[str, torch.Tensor],
        scheduled: Sequence[int],
        contributed: Sequence[int],
    ) -> None:
        """Name the clients that are missing, and let the server take its step with the mean."""
        missing = sorted(set(scheduled) - set(contributed))
        if missing:
            warnings.warn(
                f"round {self.round_index}: left out, having returned values that are not finite: "
                f"client {', '.join(map(str, missing))}; the mean is over the other "
                f"{len(contributed)} of {len(scheduled)}",
                stacklevel=4,
            )
        if contributed:
            torch._foreach_div_(total, len(contributed))
            self._model.step(fragment, total)
            self._share_statistics(statistics, len(contributed))
        else:
            self._model.restore(fragment)
        self.round_index += 1

    def _add_statistics(self, total: dict[str, torch.Tensor]) -> None:
        if isinstance(self.inner, SharesStatistics):
            for name, tensor in self.inner.statistics().items():
                total[name] = total[name] + tensor if name in total else tensor.clone()

    def _share_statistics(self, total: dict[str, torch.Tensor], contributors: int) -> None:
        """Average what the inner optimizer wants averaged, exactly."""
        if not isinstance(self.inner, SharesStatistics):
            return
        total = total or {n: torch.zeros_like(t) for n, t in self.inner.statistics().items()}
        self.exchange.average_(total, compress=False)
        torch._foreach_mul_(list(total.values()), self.exchange.transport.world_size / contributors)
        self.inner.set_statistics(total)


def is_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all elements are finite; reads one number back from the device."""
    return bool(torch.isfinite(torch.stack(torch._foreach_norm(list(tensors))).sum()))


def _checksum(parameters: Sequence[torch.Tensor]) -> int:
    """Return the sum of all bytes: equal for equal models, whatever the device."""
    octets = [p.detach().contiguous().view(-1).view(torch.uint8) for p in parameters]
    return sum(int(o.sum(dtype=torch.int64)) for o in octets)
