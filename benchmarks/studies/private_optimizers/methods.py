"""What is compared, and how a run goes."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch.optim import SGD, Adam, Optimizer

from benchmarks.lab.outcomes import Advance, Method
from benchmarks.lab.runs import Point, Tuned
from benchmarks.lab.training import batch_generator, judge, new_model
from benchmarks.studies.private_optimizers.baselines import PDADPMD, DPAdamPub, DPRPub
from benchmarks.studies.private_optimizers.data import Given, PartlyPublic
from benchmarks.studies.private_training import (
    PrivatePlan,
    diverging_ignored,
    train_privately,
)
from comm_hooks.collectives import Simulated
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
    phase = max(1, given.plan.steps // 6)
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


def _micro_adam(given: Given, settings: Tuned) -> Optimizer:
    return DPMicroAdam(
        given.parameters,
        settings["lr"],
        density=settings["density"],
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

METHODS = {**PLAIN, **PRIVATE}


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
