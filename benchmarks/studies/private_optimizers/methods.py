"""What is compared, and how a run goes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Adam, Optimizer

from benchmarks.studies.private_optimizers.models import small_cnn, wide_resnet
from benchmarks.studies.private_training import (
    PrivatePlan,
    diverging_ignored,
    train_privately,
)
from comm_hooks.collectives import Simulated, Transport
from comm_hooks.compressors import Identity
from comm_hooks.exchange import Exchange
from comm_hooks.launchers.lab.outcomes import Advance, Method, Point, Settings
from comm_hooks.launchers.lab.schedules import constant
from comm_hooks.launchers.lab.simulated import (
    Client,
    NamedParameters,
    Plan,
    batch_generator,
    new_model,
    simulated_method,
)
from comm_hooks.launchers.lab.tasks import Shard, Task, build_task
from comm_hooks.optim.private import (
    DP2,
    DPSGD,
    AdaDPS,
    DPAdam,
    DPAdamBC,
    DPMicroAdam,
    ScaleThenPrivatize,
)
from comm_hooks.optim.private.optimizers.public_knowledge import PublicGradients

NOT_PRIVATE = "Adam, not private"
TASKS = ("digits", "cifar10")
PUBLIC_SHARE = 0.01
"""Of the training images, held back from all methods; AdaDPS takes their gradients."""


@dataclass(frozen=True)
class Images:
    """A task whose training images are partly public.

    Args:
        task: with one client, which has the private ones.
        public: the others.
    """

    task: Task
    public: Shard


@dataclass(frozen=True)
class Given:
    """What an optimizer is made from.

    Args:
        model: that is trained.
        images: what it is trained on.
        plan: how.
        seed: of the order of public batches.
    """

    model: nn.Module
    images: Images
    plan: PrivatePlan
    seed: int

    @property
    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    def public_gradients(self) -> PublicGradients:
        """Return what differentiates one batch of public images after the other."""
        public = self.images.public
        batches = public.batches(min(len(public), 32), batch_generator(self.seed, 1))
        return PublicGradients(self.model, self.images.task.loss, batches)


Make = Callable[[Given, Settings], Optimizer]


def _scale_then_privatize(given: Given, settings: Settings) -> Optimizer:
    return ScaleThenPrivatize(given.parameters, settings["lr"], scale_eps=settings["scale_eps"])


def _dp2(given: Given, settings: Settings) -> Optimizer:
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


def _ada_dps(given: Given, settings: Settings) -> Optimizer:
    return AdaDPS(
        given.parameters,
        settings["lr"],
        public_gradients=given.public_gradients(),
        eps=settings["A eps"],
    )


def _adam_bc(given: Given, settings: Settings) -> Optimizer:
    gamma = settings["gamma / Phi"] * given.plan.noise_variance
    return DPAdamBC(given.parameters, settings["lr"], gamma=gamma)


def _micro_adam(given: Given, settings: Settings) -> Optimizer:
    return DPMicroAdam(given.parameters, settings["lr"], density=settings["density"], min_numel=128)


# With the first learning rate tried, and what else is.  "C" is the clipping norm over the plan's:
# in a space that is scaled, gradients have other norms.
_METHODS: dict[str, tuple[Make, float, Sequence[Settings]]] = {
    "DP-SGD": (lambda g, s: DPSGD(g.parameters, s["lr"], momentum=0.9), 0.025, ({},)),
    "DP-Adam": (lambda g, s: DPAdam(g.parameters, s["lr"]), 0.004, ({},)),
    # What DPAdamBC suggests is 0.243 Phi; the authors go down to 0.004 Phi.
    "DP-AdamBC": (_adam_bc, 0.004, ({"gamma / Phi": 0.243}, {"gamma / Phi": 0.02})),
    "DP-MicroAdam": (_micro_adam, 0.004, ({"density": 0.01}, {"density": 0.1})),
    "scale-then-privatize": (
        _scale_then_privatize,
        0.004,
        ({"C": 10.0, "scale_eps": 0.1}, {"C": 10.0, "scale_eps": 0.01}),
    ),
    "DP2": (
        _dp2,
        0.4,
        ({"clip ratio": 1.0, "lr ratio": 0.1}, {"clip ratio": 10.0, "lr ratio": 0.1}),
    ),
    "AdaDPS": (_ada_dps, 0.04, ({"C": 10.0, "A eps": 0.1}, {"C": 10.0, "A eps": 0.01})),
}
METHODS = tuple(_METHODS)


def build_images(name: str, seed: int, data_dir: Path | None) -> Images:
    """Return the task of that name for one seed.

    Args:
        name: ``"digits"`` or ``"cifar10"``.
        seed: says which images are public.
        data_dir: where CIFAR-10 lies.

    Raises:
        ValueError: for data that is missing or not what it should be, and too little of it.
    """
    options: dict[str, Any] = {"augment": False} if name == "cifar10" else {}
    task = build_task(name, clients=1, seed=seed, data_dir=data_dir, **options)
    samples = task.clients[0]
    public = round(PUBLIC_SHARE * len(samples))
    if not public:
        raise ValueError(f"{name}: {len(samples)} training images are too few")
    return Images(
        replace(
            task,
            make_model=small_cnn if name == "digits" else wide_resnet,
            clients=[replace(samples, indices=samples.indices[public:])],
        ),
        replace(samples, indices=samples.indices[:public]),
    )


def make_methods(
    names: Sequence[str], images: Sequence[Images], plans: Sequence[PrivatePlan]
) -> list[Method]:
    """Return Adam without privacy, and every method at every noise multiplier.

    Args:
        names: of the methods.
        images: one per seed.
        plans: one per noise multiplier.
    """
    private = [_private(name, images, plan) for plan in plans for name in names]
    return [_not_private(images, plans[0]), *private]


def _private(name: str, images: Sequence[Images], plan: PrivatePlan) -> Method:
    make, start, variants = _METHODS[name]

    def run(settings: Settings, seed: int, advance: Advance) -> list[Point]:
        scaled = replace(plan, max_grad_norm=settings.get("C", 1.0) * plan.max_grad_norm)
        model = new_model(images[seed].task, seed, plan.device)
        optimizer = make(Given(model, images[seed], scaled, seed), settings)
        with diverging_ignored():
            return train_privately(
                images[seed].task, model, optimizer, scaled, advance, transport=Simulated(1)[0]
            )

    return Method(name, {"sigma": plan.noise_multiplier}, run, start, variants)


def _not_private(images: Sequence[Images], plan: PrivatePlan) -> Method:
    def make(
        parameters: NamedParameters, transport: Transport, settings: Settings, seed: int
    ) -> Client:
        optimizer = Adam([p for _, p in parameters], settings["lr"])
        return Client(optimizer, Exchange(Identity(), transport=transport), optimizer)

    plain = Plan(plan.steps, 1, round(plan.batch), plan.points, constant, device=plan.device)
    tasks = [each.task for each in images]
    return simulated_method(NOT_PRIVATE, {"sigma": None}, tasks, plain, make, 0.004)
