"""The Gaussian mechanism on several ranks: makes one noised mean of the ranks' clipped sums."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from comm_hooks.collectives.requests import AllGatherObject, Round
from comm_hooks.exchange import Exchange
from comm_hooks.exchange import noise_hook as hooks
from comm_hooks.exchange.layout import Layout
from comm_hooks.optim.private.accounting.releases import Releases
from comm_hooks.optim.private.errors import PrivacyError, Settled
from comm_hooks.optim.private.noise.discrete import Grid, add_discrete_noise_
from comm_hooks.optim.private.noise.gate import Gate
from comm_hooks.optim.private.noise.gaussian import add_noise_
from comm_hooks.optim.private.noise.placement import Place, Scheme, judge
from comm_hooks.optim.private.noise.secret import Secret, Stream, Unrepeatable
from comm_hooks.requirements import require_choice, require_kind, require_within

NoiseKind = Literal["gaussian", "discrete"]
AddNoise = Callable[[Sequence[torch.Tensor]], None]
_SETTINGS = ("noise_multiplier", "max_grad_norm", "expected_batch_size", "noise")


@dataclass(frozen=True)
class Released:
    """A noised mean that was released, the same on all ranks.

    Attributes:
        tensors: the mean by parameter name, float32.
        noise_variance: the noise's variance in a coordinate; None if compression makes it unknown.
    """

    tensors: dict[str, torch.Tensor]
    noise_variance: float | None


class GaussianMechanism(Settled, Unrepeatable):
    r"""The Gaussian mechanism: adds noise to the ranks' sums of clipped gradients, exchanges them.

    With S_i the clipped sum of rank i of N, C the norm to which each sample was clipped, sigma the
    noise multiplier, B a public divisor and T the exchange's compressor:

    * ``"central"``: S_i are sent exactly to the owners of shards, which add N(0, sigma^2 C^2) to
      the sum and send T of it to all, with error feedback.  Ranks and links are trusted; half of
      the traffic is compressed.
    * ``"shares"``: each rank adds N(0, sigma^2 C^2 / N) to S_i; linear T only.
    * ``"local"``: each rank adds N(0, sigma^2 C^2) to S_i; any T.  No rank need be trusted, and the
      sum has N times the variance.
    * ``"aggregate"``: the payloads T S_i are summed, and noise is added to the sum of payloads,
      times the norm of T; linear T only, no error feedback.

    Then the result is divided by B.  :func:`~comm_hooks.optim.private.judge` returns the guarantee
    of each.

    Args:
        exchange: the exchange, with the compressor, the error feedback and the transport.
        place: where noise is added: one of the four placements above.
        noise_multiplier: sigma, the standard deviation of the noise over ``max_grad_norm``.
        max_grad_norm: C, the norm to which each sample's gradient was clipped.
        expected_batch_size: B, the public divisor, for the samples of all ranks.
        noise: ``"gaussian"``: normal numbers, in float64; ``"discrete"``: sums are rounded to a
            fine grid, and the noise is an exact discrete Gaussian on it (Canonne, Kamath & Steinke,
            NeurIPS 2020); its low bits reveal nothing about the sum.  Its standard deviation is up
            to 0.1 % larger, to cover the rounding; it takes some 30 times as long, and does not go
            with ``"shares"``.
        secret: the source of the noise; a new secret by default.

    Attributes:
        releases: the counts of releases on which the residuals of the exchange depend.

    Raises:
        PrivacyError: for an exchange that is not private with the placement, or that already has
            residuals; later, for a change of settings.
        ValueError: for arguments out of range, and ``"central"`` without owners of shards.

    Example::

        >>> from comm_hooks import Exchange, TopK, ErrorFeedback
        >>> from comm_hooks.optim.private import GaussianMechanism
        >>> mechanism = GaussianMechanism(
        ...     Exchange(TopK(density=1 / 16), ErrorFeedback()),
        ...     place="local",
        ...     noise_multiplier=1.0,
        ...     max_grad_norm=0.1,
        ...     expected_batch_size=64,
        ... )
        >>> mechanism.release({"weight": torch.zeros(64, 64)}).tensors["weight"].shape
        torch.Size([64, 64])
    """

    settled = frozenset({"exchange", "place", "verdict", "releases", *_SETTINGS})

    def __init__(
        self,
        exchange: Exchange,
        *,
        place: Place = "central",
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: float,
        noise: NoiseKind = "gaussian",
        secret: Secret | None = None,
    ) -> None:
        require_kind(self, "exchange", exchange, Exchange)
        require_within(self, "noise_multiplier", noise_multiplier, "(0, inf)")
        require_within(self, "max_grad_norm", max_grad_norm, "(0, inf)")
        require_within(self, "expected_batch_size", expected_batch_size, "(0, inf)")
        require_choice(self, "place", place, get_args(Place))
        require_choice(self, "noise", noise, get_args(NoiseKind))
        if secret is not None:
            require_kind(self, "secret", secret, Secret)
        state = exchange.state_dict()
        if state.get("memory") or state.get("server_memory"):
            raise PrivacyError(
                "GaussianMechanism: the exchange has residuals, perhaps of gradients without "
                "noise, and would release them: pass a new Exchange. Load the checkpoint of a "
                "private exchange after make_private()"
            )
        self.exchange = exchange
        self.place = place
        self.noise_multiplier = noise_multiplier
        self.max_grad_norm = max_grad_norm
        self.expected_batch_size = expected_batch_size
        self.noise = noise
        self.verdict = judge(self.scheme())
        if noise == "discrete" and place == "shares":
            raise PrivacyError(
                "noise='discrete' with placement 'shares': the sum of discrete Gaussians is no "
                "discrete Gaussian. Valid instead: placement 'central', 'local' or 'aggregate', or "
                "noise='gaussian'"
            )
        if place == "central":
            require_owners(exchange)
        self._gate = exchange.gate = Gate()
        self._secret = Secret() if secret is None else secret
        self._shared_secret: Secret | None = None
        self._step = 0
        self.releases = exchange.state.provenance = Releases(only=place)
        exchange.state.only_shards = place == "central"
        exchange.state.is_of_sums = True
        self._parts = _parts_of(exchange)
        exchange.agree_on({"placement": place, **{n: getattr(self, n) for n in _SETTINGS}})

    def require_unchanged(self) -> None:
        """Raise ``PrivacyError`` if the exchange was changed after it was judged."""
        now = _parts_of(self.exchange)
        changed = [name for name, value in self._parts.items() if now.get(name) != value]
        if changed:
            raise PrivacyError(
                "GaussianMechanism: the exchange was changed after it was judged: "
                f"{', '.join(changed)}. Nothing was released; call make_private() again, with a "
                "new exchange"
            )

    def release(self, sums: Mapping[str, torch.Tensor]) -> Released:
        """Return the noised mean; all ranks call this together, each with its own clipped sums.

        Args:
            sums: this rank's clipped sums by parameter name, float32, the same names and shapes on
                all ranks; zeros for an empty batch.  They may be overwritten.

        Raises:
            ConfigMismatchError: in the first release, if ranks are configured differently.
        """
        return self.exchange.transport.run(self.round(sums))

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]:
        """Return :meth:`release` as a round of an exchange: a generator of transport requests."""
        exchange = self.exchange
        tensors = list(sums.values())
        bucket = exchange.buckets.of(sums)
        yield from self.share_secret()
        self.begin()
        with self._gate.open(self.protect):
            yield from exchange.bucket_round(bucket, tensors)
        exchange.end_step()
        torch._foreach_mul_(tensors, exchange.transport.world_size / self.expected_batch_size)
        return Released(dict(sums), self.noise_variance)

    def share_secret(self) -> Round[None]:
        """Return a round that makes the secret of noise that all ranks add to the same sum."""
        if self.place == "aggregate" and self._shared_secret is None:
            yield from self.exchange.agree()
            parts = yield AllGatherObject(os.urandom(32).hex())
            self._shared_secret = Secret(bytes.fromhex("".join(parts)))

    def begin(self) -> None:
        """Count a release, before anything of it is sent.

        A step that fails half way and is tried again has released something.
        """
        self.require_unchanged()
        self._step += 1
        self.releases.add(self.place, self.noise_multiplier)

    def protect(self, layout: Layout) -> hooks.NoiseHook | None:
        """Add noise to clipped vectors, or return the hook that will add it to their sum.

        Args:
            layout: the vectors of the release that has begun, or of a part of it: each part has
                noise for the norm of the whole.
        """
        verdict = self.verdict
        if self.place == "aggregate":
            verdict = judge(self.scheme(self.exchange.norm_bound(layout)))
        sensitivity = verdict.std * self.max_grad_norm
        # Parts differ in their first names, on all ranks alike.
        part = layout.segments[0].name
        if self.place == "central":
            stream = self._stream(f"noise of owner for {part}")
            return _NoiseOnSum(
                "owner",
                lambda total: self._add_noise_(total, sensitivity, layout.work.numel(), stream),
            )
        if self.place == "aggregate":
            assert self._shared_secret is not None, "share_secret() comes first"
            stream = self._shared_secret.stream(f"noise for {part}", rank=0, step=self._step)
            return _NoiseOnSum(
                "payload",
                lambda total: self._add_noise_(
                    total, sensitivity, sum(tensor.numel() for tensor in total), stream
                ),
            )
        stream = self._stream(f"noise for {part}")
        self._add_noise_(layout.views, sensitivity, layout.work.numel(), stream)
        return None

    @property
    def noise_variance(self) -> float | None:
        """The variance of the noise in one coordinate of a release; None if it is not known."""
        variance = self.verdict.variance_of_sum
        if variance is None:
            return None
        elements = sum(bucket.layout.work.numel() for bucket in self.exchange.buckets)
        std = self._std(self.max_grad_norm, elements)
        return variance * (std / self.expected_batch_size) ** 2

    def _std(self, sensitivity: float, elements: int) -> float:
        if self.noise == "discrete":
            return Grid.of(self.noise_multiplier, sensitivity, elements).std
        return self.noise_multiplier * sensitivity

    def _add_noise_(
        self, tensors: Sequence[torch.Tensor], sensitivity: float, elements: int, stream: Stream
    ) -> None:
        """Add noise in place to all or some of the ``elements`` of a vector of this sensitivity."""
        if self.noise == "discrete":
            grid = Grid.of(self.noise_multiplier, sensitivity, elements)
            add_discrete_noise_(tensors, grid, stream)
        else:
            add_noise_(tensors, self._std(sensitivity, elements), stream)

    def _stream(self, purpose: str) -> Stream:
        return self._secret.stream(purpose, rank=self.exchange.transport.rank, step=self._step)

    def scheme(self, norm_bound: float | None = None) -> Scheme:
        """Return the description of this mechanism for :func:`~comm_hooks.optim.private.judge`."""
        return Scheme.of(self.exchange, self.place, norm_bound=norm_bound)


def _parts_of(exchange: Exchange) -> dict[str, Any]:
    """Return the settings and objects of an exchange on which its privacy depends, by name.

    Error-feedback memories and transports are compared by identity.
    """
    return {
        **exchange.settings.as_dict(),
        "memory": exchange.memory,
        "the memory's settings": repr(exchange.memory),
        "transport": exchange.transport,
        "provenance": exchange.state.provenance,
    }


class _NoiseOnSum(hooks.NoiseHook):
    """A hook that adds noise to a sum of clipped vectors: at a shard's owner, or to payloads."""

    def __init__(self, place: hooks.Place, add_noise_: AddNoise) -> None:
        self.place = place
        self._add_noise_ = add_noise_

    def clip_(self, message: Sequence[torch.Tensor]) -> None:
        pass

    def add_noise_(self, total: Sequence[torch.Tensor]) -> None:
        self._add_noise_(total)


def require_owners(exchange: Exchange) -> None:
    """Raise ``ValueError`` if an exchange cannot use the sharded collective."""
    possible = exchange.settings.carriers()
    if "sharded" not in possible or exchange.settings.collective not in ("auto", "sharded"):
        raise ValueError(
            f"placement 'central' needs owners of shards, which {exchange.compressor} with "
            f"collective={exchange.settings.collective!r} cannot have: leave collective at 'auto', "
            "and choose a compressor that is the same on all ranks"
        )
