"""What is compared, and how a run goes."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.optim import SGD, Adam, Optimizer

from benchmarks.lab.outcomes import Advance, Method
from benchmarks.lab.runs import Point, Tuned
from benchmarks.lab.training import batch_generator, judge, new_model
from benchmarks.studies.private_optimizers.data import Given, PartlyPublic
from benchmarks.studies.private_training import (
    PrivatePlan,
    diverging_ignored,
    train_privately,
)
from comm_hooks.collectives import Simulated
from comm_hooks.optim.base import Tensors
from comm_hooks.optim.private import (
    DP2,
    DPSGD,
    AdaDPS,
    DPAdam,
    DPAdamBC,
    DPMicroAdam,
    ScaleThenPrivatize,
)
from comm_hooks.optim.private.optimizers.ada_dps import AdaS
from comm_hooks.optim.private.optimizers.dp_sgd import DPRMSProp
from comm_hooks.optim.private.optimizers.public_baselines import PDADPMD, DPAdamPub, DPRPub
from comm_hooks.optim.private.optimizers.public_knowledge import (
    mean_tf_idf,
    tf_idf,
    token_frequency,
)

Make = Callable[[Given, Tuned], Optimizer]

_WARM_EPOCHS, _WARM_LR = 10, 0.003


@dataclass(frozen=True)
class Compared:
    """A method as the study knows it.

    Args:
        make: the optimizer.
        start: the first learning rate tried.
        variants: other settings; "C" is the clipping norm over the plan's: in a space that is
            scaled, gradients have other norms.
        private: whether it is run with noise, and every noise multiplier.
        words: whether it is for counts of words only.
    """

    make: Make
    start: float
    variants: Sequence[Tuned] = ({},)
    private: bool = True
    words: bool = False


def _dp2(given: Given, settings: Tuned) -> Optimizer:
    phase = round(settings.get("s", max(1, given.plan.steps // 6)))
    return DP2(
        given.parameters,
        settings["lr"],
        lr_ratio=settings["lr ratio"],
        clip_ratio=settings["clip ratio"],
        sgd_steps=phase,
        preconditioned_steps=phase,
        eps=0.01,
    )


def _ada_dps(preconditioner: Literal["rmsprop", "adam"], ideal: bool = False) -> Make:
    def make(given: Given, settings: Tuned) -> Optimizer:
        return AdaDPS(
            given.parameters,
            settings["lr"],
            public_gradients=given.private_gradients() if ideal else given.public_gradients(),
            preconditioner=preconditioner,
            eps=settings["A eps"],
        )

    return make


def _by_frequency(kind: type[AdaDPS] | type[AdaS]) -> Make:
    def make(given: Given, settings: Tuned) -> Optimizer:
        scales = token_frequency(given.public_counts().sum(0), floor=settings["floor"])
        return kind(given.parameters, settings["lr"], side_information={"weight": scales})

    return make


def _by_tf_idf(given: Given, settings: Tuned) -> Optimizer:
    scales = tf_idf(mean_tf_idf(given.public_counts()), floor=settings["floor"])
    return AdaDPS(given.parameters, settings["lr"], side_information={"weight": scales})


def _warm_start(given: Given, settings: Tuned) -> Optimizer:
    given.train_on_public(_WARM_EPOCHS, _WARM_LR)
    return DPSGD(given.parameters, settings["lr"])


def _adam_bc(given: Given, settings: Tuned) -> Optimizer:
    gamma = settings["gamma / Phi"] * given.plan.noise_variance
    return DPAdamBC(given.parameters, settings["lr"], gamma=gamma)


class _FalsePhi(DPAdamBC):
    """DP-AdamBC that subtracts ``ratio`` times the variance of the noise."""

    ratio = 1.0

    def _divisors(self, *arguments: Any) -> Tensors:
        true = self.noise_variance
        assert true is not None
        self.noise_variance = self.ratio * true
        divisors = super()._divisors(*arguments)
        self.noise_variance = true
        return divisors


def _adam_bc_of_a_false_phi(given: Given, settings: Tuned) -> Optimizer:
    gamma = 0.243 * given.plan.noise_variance
    optimizer = _FalsePhi(given.parameters, settings["lr"], gamma=gamma)
    optimizer.ratio = settings["Phi' / Phi"]
    return optimizer


class _ShiftedAdam(DPAdam):
    """Adam whose second moments are all too large by ``shift``, as noise makes them."""

    shift = 0.0

    def _divisors(self, seconds: Tensors, *arguments: Any) -> Tensors:
        torch._foreach_add_(seconds, self.shift)
        return super()._divisors(seconds, *arguments)


def _shifted_adam(given: Given, settings: Tuned) -> Optimizer:
    optimizer = _ShiftedAdam(given.parameters, settings["lr"])
    optimizer.shift = settings["shift / Phi"] * given.plan.noise_variance
    return optimizer


def _as_dp_sgd(given: Given, settings: Tuned) -> Optimizer:
    beta1 = 0.9
    rate = settings["lr"] * (1 - beta1) / math.sqrt(given.plan.noise_variance)
    return DPSGD(given.parameters, rate, momentum=beta1)


def _micro_adam(given: Given, settings: Tuned) -> Optimizer:
    return DPMicroAdam(
        given.parameters,
        settings["lr"],
        density=settings["density"],
        window=round(settings.get("window", 10)),
        residual_bits=round(settings.get("residual bits", 4)),
        bias_correction="published" if settings.get("published") else "window",
        min_numel=128,
    )


def _scale_then_privatize(given: Given, settings: Tuned) -> Optimizer:
    return ScaleThenPrivatize(given.parameters, settings["lr"], scale_eps=settings["scale_eps"])


_FLOORS = tuple({"C": 10.0, "A eps": eps} for eps in (0.1, 0.01))
_WORDS = tuple({"C": 10.0, "floor": floor} for floor in (0.1, 0.01))

PRIVATE: dict[str, Compared] = {
    "DP-SGD": Compared(lambda g, s: DPSGD(g.parameters, s["lr"], momentum=0.9), 0.025),
    "DP-Adam": Compared(lambda g, s: DPAdam(g.parameters, s["lr"]), 0.004),
    # What DPAdamBC suggests is 0.243 Phi; the authors go down to 0.004 Phi.
    "DP-AdamBC": Compared(_adam_bc, 0.004, ({"gamma / Phi": 0.243}, {"gamma / Phi": 0.02})),
    "DP-MicroAdam": Compared(_micro_adam, 0.004, ({"density": 0.01}, {"density": 0.1})),
    "scale-then-privatize": Compared(
        _scale_then_privatize,
        0.004,
        ({"C": 10.0, "scale_eps": 0.1}, {"C": 10.0, "scale_eps": 0.01}),
    ),
    "DP2": Compared(
        _dp2, 0.4, ({"clip ratio": 1.0, "lr ratio": 0.1}, {"clip ratio": 10.0, "lr ratio": 0.1})
    ),
    "DP-RMSProp": Compared(lambda g, s: DPRMSProp(g.parameters, s["lr"]), 0.004),
    "AdaDPS": Compared(_ada_dps("rmsprop"), 0.04, _FLOORS),
    "AdaDPS, Adam": Compared(_ada_dps("adam"), 0.04, _FLOORS),
    "DP-R-Pub": Compared(
        lambda g, s: DPRPub(g.parameters, s["lr"], g.public_gradients(), eps=s["eps"]),
        0.004,
        ({"eps": 0.1}, {"eps": 0.01}),
    ),
    "DP-Adam-Pub": Compared(
        lambda g, s: DPAdamPub(g.parameters, s["lr"], g.public_gradients(), eps=s["eps"]),
        0.004,
        ({"eps": 0.1}, {"eps": 0.01}),
    ),
    "PDA-DPMD": Compared(
        lambda g, s: PDADPMD(g.parameters, s["lr"], g.public_gradients(), total_steps=g.plan.steps),
        0.1,
    ),
    "warm start, DP-SGD": Compared(_warm_start, 0.1),
    "AdaDPS, token frequency": Compared(_by_frequency(AdaDPS), 0.1, _WORDS, words=True),
    "AdaDPS, TF-IDF": Compared(_by_tf_idf, 0.1, _WORDS, words=True),
    # What the paper calls ideal: no guarantee covers it.
    "AdaDPS, ideal": Compared(_ada_dps("rmsprop", ideal=True), 0.04, _FLOORS),
}
"""Compared unless ``--methods`` says otherwise: the papers' methods and their baselines."""

_OF_MICRO_ADAM: dict[str, Tuned] = {
    "density 0.1": {},
    "density 0.01": {"density": 0.01},
    "density 1": {"density": 1.0},
    "window 1": {"window": 1},
    "window 40": {"window": 40},
    "residual 32 bits": {"residual bits": 32},
    "published correction": {"published": 1},
}
ABLATIONS: dict[str, Compared] = {
    **{
        f"DP-Adam, eps {eps:g} sqrt(Phi)": Compared(
            lambda g, s: DPAdam(
                g.parameters, s["lr"], eps=s["eps / sqrt(Phi)"] * g.plan.noise_variance**0.5
            ),
            0.004,
            ({"eps / sqrt(Phi)": eps},),
        )
        for eps in (0.1, 1.0, 10.0)
    },
    **{
        f"DP-Adam, beta1 {beta1:g}": Compared(
            lambda g, s: DPAdam(
                g.parameters, s["lr"], betas=(s["beta1"], 1 - (1 - s["beta1"]) ** 2)
            ),
            0.004,
            ({"beta1": beta1},),
        )
        for beta1 in (0.0, 0.5, 0.9, 0.97)
    },
    **{
        f"DP-AdamBC, {ratio:.2g} Phi": Compared(
            _adam_bc_of_a_false_phi, 0.004, ({"Phi' / Phi": ratio},)
        )
        for ratio in (1 / 24, 1.0, 4.0)
    },
    **{
        f"Adam, v + {shift:g} Phi": Compared(
            _shifted_adam, 0.004, ({"shift / Phi": shift},), private=False
        )
        for shift in (0.0001, 0.01, 1.0, 100.0)
    },
    **{
        f"DP-MicroAdam, {what}": Compared(_micro_adam, 0.004, ({"density": 0.1, **changed},))
        for what, changed in _OF_MICRO_ADAM.items()
    },
    "DP-Adam as DP-SGD": Compared(_as_dp_sgd, 0.004),
    **{
        f"DP2, s = {phase}": Compared(
            _dp2, 0.4, ({"clip ratio": 1.0, "lr ratio": 0.1, "s": float(phase)},)
        )
        for phase in (5, 25, 75)
    },
}
"""Single claims of the papers, only if ``--methods`` names them."""

PLAIN: dict[str, Compared] = {
    "SGD": Compared(lambda g, s: SGD([p for _, p in g.parameters], s["lr"]), 0.1, private=False),
    "Adam": Compared(
        lambda g, s: Adam([p for _, p in g.parameters], s["lr"]), 0.004, private=False
    ),
    "AdaS": Compared(
        lambda g, s: AdaS(
            g.parameters, s["lr"], public_gradients=g.public_gradients(), eps=s["A eps"]
        ),
        0.04,
        ({"A eps": 0.1}, {"A eps": 0.01}),
        private=False,
    ),
    "AdaS, token frequency": Compared(
        _by_frequency(AdaS), 0.1, ({"floor": 0.1}, {"floor": 0.01}), private=False, words=True
    ),
}
"""Without privacy: what it costs."""

METHODS = {**PRIVATE, **ABLATIONS, **PLAIN}


def make_methods(
    names: Sequence[str], data: Sequence[PartlyPublic], plans: Sequence[PrivatePlan]
) -> list[Method]:
    """Return those without privacy once, and the others at every noise multiplier.

    Args:
        names: of the methods.
        data: one per seed.
        plans: one per noise multiplier.
    """
    plain = [_method(name, data, plans[0]) for name in names if not METHODS[name].private]
    return plain + [
        _method(name, data, plan) for plan in plans for name in names if METHODS[name].private
    ]


def _method(name: str, data: Sequence[PartlyPublic], plan: PrivatePlan) -> Method:
    compared = METHODS[name]

    def run(settings: Tuned, seed: int, advance: Advance) -> list[Point]:
        own = replace(plan, max_grad_norm=settings.get("C", 1.0) * plan.max_grad_norm)
        task = data[seed].task
        model = new_model(task, seed, plan.device)
        given = Given(model, data[seed], own, seed)
        optimizer = compared.make(given, settings)
        if not compared.private:
            return _train_plainly(given, optimizer, advance)
        with diverging_ignored():
            return train_privately(task, model, optimizer, own, advance, transport=Simulated(1)[0])

    sigma = plan.noise_multiplier if compared.private else None
    return Method(name, {"sigma": sigma}, run, compared.start, compared.variants)


def _train_plainly(given: Given, optimizer: Optimizer, advance: Advance) -> list[Point]:
    """Train without noise and clipping, in epochs; return the curve.

    Raises:
        Diverged: with the points so far, as soon as a loss on held-out data is not finite.
    """
    task, plan, model = given.data.task, given.plan, given.model
    batches = task.clients[0].batches(round(plan.batch), batch_generator(given.seed, 0))
    curve: list[Point] = []
    for step, batch in enumerate(itertools.islice(batches, plan.steps), start=1):
        model.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        if plan.is_due(step):
            judge(task, model, step, 0, curve)
        advance()
    return curve
