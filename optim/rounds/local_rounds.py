"""Optimizers of local steps: several steps per rank, then one exchange of the displacement."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import SGD, Optimizer

from comm_hooks.exchange import Exchange
from comm_hooks.exchange.agreement import hyperparameters_of
from comm_hooks.exchange.saved_state import check_complete
from comm_hooks.optim.already_averaged import require_unaveraged
from comm_hooks.optim.base import parameters_of
from comm_hooks.optim.frozen import FrozenParameters, trains
from comm_hooks.optim.rounds.checks import check_rounds
from comm_hooks.optim.rounds.participation import Aggregate, ClientSampling
from comm_hooks.optim.rounds.round_exchange import RoundExchange
from comm_hooks.optim.rounds.state import RoundsState
from comm_hooks.optim.rounds.turns import mark_taken
from comm_hooks.optim.wrapping import WrappingOptimizer
from comm_hooks.shards import local_gradients, shard_groups


class LocalRounds(WrappingOptimizer):
    """Several local steps on every rank, then an exchange of displacements and a server step.

    Local SGD (Stich, ICLR 2019), FedAvg (McMahan et al., AISTATS 2017) and, with an adaptive
    server optimizer, FedOPT (Reddi et al., ICLR 2021) and SAFL.  x is the shared model, the same
    on all ranks, and C the compressor.  A round:

    1. every rank (client) i starts at x_i = x and takes K = ``local_steps`` steps with ``inner``;
    2. the displacement delta_i = x - x_i goes through ``exchange``, error feedback included:
       D = mean_i C(delta_i);
    3. ``server`` takes a step at x with D for a gradient, identically on every rank.

    This also suits compressors that send few coordinates.  Adam on averaged gradients that gets a
    coordinate once in 64 steps mistakes it for noise; a frozen second moment becomes outdated.
    Here the second moment of each client is updated by all of its dense gradients, and a message
    is a displacement in units of the learning rate, which the server optimizer only adds.

    **Fragments** (Streaming DiLoCo, Douillard et al., 2025).  With ``fragments=F`` the parameters
    are divided into F fragments; fragment f is exchanged at the steps t with t mod K =
    floor(f K / F), so still every K steps.  The link is used evenly, with F = K at every step.

    **Many clients.**  With ``participation`` each rank runs several clients in turn::

        for _ in range(number_of_rounds):
            for client in rounds.clients():
                for batch in batches[client]:  # the client's K steps
                    loss = loss_function(model, batch)
                    loss.backward()
                    rounds.step()
                    rounds.zero_grad()

    Every client has a residual, kept until it is drawn again, and with ``client_state="keep"`` its
    own inner optimizer state.  Without error feedback and with a linear compressor, a rank adds up
    the displacements of its clients before it compresses; otherwise it sends one payload each.

    A client with a displacement (or shared second moment) that is not finite, or of a norm above
    2^50, is left out of the round: the mean is over the other clients, all ranks warn and
    name it, its residual is kept and its inner optimizer state is cleared.

    Args:
        inner: the optimizer of the local steps.
        exchange: the exchange that averages displacements over ranks.
        server: the server optimizer, over the same parameters, with D as their gradient; by default
            x = x - D, plain averaging.
        local_steps: K, the steps between exchanges; with ``participation`` the loop above decides.
        fragments: F, the number of fragments, at most K.
        participation: the draw of the clients, if there are more clients than ranks.
        client_state: with ``participation``: ``"keep"`` each client's inner optimizer state until
            it is drawn again, or ``"reset"`` it at the start of every turn.
        look_ahead: the share of its residual e_i that a rank subtracts from the shared model at the
            start: x_i = x - look_ahead e_i.  Parts of a residual wait for many rounds.  Gradients
            at x do not account for them and repeat them, so that the sum is too large.  With a
            server optimizer that multiplies D by eta, and N ranks, look_ahead = eta / N starts each
            rank where x will be once its residual has arrived.  (Step-Ahead Error Feedback, Xu, Huo
            and Huang, AAAI 2021, subtracts all of it.)
        shared_decay: leave the weight decay of the local steps out of delta_i, and apply it to x:
            before an exchange x shrinks by the product of 1 - lr weight_decay over the steps since
            the last exchange, the same on all ranks, and delta_i is measured from there.  In
            delta_i, where it is small and in all elements, a sparse compressor sends it late or, if
            residuals decay, not at all.  For decoupled decay, as in AdamW.  All ranks apply it in
            every step, even without a gradient or if a GradScaler skips the step.

    State: one copy of the parameters (x) in addition to the states of inner and server, with
    ``look_ahead`` two; with ``participation`` a residual, and with ``"keep"`` an inner optimizer
    state, for every client of this rank.  Every rank saves its own :meth:`state_dict`, which has
    its model's parameters too: ``save_rank_file(rounds, folder)``.  Where clients are private, only
    its ``"released"`` part may be published (:meth:`release_state_dict`): all else, :meth:`stats`
    and :attr:`steps` reveal single clients.  Other ranks can load a framework's checkpoint of rank
    0: they start from the shared model, and warn of their lost residuals.

    It is an optimizer like any other, with the groups and the state of ``inner``: schedulers set
    the local learning rate.  Between exchanges replicas differ.  Evaluate and save within
    :meth:`server_parameters`, and end with :meth:`synchronize`.

    Raises:
        ValueError: for settings that are out of range or exclude each other; nothing has been sent.

    Parameters of the inner optimizer that are frozen (``requires_grad=False``) at construction are
    left out; a step raises an error if they require a gradient later.

    A schedule of clients counts rounds: step it after the loop over :meth:`clients`, on all ranks.

    Not supported: ``fragments`` with ``participation``; buffers of clients (batch norm statistics
    are averaged only where each rank is one client, and the model is registered); parameters added
    later; copies; loading the states of clients on another number of ranks.

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
        look_ahead: float = 0.0,
        shared_decay: bool = False,
    ) -> None:
        settings: dict[str, Any] = {
            "local_steps": local_steps,
            "fragments": fragments,
            "participation": participation,
            "client_state": client_state,
            "look_ahead": look_ahead,
            "shared_decay": shared_decay,
        }
        check_rounds(self, inner, exchange, server, **settings)
        members = parameters_of(inner.param_groups)
        if server is None:
            server = SGD(filter(trains, members), lr=1.0)
        super().__init__(inner)
        self.exchange = exchange
        self.server = server
        self.local_steps = local_steps
        self.client_state = client_state
        self.look_ahead = look_ahead
        self.shared_decay = shared_decay
        self._participation = participation
        self.round_state = RoundsState(
            type(self).__name__,
            inner,
            exchange,
            server,
            fragments=fragments,
            local_steps=local_steps if participation is None else None,
            keep_inner=client_state == "keep",
        )
        self._nbytes = sum(p.nbytes for p in self.parameters)
        self._frozen = FrozenParameters(self, [p for p in members if not trains(p)])
        self._inner_of_round: dict[str, Any] = {}
        self._round = RoundExchange(
            inner,
            exchange,
            self.round_state,
            self._frozen,
            participation=participation,
            look_ahead=look_ahead,
            shared_decay=shared_decay,
        )
        exchange.agree_on(
            {
                **settings,
                "participation": repr(participation),
                "rounds": type(self).__name__,
                "inner": type(inner).__name__,
                "server": type(server).__name__,
            }
        )
        exchange.owner, exchange.owner_counts = self, True
        if local_steps is not None:
            exchange.steps_per_round = local_steps / fragments
        if participation is not None:
            participation.prepare(exchange, self.round_state.model)

    @property
    def participation(self) -> ClientSampling | None:
        """The draw of the clients; None if every rank is one client."""
        return self._participation

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The exchanged parameters: those that were trainable at construction."""
        return self.round_state.parameters

    @property
    def model_parallel_groups(self) -> list[dist.ProcessGroup]:
        """The process groups over which the model is sharded: nothing is averaged inside them."""
        return shard_groups(self.parameters)

    @property
    def steps(self) -> int:
        """The number of local steps that this rank has taken."""
        return self.round_state.clock.steps

    @property
    def round_index(self) -> int:
        """The number of exchanges so far; each is of one fragment."""
        return self.round_state.round_index

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings that the next exchange compares between ranks.

        The inner optimizer's hyperparameters are those at the start of a round if there are
        clients, which may have their own.
        """
        found: dict[str, Any] = {"round": self.round_index}
        groups = {"server": hyperparameters_of(self.server.param_groups)}
        if self.participation is None:  # clients may have different amounts of data
            found["local step"] = self.steps
            groups["inner"] = hyperparameters_of(self.inner.param_groups)
        else:
            groups["inner"] = self._inner_of_round
        for name, own in groups.items():
            found |= {f"{name} {key}": value for key, value in own.items()}
        found["buffers"] = self.round_state.buffers.names
        if self.shared_decay:  # which all ranks take at x for the parameters that train
            pairs = zip(self.names(), self.parameters, strict=True)
            found["frozen parameters"] = [name for name, p in pairs if not trains(p)]
        return found

    def replica(self) -> Sequence[torch.Tensor]:
        """Return the shared model, the same on all ranks before every exchange."""
        return self.round_state.model.values

    def names(self) -> Sequence[str]:
        """Return the names of the exchanged parameters."""
        return self.round_state.names

    def _take_step(self) -> None:
        """Take one local step and, if an exchange is due, exchange together with all ranks."""
        with self.exchange.failing_together():
            self._require_own_model("step()")
            self.round_state.begin()
            self._frozen.check()
            with local_gradients(parameters_of(self.param_groups)):
                self.round_state.warn_of_losses()
                self._step()
        if self.participation is not None:
            mark_taken(parameters_of(self.param_groups))
        self.round_state.model.note()

    def _step(self) -> None:
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        gradients = [p.grad for p in self.parameters]
        require_unaveraged(self, self.parameters)
        if self.participation is not None:
            self.participation.check_step(is_scaled=found_inf is not None)
        if grad_scale is not None:
            torch._foreach_div_([g for g in gradients if g is not None], grad_scale)
        is_skipped = found_inf is not None and bool(found_inf)
        if not is_skipped:
            self.inner.step()
        self.exchange.count_gradients(self._nbytes)
        self._round.end_step(is_skipped=is_skipped)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange outstanding displacements, so that replicas agree; all ranks must call it."""
        state = self.round_state
        outstanding = state.clock.outstanding
        with state.showing(shared=False):
            if self.participation is None and outstanding:
                self._round.exchange_fragments(outstanding)
            if self.look_ahead:  # nothing has been done since, so nothing is undone
                state.model.restore()
            if buffers := state.buffers.due(0):
                self.exchange.average_(buffers, compress=False)
                state.buffers.set(buffers)
        state.model.note()
        self.exchange.wait()
        self.exchange.compare_replicas()

    @torch.no_grad()
    def restart(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Continue from the present parameters, after all ranks have set them to equal values.

        Any other write to parameters between steps counts as progress of this rank, and the
        exchange may send little of it.  The progress of this rank since the last exchange is
        given up; momenta and residuals stay.  After ``register(model, rounds)``
        ``model.load_state_dict()`` calls this by itself.  Sends nothing; all ranks must call it
        between the same steps.

        Args:
            parameters: the parameters that have been set; by default all.

        Example::

            >>> from comm_hooks.optim import low_communication
            >>> named = model.named_parameters()
            >>> rounds = low_communication(named, lr=0.01, bits_per_parameter=8.0)
            >>> _ = torch.nn.init.zeros_(model.bias)
            >>> rounds.restart([model.bias])
        """
        state = self.round_state
        every = range(len(self.parameters))
        state.adopt(every if parameters is None else state.places_of(parameters))
        if parameters is None:
            state.buffers.adopt()

    def stats(self) -> dict[str, float]:
        """Return the traffic of this rank since the start; see :meth:`~comm_hooks.Exchange.stats`.

        The reference is an all-reduce of the gradients at every local step: ``steps`` counts local
        steps, ``bytes_uncompressed`` is the reference's traffic, ``compression_ratio`` is that
        traffic over the bytes sent.  ``rounds`` counts the exchanges, each of one fragment.
        """
        return {**self.exchange.stats(), "steps": self.steps, "rounds": self.round_index}

    def server_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which the model's parameters have the values of the shared model.

        Local progress comes back afterwards.  Sends nothing; :meth:`step` raises within.  After
        ``register(model, rounds)``, ``model.eval()`` does it by itself.
        """
        self.round_state.begin()
        return self.round_state.showing(shared=True)

    def clients(self) -> Iterator[int]:
        """Run one round: yield the number of each client of this rank, for the loop to train it.

        The model is the shared one at the start of each turn.  When the loop is over, the clients'
        displacements are exchanged and the server has taken its step.  All ranks must run the loop
        to its end; should all leave it early, which warns, or fail in it, the model and the states
        of the clients are as before the round.

        Raises:
            ValueError: without ``participation``; within another such loop; after the first turn
                in which several ranks took steps, if DDP or FSDP has averaged the gradients.
        """
        if self.participation is None:
            raise ValueError(
                "LocalRounds: clients() needs participation=Participation(clients=...); without, "
                "every rank is one client and step() exchanges by itself"
            )
        self._require_own_model("clients()")
        self.round_state.require_no_round("clients()")
        self.round_state.begin()
        self.round_state.warn_of_losses()
        self._inner_of_round = hyperparameters_of(self.inner.param_groups)
        with self.exchange.failing_together():
            yield from self._round.play(self.server, self._conclude)

    def leave_out(self, client: int) -> None:
        """Leave a client out of the present round, as if it had not been drawn.

        For a client without data, or one whose turn failed: its steps so far have no effect, and
        its residual and its inner optimizer's state stay as they were before the round.

        Args:
            client: the number that :meth:`clients` has yielded last.

        Raises:
            ValueError: outside of the loop over :meth:`clients`.
        """
        if not self.round_state.is_round_open:
            raise ValueError("LocalRounds: leave_out() belongs in the loop over clients()")
        self.round_state.left_out.add(client)

    def _conclude(self, places: Sequence[int], aggregate: Aggregate) -> None:
        """Take the server step along the clients' mean displacement; subclasses may refuse it."""
        self._round.conclude(places, aggregate)

    def release_state_dict(self) -> dict[str, Any]:
        """Return the part of the state that may be published if clients are private.

        That is the shared ``model`` by name, the ``server``'s state and the ``round_index``.
        Residuals, inner states of clients, the number of steps and this rank's own values are not
        in it.  To continue the run, save :meth:`state_dict` in a private place.
        """
        return self.round_state.release_state_dict()

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the states of *all* ranks that :meth:`state_dict` returned, in rank order.

        On the same number of ranks in the same nodes, each rank loads its own state.  Otherwise all
        begin at the saved shared model, with the inner optimizer state of one saved rank, and on
        another number of ranks the server optimizer keeps its present hyperparameters.
        The local progress of the saved ranks is added to their residuals, where these are in
        float32; else each rank begins with its mean.  So the mean over ranks of progress plus
        residuals stays the same.

        Raises:
            ValueError: if states are missing, out of order or of different steps; if they include
                states of clients, on another number of ranks or other nodes.
        """
        check_complete(states)
        if self.exchange.continues(states):
            self.load_state_dict(dict(states[self.exchange.transport.rank]))
        else:
            self.round_state.load_merged(states)

    def _state_to_save(self) -> dict[str, Any]:
        return self.round_state.state_dict()

    def _restore(self, state: dict[str, Any]) -> None:
        self.round_state.load_state_dict(state)

    def _require_own_model(self, call: str) -> None:
        if self.round_state.model.is_shown:
            raise ValueError(
                f"{type(self).__name__}: {call} while the shared model is shown: gradients must be "
                "those of this rank's model. Leave server_parameters(), or call model.train(), "
                "before the training step"
            )
