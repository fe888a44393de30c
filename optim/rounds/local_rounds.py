"""Rounds of local work: several steps on each rank, then one exchange of how far each has come."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np
import torch
from torch.optim import SGD, Optimizer

from comm_hooks.callers import warn_program
from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.exchange import Exchange
from comm_hooks.exchange.agreement import hyperparameters_of
from comm_hooks.optim.alike import require_alike
from comm_hooks.optim.already_averaged import (
    averaging,
    check_double_averaging,
    refuse_double_averaging,
)
from comm_hooks.optim.base import parameters_of
from comm_hooks.optim.frozen import trains
from comm_hooks.optim.rounds.checks import check_rounds, check_shared_decay, cut
from comm_hooks.optim.rounds.participation import (
    Aggregate,
    ClientSampling,
    Collection,
    Contribution,
    PlainCollection,
)
from comm_hooks.optim.rounds.saving import SavedRounds
from comm_hooks.optim.rounds.shared_moments import SharesStatistics
from comm_hooks.optim.rounds.turns import mark_taken
from comm_hooks.requirements import require_choice, require_flag, require_within
from comm_hooks.shards import local_gradients

# Squares of what is above 2^64 overflow in float32: this leaves room for sums of 2^13 clients.
_LARGEST = 2.0**50


class LocalRounds(SavedRounds):
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
        look_ahead: the share of its residual that a rank takes off the server's model where it
            begins: x_i = x - look_ahead e_i. What was not sent waits for many rounds, and
            gradients at x know nothing of it: they ask again for what is on its way, and then too
            much arrives. With a server that multiplies D by eta, look_ahead = eta / N takes each
            rank to where the server's model will be once this rank's residual has arrived.
            (Step-Ahead Error Feedback, Xu, Huo and Huang, AAAI 2021, takes off all of it.)
        shared_decay: leave the weight decay of the local steps out of delta_i, and take it at x:
            before an exchange x shrinks by the product of 1 - lr weight_decay over the steps since
            the last one, the same on all ranks, and delta_i is the distance from there.  As a part
            of delta_i, small and in all elements, a sparse compressor sends it late or, where
            residuals fade, not at all.  For decoupled decay, as in AdamW.  All ranks take it for
            every step: also where a rank has no gradient, and where a GradScaler leaves one out.

    State: one copy of the parameters (x) beside the inner and the server's state, with
    ``look_ahead`` two; with ``participation`` a residual, and unless reset an inner state, for
    every client played here.
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

    Parameters of the inner optimizer that are frozen (``requires_grad=False``) when the rounds are
    made are left out, and missed if they train later on.

    Not supported: weights for clients of different size; ``fragments`` with ``participation``;
    buffers (batch norm statistics stay each rank's own); parameters added later; copies; for
    clients, another number of ranks when resuming.

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

    published: ClassVar[Mapping[str, Any]]
    """The exchange that a kind of rounds was published with."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Keys of :attr:`published` without which no exchange can be used."""

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
        check_rounds(self, inner, exchange, server, local_steps, fragments, participation)
        require_choice(self, "client_state", client_state, ("keep", "reset"))
        require_within(self, "look_ahead", look_ahead, "[0, inf)")
        if participation is not None and look_ahead:
            raise ValueError(
                f"{type(self).__name__}: look_ahead cannot go with participation: clients have "
                "residuals of their own"
            )
        if look_ahead and exchange.memory is None:
            raise ValueError(
                f"{type(self).__name__}: look_ahead is a share of the residual, and the exchange "
                "has none: give it ErrorFeedback()"
            )
        if look_ahead and exchange.settings.collective == "hierarchical":
            raise ValueError(
                f"{type(self).__name__}: look_ahead cannot go with collective='hierarchical', "
                "where a rank has the residual of a shard only: leave one of the two out"
            )
        require_flag(self, "shared_decay", shared_decay)
        if shared_decay:
            check_shared_decay(self, inner, participation)
        if server is None:
            server = SGD(filter(trains, parameters_of(inner.param_groups)), lr=1.0)
        keep_inner = client_state == "keep"
        super().__init__(inner, exchange, server, fragments=fragments, keep_inner=keep_inner)
        self._nbytes = sum(p.nbytes for p in self._parameters)
        self.local_steps = local_steps
        self._participation = participation
        self.client_state = client_state
        self.look_ahead = look_ahead
        self.shared_decay = shared_decay
        self._fragments = cut([p.numel() for p in self._parameters], fragments)
        exchange.agree_on(
            {
                "rounds": type(self).__name__,
                "inner": type(inner).__name__,
                "server": type(self.server).__name__,
                "local_steps": local_steps,
                "fragments": fragments,
                "participation": repr(participation),
                "client_state": client_state,
                "look_ahead": look_ahead,
                "shared_decay": shared_decay,
            }
        )
        exchange.owner = self
        if participation is not None:
            participation.prepare(exchange)

    @property
    def participation(self) -> ClientSampling | None:
        """Who takes part in a round; None where every rank is one client."""
        return self._participation

    def hyperparameters(self) -> dict[str, Any]:
        """Return what the next exchange goes by, which it compares between ranks.

        Those of the inner optimizer are compared unless there are clients, who may have their own.
        """
        found: dict[str, Any] = {"local step": self.steps, "round": self.round_index}
        if self.participation is not None:
            del found["local step"]  # clients may have different amounts of data
        parts = {"server": self.server, "inner": self.inner}
        for name, optimizer in parts.items():
            if name == "server" or self.participation is None:
                groups = hyperparameters_of(optimizer.param_groups)
                found |= {f"{name} {key}": value for key, value in groups.items()}
        if self.shared_decay:  # which all take at x for those that train
            pairs = zip(self._names, self._parameters, strict=True)
            found["frozen parameters"] = [name for name, p in pairs if not trains(p)]
        return found

    def replica(self) -> Sequence[torch.Tensor]:
        """Return what is the same on all ranks before every exchange: the server's model."""
        return self._model.values

    def names(self) -> Sequence[str]:
        """Return the names of the parameters."""
        return self._names

    def _take_step(self) -> None:
        """Take one local step and, where one is due, exchange: then all ranks must be here."""
        self._require_own_model("step()")
        self._begin()
        self._frozen.check()
        with local_gradients(parameters_of(self.param_groups)):
            self._tell_what_was_loaded()
            self._step()
        if self.participation is not None:
            mark_taken(parameters_of(self.param_groups))
        self._model.note()

    def _step(self) -> None:
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        progress, transport = self._progress, self.exchange.transport
        if self.participation is not None:
            self.participation.check_step(is_scaled=found_inf is not None)
        if not progress.averaging_ruled_out:
            own = [p.grad for p in self._parameters]
            if self.participation is None:
                require_alike(self)
                check_double_averaging(transport, self._parameters, own)
                progress.averaging_ruled_out = True
            elif progress.averaging is None:
                # Other ranks may have no client, or one without data: compared when turns are over.
                progress.averaging = averaging(transport, self._parameters, own)
        if grad_scale is not None:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            torch._foreach_div_(gradients, grad_scale)
        is_skipped = found_inf is not None and bool(found_inf)
        if not is_skipped:
            self.inner.step()
        if self.shared_decay:
            self._decay(is_skipped)
        progress.steps += 1
        ranks = transport.world_size
        progress.bytes_uncompressed += 2 * (ranks - 1) * self._nbytes // ranks
        if self.participation is None:
            assert self.local_steps
            count = len(self._fragments)
            for index in range(count):
                if progress.steps % self.local_steps == index * self.local_steps // count:
                    self._exchange_own([index])
                    progress.exchanged_at[index] = progress.steps

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange now what has not been, so that replicas agree; all ranks must call it."""
        exchanged_at = self._progress.exchanged_at
        outstanding = [i for i, step in enumerate(exchanged_at) if step != self.steps]
        with self._model.hidden():
            if self.participation is None and outstanding:
                self._exchange_own(outstanding)
                self._progress.exchanged_at = [self.steps] * len(self._fragments)
            if self.look_ahead:  # nothing has been done since, so nothing is undone
                self._model.restore()
        self._model.note()
        self.exchange.wait()

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

        Local progress comes back afterwards.  Sends nothing; :meth:`step` raises within.  After
        ``register(model, rounds)`` evaluation mode does it by itself.
        """
        self._begin()
        return self._model.shown()

    def clients(self) -> Iterator[int]:
        """Play one round: yield, in turn, each client of this rank, whose steps are to be taken.

        The model is the server's at the start of each turn.  When the loop is over the round's
        deltas have been exchanged and the server has taken its step.  All ranks must run the loop
        to its end; should all leave it early, which warns, or fail in it, the model is the
        server's of before the round, and clients remember what they did then.

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
        self._require_no_round("clients()")
        self._begin()
        self._tell_what_was_loaded()
        self._is_round_open = True
        try:
            yield from self._play(self.participation)
        except BaseException as error:
            self._model.restore()
            self._clients.discard()
            if isinstance(error, GeneratorExit):
                warn_program(
                    f"round {self.round_index} of clients was left before its end: the model and "
                    "the clients are as before it. With zip(), let clients() come first",
                )
            raise
        else:
            self._clients.commit()
        finally:
            self._is_round_open = False
            self._model.note()

    def _play(self, participation: ClientSampling) -> Iterator[int]:
        transport = self.exchange.transport
        everything = range(len(self._parameters))
        turns = participation.turns(self.round_index, transport)
        collection = self._collection(everything)
        for turn in turns:
            client = turn[transport.rank]
            contribution, memory = None, None
            if client is not None:
                self._model.restore()
                self._clients.enter(client)
                try:
                    with participation.turn(client, self.inner, self.server):
                        yield client
                except Exception as error:  # the other ranks are about to wait for its message
                    transport.report(error, transport.begin_round())
                    raise
            self._refuse_averaging()
            if client is not None:
                memory = self._clients.memory(client)
                contribution = self._contribution(client, everything)
                self._clients.leave(client, keep=contribution is not None)
            collection.add(turn, contribution, memory)
        self._conclude(everything, collection.finish())

    def _require_own_model(self, call: str) -> None:
        if self._model.is_shown:
            raise ValueError(
                f"{type(self).__name__}: {call} while the server's model is shown, of which the "
                "gradients then are: leave server_parameters(), or call model.train(), before the "
                "training step"
            )

    def _exchange_own(self, due: Sequence[int]) -> None:
        """Exchange this rank's progress on fragments and let the server take its step there."""
        fragment = sorted(place for index in due for place in self._fragments[index])
        self._frozen.look([self._names[i] for i in fragment if not trains(self._parameters[i])])
        if self.shared_decay:
            self._decay_shared(fragment)
        contribution = self._contribution(self.exchange.transport.rank, fragment)
        if contribution is None:
            # What spoiled this fragment has reached the others or soon will.
            self.inner.state.clear()
            self._model.restore()
            if self.shared_decay:  # what x has still to take elsewhere is no progress of this rank
                places = [i for i, parameter in enumerate(self._parameters) if trains(parameter)]
                parameters = [self._parameters[i].detach() for i in places]
                torch._foreach_mul_(parameters, self._progress.decay[places].tolist())
        collection = self._collection(fragment)
        ranks = range(self.exchange.transport.world_size)
        collection.add(ranks, contribution, self.exchange.memory)
        self._conclude(fragment, collection.finish())

    def _decay(self, is_skipped: bool) -> None:
        """Note the decay of a local step; take it where the inner optimizer has not stepped.

        Ranks take it at x alike, and cannot know which of the others had no gradient.
        """
        of_groups = [1 - group["lr"] * group["weight_decay"] for group in self.param_groups]
        factors = np.array(of_groups)[self._group_of]
        self._progress.decay *= factors
        left = [
            place
            for place, parameter in enumerate(self._parameters)
            if (is_skipped or parameter.grad is None) and trains(parameter)
        ]
        if left:
            parameters = [self._parameters[place].detach() for place in left]
            torch._foreach_mul_(parameters, factors[left].tolist())

    def _decay_shared(self, fragment: Sequence[int]) -> None:
        """Take the decay of the local steps since the last exchange of parameters at x."""
        decay = self._progress.decay
        places = [i for i in fragment if trains(self._parameters[i])]
        if places:
            self._model.shrink(places, decay[places].tolist())
        decay[list(fragment)] = 1.0

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

        Asked in every turn until two ranks have taken a step: one alone cannot know.
        """
        progress, transport = self._progress, self.exchange.transport
        if progress.averaging_ruled_out or transport.world_size == 1:
            return
        own, progress.averaging = progress.averaging, None
        findings = [each for each in transport.perform(AllGatherObject(own)) if each]
        refuse_double_averaging(findings)
        progress.averaging_ruled_out = len(findings) > 1

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
            warn_program(
                f"round {self.round_index}: left out, having returned values that are huge or not "
                f"finite: client {', '.join(map(str, aggregate.missing))}; the mean is over the "
                f"other {aggregate.contributors} of "
                f"{aggregate.contributors + len(aggregate.missing)}",
            )
        if aggregate.delta is None:
            self._model.restore(fragment)
        else:
            self._model.step(fragment, aggregate.delta)
            if self.look_ahead:
                memory = self.exchange.memory
                assert memory
                pending = [memory.vector(self._names[i]) for i in fragment]
                self._model.look_ahead(fragment, pending, self.look_ahead)
            if isinstance(self.inner, SharesStatistics):
                self.inner.set_statistics(aggregate.statistics)
        self._progress.round_index += 1


def is_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether sums of thousands of such tensors are finite, and so are their norms.

    Reads one number back from the device.
    """
    norms = [norm.double() for norm in torch._foreach_norm(list(tensors))]
    return bool(torch.linalg.vector_norm(torch.stack(norms)) <= _LARGEST)
