"""The privacy engine: makes training differentially private, and computes epsilon."""

import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
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
from comm_hooks.optim.private.accounting.releases import (
    Releases,
    read_history,
    releases_of,
    saved_history,
)
from comm_hooks.optim.private.client_level import PrivateParticipation
from comm_hooks.optim.private.data.poisson import private_loader
from comm_hooks.optim.private.data.same_data import compare_datasets
from comm_hooks.optim.private.dp_optimizer import DPOptimizer, releases_into
from comm_hooks.optim.private.errors import PrivacyError, resettle
from comm_hooks.optim.private.gradients.clipping import ClippedGradients, LossFunction
from comm_hooks.optim.private.gradients.model_checks import (
    check_model,
    padding_rows,
    refuse_later_hooks,
)
from comm_hooks.optim.private.gradients.per_sample import PerSampleGradients
from comm_hooks.optim.private.noise.mechanism import GaussianMechanism, NoiseKind
from comm_hooks.optim.private.noise.placement import Place, require_known_variance
from comm_hooks.registered_model import RegisteredModel
from comm_hooks.requirements import require_choice, require_kind, require_within


class PrivacyEngine:
    """Makes training differentially private, on one rank or on many, compressed or not.

    Names and return values are those of Opacus.  Every rank makes an engine and calls the same
    methods.  The guarantee is (epsilon, delta)-differential privacy of all releases (the model at
    every step, and the state of optimizers) for neighbours that differ by one sample, or by one
    client (:meth:`private_participation`).  It does not cover logs of the loss.

    Args:
        accountant: ``"rdp"``, ``"pld"`` (tighter, needs dp-accounting) or an ``Accountant``.
        ledger: the path of a file, outside of checkpoints, to which every release is written before
            it is made; an existing file is continued.  Without it, a restart loses the record of
            releases: then save :meth:`state_dict`, which misses steps that were rolled back.
            Only the first rank of a training opens the file, when it is needed.

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
        self, *, accountant: Accountant | str = "rdp", ledger: str | os.PathLike[str] | None = None
    ) -> None:
        try:
            self.accountant = build_accountant(accountant)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}: {error}") from None
        if ledger is not None:
            require_kind(self, "ledger", ledger, str, bytes, os.PathLike)
        # The directory may be another one when the file is opened.
        self._path = ledger and os.path.abspath(ledger)
        self._ledger: Ledger | None = None
        self._budget: tuple[float, float] | None = None
        # Of the last kind of step; computed anew for another kind.
        self._steps_left: dict[GaussianEvent, int] = {}
        self._most_units = 0
        self.witnesses: weakref.WeakSet[Any] = weakref.WeakSet()  # with look(), before an epsilon

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
        """Return a model, an optimizer and a loader for private training; call it on all ranks.

        Args:
            module: the model, the same on all ranks; if it is in ``DistributedDataParallel``, DDP
                averages nothing.  The same object is returned.
            optimizer: the optimizer of the model's parameters; it receives noised gradients.
            data_loader: a loader of the whole dataset, the same on all ranks.  Rank i of N
                gets samples i, i + N, ...; every step draws each of them with ``sample_rate``.
            noise_multiplier: sigma, the standard deviation of the noise over ``max_grad_norm``.
            max_grad_norm: C, the norm to which every sample's gradient is clipped.
            sample_rate: q, the probability of a sample to be in a step.  Public: do not compute it
                from the exact number of private samples.
            expected_batch_size: B, the divisor of sums over all ranks; public.
            loss_function: ``loss_function(model, batch)`` returns the loss of each sample,
                ``(B,)``, independent of the other samples.  ``"functorch"`` passes one sample at a
                time, and accepts a mean over them as well.
            placement: where noise is added; see
                :class:`~comm_hooks.optim.private.GaussianMechanism`.
            noise: ``"gaussian"`` or ``"discrete"``; see ``GaussianMechanism``, too.
            exchange: the exchange of the noised sums; by default without compression.
            grad_sample_mode: the source of per-sample gradients: ``"functorch"``, by
                ``torch.func``; ``"hooks"``, by Opacus.
            micro_batch_size: the number of samples that the loss function receives at a time.

        Raises:
            PrivacyError: for a model that mixes samples or has a communication hook, a compressor
                that is not private with the placement, or an optimizer that has taken steps.
            ValueError: for arguments of a wrong type or out of range.
            ConfigMismatchError: on all ranks, if lengths or some samples of data sets differ.
        """
        check_model(module)
        require_choice(self, "grad_sample_mode", grad_sample_mode, ("functorch", "hooks"))
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
        kind: Callable[..., ClippedGradients] = PerSampleGradients
        if grad_sample_mode == "hooks":
            from comm_hooks.optim.private.gradients.opacus import OpacusGradients

            kind = OpacusGradients
        elif opacus := sys.modules.get("comm_hooks.optim.private.gradients.opacus"):
            opacus.detach(module)
        gradients = kind(module, loss_function, max_grad_norm, micro_batch_size=micro_batch_size)
        transport = exchange.transport
        require_kind(self, "data_loader", data_loader, DataLoader)
        compare_datasets(data_loader.dataset, transport)
        loader = private_loader(
            data_loader, sample_rate, rank=transport.rank, world_size=transport.world_size
        )
        exchange.agree_on({"sample_rate": sample_rate, "optimizer": type(optimizer).__name__})
        refuse_later_hooks(module)

        def event_of_step() -> GaussianEvent:
            # By the settings at the time of the step, which may have changed.
            event = GaussianEvent(mechanism.noise_multiplier, sample_rate)
            return mechanism.verdict.recorded(event, placement)

        enter = self.account(
            transport,
            len(data_loader.dataset),  # type: ignore[arg-type]
            event_of_step,
            [mechanism.releases, releases_into(optimizer)],
            module.parameters(),
        )
        private = DPOptimizer(
            optimizer,
            gradients,
            mechanism,
            enter,
            tickets=loader.tickets,
            model=RegisteredModel(module, is_fixed=False),
            padding=padding_rows(module),
        )
        exchange.owner = private
        private.witness.watch(gradients.parameters, module)
        self.witnesses.add(private.witness)
        return module, private, loader

    def make_private_with_epsilon(
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        steps: float,
        sample_rate: float,
        **settings: Any,
    ) -> tuple[nn.Module, DPOptimizer, DataLoader[Any]]:
        """Call :meth:`make_private` with the least noise that stays within a privacy budget.

        Earlier releases in the ledger count against the budget.  A step that would exceed the
        budget raises ``PrivacyError``.

        Args:
            target_epsilon, target_delta: the privacy budget.
            steps: the number of steps to be taken, such as ``epochs / sample_rate``; rounded up.
            sample_rate: see :meth:`make_private`.
            settings: the other arguments of :meth:`make_private`.

        Raises:
            ValueError: for a budget that no noise multiplier keeps, and as :meth:`make_private`.
        """
        require_within(self, "steps", steps, "(0, inf)")
        if "noise_multiplier" in settings:
            raise ValueError(
                "PrivacyEngine: noise_multiplier follows from the budget: pass it to "
                "make_private() instead"
            )
        exchange = settings.get("exchange") or _dense_exchange()
        self._share_history(exchange.transport)
        noise_multiplier = noise_multiplier_for(
            target_epsilon,
            target_delta,
            sample_rate=sample_rate,
            steps=math.ceil(steps),
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
        """Change settings of the coming steps, and of their ledger entries; call it on all ranks.

        To change ``sample_rate``, the exchange or the placement, call :meth:`make_private` anew.

        Args:
            optimizer: the optimizer that :meth:`make_private` returned.
            noise_multiplier, max_grad_norm, expected_batch_size: see :meth:`make_private`; None
                for no change.  They must depend on public data and releases only.

        Raises:
            PrivacyError: between ``backward()`` and ``step()``.
            ValueError: for values out of range.
            ConfigMismatchError: on all ranks, if their changes differ.
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
        self, *, clients: int, sample_rate: float, noise_multiplier: float, max_norm: float
    ) -> PrivateParticipation:
        """Return the sampling of clients for private rounds of local steps, for ``LocalRounds``.

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
        enter = self._entry(lambda: event, [participation.releases], participation.of_model)
        resettle(participation, "enter", enter)
        self.witnesses.add(participation)
        return participation

    def account(
        self,
        transport: Transport,
        units: int,
        event_of_step: Callable[[], GaussianEvent],
        continued: Sequence[Releases],
        parameters: Iterable[torch.Tensor],
    ) -> Callable[[], None]:
        """Return a function that writes a coming release to the ledger; collective.

        Args:
            transport: connects the ranks, which then have one history.
            units: the number of samples, clients or ranks that are protected.
            event_of_step: returns the event of the release.
            continued: the counts of the releases on which loaded states depend.
            parameters: all parameters of the model that is released.
        """
        self._share_history(transport)
        self._know_units(units)
        return self._entry(event_of_step, continued, releases_of(parameters))

    def set_budget(self, target_epsilon: float, target_delta: float) -> None:
        """Set a budget: a later step raises ``PrivacyError`` if epsilon would exceed the target.

        Raises:
            ValueError: for values out of range, and a delta that :meth:`get_epsilon` refuses.
        """
        require_delta(target_delta, "target_delta")
        require_within(self, "target_epsilon", target_epsilon, "(0, inf)")
        self._require_small(target_delta)
        self._budget = (target_epsilon, target_delta)
        self._steps_left.clear()

    def get_epsilon(self, delta: float, *, observer: str = "model") -> float:
        """Return epsilon for all releases in the ledger, by this run and before it.

        Warns if something else has written to a model in training since its last step.

        Args:
            delta: less than one over the number of samples (or clients): to publish one of them at
                random would satisfy any larger delta.
            observer: ``"model"`` sees the model at every step; ``"checkpoint"`` also the saved
                states of single ranks, residuals included; ``"rank"`` the messages of single ranks.

        Raises:
            ValueError: before the first step, for a delta out of range, and for one that is not
                less than one over the number of samples in this process's trainings.
            PrivacyError: for ``"checkpoint"`` and ``"rank"`` if the noise of one of the steps does
                not protect from that observer, or its placement is not known.
        """
        require_choice(self, "observer", observer, ("model", "checkpoint", "rank"))
        require_delta(delta)
        self._require_small(delta)
        for witness in self.witnesses:
            witness.look()
        return self.accountant.epsilon(seen_by(observer, self._history()), delta)

    def max_steps(
        self,
        target_epsilon: float,
        target_delta: float,
        *,
        noise_multiplier: float,
        sample_rate: float,
    ) -> int:
        """Return the largest number of further steps after which epsilon is still <= the target."""
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
        return saved_history(self._opened().history())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add the releases that are in a saved :meth:`state_dict` but not in the ledger.

        Warns if the two differ.  Call it on all ranks, before the first step.

        Raises:
            ValueError: for a state that :meth:`state_dict` has not returned.
        """
        self._opened().reconcile(read_history(state))
        self._steps_left.clear()

    def _know_units(self, count: int) -> None:
        """Record the number n of samples or clients; check that the budget's delta is below 1/n."""
        self._most_units = max(self._most_units, count)
        if self._budget is not None:
            self._require_small(self._budget[1])

    def _require_small(self, delta: float) -> None:
        if self._most_units and delta >= 1 / self._most_units:
            raise ValueError(
                f"PrivacyEngine: delta {delta:g} is not below one over the number of samples, "
                "clients or ranks: publishing one of them at random would satisfy it. "
                f"Take less than {1 / self._most_units:.1g}"
            )

    def _history(self) -> list[GaussianEvent]:
        return self._opened().events()

    def _opened(self) -> Ledger:
        """Return the ledger; the first call opens the file on rank 0, else a ledger in memory."""
        if self._ledger is None:
            is_first = not dist.is_initialized() or dist.get_rank() == 0
            self._ledger = Ledger(self._path if is_first else None)
        return self._ledger

    def _share_history(self, transport: Transport) -> None:
        """Send the releases in the first rank's ledger to all ranks, so that all have the same."""
        if self._ledger is None and transport.rank:
            self._ledger = Ledger(None)
        history, problem = None, None
        try:
            if transport.rank == 0 and self._path is not None and self._opened().path is None:
                # The first of a group that is not the first of all.
                known = self._opened()
                self._ledger = Ledger(self._path)
                if known.events():
                    self._ledger.reconcile(known.history())
            history = self._opened().run, self.state_dict()
        except (OSError, ValueError) as error:  # the other ranks must hear of it
            problem = error
        told = None if problem is None else str(problem)
        of_first, refusal = transport.perform(AllGatherObject([history, told]))[0]
        if problem is not None:
            raise problem
        if refusal is not None:
            raise ValueError(refusal)
        if transport.rank != 0:
            run, saved = of_first
            self._ledger = Ledger(None, run=run)
            for event in read_history(saved):
                self._ledger.record(event)
        self._steps_left.clear()

    def _entry(
        self,
        event_of_step: Callable[[], GaussianEvent],
        continued: Sequence[Releases],
        of_model: Sequence[Releases],
    ) -> Callable[[], None]:
        """Return a function that writes a release to the ledger, or raises if the budget is spent.

        It also raises if the ledger lacks releases in ``continued``, the counts of loaded states,
        or ``of_model``, those of the parameters.  (The argument is not the owner of these counts,
        which holds this function: a reference cycle would keep the ledger locked.)
        """
        for releases in continued:
            releases.needs_entry = True

        def enter() -> None:
            ledger = self._opened()
            for releases in (*continued, *of_model):
                releases.require_counted(ledger)
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
                        f"PrivacyEngine: the budget of epsilon {epsilon:g} at delta {delta:g} is "
                        "spent: one more step would exceed it. Stop the training: this step has "
                        "released nothing"
                    )
                self._steps_left[event] -= 1
            self._record(event)
            for releases in continued:
                releases.enter(event, ledger.run)
            for releases in of_model:
                releases.steps[replace(event, run=ledger.run)] += 1

        return enter

    def _record(self, event: GaussianEvent) -> None:
        """Write a release to the ledger; the audit of scripts observes it."""
        self._opened().record(event)


def _dense_exchange() -> Exchange:
    transport = None if dist.is_initialized() else Simulated(1)[0]
    return Exchange(Identity(), transport=transport)
