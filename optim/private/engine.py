"""The entrance: makes training private, and knows what it has cost."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.collectives.simulated import Simulated
from comm_hooks.compressors.identity import Identity
from comm_hooks.exchange import Exchange
from comm_hooks.exchange.agreement import check_agreement
from comm_hooks.optim.private.accounting import (
    Accountant,
    GaussianEvent,
    build_accountant,
    max_steps,
    noise_multiplier_for,
)
from comm_hooks.optim.private.accounting.accountant import require_delta
from comm_hooks.optim.private.accounting.events import seen_by
from comm_hooks.optim.private.accounting.ledger import Ledger
from comm_hooks.optim.private.accounting.releases import Releases
from comm_hooks.optim.private.client_level import PrivateParticipation
from comm_hooks.optim.private.data.poisson import private_loader
from comm_hooks.optim.private.data.same_data import compare_datasets
from comm_hooks.optim.private.dp_optimizer import DPOptimizer, releases_into
from comm_hooks.optim.private.errors import PrivacyError, resettle
from comm_hooks.optim.private.gradients.clipping import ClippedGradients, LossFunction
from comm_hooks.optim.private.gradients.model_checks import check_model, refuse_later_hooks
from comm_hooks.optim.private.gradients.per_sample import PerSampleGradients
from comm_hooks.optim.private.noise.mechanism import (
    GaussianMechanism,
    NoiseKind,
    require_positive_number,
)
from comm_hooks.optim.private.noise.placement import (
    Place,
    require_known_variance,
)
from comm_hooks.requirements import in_one_line, require_choice, require_kind, require_within


class PrivacyEngine:
    """Makes training differentially private, on one rank or on many, compressed or not.

    Names and return values are those of Opacus.  Every rank makes an engine and calls the same
    methods.  A guarantee is (epsilon, delta)-differential privacy of everything that is released
    (the model at every step, and what optimizers keep) for neighbours that differ by one sample, or
    by one client (:meth:`private_participation`).  It does not cover what is logged of the loss.

    Args:
        accountant: ``"rdp"``, ``"pld"`` (tighter, needs dp-accounting) or an ``Accountant``.
        ledger: a file, outside of checkpoints, into which every release is entered before it is
            made; it is continued if it exists.  Without, releases before a restart are forgotten:
            then save :meth:`state_dict`, which does not know of steps that were rolled back.  The
            first rank of those that train together opens it, when it is needed.

    Raises:
        ValueError: for an unknown accountant; when the ledger is needed, if it cannot be read.

    Example::

        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from comm_hooks.optim.private import DPAdamBC, PrivacyEngine
        >>> dataset = TensorDataset(torch.randn(256, 8), torch.randint(8, (256,)))
        >>> def loss_function(model, batch):
        ...     inputs, labels = batch
        ...     return torch.nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        >>> engine = PrivacyEngine()
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model,
        ...     optimizer=DPAdamBC(model.named_parameters(), lr=1e-3),
        ...     data_loader=DataLoader(dataset),
        ...     loss_function=loss_function,
        ...     noise_multiplier=1.0,
        ...     max_grad_norm=1.0,
        ...     sample_rate=0.125,
        ...     expected_batch_size=32,
        ... )
        >>> for batch in loader:
        ...     loss = optimizer.backward(batch)
        ...     optimizer.step()
        >>> 1 < engine.get_epsilon(delta=1e-3) < 5
        True
    """

    def __init__(
        self,
        *,
        accountant: Accountant | str = "rdp",
        ledger: str | os.PathLike[str] | None = None,
    ) -> None:
        try:
            self.accountant = build_accountant(accountant)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}: {error}") from None
        if ledger is not None:
            require_kind(self, "ledger", ledger, str, bytes, os.PathLike)
        self._path = ledger
        self._ledger: Ledger | None = None
        self._budget: tuple[float, float] | None = None
        # Until another kind of step is taken, of which fewer or more may be left.
        self._steps_left: dict[GaussianEvent, int] = {}
        self._most_units = 0

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float,
        sample_rate: float,
        expected_batch_size: float,
        loss_function: LossFunction,
        placement: Place = "central",
        noise: NoiseKind = "gaussian",
        exchange: Exchange | None = None,
        grad_sample_mode: str = "functorch",
        micro_batch_size: int | None = None,
    ) -> tuple[nn.Module, DPOptimizer, DataLoader[Any]]:
        """Return a model, an optimizer and a loader for private training; all ranks together.

        Args:
            module: the model, the same on all ranks, or one in ``DistributedDataParallel`` (whose
                averaging is not used).  It is what is returned.
            optimizer: over the model's parameters; what it gets for gradients is noised.
            data_loader: over the whole dataset, the same on all ranks.  Of its samples rank i of N
                gets those at i, i + N, ...; every step draws each of them with ``sample_rate``.
            noise_multiplier: sigma, the standard deviation of the noise over ``max_grad_norm``.
            max_grad_norm: C, the norm to which every sample's gradient is clipped.
            sample_rate: q.  Public: do not compute it from the exact number of private samples.
            expected_batch_size: B, by which sums are divided; over all ranks, and public.
            loss_function: ``loss_function(model, batch)`` returns the loss of each sample,
                ``(B,)``, which knows nothing of the others.  ``"functorch"`` passes samples one at
                a time, and takes a mean over them as well.
            placement: where noise is added; see
                :class:`~comm_hooks.optim.private.GaussianMechanism`.
            noise: ``"gaussian"`` or ``"discrete"``; see the same.
            exchange: compresses; by default nothing is compressed.
            grad_sample_mode: how ``optimizer.backward(batch)`` finds per-sample gradients:
                ``"functorch"``, by ``torch.func``; ``"hooks"``, by Opacus; ``"ghost"``, by Opacus
                without any sample's gradient, which needs the least memory, but see
                :class:`~comm_hooks.optim.private.gradients.opacus.OpacusGhostGradients` about
                sequences and 16 bits.
            micro_batch_size: how many samples to pass to the loss function at a time.

        Raises:
            PrivacyError: for what would not be private: a model that mixes samples, a comm hook, a
                compressor that does not go with the placement, an optimizer that has taken steps.
            ValueError: for settings that cannot work.
            ConfigMismatchError: on all ranks, if their data sets differ, as far as the lengths and
                some samples tell.
        """
        check_model(module)
        require_choice(self, "grad_sample_mode", grad_sample_mode, ("functorch", "hooks", "ghost"))
        GaussianEvent(noise_multiplier, sample_rate)  # raises for values out of range
        exchange = exchange if exchange is not None else _dense_exchange()
        mechanism = GaussianMechanism(
            exchange,
            place=placement,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            noise=noise,
        )
        require_known_variance(type(optimizer), mechanism.scheme())
        gradients = clipped_gradients(
            module, loss_function, max_grad_norm, grad_sample_mode, micro_batch_size
        )
        transport = exchange.transport
        compare_datasets(data_loader.dataset, transport)
        loader = private_loader(
            data_loader, sample_rate, rank=transport.rank, world_size=transport.world_size
        )
        exchange.agree_on(
            {
                "sample_rate": sample_rate,
                "optimizer": type(optimizer).__name__,
            }
        )
        refuse_later_hooks(module)
        self._share_history(transport)
        self._know_units(len(data_loader.dataset))  # type: ignore[arg-type]

        def event_of_step() -> GaussianEvent:
            # What the step goes by at that moment, whatever has changed.
            event = GaussianEvent(mechanism.noise_multiplier, sample_rate)
            return mechanism.verdict.recorded(event, placement)

        private = DPOptimizer(
            optimizer,
            gradients,
            mechanism,
            self._entry(event_of_step, [mechanism.releases, releases_into(optimizer)]),
            tickets=loader.tickets,
        )
        exchange.owner = private
        return module, private, loader

    def make_private_with_epsilon(
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        steps: int,
        sample_rate: float,
        **settings: Any,
    ) -> tuple[nn.Module, DPOptimizer, DataLoader[Any]]:
        """Do as :meth:`make_private`, with the least noise that keeps a budget.

        What the ledger holds already is part of the budget.  A step that would exceed it raises.

        Args:
            target_epsilon, target_delta: the budget.
            steps: how many are to be taken (``epochs / sample_rate``).
            sample_rate: see :meth:`make_private`.
            settings: the other arguments of :meth:`make_private`.

        Raises:
            ValueError: also if no noise keeps the budget.
        """
        if "noise_multiplier" in settings:
            raise ValueError(
                "make_private_with_epsilon finds noise_multiplier itself: use make_private to give "
                "it"
            )
        exchange = settings.get("exchange") or _dense_exchange()
        self._share_history(exchange.transport)
        noise_multiplier = noise_multiplier_for(
            target_epsilon,
            target_delta,
            sample_rate=sample_rate,
            steps=steps,
            accountant=self.accountant,
            spent=self._history(),
        )
        private = self.make_private(
            noise_multiplier=noise_multiplier,
            sample_rate=sample_rate,
            **{**settings, "exchange": exchange},
        )
        self.set_budget(target_epsilon, target_delta)
        return private

    def change(
        self,
        optimizer: DPOptimizer,
        *,
        noise_multiplier: float | None = None,
        max_grad_norm: float | None = None,
        expected_batch_size: float | None = None,
    ) -> None:
        """Let the coming steps go by other settings, and the ledger say so; on all ranks together.

        All else (``sample_rate``, the exchange, the placement) is settled: for another one call
        :meth:`make_private` anew.

        Args:
            optimizer: from :meth:`make_private`.
            noise_multiplier, max_grad_norm, expected_batch_size: see there; None for no change.
                They must not depend on the private data, nor on what was not released.

        Raises:
            PrivacyError: between ``backward()`` and ``step()``.
            ValueError: for values out of range.
            ConfigMismatchError: on all ranks, if they change something else.
        """
        require_kind(self, "optimizer", optimizer, DPOptimizer)
        given = {
            "noise_multiplier": noise_multiplier,
            "max_grad_norm": max_grad_norm,
            "expected_batch_size": expected_batch_size,
        }
        changed = {name: value for name, value in given.items() if value is not None}
        for name, value in changed.items():
            require_within(self, name, value, "(0, inf)")
        transport = optimizer.mechanism.exchange.transport
        check_agreement(transport.perform(AllGatherObject(changed)), transport.ranks)
        optimizer.change(**changed)

    def private_participation(
        self,
        *,
        clients: int,
        sample_rate: float,
        noise_multiplier: float,
        max_norm: float,
    ) -> PrivateParticipation:
        """Return what makes rounds of local work private for clients, entered into the ledger.

        Args:
            clients, sample_rate, noise_multiplier, max_norm: see
                :class:`~comm_hooks.optim.private.PrivateParticipation`.
        """
        self._know_units(clients)
        event = GaussianEvent(
            noise_multiplier,
            sample_rate,
            placement="clients",
            checkpoint_multiplier=0.0,
            rank_multiplier=0.0,
        )
        participation = PrivateParticipation(
            clients=clients,
            sample_rate=sample_rate,
            noise_multiplier=noise_multiplier,
            max_norm=max_norm,
            join=self._share_history,
        )
        resettle(participation, "enter", self._entry(lambda: event, [participation.releases]))
        return participation

    def set_budget(self, target_epsilon: float, target_delta: float) -> None:
        """Let every step raise that would take epsilon above the target.

        Raises:
            ValueError: for values out of range, and a delta that is too large; see
                :meth:`get_epsilon`.
        """
        require_delta(target_delta, "target_delta")
        require_positive_number("target_epsilon", target_epsilon)
        self._require_small(target_delta)
        self._budget = (target_epsilon, target_delta)
        self._steps_left.clear()

    def get_epsilon(self, delta: float, *, observer: str = "model") -> float:
        """Return epsilon for all that was released so far, by this run and before it.

        Args:
            delta: less than one over the number of samples (or clients): to publish one of them at
                random would satisfy any larger one.
            observer: ``"model"``: who sees the model at every step, and what is made of it;
                ``"checkpoint"``: who also sees what single ranks save, residuals included;
                ``"rank"``: who sees what single ranks send.  The ledger says of every step where
                its noise was added.

        Raises:
            ValueError: before the first step, for a delta out of range, and for one that is not
                less than one over the number of samples in this process's trainings.
            PrivacyError: for ``"checkpoint"`` and ``"rank"`` where that carries no noise in one of
                the steps, or it is not known.
        """
        require_choice(self, "observer", observer, ("model", "checkpoint", "rank"))
        require_delta(delta)
        self._require_small(delta)
        return self.accountant.epsilon(seen_by(observer, self._history()), delta)

    def max_steps(
        self,
        target_epsilon: float,
        target_delta: float,
        *,
        noise_multiplier: float,
        sample_rate: float,
    ) -> int:
        """Return how many such steps may still be taken: after the last, epsilon <= the target."""
        return max_steps(
            target_epsilon,
            target_delta,
            noise_multiplier=noise_multiplier,
            sample_rate=sample_rate,
            accountant=self.accountant,
            spent=self._history(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the history of releases, as plain numbers.  No secret is in it."""
        return {"events": [asdict(event) for event in self._history()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count what a checkpoint counts, too: where the ledger has less, the larger wins.

        Warns if they differ.  Call it on all ranks, before the first step.

        Raises:
            ValueError: for anything but what :meth:`state_dict` returned.
        """
        try:
            events = [GaussianEvent(**event) for event in state["events"]]
        except (KeyError, TypeError):
            raise ValueError(
                "PrivacyEngine: the state is not what its state_dict() returned, a mapping with "
                f"'events': got {in_one_line(state)}"
            ) from None
        self._opened().reconcile(events)
        self._steps_left.clear()

    def _know_units(self, count: int) -> None:
        """Note of how many samples or clients one is protected; a budget may have been set."""
        self._most_units = max(self._most_units, count)
        if self._budget is not None:
            self._require_small(self._budget[1])

    def _require_small(self, delta: float) -> None:
        if self._most_units and delta >= 1 / self._most_units:
            raise ValueError(
                f"delta {delta:g} is not below one over the number of samples: publishing one of "
                f"them at random would satisfy it. Take less than {1 / self._most_units:.1g}"
            )

    def _history(self) -> list[GaussianEvent]:
        return self._opened().events()

    def _opened(self) -> Ledger:
        """Return the ledger; until the ranks of the training are known, the first of all has it."""
        if self._ledger is None:
            is_first = not dist.is_initialized() or dist.get_rank() == 0
            self._ledger = Ledger(self._path if is_first else None)
        return self._ledger

    def _share_history(self, transport: Transport) -> None:
        """Let all ranks know what the first one finds in its file, so that all count alike."""
        if self._ledger is None and transport.rank:
            self._ledger = Ledger(None)
        history, problem = [], None
        try:
            if transport.rank == 0 and self._path is not None and self._opened().path is None:
                # The first of a group that is not the first of all.
                known = self._history()
                self._ledger = Ledger(self._path)
                if known:
                    self._ledger.reconcile(known)
            history = [asdict(event) for event in self._history()]
        except (OSError, ValueError) as error:  # the other ranks must hear of it
            problem = error
        told = None if problem is None else str(problem)
        events, of_first = transport.perform(AllGatherObject([history, told]))[0]
        if problem is not None:
            raise problem
        if of_first is not None:
            raise ValueError(of_first)
        if transport.rank != 0:
            self._ledger = Ledger(None)
            for event in events:
                self._ledger.record(GaussianEvent(**event))
        self._steps_left.clear()

    def _entry(
        self,
        event_of_step: Callable[[], GaussianEvent],
        continued: Iterable[Releases],
    ) -> Callable[[], None]:
        """Return what enters one such release, and raises instead if the budget is spent.

        Args:
            event_of_step: returns what is entered.
            continued: what the release will be added to, which has to be in the ledger.  (Not who
                has it: that has this function, and both would outlive their last user, and with
                them the lock of the ledger.)
        """

        def enter() -> None:
            for releases in continued:
                releases.require_counted(self._history)
            event = event_of_step()
            if self._budget is not None:
                if event not in self._steps_left:
                    self._steps_left = {
                        event: self.max_steps(
                            *self._budget,
                            noise_multiplier=event.noise_multiplier,
                            sample_rate=event.sample_rate,
                        )
                    }
                if not self._steps_left[event]:
                    epsilon, delta = self._budget
                    raise PrivacyError(
                        f"the budget of epsilon {epsilon:g} at delta {delta:g} is spent: one more "
                        "step would exceed it. Stop here: nothing was released"
                    )
                self._steps_left[event] -= 1
            self._record(event)

        return enter

    def _record(self, event: GaussianEvent) -> None:
        self._opened().record(event)


def clipped_gradients(
    module: nn.Module,
    loss_function: LossFunction,
    max_grad_norm: float,
    grad_sample_mode: str,
    micro_batch_size: int | None,
) -> ClippedGradients:
    """Return what computes clipped sums of the per-sample gradients of a model."""
    kind: Callable[..., ClippedGradients] = PerSampleGradients
    if grad_sample_mode == "functorch":
        loaded = sys.modules.get("comm_hooks.optim.private.gradients.opacus")
        if loaded is not None:
            loaded.detach(module)
    else:
        from comm_hooks.optim.private.gradients import opacus

        ghost = grad_sample_mode == "ghost"
        kind = opacus.OpacusGhostGradients if ghost else opacus.OpacusGradients
    return kind(module, loss_function, max_grad_norm, micro_batch_size=micro_batch_size)


def _dense_exchange() -> Exchange:
    transport = None if dist.is_initialized() else Simulated(1)[0]
    return Exchange(Identity(), transport=transport)
