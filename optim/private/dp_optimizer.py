"""An ordinary optimizer, fed with noised gradients."""

import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from comm_hooks.exchange.agreement import hyperparameters_of
from comm_hooks.optim.base import names_of, parameters_of
from comm_hooks.optim.private.accounting.releases import Releases
from comm_hooks.optim.private.data.tickets import Claim, Tickets
from comm_hooks.optim.private.errors import PrivacyError, Settled, resettle
from comm_hooks.optim.private.gradients.clipping import ClippedGradients, PublicTransform
from comm_hooks.optim.private.noise.mechanism import GaussianMechanism
from comm_hooks.optim.private.optimizers.descent import NoisedOptimizer
from comm_hooks.optim.wrapping import WrappingOptimizer
from comm_hooks.requirements import require_callable, require_kind

_RELEASES = "releases"

_releases_into: weakref.WeakKeyDictionary[Optimizer, Releases] = weakref.WeakKeyDictionary()

# The optimizer inside the private one that takes a step at this moment.
_stepping: ContextVar[Optimizer | None] = ContextVar("stepping", default=None)


class DPOptimizer(Settled, WrappingOptimizer):
    """Turns the step of any optimizer into a private one.

    :class:`~comm_hooks.optim.private.PrivacyEngine` makes it.  A step

    1. takes the clipped sum of per-sample gradients of this rank's batch: the next one that the
       loader has drawn, whole, and used in no step before;
    2. enters itself into the ledger, before anything is released;
    3. has the mechanism add noise and exchange it: a mean that is the same on all ranks;
    4. puts that into ``p.grad`` and steps the inner optimizer, which thus sees nothing private.

    A step whose batches are all empty releases pure noise, and must be taken: that nobody was drawn
    is private as well.

    Args:
        inner: an optimizer over the same parameters.
        gradients: where clipped sums come from.
        mechanism: what makes them private.
        enter: called at the start of every step; raises if the budget is spent.
        tickets: those of the loader; without them the caller answers for the batches.

    Attributes:
        not_finite: how many samples of this rank were left out so far, because their gradients were
            not finite.  Private, like the loss.
        releases: those that are in the inner optimizer's state.

    Raises:
        ValueError: for an inner optimizer whose steps need a closure.
        PrivacyError: in a step that would exceed the budget, or has no drawn batch, or not all of
            it, and after ``loss.backward()``, whose gradients are discarded; for an inner optimizer
            that has taken steps of its own, and for a state that none of these has saved.

    Not supported: closures; ``GradScaler`` (use bfloat16 autocast); sparse gradients.
    """

    settled = frozenset({"gradients", "mechanism", "releases"})

    def __init__(
        self,
        inner: Optimizer,
        gradients: ClippedGradients,
        mechanism: GaussianMechanism,
        enter: Callable[[], None],
        *,
        tickets: Tickets | None = None,
    ) -> None:
        require_kind(self, "inner", inner, Optimizer)
        require_kind(self, "gradients", gradients, ClippedGradients)
        require_kind(self, "mechanism", mechanism, GaussianMechanism)
        require_callable(self, "enter", enter)
        if tickets is not None:
            require_kind(self, "tickets", tickets, Tickets)
        releases = releases_into(inner)
        super().__init__(inner)
        self.gradients = gradients
        self.mechanism = mechanism
        self.releases = releases
        self._enter = enter
        self._claim = Claim(tickets)
        self._has_discarded = False
        self._raw = _RawGradients(gradients.parameters)
        self._transform_is_due = True
        self.not_finite = 0
        inner.register_step_pre_hook(_refuse_other_steps)
        order = parameters_of(inner.param_groups)
        trained, held = set(gradients.parameters), set(order)
        # What is frozen never has a gradient, of which optimizers take no notice.
        self._frozen = [parameter for parameter in held - trained if not parameter.requires_grad]
        strangers = held - trained - set(self._frozen)
        if strangers or trained - held:
            raise ValueError(
                f"DPOptimizer: the optimizer holds {len(strangers)} parameters that the model "
                f"does not train, and lacks {len(trained - held)} that it does: make it from "
                "model.parameters(), and freeze what is not to be trained (requires_grad_(False))"
            )
        places = {parameter: place for place, parameter in enumerate(order)}
        self._order = [places[p] for p in gradients.parameters]
        names = names_of(inner.param_groups)
        # Residuals and random keys are tied to names, which the order of parameters must not be.
        self._names = [names[i] for i in self._order]

    def hyperparameters(self) -> dict[str, Any]:
        """Return what the next step goes by, which every exchange compares between ranks."""
        return hyperparameters_of(self.param_groups)

    def replica(self) -> Sequence[torch.Tensor]:
        """Return what is the same on all ranks before every step: the parameters."""
        return self.gradients.parameters

    def names(self) -> Collection[str]:
        """Return the names of the parameters, in the order of the gradients."""
        return self._names

    def backward(self, batch: Any, *, of: Any = None) -> torch.Tensor:
        """Add the clipped gradients of the batch that was drawn; return its mean loss.

        The loss is private: what is logged of it is not covered by the guarantee.  If this fails
        half way, the batch may be tried again.

        Args:
            batch: what the loss function takes, tensors with one sample in each row; it may have
                none.
            of: the batch, if the first argument is a part of it: slices of its tensors, until all
                of its rows were used.

        Raises:
            PrivacyError: for anything but the batch whose turn it is, once, and after
                ``loss.backward()``, whose gradients are discarded.
        """
        self._raw.refuse()
        self._require_same_trained()
        self._set_transform()
        self._claim.admit(self.gradients.samples_in(batch), batch, of)
        try:
            return self.gradients.backward(batch)
        except BaseException:
            self.gradients.discard()
            self._claim.restart()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and discard the batch that was passed to :meth:`backward`, if any.

        It cannot be used again: draw the next one.  Whether a batch is discarded must not depend on
        what is in it, its loss for example: epsilon is of a rate at which batches are drawn, not of
        the rate at which they are released.  The first time warns.
        """
        if self._claim.has_begun and not self._has_discarded:
            self._has_discarded = True
            warnings.warn(
                "zero_grad() discards a batch that backward() has seen: epsilon holds only if that "
                "does not depend on its content. Take the step also where the batch is empty or "
                "the loss is not finite: such samples are left out of it",
                stacklevel=2,
            )
        super().zero_grad(set_to_none)
        self._raw.forget()
        self.gradients.discard()
        self._claim.discard()

    def _require_same_trained(self) -> None:
        """Raise ``ValueError`` if parameters were frozen, or unfrozen, after this was made."""
        changed: list[torch.Tensor] = [p for p in self.gradients.parameters if not p.requires_grad]
        changed += [p for p in self._frozen if p.requires_grad]
        if changed:
            raise ValueError(
                f"DPOptimizer: requires_grad of {len(changed)} parameters has changed since it was "
                "made, and clipping is of those that trained then: freeze first, and then call "
                "make_private, which may be called again"
            )

    def _step_with(self, closure: Callable[[], float] | None) -> None:
        if closure is not None:
            raise ValueError(
                "DPOptimizer: a closure would be evaluated without accounting for it: call "
                "backward(batch), then step() (in Lightning's manual optimization, which passes "
                "one of its own, of self.optimizers(use_pl_optimizer=False))"
            )
        self._take_step()

    def _take_step(self) -> None:
        self._raw.refuse()
        self._set_transform()
        self._claim.require_whole()
        self._require_settled()
        clipped = self.gradients.take()
        self._claim.spend(clipped.samples + clipped.not_finite)
        self._transform_is_due = True
        self.not_finite += clipped.not_finite
        self._enter()
        self.releases.add(self.mechanism.place, self.mechanism.noise_multiplier)
        released = self.mechanism.release(dict(zip(self._names, clipped.tensors, strict=True)))
        for parameter, name in zip(self.gradients.parameters, self._names, strict=True):
            parameter.grad = released.tensors[name].to(parameter.dtype)
        if isinstance(self.inner, NoisedOptimizer):
            self.inner.noise_variance = released.noise_variance
        token = _stepping.set(self.inner)
        try:
            self.inner.step()
        finally:
            _stepping.reset(token)

    def change(self, **settings: float) -> None:
        """Go by other settings from now on: for ``PrivacyEngine.change``, which compares ranks.

        Args:
            settings: ``noise_multiplier``, ``max_grad_norm``, ``expected_batch_size``.

        Raises:
            PrivacyError: between ``backward()`` and :meth:`step`.
        """
        if self._claim.has_begun:
            raise PrivacyError(
                "settings are changed between steps, and this one has begun: call step() or "
                "zero_grad() first"
            )
        self.mechanism.change(**settings)
        resettle(self.gradients, "max_grad_norm", self.mechanism.max_grad_norm)

    def _state_to_save(self) -> dict[str, Any]:
        return {**super()._state_to_save(), _RELEASES: self.releases.saved()}

    def _restore(self, state: dict[str, Any]) -> None:
        found = state.pop(_RELEASES, None)
        self.releases.check(found)
        super()._restore(state)
        self.releases.adopt(found)

    def release_state_dict(self) -> dict[str, Any]:
        """Return what may be published with the model: what the guarantee covers.

        That is the inner optimizer's state, which is made of noised gradients alone.  Residuals of
        ranks (``exchange.state_dict()``) are not in it: with placement ``"shares"`` they carry
        less noise, see ``observer="checkpoint"`` of
        :meth:`~comm_hooks.optim.private.PrivacyEngine.get_epsilon`.
        """
        return self.inner.state_dict()

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raise: per-sample gradients are computed for the parameters that were there at first."""
        raise ValueError("DPOptimizer: parameters cannot be added; call make_private() again")

    def _require_settled(self) -> None:
        self.mechanism.require_unchanged()
        if self.gradients.max_grad_norm != self.mechanism.max_grad_norm:
            raise PrivacyError(
                f"gradients are clipped to {self.gradients.max_grad_norm:g} and the noise is for "
                f"{self.mechanism.max_grad_norm:g}: give both the same max_grad_norm"
            )

    def _set_transform(self) -> None:
        """Ask the inner optimizer, once per step, what to do before clipping."""
        if self._transform_is_due and isinstance(self.inner, NoisedOptimizer):
            transform = self.inner.transform()
            if transform is not None:
                scale = [transform.scale[place] for place in self._order]
                shift = transform.shift and [transform.shift[place] for place in self._order]
                transform = PublicTransform(scale, shift)
            self.gradients.transform = transform
        self._transform_is_due = False


class _RawGradients:
    """Notices gradients that ``loss.backward()`` adds to ``p.grad``: neither clipped nor noised."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._found = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: torch.Tensor) -> None:
        self._found = True

    def forget(self) -> None:
        self._found = False

    def refuse(self) -> None:
        """Raise ``PrivacyError`` if there are any that nobody has cleared, and clear them."""
        found, self._found = self._found, False
        if found and any(p.grad is not None and bool(p.grad.any()) for p in self._parameters):
            for parameter in self._parameters:
                parameter.grad = None
            raise PrivacyError(
                "loss.backward() was called, whose gradients are neither clipped nor noised: call "
                "optimizer.backward(batch) instead, which calls the loss function. They are "
                "discarded"
            )


def releases_into(optimizer: Optimizer) -> Releases:
    """Return what was released into an optimizer that is, or will be, inside a private one.

    Raises:
        PrivacyError: if it remembers steps that were not private.
    """
    # Some optimizers (Adagrad) have a state before their first step.
    steps = (state.get("step", 1) for state in optimizer.state.values() if state)
    if optimizer not in _releases_into and any(steps):
        raise PrivacyError(
            f"this {type(optimizer).__name__} has taken steps: its moments, perhaps of gradients "
            "without noise, would be released. Make a new one; moments of public data alone are "
            "loaded into optimizer.inner after make_private()"
        )
    return _releases_into.setdefault(optimizer, Releases())


def _refuse_other_steps(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Let only a :class:`DPOptimizer` step the optimizer inside it."""
    if _stepping.get() is not optimizer:
        raise PrivacyError(
            f"this {type(optimizer).__name__} is inside a DPOptimizer, and a step of its own would "
            "be in no ledger: after loss.backward(), p.grad holds gradients without noise. Call "
            "step() of the optimizer that make_private() returned"
        )
