"""The registry of optimizers: for each name its class, its options and their usual values.

To add one, add an entry to :data:`OPTIMIZERS`; everything else is read off its class.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from comm_hooks import optim
from comm_hooks.config import check_options, unknown
from comm_hooks.exchange import Exchange
from comm_hooks.optim.moments import shortened
from comm_hooks.optim.rounds.algorithms import LocalAdamW
from comm_hooks.requirements import in_one_line, is_number

Options = dict[str, Any]

_BETAS = ("beta1", "beta2")
_SIMPLE = (bool, int, float, str)


@dataclass(frozen=True)
class Defaults:
    """Settings of a training, from which the usual options of each optimizer follow.

    Args:
        lr, betas, weight_decay: the settings of AdamW in this training.
        steps: the number of steps of the training.
        warmup: the number of steps over which the learning rate rises.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    steps: int = 1000
    warmup: int = 100

    def of_adamw(self, **options: Any) -> Options:
        """Return AdamW's settings, and ``options``, which override them."""
        own = {"lr": self.lr, "betas": self.betas, "weight_decay": self.weight_decay}
        return {**own, **options}

    def freezing(self) -> Options:
        """Return the usual options of an optimizer that freezes its second moment."""
        return self.of_adamw(freeze_step=self.warmup, total_steps=self.steps)


@dataclass(frozen=True)
class Option:
    """An option of an optimizer: a keyword argument of its class or function.

    Args:
        name: the name of the keyword argument.
        default: its default value; ``inspect.Parameter.empty`` if it must be given.
        kinds: the types of a value: bool, int, float, str, NoneType, or tuple for ``betas``.
    """

    name: str
    default: Any
    kinds: tuple[type, ...]

    @property
    def is_required(self) -> bool:
        """Whether the option has no default."""
        return self.default is inspect.Parameter.empty

    def check(self, owner: str, value: Any) -> None:
        """Raise ``ValueError`` if ``value`` has none of ``kinds``; the optimizer checks ranges."""
        if not any(_fits(value, kind) for kind in self.kinds):
            words = {bool: "true or false", int: "an integer", float: "a number", str: "a word"}
            words |= {type(None): "none", tuple: "two numbers"}
            wanted = " or ".join(words[kind] for kind in self.kinds)
            raise ValueError(f"{owner}: {self.name} must be {wanted}, got {in_one_line(value)}")


def _fits(value: Any, kind: type) -> bool:
    if kind is float:
        return is_number(value)
    if kind is tuple:
        return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_number, value))
    # type() and not isinstance(): True is an instance of int.
    return type(value) is kind


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer of the registry.

    Args:
        name: the optimizer's name in snake case.
        make: the optimizer's class, or a function that returns an optimizer.
        usual: a function from a training's settings to the options that differ from the signature.
    """

    name: str
    make: Callable[..., torch.optim.Optimizer]
    usual: Callable[[Defaults], Options]

    @functools.cached_property
    def options(self) -> Mapping[str, Option]:
        """The options by name, in the order of the signature, without parameters and exchange."""
        parameters = inspect.signature(self.make).parameters.values()
        found = [Option(p.name, p.default, _kinds(p)) for p in parameters]
        return {option.name: option for option in found if option.kinds}

    @property
    def averages(self) -> Literal["before", "exchange", "own"]:
        """The place where the average over ranks is taken.

        ``"before"`` the step, by a hook for instance; in the ``"exchange"`` that is given to the
        optimizer; or in an exchange of its ``"own"`` making.
        """
        parameters = inspect.signature(self.make).parameters
        if "exchange" in parameters:
            return "exchange"
        return "own" if "transport" in parameters else "before"

    @property
    def published(self) -> Mapping[str, Any] | None:
        """The published exchange, for :meth:`~comm_hooks.ExchangeSettings.from_dict`, or None."""
        return getattr(self.make, "published", None)

    @property
    def needs(self) -> Mapping[str, Any]:
        """The published settings without which the optimizer refuses an exchange."""
        return {key: (self.published or {})[key] for key in getattr(self.make, "needs", ())}

    @property
    def type_name(self) -> str:
        """The name of the class or function, as DeepSpeed's ``optimizer.type`` has it."""
        return self.make.__name__

    @property
    def works_in_rounds(self) -> bool:
        """Whether ranks take several steps between two exchanges of a parameter."""
        return "local_steps" in self.options or self.averages == "own"

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for unknown options, with the nearest, and values of other types.

        ``beta1`` and ``beta2`` are options wherever ``betas`` are.
        """
        known = dict(self.options)
        if "betas" in known:
            known |= {name: Option(name, None, (float,)) for name in _BETAS}
        check_options(self.name, options, known)
        for name, value in options.items():
            known[name].check(self.name, value)

    def build(
        self,
        params: Any,
        exchange: Exchange | None = None,
        *,
        defaults: Defaults | None = None,
        **options: Any,
    ) -> Any:
        """Return a new optimizer.

        Args:
            params: the named parameters to train.
            exchange: the exchange of an optimizer that takes one.
            defaults: the settings of the training; None for the defaults of the signature.
            options: options that override both; ``beta1`` or ``beta2`` overrides one of ``betas``.
                An optimizer that makes its exchange takes ``transport`` and ``process_group``, too.

        Raises:
            ValueError: for unknown options, and for values that the optimizer refuses.
        """
        given = {k: options.pop(k) for k in ("transport", "process_group") if k in options}
        self.check(options)
        chosen = {**(self.usual(defaults) if defaults is not None else {}), **options}
        own_betas = [chosen.pop(name, None) for name in _BETAS]
        if own_betas != [None, None]:
            betas = chosen.get("betas", self.options["betas"].default)
            pairs = zip(own_betas, betas, strict=True)
            chosen["betas"] = tuple(usual if own is None else own for own, usual in pairs)
        arguments = [params] if exchange is None else [params, exchange]
        return self.make(*arguments, **given, **chosen)


def _kinds(parameter: inspect.Parameter) -> tuple[type, ...]:
    """Return the types of an option's values, or () for a parameter that is no option."""
    if parameter.name == "betas":
        return (tuple,)
    annotation = parameter.annotation
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    found = typing.get_args(annotation) if is_union else (annotation,)
    simple = tuple(kind for kind in found if kind in _SIMPLE)
    return (*simple, *(kind for kind in found if kind is type(None))) if simple else ()


_MAKERS: Mapping[str, tuple[Callable[..., Any], Callable[[Defaults], Options]]] = {
    # fused: a sixth of the step's time on a CPU
    "adamw": (torch.optim.AdamW, lambda d: d.of_adamw(fused=True)),
    "adam": (optim.Adam, Defaults.of_adamw),
    "amsgrad": (optim.AMSGrad, Defaults.of_adamw),
    "laprop": (optim.LaProp, Defaults.of_adamw),
    "muon_adamw": (optim.MuonAdamW, Defaults.of_adamw),
    "local_variance_adam": (
        optim.LocalVarianceAdam,
        lambda d: d.of_adamw(betas=(shortened(d.betas[0], 0.5), d.betas[1])),
    ),
    "low_communication": (optim.low_communication, lambda d: d.of_adamw(total_steps=d.steps)),
    "local_adamw": (LocalAdamW, Defaults.of_adamw),
    "one_bit_adam": (optim.OneBitAdam, Defaults.freezing),
    "one_bit_lamb": (optim.OneBitLamb, Defaults.freezing),
    "zero_one_adam": (
        optim.ZeroOneAdam,
        lambda d: d.of_adamw(var_freeze_step=max(1, d.steps // 2)),
    ),
    "cd_adam": (optim.CDAdam, Defaults.of_adamw),
    "micro_adam": (optim.MicroAdam, Defaults.of_adamw),
    "fetch_sgd": (
        optim.FetchSGD,
        lambda _: {"lr": 0.05, "density": 0.01, "rows": 5, "masking": True},
    ),
    "marina": (optim.Marina, lambda _: {"lr": 0.01, "p": 0.05}),
    "ef21": (optim.EF21, lambda _: {"lr": 0.003, "momentum": 0.9}),
    "dgc": (optim.DGC, lambda _: {"lr": 0.03, "clip_norm": 1.0}),
    "demo": (optim.DeMo, lambda _: {"lr": 1e-3}),
    "cocktail_sgd": (optim.CocktailSGD, lambda _: {"lr": 0.003, "momentum": 0.9}),
    "safl": (optim.SAFL, lambda d: d.of_adamw(local_steps=1, local_lr=0.1, amsgrad=False)),
    "fed_avg": (optim.FedAvg, lambda _: {"lr": 0.03, "local_steps": 8}),
    # As the paper has it, its first round has nothing but eps to divide by.
    "fed_ams": (
        optim.FedAMS,
        lambda _: {"bias_correction": True, "bound": "client", "local_steps": 8},
    ),
    "fed_lamb": (optim.FedLAMB, lambda _: {"lr": 1e-2, "local_steps": 8}),
    "diloco": (optim.DiLoCo, lambda d: d.of_adamw(local_steps=30)),
    "mu_lo_co": (optim.MuLoCo, lambda d: d.of_adamw(local_steps=30)),
    "sparse_loco": (optim.SparseLoCo, lambda d: d.of_adamw(local_steps=15)),
}

OPTIMIZERS: Mapping[str, OptimizerEntry] = {
    name: OptimizerEntry(name, make, usual) for name, (make, usual) in _MAKERS.items()
}
"""All optimizers by name."""


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


_SPELLINGS = {
    _plain(s): entry for entry in OPTIMIZERS.values() for s in (entry.name, entry.type_name)
}


def lookup(name: str) -> OptimizerEntry | None:
    """Return an optimizer's entry by name or class name in any case; None for an unknown name.

    Example::

        >>> lookup("OneBitAdam").name, lookup("onebitadam").name, lookup("zero_adam")
        ('one_bit_adam', 'one_bit_adam', None)
    """
    return _SPELLINGS.get(_plain(name))


def find(name: str) -> OptimizerEntry:
    """Return the registry entry of an optimizer's name, as :func:`lookup` does.

    Raises:
        ValueError: for an unknown name, with the nearest known one.
    """
    entry = lookup(name)
    if entry is None:
        raise ValueError(unknown("optimizer", name, OPTIMIZERS))
    return entry
