"""An optimizer that wraps an ordinary one and gives it clipped and noised gradients."""

import weakref
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch.optim import Optimizer

from comm_hooks.exchange.agreement import hyperparameters_of
from comm_hooks.optim.base import names_of, parameters_of
from comm_hooks.optim.private.accounting.releases import Releases
from comm_hooks.optim.private.data.tickets import Tickets
from comm_hooks.optim.private.errors import PrivacyError, Settled, resettle
from comm_hooks.optim.private.gradients.clipping import ClippedGradients, PublicTransform
from comm_hooks.optim.private.noise.mechanism import GaussianMechanism
from comm_hooks.optim.private.optimizers.descent import NoisedOptimizer
from comm_hooks.optim.private.witness import Witness
from comm_hooks.optim.wrapping import WrappingOptimizer
from comm_hooks.registered_model import RegisteredModel, watch
from comm_hooks.requirements import require_kind

_releases_into: weakref.WeakKeyDictionary[Optimizer, Releases] = weakref.WeakKeyDictionary()

# The inner optimizer of the private step in progress.
_stepping: ContextVar[Optimizer | None] = ContextVar("stepping", default=None)


class DPOptimizer(Settled, WrappingOptimizer):
    """A wrapper of any optimizer that makes its steps differentially private.

    :class:`~comm_hooks.optim.private.PrivacyEngine` makes it.  A step

    1. takes the clipped sum of per-sample gradients of this rank's batch: the next batch that the
       loader has drawn, whole, and used in no step before;
    2. writes itself to the ledger, the record of releases, before anything is released;
    3. has the mechanism add noise and exchange the sums: a mean that is the same on all ranks;
    4. puts the mean into ``p.grad`` and steps the inner optimizer, which sees nothing private.

    A step with empty batches on all ranks releases pure noise, and must be taken: an empty draw is
    private as well.

    Args:
        inner: the wrapped optimizer, over the parameters of ``gradients``.
        gradients: the source of clipped sums of per-sample gradients.
        mechanism: the mechanism that adds noise to the sums and exchanges them.
        enter: called in every step to write it to the ledger; raises if the budget is spent.
        tickets: the loader's record of drawn batches; if None, batches are not checked.
        model: the model, which must keep its parameters; None: it is not checked.
        padding: weights and their rows that are always zero in gradients, and get no noise.

    Attributes:
        not_finite: the number of this rank's samples that were left out so far, because their
            gradients were not finite.  Private, like the loss.
        releases: the counts of releases on which the inner optimizer's state depends.
        witness: warns of writes of others to the model.

    Raises:
        ValueError: for an inner optimizer that needs a closure or holds other parameters.
        PrivacyError: in a step that would exceed the budget, has no drawn batch, or follows
            ``loss.backward()`` (its gradients are discarded); for an inner optimizer that has taken
            steps without privacy; and for loading a state that was saved without privacy.

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
        model: RegisteredModel | None = None,
        padding: Sequence[tuple[torch.Tensor, int]] = (),
    ) -> None:
        require_kind(self, "inner", inner, Optimizer)
        require_kind(self, "gradients", gradients, ClippedGradients)
        releases = releases_into(inner)
        super().__init__(inner)
        self.gradients = gradients
        self.mechanism = mechanism
        self.releases = releases
        self._enter = enter
        if tickets is not None:
            require_kind(self, "tickets", tickets, Tickets)
        self._tickets = Tickets(are_checked=False) if tickets is None else tickets
        self._tickets.has_steps = True
        self._model = model
        self._padding = padding
        self._raw = _RawGradients(gradients.parameters)
        self._transform_is_due = True
        self.not_finite = 0
        self.witness = Witness()
        watch(gradients.parameters, self)
        order = parameters_of(inner.param_groups)
        trained, held = set(gradients.parameters), set(order)
        # Frozen parameters never have a gradient, so optimizers ignore them.
        self._frozen = [parameter for parameter in held - trained if not parameter.requires_grad]
        strangers = held - trained - set(self._frozen)
        if strangers or trained - held:
            raise ValueError(
                f"DPOptimizer: the optimizer holds {len(strangers)} parameters that the model "
                f"does not train, and lacks {len(trained - held)} that it does train: make it from "
                "model.parameters(), and freeze other parameters (requires_grad_(False))"
            )
        places = {parameter: place for place, parameter in enumerate(order)}
        self._order = [places[p] for p in gradients.parameters]
        names = names_of(inner.param_groups)
        # Residuals and random keys are kept by name, independently of the order of parameters.
        self._names = [names[i] for i in self._order]

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings of the next step, which every exchange compares between ranks."""
        return hyperparameters_of(self.param_groups)

    def replica(self) -> Sequence[torch.Tensor]:
        """Return the parameters, which must be equal on all ranks before every step."""
        return self.gradients.parameters

    def names(self) -> Collection[str]:
        """Return the names of the parameters, in the order of the gradients."""
        return self._names

    def backward(self, batch: Any) -> torch.Tensor:
        """Add the clipped gradients of the next drawn batch; return its mean loss.

        The loss is private: the guarantee does not cover a log of it.  If this call fails, the
        batch may be passed again.

        Args:
            batch: the argument of the loss function, tensors with one sample in each row; it may
                have no rows.

        Raises:
            PrivacyError: for any batch but the next drawn one, and after ``loss.backward()`` (its
                gradients are discarded).
        """
        self._raw.refuse()
        self._require_same_trained()
        self.witness.look(before="backward")
        self._set_transform()
        self._tickets.admit(self.gradients.samples_in(batch), batch)
        try:
            return self.gradients.backward(batch, self._tickets.reader(batch))
        except BaseException:
            self.gradients.discard()
            self._tickets.restart()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the last step.

        Raises:
            PrivacyError: between :meth:`backward` and :meth:`step`.  Whether a batch that was seen
                is used must not depend on its content, the loss for example: epsilon is computed
                from the rate at which samples are drawn, not released.
        """
        if self._tickets.has_begun:
            raise PrivacyError(
                "DPOptimizer: zero_grad() would discard a batch that backward() has seen, and "
                "epsilon holds only if that does not depend on its content: call step() first, "
                "also if the batch is empty or the loss not finite, since samples without finite "
                "gradients are left out"
            )
        super().zero_grad(set_to_none)
        self._raw.forget()

    def _require_same_trained(self) -> None:
        """Raise ``ValueError`` if parameters were frozen or unfrozen since construction."""
        changed: list[torch.Tensor] = [p for p in self.gradients.parameters if not p.requires_grad]
        changed += [p for p in self._frozen if p.requires_grad]
        if changed:
            raise ValueError(
                f"DPOptimizer: requires_grad of {len(changed)} parameters has changed since "
                "make_private(), which fixes the parameters with clipped and noised gradients: "
                "call make_private() again after freezing or unfreezing"
            )
        if self._model:
            self._model.require_unchanged()

    def check_step(self, optimizer: Optimizer) -> None:
        """Raise ``PrivacyError`` if an optimizer steps that is not in a step of this one."""
        if optimizer is not self and _stepping.get() is not self.inner:
            is_inner = optimizer is self.inner
            raise PrivacyError(
                f"this {type(optimizer).__name__} "
                + ("is inside" if is_inner else "has the parameters of")
                + " a DPOptimizer, and a step of its own would not be in the ledger: after "
                "loss.backward(), p.grad holds gradients without noise. Call step() of the "
                "optimizer that make_private() returned"
            )

    def _step_with(self, closure: Callable[[], float] | None) -> None:
        if closure is not None:
            raise ValueError(
                "DPOptimizer: a closure would be evaluated without accounting for it: call "
                "backward(batch), then step() (in Lightning's manual optimization, which passes a "
                "closure, take self.optimizers(use_pl_optimizer=False))"
            )
        with self.mechanism.exchange.failing_together():
            self._take_step()

    def _take_step(self) -> None:
        self._raw.refuse()
        self._set_transform()
        if not self._tickets.has_begun:
            self._tickets.admit(0)
        self.mechanism.require_unchanged()
        if self.gradients.max_grad_norm != self.mechanism.max_grad_norm:
            raise PrivacyError(
                f"DPOptimizer: gradients are clipped to {self.gradients.max_grad_norm:g} and the "
                f"noise is for {self.mechanism.max_grad_norm:g}: make the arguments gradients and "
                "mechanism with the same max_grad_norm"
            )
        self.witness.look(before="step")
        clipped = self.gradients.take()
        clipped.require_bounded(self.mechanism.max_grad_norm)
        self._tickets.finish(clipped.samples + clipped.not_finite)
        self._transform_is_due = True
        self.not_finite += clipped.not_finite
        self._enter()
        self.releases.add(self.mechanism.place, self.mechanism.noise_multiplier)
        released = self.mechanism.release(dict(zip(self._names, clipped.tensors, strict=True)))
        for parameter, name in zip(self.gradients.parameters, self._names, strict=True):
            parameter.grad = released.tensors[name].to(parameter.dtype)
        for weight, row in self._padding:
            cast(torch.Tensor, weight.grad)[row] = 0
        if isinstance(self.inner, NoisedOptimizer):
            self.inner.noise_variance = released.noise_variance
        token = _stepping.set(self.inner)
        try:
            with self.witness.stepping():
                self.inner.step()
        finally:
            _stepping.reset(token)
        self.witness.note()

    def change(self, **settings: float) -> None:
        """Change settings of the coming steps; ``PrivacyEngine.change`` calls it on all ranks."""
        if self._tickets.has_begun:
            raise PrivacyError(
                "PrivacyEngine.change: settings can be changed only between steps, and backward() "
                "has begun a step: call step() first"
            )
        for name, value in settings.items():
            resettle(self.mechanism, name, value)
        self.mechanism.exchange.agree_on(settings)
        resettle(self.gradients, "max_grad_norm", self.mechanism.max_grad_norm)

    def _state_to_save(self) -> dict[str, Any]:
        return {**super()._state_to_save(), "releases": self.releases.saved()}

    def _restore(self, state: dict[str, Any]) -> None:
        found = state.pop("releases", None)
        self.releases.check(found)
        super()._restore(state)
        self.releases.adopt(found)

    def release_state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, which may be published with the model.

        It is computed from noised gradients alone, so the guarantee covers it.  It does not have
        the ranks' residuals (``exchange.state_dict()``), which with placement ``"shares"`` carry
        less noise, see ``observer="checkpoint"`` of
        :meth:`~comm_hooks.optim.private.PrivacyEngine.get_epsilon`.
        """
        return self.inner.state_dict()

    def _set_transform(self) -> None:
        """Copy the inner optimizer's transform of per-sample gradients to ``self.gradients``."""
        if self._transform_is_due and isinstance(self.inner, NoisedOptimizer):
            transform = self.inner.transform()
            if transform is not None:
                scale = [transform.scale[place] for place in self._order]
                shift = transform.shift and [transform.shift[place] for place in self._order]
                transform = PublicTransform(scale, shift)
            self.gradients.transform = transform
        self._transform_is_due = False


class _RawGradients:
    """A detector of gradients in ``p.grad`` from ``loss.backward()``: not clipped, not noised."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        # Hooks of a parameter that refer to it would keep it for ever.
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._found = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: torch.Tensor) -> None:
        self._found = True

    def forget(self) -> None:
        self._found = False

    def refuse(self) -> None:
        """Raise ``PrivacyError`` if ``loss.backward()`` has added gradients, and clear them."""
        found, self._found = self._found, False
        parameters = [p for ref in self._parameters if found and (p := ref()) is not None]
        if any(p.grad is not None and bool(p.grad.any()) for p in parameters):
            for parameter in parameters:
                parameter.grad = None
            raise PrivacyError(
                "DPOptimizer: loss.backward() was called, but its gradients are neither clipped "
                "nor noised, and were discarded: call optimizer.backward(batch) instead, which "
                "calls the loss function"
            )


def releases_into(optimizer: Optimizer) -> Releases:
    """Return the counts of releases on which the state of an inner optimizer depends.

    Raises:
        PrivacyError: if the optimizer has taken steps that were not private.
    """
    # Some optimizers (Adagrad) have a state before their first step.
    steps = (state.get("step", 1) for state in optimizer.state.values() if state)
    if optimizer not in _releases_into and any(steps):
        raise PrivacyError(
            f"make_private: this {type(optimizer).__name__} has taken steps: its moments, perhaps "
            "of gradients without noise, would be released. Make a new optimizer; load moments of "
            "public data alone into optimizer.inner after make_private()"
        )
    return _releases_into.setdefault(optimizer, Releases())
