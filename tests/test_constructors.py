"""Whatever a public class is given, it takes, or refuses in one line that says who and what."""

import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comm_hooks
from comm_hooks import (
    CompressionState,
    CountSketch,
    Differences,
    ErrorFeedback,
    Exchange,
    ExchangeSettings,
    MomentumCorrection,
    RandomK,
    TopK,
    collectives,
    optim,
)
from comm_hooks.collectives import Simulated
from comm_hooks.optim import private
from comm_hooks.optim.private import GaussianMechanism, PerSampleGradients, PoissonLoader

ODD: tuple[Any, ...] = (
    *(
        None,
        "x",
        "",
        "\n",
        b"x",
        math.nan,
        math.inf,
        -math.inf,
        True,
        False,
        0,
        -1,
        0.5,
        10**400,
        10**5000,
    ),
    *([], {}, (), [1], (0.9,), (0.9, 2.0), (None, None), ("x", "y"), (math.nan, 0.9), object()),
    *(torch.ones(2), torch.ones(3, 3)),
)

# Results, which the library makes, and what is there to be derived from.
_OTHERS = ("ClippedGradients", "ClippedSum", "NoisedOptimizer", "PublicTransform", "Released")
_OTHERS += ("Verdict", "Compressor", "Memory", "Transport")
# These need a process group.
_OTHERS += ("TorchDistributed", "MPITransport")

# A state is an exchange and more, settings are those of an exchange, and a loader has a sampler.
_CHECKED_BY: dict[type, str] = {
    CompressionState: "Exchange",
    ExchangeSettings: "Exchange",
    PoissonLoader: "PoissonSampler",
}


pytestmark = pytest.mark.filterwarnings("ignore")


def _public() -> Iterator[type]:
    for module in (comm_hooks, collectives, optim, private):
        for name in module.__all__:
            kind = getattr(module, name)
            is_class = inspect.isclass(kind) and not issubclass(kind, Exception)
            if is_class and name not in _OTHERS:
                yield kind


def _model() -> nn.Module:
    return nn.Linear(4, 2)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).sum()


def _exchange(compressor: Any = None, memory: Any = None, collective: Any = "auto") -> Exchange:
    return Exchange(compressor or TopK(0.5), memory, collective, transport=Simulated(1)[0])


# Of what has no default, by its name.
_NEEDED: dict[str, Callable[[], Any]] = {
    "params": lambda: [nn.Parameter(torch.ones(4, 2))],
    "named_parameters": lambda: list(_model().named_parameters()),
    "exchange": lambda: _exchange(memory=ErrorFeedback()),
    "compressor": TopK,
    "lr": lambda: 0.1,
    "p": lambda: 0.5,
    "density": lambda: 0.5,
    "sample_rate": lambda: 0.5,
    "noise_multiplier": lambda: 1.0,
    "max_norm": lambda: 1.0,
    "max_grad_norm": lambda: 1.0,
    "expected_batch_size": lambda: 4.0,
    "clients": lambda: 4,
    "steps": lambda: 4,
    "num_samples": lambda: 4,
    "world_size": lambda: 2,
    "local_steps": lambda: 4,
    "freeze_step": lambda: 4,
    "var_freeze_step": lambda: 4,
    "total_steps": lambda: 10,
    "model": _model,
    "loss_function": lambda: _loss,
    "batches": lambda: [torch.ones(2, 4)],
    "dataset": lambda: torch.utils.data.TensorDataset(torch.ones(4, 4)),
    "public_gradients": lambda: lambda: {"weight": torch.ones(4, 2)},
    "enter": lambda: lambda: None,
}
_EXCHANGES: dict[str, Callable[[], Exchange]] = {
    "CDAdam": lambda: _exchange(memory=Differences()),
    "EF21": lambda: _exchange(memory=Differences()),
    "DGC": lambda: _exchange(memory=MomentumCorrection()),
    "FetchSGD": lambda: _exchange(CountSketch(0.5)),
    "Marina": lambda: _exchange(RandomK(0.5)),
    "MicroAdam": lambda: _exchange(memory=ErrorFeedback(4), collective="all_gather"),
    "SAFL": lambda: _exchange(CountSketch(0.5)),
    "SparseLoCo": lambda: _exchange(memory=ErrorFeedback(decay=0.9)),
    "GaussianMechanism": lambda: _exchange(CountSketch(0.5)),
}


def _arguments(kind: type) -> dict[str, Any]:
    """Return what a class takes, of all that it needs."""
    arguments = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        is_needed = parameter.default is parameter.empty and parameter.kind != parameter.VAR_KEYWORD
        if is_needed and name in _NEEDED:
            arguments[name] = _NEEDED[name]()
    name = kind.__name__
    if name in _EXCHANGES:
        arguments["exchange"] = _EXCHANGES[name]()
    elif name in ("AdaDPS", "AdaS"):
        arguments["public_gradients"] = _NEEDED["public_gradients"]()
    elif name == "LocalRounds":
        parameters = _NEEDED["params"]()
        arguments["inner"] = torch.optim.SGD(parameters, lr=0.1)
        arguments["local_steps"] = 2
    if name in ("FedAvg", "FedAMS", "FedLAMB", "SAFL"):
        arguments["local_steps"] = 2
    elif name == "DPOptimizer":
        model = _model()
        arguments["inner"] = torch.optim.SGD(model.parameters(), lr=0.1)
        arguments["gradients"] = PerSampleGradients(model, _loss, 1.0)
        arguments["mechanism"] = GaussianMechanism(**_arguments(GaussianMechanism))
    return arguments


KINDS = sorted(_public(), key=lambda kind: kind.__name__)
CASES = [
    pytest.param(kind, name, id=f"{kind.__name__}-{name}")
    for kind in KINDS
    for name, parameter in inspect.signature(kind).parameters.items()
    # What optimizers are of, and what is in a dataset, is for torch to refuse.
    if name not in ("params", "named_parameters", "dataset")
    and parameter.kind != parameter.VAR_KEYWORD
]


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a ledger may be called "x"


@pytest.mark.parametrize("kind", KINDS)
def test_what_every_class_needs_is_known_here(kind: type) -> None:
    kind(**_arguments(kind))


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_any_argument_is_taken_or_refused(kind: type, name: str) -> None:
    for value in ODD:
        try:
            kind(**{**_arguments(kind), name: value})
        except ValueError as error:
            message = str(error)
            assert "\n" not in message
            who = kind.__name__, _CHECKED_BY.get(kind, kind.__name__)
            assert message.startswith(tuple(f"{name}: " for name in who)), message
            assert name in message, message
