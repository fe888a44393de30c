"""Client-level privacy: rounds of local steps that protect all data of a client together."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import torch
from torch.optim import Optimizer

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.exchange import Exchange
from comm_hooks.exchange.noise_hook import NoiseHook, Place
from comm_hooks.memory.base import Memory
from comm_hooks.optim.base import parameters_of
from comm_hooks.optim.private.accounting.releases import Releases, releases_of
from comm_hooks.optim.private.errors import PrivacyError, Settled
from comm_hooks.optim.private.gradients.clipping import clip_factors, sample_norms
from comm_hooks.optim.private.gradients.model_checks import unchanged_modules
from comm_hooks.optim.private.noise.gate import Gate
from comm_hooks.optim.private.noise.gaussian import add_noise_
from comm_hooks.optim.private.noise.placement import Scheme, judge
from comm_hooks.optim.private.noise.secret import Secret, Stream, Unrepeatable
from comm_hooks.optim.private.witness import WRITTEN
from comm_hooks.optim.rounds.participation import (
    Aggregate,
    ClientSampling,
    Collection,
    Contribution,
    Named,
    Turn,
    deal,
)
from comm_hooks.optim.rounds.shared_model import SharedModel
from comm_hooks.optim.rounds.turns import own_gradients
from comm_hooks.requirements import require_positive, require_within
from comm_hooks.warnings import warn_program

_PLACE = "clients"
"""The name of this placement of the noise in the ledger."""


@dataclass(eq=False)
class PrivateParticipation(Settled, Unrepeatable, ClientSampling):
    r"""Secret sampling of the clients of a round of local steps, with noise on their messages' sum.

    Takes the place of :class:`~comm_hooks.optim.Participation` in
    :class:`~comm_hooks.optim.LocalRounds` and its subclasses SAFL and FedAvg.  A client's delta is
    its parameters at the start of the round minus those at its end.  With n = ``clients``,
    q = ``sample_rate``, C = ``max_norm``, sigma = ``noise_multiplier``, a round has these steps:

    1. every client is drawn with probability q, independently, from a secret that ranks share;
    2. each drawn client sends its compressed delta (residuals of error feedback stay with it);
    3. every message is decompressed and clipped to the norm C on arrival; messages of a linear
       compressor are instead clipped by the client, compressed, so that an all-reduce can add them;
    4. N(0, sigma^2 C^2) is added to the sum of the clipped messages, the same on all ranks;
    5. the sum is divided by q n, which is public, for any number of drawn clients, also zero.

    One client changes a sum by at most C, so a round has noise multiplier sigma and sample rate q;
    the outer optimizer's step is post-processing.  Ranks are trusted: they compute that step.

    FedAMS and FedLAMB are refused: they keep the maximum of the rounds' mean second moments, which
    with noise grows in every round.

    Source: McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018,
    Algorithm 1, with Poisson sampling and the clipping moved behind the compressor.

    Args:
        clients: n, the number of clients; client c always runs on rank c mod N of N ranks.
        sample_rate: q, the probability of a client to be drawn in a round, in (0, 1].
        noise_multiplier: sigma, the standard deviation of the noise divided by ``max_norm``.
        max_norm: C, in units of the delta (learning rate times gradient).
        enter: called at the start of every round to write it to the ledger of releases.
            :class:`~comm_hooks.optim.private.PrivacyEngine` sets it.
        join: called once, before the first round, with the transport, to share the ledger.

    Attributes:
        releases: the counts of releases on which the saved state depends.
        of_model: the counts of releases that made the model.

    Raises:
        ValueError: for settings out of range.
        PrivacyError: for a change of settings; in ``LocalRounds.load_state_dict()``, for a state
            that was saved without privacy; in the next round, if the ledger lacks releases that
            the loaded state depends on.

    Publish ``release_state_dict()`` of :class:`~comm_hooks.optim.LocalRounds` and nothing else.
    Buffers that clients' forward passes change (batch norm's) are refused: they stay in the model.

    Not supported: weights for clients of different size; inner optimizers that share statistics;
    ``collective="sharded"``; clients that distrust the ranks.

    Example::

        >>> from comm_hooks import CountSketch, Exchange
        >>> from comm_hooks.optim import SAFL
        >>> from comm_hooks.optim.private import PrivacyEngine
        >>> engine = PrivacyEngine()
        >>> participation = engine.private_participation(
        ...     clients=100, sample_rate=0.1, noise_multiplier=1.0, max_norm=0.5
        ... )
        >>> exchange = Exchange(CountSketch(ratio=0.5))
        >>> rounds = SAFL(model.named_parameters(), exchange, participation=participation)
        >>> for client in rounds.clients():
        ...     model(torch.ones(1, 8)).square().sum().backward()
        ...     rounds.step()
        ...     rounds.zero_grad()
        >>> 0 < engine.get_epsilon(delta=1e-3) < 10
        True
    """

    averages_statistics: ClassVar[bool] = False
    settled = frozenset(
        {"clients", "sample_rate", "noise_multiplier", "max_norm", "enter", "join", "releases"}
    )

    clients: int
    sample_rate: float
    noise_multiplier: float
    max_norm: float
    enter: Callable[[], None] = field(default_factory=lambda: lambda: None, repr=False)
    join: Callable[[Transport], None] = field(
        default_factory=lambda: lambda transport: None, repr=False
    )
    _secret: Secret | None = field(default=None, init=False, repr=False)
    _rounds: int = field(default=0, init=False, repr=False)
    releases: Releases = field(default_factory=lambda: Releases(_PLACE), init=False, repr=False)
    of_model: list[Releases] = field(default_factory=list, init=False, repr=False)
    _model: SharedModel | None = field(default=None, init=False, repr=False)
    _has_warned: bool = field(default=False, init=False, repr=False)
    gate: Gate = field(default_factory=Gate, init=False, repr=False)

    def __post_init__(self) -> None:
        require_positive(self, "clients", self.clients)
        require_within(self, "noise_multiplier", self.noise_multiplier, "(0, inf)")
        require_within(self, "max_norm", self.max_norm, "(0, inf)")
        require_within(self, "sample_rate", self.sample_rate, "(0, 1]")

    def prepare(self, exchange: Exchange, model: SharedModel) -> None:
        self._model = model
        self.of_model += releases_of(model.parameters)
        exchange.state.provenance = self.releases
        exchange.gate = self.gate

    def turns(self, round_index: int, transport: Transport) -> list[list[int | None]]:
        """Write a round to the ledger; return its drawn clients: per turn one or None per rank."""
        if self._secret is None:
            self.join(transport)
            parts = transport.perform(AllGatherObject(os.urandom(32).hex()))
            self._secret = Secret(bytes.fromhex("".join(parts)))
        self.look()
        self.enter()
        self.releases.add(_PLACE, self.noise_multiplier)
        # Rounds of this process, not of the run: a repeated round draws other clients.
        self._rounds += 1
        stream = self._secret.stream("participation", rank=0, step=self._rounds)
        return deal(stream.draw(self.clients, self.sample_rate), transport.world_size)

    @contextmanager
    def turn(self, client: int, inner: Optimizer, server: Optimizer) -> Iterator[None]:
        """Return the context of a client's local steps; check that only the client's delta remains.

        Raises:
            PrivacyError: at the end, if the steps have changed buffers (running statistics), other
                parameters than the optimizer's, or settings of the optimizers (schedulers), or have
                left unused gradients.
        """
        groups = [*inner.param_groups, *server.param_groups]
        before = [_settings_in(group) for group in groups]
        trained = parameters_of(inner.param_groups)
        with unchanged_modules(trained), own_gradients(inner, _refuse_gradients):
            yield
        for old, group in zip(before, groups, strict=True):
            for name, value in _settings_in(group).items():
                if old.get(name) != value:
                    raise PrivacyError(
                        f"PrivateParticipation: a client's steps have changed {name} from "
                        f"{old.get(name)} to {value}: the drawn clients would influence later "
                        "clients' steps. Step learning rate schedulers between rounds"
                    )

    def look(self) -> None:
        """Warn, once, if something else has written to the model since the last round."""
        if self._model and self._rounds and self._model.is_written_to and not self._has_warned:
            self._has_warned = True
            warn_program(WRITTEN)

    def check_step(self, *, is_scaled: bool) -> None:
        if is_scaled:
            raise PrivacyError(
                "PrivateParticipation: a GradScaler's scale depends on earlier clients' gradients, "
                "without noise: use bfloat16, which needs no GradScaler"
            )

    def collection(self, exchange: Exchange, delta: Named, statistics: Named) -> Collection:
        """Return the empty :class:`Collection` for the round that ``turns()`` has drawn last.

        Raises:
            PrivacyError: if the exchange breaks a rule of :func:`~comm_hooks.optim.private.judge`.
        """
        assert self._secret is not None, "turns() comes first"
        stream = self._secret.stream("noise", rank=0, step=self._rounds)
        return _PrivateCollection(exchange, delta, statistics, self, stream)


def _refuse_gradients() -> NoReturn:
    raise PrivacyError(
        "PrivateParticipation: a client leaves gradients that no step has used: its turn ends in "
        "the middle of an accumulation, which the next client would continue. Call step() after "
        "each client's last batch"
    )


def _settings_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group, with tensors as plain numbers."""
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


class _PrivateCollection(Collection):
    """The messages of a round: a noise hook clips them, adds them up and noises the sum."""

    def __init__(
        self,
        exchange: Exchange,
        delta: Named,
        statistics: Named,
        participation: PrivateParticipation,
        stream: Stream,
    ) -> None:
        super().__init__(exchange, delta, statistics)
        self._participation = participation
        possible = exchange.settings.carriers()
        sums = "all_reduce" in possible and exchange.settings.collective in ("auto", "all_reduce")
        self._guard = _ClientGuard("payload" if sums else "message", participation.max_norm, stream)
        # Guards clip every message: raises only where the rules change.
        judge(Scheme.of(exchange, "aggregate", "client"))
        self._pending: tuple[dict[str, torch.Tensor], Memory | None] | None = None

    def add(self, turn: Turn, contribution: Contribution | None, memory: Memory | None) -> None:
        self._send()
        message = {name: torch.zeros_like(t) for name, t in self.total.items()}
        if contribution is not None:
            message = dict(zip(message, contribution.delta, strict=True))
        self._pending = (message, memory)

    def finish(self) -> Aggregate:
        participation = self._participation
        self._guard.noise_std = participation.noise_multiplier * participation.max_norm
        torch._foreach_add_(list(self.total.values()), self._send())
        self.exchange.end_step()
        expected = participation.sample_rate * participation.clients
        torch._foreach_div_(list(self.total.values()), expected)
        # The drawn clients, and those with a delta that is not finite, stay private.
        return Aggregate(list(self.total.values()), {}, [], round(expected))

    def _send(self) -> list[torch.Tensor]:
        """Exchange the last message of :meth:`add`; in :meth:`finish`, return the noised sum.

        All messages of a round have the same random keys, so that a linear compressor applies one
        map to all of them, and the sum of payloads is the payload of the sum.
        """
        if self._pending is None:
            return []
        message, memory = self._pending
        exchange = self.exchange
        tensors = list(message.values())
        bucket = exchange.buckets.of(message)
        with self._participation.gate.open(lambda layout: self._guard):
            exchange.transport.run(exchange.bucket_round(bucket, tensors, memory=memory))
        torch._foreach_mul_(tensors, exchange.transport.world_size)
        return tensors


class _ClientGuard(NoiseHook):
    """A noise hook that clips clients' messages, adds up those of a round, and noises the sum.

    Noise is added to the complete sum: added to one message first, it would leave the last digits
    of the other messages visible in float32.
    """

    def __init__(self, place: Place, max_norm: float, stream: Stream) -> None:
        self.place = place
        self._max_norm = max_norm
        self._stream = stream
        self._sum: list[torch.Tensor] | None = None
        self.noise_std: float | None = None  # set before a round's last message

    def clip_(self, message: Sequence[torch.Tensor]) -> None:
        norm = sample_norms([tensor.reshape(1, -1) for tensor in message])
        torch._foreach_mul_(list(message), clip_factors(norm, self._max_norm)[0])
        for tensor in message:
            # 0 x infinity is NaN: an overflow would go past the bound.
            tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def add_noise_(self, total: Sequence[torch.Tensor]) -> None:
        if self._sum is None:
            self._sum = [tensor.clone() for tensor in total]
        else:
            torch._foreach_add_(self._sum, list(total))
        if self.noise_std is not None:
            torch._foreach_copy_(list(total), self._sum)
            add_noise_(total, self.noise_std, self._stream)
