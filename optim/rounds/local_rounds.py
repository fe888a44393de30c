"""Rounds of local work: several steps on each rank, then one exchange of how far each has come."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, overload

import torch
from torch.optim import SGD, Optimizer

from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.exchange import Exchange
from comm_hooks.exchange.agreement import hyperparameters_of
from comm_hooks.exchange.resuming import check_complete, check_whole, seal_own
from comm_hooks.exchange.sealing import SEAL, require_seal, sealed
from comm_hooks.optim.double_averaging import (
    averaging,
    check_double_averaging,
    refuse_double_averaging,
)
from comm_hooks.optim.observed import observed
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
from comm_hooks.optim.rounds.progress import Progress
from comm_hooks.optim.rounds.server_model import ServerModel
from comm_hooks.optim.rounds.sharing import SharesStatistics
from comm_hooks.optim.wrapping import WrappingOptimizer
from comm_hooks.requirements import require_choice

# Squares of what is above 2^64 overflow in float32: this leaves room for sums of 2^13 clients.
_LARGEST = 2.0**50


class LocalRounds(WrappingOptimizer):
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

    A client whose delta (or second moment, where that is shared) is not finite, or of a norm above
    2^50, is left out of the round: the others are averaged by the right divisor, all ranks warn and
    name it, its residual stays and its inner state is forgotten.

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
    Every rank saves its own :meth:`state_dict`, which has its model's parameters too:
    ``save_rank_file(rounds, folder)``.  Where clients are private, only its ``"released"`` part may
    be published (:meth:`release_state_dict`): all else, :meth:`stats` and :attr:`steps` tell of
    single clients.  What a framework saves of rank 0 serves the others as well: they start from the
    server's model, and warn of what is lost.

    It is an optimizer like any other, whose groups and state are those of ``inner``: schedulers set
    the local learning rate.  Between exchanges replicas differ.  Evaluate and save within
    :meth:`server_parameters`, and end with :meth:`synchronize`.

    Raises:
        ValueError: for settings that cannot work; nothing has been sent.

    Not supported: weights for clients of different size; ``fragments`` with ``participation``;
    buffers (batch norm statistics stay each rank's own); parameters added later; copies; another
    number of ranks when resuming.

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
        super().__init__(inner)
        self.exchange = exchange
        self._parameters = [p for group in inner.param_groups for p in group["params"]]
        self._nbytes = sum(p.nbytes for p in self._parameters)
        self.server = SGD(self._parameters, lr=1.0) if server is None else server
        self.local_steps = local_steps
        self.participation = participation
        self.client_state = client_state
        names = [name for group in inner.param_groups for name in group.get("param_names", ())]
        self._names = names or [str(index) for index in range(len(self._parameters))]
        self._fragments = cut([p.numel() for p in self._parameters], fragments)
        self._progress = Progress(exchanged_at=[0] * fragments)
        self._model = ServerModel(self._parameters, self.server)
        self._clients = ClientStates(inner, exchange.memory, keep_inner=client_state == "keep")
        exchange.agree_on(
            {
                "rounds": type(self).__name__,
                "inner": type(inner).__name__,
                "server": type(self.server).__name__,
                "local_steps": local_steps,
                "fragments": fragments,
                "participation": repr(participation),
                "client_state": client_state,
            }
        )
        exchange.owner = self

    @property
    def steps(self) -> int:
        """How many local steps this rank has taken."""
        return self._progress.steps

    @property
    def round_index(self) -> int:
        """How many exchanges there have been, each of a fragment."""
        return self._progress.round_index

    def hyperparameters(self) -> dict[str, Any]:
        """Return what the next exchange goes by, which it compares between ranks.

        Those of the inner optimizer are compared unless there are clients, who may have their own.
        """
        found = {"local step": self.steps, "round": self.round_index}
        if self.participation is not None:
            del found["local step"]  # clients may have different amounts of data
        parts = {"server": self.server, "inner": self.inner}
        for name, optimizer in parts.items():
            if name == "server" or self.participation is None:
                groups = hyperparameters_of(optimizer.param_groups)
                found |= {f"{name} {key}": value for key, value in groups.items()}
        return found

    def replica(self) -> Sequence[torch.Tensor]:
        """Return what is the same on all ranks before every exchange: the server's model."""
        return self._model.values

    def names(self) -> Sequence[str]:
        """Return the names of the parameters."""
        return self._names

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
            ValueError: in the first step, if DDP or FSDP has averaged the gradients, which nobody
                must before they are used; with ``participation`` :meth:`clients` does so.
            ConfigMismatchError: in the first exchange, if ranks are configured differently or start
                from different models.
        """
        self._tell_what_was_loaded()
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        progress, transport = self._progress, self.exchange.transport
        if not progress.knows_gradients:
            own = [p.grad for p in self._parameters]
            if self.participation is None:
                check_double_averaging(transport, self._parameters, own)
                progress.knows_gradients = True
            elif progress.averaging is None:
                # Other ranks may have no client, or one without data: compared when turns are over.
                progress.averaging = averaging(transport, self._parameters, own)
        if grad_scale is not None:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            torch._foreach_div_(gradients, grad_scale)
        if found_inf is None or not found_inf:
            self.inner.step()
        progress.steps += 1
        ranks = transport.world_size
        progress.bytes_uncompressed += 2 * (ranks - 1) * self._nbytes // ranks
        if self.participation is None:
            assert self.local_steps
            count = len(self._fragments)
            for index, fragment in enumerate(self._fragments):
                if progress.steps % self.local_steps == index * self.local_steps // count:
                    self._exchange_own(fragment)
                    progress.exchanged_at[index] = progress.steps
        return loss

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange now what has not been, so that replicas agree; all ranks must call it."""
        outstanding = [
            place
            for fragment, step in zip(self._fragments, self._progress.exchanged_at, strict=True)
            for place in fragment
            if step != self.steps
        ]
        if self.participation is None and outstanding:
            self._exchange_own(sorted(outstanding))
            self._progress.exchanged_at = [self.steps] * len(self._fragments)

    def stats(self) -> dict[str, float]:
        """Return what this rank moved since the start; see :meth:`~comm_hooks.Exchange.stats`.

        What it replaces is an all-reduce of the gradients at every local step: ``steps`` counts
        those, ``bytes_uncompressed`` is what they would have sent, ``compression_ratio`` that over
        the bytes sent.  ``rounds`` counts the exchanges, each of a fragment.
        """
        stats = self.exchange.stats()
        uncompressed, sent = self._progress.bytes_uncompressed, stats["bytes_sent"]
        return {
            **stats,
            "steps": self.steps,
            "rounds": self.round_index,
            "bytes_uncompressed": uncompressed,
            "compression_ratio": uncompressed / sent if sent else 1.0,
        }

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
            ValueError: without ``participation``; after the first turn in which several ranks took
                steps, if DDP or FSDP has averaged the gradients: the model is the server's.
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
                    with self.participation.turn():
                        yield client
                except GeneratorExit:
                    self._model.restore()
                    self._clients.leave(client, keep=False)
                    raise
            self._refuse_averaging()
            if client is not None:
                memory = self._clients.memory(client)
                contribution = self._contribution(client, everything)
                self._clients.leave(client, keep=contribution is not None)
            collection.add(turn, contribution, memory)
        self._conclude(everything, collection.finish())

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore this rank's part of what :meth:`state_dict` returned on all ranks, in rank order.

        Raises:
            ValueError: if states are missing, out of order or of different steps, and on another
                number of ranks: each has a model of its own between exchanges.
        """
        check_complete(states)
        transport = self.exchange.transport
        if len(states) != transport.world_size:
            raise ValueError(
                f"{type(self).__name__}: what {len(states)} ranks saved cannot go on with "
                f"{transport.world_size}, since each has a model of its own: end with "
                "synchronize(), save the model, and begin the rounds anew"
            )
        self.load_state_dict(dict(states[transport.rank]))

    def release_state_dict(self) -> dict[str, Any]:
        """Return what rounds of private clients may show to anybody: what their guarantee covers.

        That is the server's ``model`` by name, the ``server``'s state and the ``round_index``.
        Residuals, clients' inner states and how many steps were taken are not in it, nor what only
        this rank has.  To go on with the run, save :meth:`state_dict` in a place that is private.
        """
        shared = (value.clone() for value in self._model.values)
        return {
            "model": dict(zip(self._names, shared, strict=True)),
            # A copy, like all the rest: the state is that of this moment.
            "server": copy.deepcopy(self.server.state_dict()),
            "round_index": self.round_index,
        }

    def _state_to_save(self) -> dict[str, Any]:
        shared = self._model.values
        own = {
            name: p.detach().clone()
            for name, p, value in zip(self._names, self._parameters, shared, strict=True)
            if not torch.equal(p, value)
        }
        inner = copy.deepcopy(self.inner.state_dict())
        return {
            **self.exchange.state_dict(),
            **inner,
            "rounds": sealed(
                {
                    "released": self.release_state_dict(),
                    "private": {
                        "inner": sealed(inner)[SEAL],
                        "steps": self.steps,
                        "exchanged_at": list(self._progress.exchanged_at),
                        "own": own,
                        "clients": self._clients.state_dict(),
                    },
                }
            ),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        rounds, transport = state.get("rounds"), self.exchange.transport
        if not isinstance(rounds, Mapping):
            raise ValueError(
                f"{type(self).__name__}: the state is not one of rounds: load what their "
                "state_dict() returned"
            )
        require_seal(rounds)
        check_whole(state)
        released, private = rounds["released"], rounds["private"]
        inner = {key: state[key] for key in self.inner.state_dict() if key in state}
        require_seal({**inner, SEAL: private["inner"]})
        shapes = {n: tuple(s.shape) for n, s in zip(self._names, self._model.values, strict=True)}
        if {name: tuple(tensor.shape) for name, tensor in released["model"].items()} != shapes:
            raise ValueError(
                f"{type(self).__name__}: the state has other parameters than this model: it was "
                f"saved with {len(released['model'])}, here are {len(shapes)}, and all names and "
                "shapes must be the same"
            )
        loaded_from = state["rank"] if state["rank"] != transport.rank else None
        if loaded_from is not None:
            # What only the rank that saved it may go on with, lest it be counted twice.
            private = {**private, "own": {}, "clients": {}}
            keys = {"memory", "server_memory"} & state.keys()
            remembered: dict[str, Any] = {key: {} for key in keys}
            state = seal_own({**state, **remembered, "rank": transport.rank})
        self.exchange.load_state_dict(state)
        self._clients.load_state_dict(private["clients"])
        self.inner.load_state_dict(state)
        self.server.load_state_dict(released["server"])
        self._model.load([released["model"][name] for name in self._names])
        with torch.no_grad():
            for name, parameter in zip(self._names, self._parameters, strict=True):
                if name in private["own"]:
                    parameter.copy_(private["own"][name])
        progress = self._progress
        progress.steps = private["steps"]
        progress.round_index = released["round_index"]
        progress.exchanged_at = list(private["exchanged_at"])
        progress.loaded_from = loaded_from

    def _tell_what_was_loaded(self) -> None:
        """Warn, once, if what is lost has not been restored by now from this rank's own file."""
        other, self._progress.loaded_from = self._progress.loaded_from, None
        if other is not None:
            warnings.warn(
                f"{type(self).__name__}: this rank goes on from the state that rank {other} saved, "
                "without a residual and without what it had not exchanged itself: let every rank "
                "save_rank_file(rounds, folder) with the checkpoint, and load_rank_files(rounds, "
                "folder) when that is loaded",
                stacklevel=5,
            )

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
        """Return what a client has done since the last exchange; None if it is not finite.

        Nor may it be so large that the sum over clients, or its norm, would not be.
        """
        delta, statistics = self._model.progress(fragment), {}
        if isinstance(self.inner, SharesStatistics):
            statistics = self.inner.statistics()
        if not is_finite([*delta, *statistics.values()]):
            return None
        return Contribution(client, delta, statistics)

    def _refuse_averaging(self) -> None:
        """Raise ``ValueError`` on all ranks if somebody else averaged what this turn's steps saw.

        Until it is known: one rank alone cannot know.
        """
        progress, transport = self._progress, self.exchange.transport
        if progress.knows_gradients or transport.world_size == 1:
            return
        own, progress.averaging = progress.averaging, None
        findings = [each for each in transport.perform(AllGatherObject(own)) if each]
        try:
            refuse_double_averaging(findings)
        except ValueError:
            self._model.restore()
            raise
        progress.knows_gradients = len(findings) > 1

    def _collection(self, fragment: Sequence[int]) -> Collection:
        delta = {self._names[i]: torch.zeros_like(self._model.values[i]) for i in fragment}
        statistics = {}
        if isinstance(self.inner, SharesStatistics):
            statistics = {n: torch.zeros_like(t) for n, t in self.inner.statistics().items()}
        if self.participation is None:
            return PlainCollection(self.exchange, delta, statistics)
        return self.participation.collection(self.exchange, delta, statistics)

    @observed("round")
    def _conclude(self, fragment: Sequence[int], aggregate: Aggregate) -> None:
        """Name the clients that are missing, and let the server take its step with the mean."""
        if aggregate.missing:
            warnings.warn(
                f"round {self.round_index}: left out, having returned values that are huge or not "
                f"finite: client {', '.join(map(str, aggregate.missing))}; the mean is over the "
                f"other {aggregate.contributors} of "
                f"{aggregate.contributors + len(aggregate.missing)}",
                stacklevel=4,
            )
        if aggregate.delta is None:
            self._model.restore(fragment)
        else:
            self._model.step(fragment, aggregate.delta)
            if isinstance(self.inner, SharesStatistics):
                self.inner.set_statistics(aggregate.statistics)
        self._progress.round_index += 1


def is_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether sums of thousands of such tensors are finite, and so are their norms.

    Reads one number back from the device.
    """
    norms = [norm.double() for norm in torch._foreach_norm(list(tensors))]
    return bool(torch.linalg.vector_norm(torch.stack(norms)) <= _LARGEST)
