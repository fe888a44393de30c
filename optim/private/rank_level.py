"""Rank-level privacy: rounds of a communication hook that protect all data of a rank together."""

import math
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from comm_hooks.exchange import Exchange
from comm_hooks.exchange.layout import Layout
from comm_hooks.exchange.noise_hook import NoiseHook
from comm_hooks.optim.private.accounting import GaussianEvent
from comm_hooks.optim.private.accounting.accountant import require_delta
from comm_hooks.optim.private.engine import PrivacyEngine
from comm_hooks.optim.private.errors import PrivacyError, Settled
from comm_hooks.optim.private.gradients.clipping import clip_factors
from comm_hooks.optim.private.gradients.model_checks import padding_rows
from comm_hooks.optim.private.noise.mechanism import GaussianMechanism
from comm_hooks.optim.private.noise.placement import Place, require_known_variance
from comm_hooks.optim.private.noise.secret import Unrepeatable
from comm_hooks.optim.private.optimizers.descent import NoisedOptimizer
from comm_hooks.optim.private.witness import WRITTEN
from comm_hooks.requirements import require_choice, require_kind, require_within
from comm_hooks.warnings import warn_program
from comm_hooks.wire.checksum import fingerprint

_STEPS = (1, 100, 10_000)
"""The numbers of steps for which epsilon is told before the first one."""


class RankLevel(Settled, Unrepeatable):
    r"""Differential privacy of each rank's whole contribution, for a communication hook.

    A hook sees the gradient of a rank's batch, in which no sample can be clipped.  What it can
    protect is everything that a rank contributes: ranks are sites (hospitals, companies), each with
    data of its own.  With N ranks, C = ``max_norm`` and sigma = ``noise_multiplier``, in each
    backward pass:

    1. the pass is written to the ledger, before anything is sent;
    2. the gradient of each bucket, d_b of all d trained elements, is clipped to C sqrt(d_b / d), so
       that the whole gradient has at most the norm C; a bucket that is not finite becomes zeros;
    3. noise of standard deviation sigma C in the sum over ranks is added where ``placement`` says,
       as by :class:`~comm_hooks.optim.private.GaussianMechanism`;
    4. the noised sum is divided by N.

    Neighbours differ in all data of one rank.  Every rank is in every step, so these change the sum
    by at most 2 C: a step counts as the Gaussian mechanism with noise multiplier sigma / 2 and
    sample rate 1.  **Epsilon is large**: a warning tells it before the first step.  To protect
    samples, which a step draws at random, costs far less: :class:`PrivacyEngine`.

    Args:
        noise_multiplier: sigma, the standard deviation of the noise in the sum over ``max_norm``.
        max_norm: C, the norm to which a rank's gradient, of its mean loss, is clipped.
        placement: where noise is added.  ``"central"``: ranks and links are trusted.
        engine: has the ledger, the accountant and the budget; by default a new one.
        delta: for the epsilon in the warning.

    Attributes:
        mechanism: adds the noise; None before :meth:`attach`.

    Raises:
        ValueError: for settings out of range.
        PrivacyError: from ``register()``, for a compressor that is not private with the placement,
            and for settings of DDP that send other things of a rank; in the backward pass, on all
            ranks, if the budget is spent, or if the model has buffers of a rank's data; in a step,
            for an optimizer that has gradients of other parameters.

    An optimizer that subtracts the variance of the noise
    (:class:`~comm_hooks.optim.private.DPAdamBC`) is told it before each step.

    Not protected: the number of steps, logs of the loss, a sample in the data of several ranks, and
    the writes of anything but optimizers to the model.
    Not supported: a ``GradScaler`` (use bfloat16), first steps without compression, sparse
    gradients, FSDP, optimizers with an exchange of their own.

    Example::

        >>> from comm_hooks import register
        >>> from comm_hooks.optim.private import RankLevel
        >>> private = RankLevel(noise_multiplier=8.0, max_norm=0.5)
        >>> state = register(ddp_model, "topk", density=1 / 64, private=private)
        >>> ddp_model(torch.ones(1, 8)).sum().backward()
        >>> 1 < private.engine.get_epsilon(delta=1e-5) < 2
        True
    """

    settled = frozenset({"noise_multiplier", "max_norm", "placement", "engine"})

    def __init__(
        self,
        *,
        noise_multiplier: float,
        max_norm: float,
        placement: Place = "central",
        engine: PrivacyEngine | None = None,
        delta: float = 1e-5,
    ) -> None:
        require_within(self, "noise_multiplier", noise_multiplier, "(0, inf)")
        require_within(self, "max_norm", max_norm, "(0, inf)")
        require_choice(self, "placement", placement, get_args(Place))
        if engine is not None:
            require_kind(self, "engine", engine, PrivacyEngine)
        require_delta(delta, "RankLevel: delta")
        self.noise_multiplier = noise_multiplier
        self.max_norm = max_norm
        self.placement = placement
        self.engine = PrivacyEngine() if engine is None else engine
        self._delta = delta
        self.mechanism: GaussianMechanism | None = None
        self._sent: dict[str, int] = {}

    @classmethod
    def of(cls, settings: Any) -> "RankLevel":
        """Return the rank-level privacy of a ``private`` block of JSON.

        Args:
            settings: ``unit``, which must be ``"rank"``, the arguments of this class, and
                ``accountant`` and ``ledger`` of :class:`PrivacyEngine` in place of ``engine``.

        Raises:
            ValueError: for other settings, naming them.
        """
        if not isinstance(settings, Mapping):
            raise ValueError(f"must be an object, got {settings!r}")
        rest = dict(settings)
        if (unit := rest.pop("unit", None)) != "rank":
            raise ValueError(
                f"unit must be 'rank', got {unit!r}: gradients arrive as the sum over a batch, in "
                "which no sample can be clipped. To protect samples or clients, train with "
                "comm_hooks.optim.private.PrivacyEngine, without DeepSpeed"
            )
        of_engine = {name: rest.pop(name) for name in ("accountant", "ledger") if name in rest}
        try:
            return cls(**rest, engine=PrivacyEngine(**of_engine))
        except TypeError as error:
            raise ValueError(str(error).partition("__init__() ")[2]) from None

    def attach(self, exchange: Exchange, module: nn.Module) -> None:
        """Protect all rounds of an exchange from now on; collective, before its first round.

        Args:
            exchange: an exchange of gradients.
            module: the model that is trained, without DDP.
        """
        if self.mechanism is not None:
            raise PrivacyError(
                "RankLevel: it protects the rounds of another model: make one for each, with the "
                "same engine"
            )
        if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
            raise PrivacyError(
                "RankLevel: SyncBatchNorm sends statistics of each rank's batch, without noise: "
                "use GroupNorm or LayerNorm"
            )
        transport = exchange.transport
        self.mechanism = mechanism = GaussianMechanism(
            exchange,
            place=self.placement,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.max_norm,
            expected_batch_size=transport.world_size,
        )
        exchange.gate = self
        # Of another number of ranks, the residual of the mean stays the same.
        exchange.state.is_of_sums = False
        self._elements = sum(p.numel() for p in module.parameters() if p.requires_grad)
        self._padding = padding_rows(module)
        self._module, self._own = module, set(module.parameters())
        self._all_buffers = int(fingerprint([*module.buffers()]))
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._fixed = self._fingerprints_of_fixed()
        self.engine.witnesses.add(self)
        one = GaussianEvent(self.noise_multiplier / 2, 1.0)
        event = mechanism.verdict.recorded(one, self.placement)
        self._enter = self.engine.account(
            transport,
            transport.world_size,
            lambda: event,
            [mechanism.releases],
            module.parameters(),
        )
        transport.run(mechanism.share_secret())
        if transport.rank == 0:
            self._tell_epsilon()

    def require_open(self, *, protects: bool) -> None:
        """Raise ``PrivacyError`` for a round whose vectors this class cannot protect."""
        if not protects:
            raise PrivacyError(
                "RankLevel: sparse gradients and shards are not supported, since what a rank sends "
                "of them is not clipped: use Embedding(sparse=False), and DDP"
            )

    @torch.no_grad()
    def protect(self, layout: Layout) -> NoiseHook | None:
        """Clip a bucket's gradients and see to their noise; the first bucket counts a release."""
        assert self.mechanism is not None, "attach() comes first"
        part = {segment.name: segment.numel for segment in layout.segments}
        # A name for the second time: another pass, also if the last one has failed half way.
        if not self._sent or not self._sent.keys().isdisjoint(part):
            self._require_same_buffers()
            self._sent = {}
            self._enter()
            self.mechanism.begin()
        self._sent |= part
        if sum(self._sent.values()) > self._elements:
            raise PrivacyError(
                f"RankLevel: a step has more than the {self._elements} elements that were trained "
                "at register(), for which bounds were computed: register after the last change of "
                "the model"
            )
        bound = self.max_norm * math.sqrt(sum(part.values()) / self._elements)
        norm = torch.linalg.vector_norm(layout.work, dtype=torch.float64)
        layout.work.mul_(clip_factors(norm, bound))
        # 0 x infinity is NaN: an overflow would go past the bound.
        layout.work.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return self.mechanism.protect(layout)

    def prepare(self, optimizer: Optimizer) -> None:
        """Tell an optimizer the variance of the noise in its gradients, if it uses it.

        Called before each step; gradients of ``padding_idx`` become zeros again.

        Raises:
            PrivacyError: if it needs the variance, and compression makes it unknown; and if it
                has gradients of other parameters.
        """
        held = (p for group in optimizer.param_groups for p in group["params"])
        if others := [p for p in held if p.grad is not None and p not in self._own]:
            raise PrivacyError(
                f"RankLevel: this {type(optimizer).__name__} has gradients of {len(others)} "
                "parameters outside of the model that was registered: nothing clips or noises "
                "them. Make one module of all that is trained, and freeze the rest"
            )
        if isinstance(optimizer, NoisedOptimizer):
            assert self.mechanism is not None, "attach() comes first"
            require_known_variance(type(optimizer), self.mechanism.scheme())
            optimizer.noise_variance = self.mechanism.noise_variance
        for weight, row in self._padding:
            if weight.grad is not None:
                weight.grad[row] = 0

    def look(self) -> None:
        """Warn if buffers or frozen parameters have changed since :meth:`attach`."""
        if self._changed():
            warn_program(WRITTEN)

    def _require_same_buffers(self) -> None:
        if int(fingerprint([*self._module.buffers()])) == self._all_buffers:
            return
        if changed := self._changed():
            raise PrivacyError(
                f"RankLevel: the forward pass has changed {', '.join(changed)}: statistics of a "
                "rank's data, which DDP sends, without noise. Use GroupNorm, LayerNorm or eval()"
            )

    def _changed(self) -> list[str]:
        now = self._fingerprints_of_fixed()
        return [name for name, value in now.items() if self._fixed.get(name) != value]

    def _fingerprints_of_fixed(self) -> dict[str, int]:
        # Values: DDP writes buffers anew before each pass, and batch norm uncounted.
        frozen = [(f"frozen {i}", p) for i, p in enumerate(self._frozen) if not p.requires_grad]
        fixed = [*self._module.named_buffers(), *frozen]
        return {name: int(fingerprint([tensor])) for name, tensor in fixed}

    def _tell_epsilon(self) -> None:
        epsilons = [
            self.engine.accountant.epsilon(
                [GaussianEvent(self.noise_multiplier / 2, 1.0, steps=steps)], self._delta
            )
            for steps in _STEPS
        ]
        told = ", ".join(
            f"{epsilon:.3g} after {steps:,} step{'s' * (steps > 1)}"
            for epsilon, steps in zip(epsilons, _STEPS, strict=True)
        )
        warn_program(
            f"RankLevel: with noise_multiplier {self.noise_multiplier:g}, epsilon at delta "
            f"{self._delta:g} is {told}, for neighbours that differ in all data of one rank"
        )
