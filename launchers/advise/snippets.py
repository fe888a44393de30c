"""The line of Python, and of a DeepSpeed configuration, that switches a method on."""

import inspect
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.lab.crossings import build_exchange
from benchmarks.lab.methods import Method
from benchmarks.lab.optimizers import OPTIMIZERS
from benchmarks.lab.runs import Settings
from comm_hooks import ExchangeSettings
from comm_hooks.config import COMPRESSORS, MEMORIES
from comm_hooks.optim import LaProp, LocalRounds, Marina

# Rounds end between an engine's steps, and Marina needs two gradients of one minibatch.
_NOT_IN_JSON = (LocalRounds, Marina)


def python_line(method: Method) -> str:
    """Return an expression over ``model``, ``ddp_model`` and the learning rate ``lr``.

    Example::

        >>> from benchmarks.lab.methods import parse_method
        >>> python_line(parse_method("topk"))
        "register(ddp_model, 'topk')"
    """
    entry = OPTIMIZERS[method.optimizer]
    if entry.makes_exchange:
        keywords = ["lr=lr", *_keywords(_chosen(method))]
        return f"{method.optimizer}(model.named_parameters(), {', '.join(keywords)})"
    if entry.crossing:
        return _optimizer_line(method)
    if method.crossing in COMPRESSORS:
        settings = [repr(method.crossing), *_keywords(_block(method, with_name=False))]
        return f"register(ddp_model, {', '.join(settings)})"
    return {
        "all_reduce": "DistributedDataParallel(model)",
        "none": "ddp_model.register_comm_hook(None, skip_hook)",
        "bf16": "ddp_model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
        "powersgd": "ddp_model.register_comm_hook(powerSGD_hook.PowerSGDState(None, "
        f"{method.crossing_options.get('rank')}), powerSGD_hook.powerSGD_hook)",
    }[method.crossing]


def json_line(method: Method) -> str | None:
    """Return what to add to a DeepSpeed configuration; None if the method has no such form."""
    if OPTIMIZERS[method.optimizer].makes_exchange:
        return json.dumps({"comm_hooks": {"method": method.optimizer, **_chosen(method)}})
    if method.crossing not in COMPRESSORS:
        return {"all_reduce": "{}", "bf16": '{"communication_data_type": "bf16"}'}.get(
            method.crossing
        )
    lines: dict[str, Any] = {"comm_hooks": _block(method)}
    if OPTIMIZERS[method.optimizer].crossing:
        optimizer = _built(method)
        if isinstance(optimizer, _NOT_IN_JSON):
            return None
        params = _arguments(method, optimizer)
        lines["optimizer"] = {"type": type(optimizer).__name__, "params": params}
    return json.dumps(lines)


def _chosen(method: Method) -> dict[str, Any]:
    """Return the arguments of a method that chooses its exchange by itself."""
    options = dict(method.optimizer_options)
    bits = {"bits_per_parameter": options.pop("bits")} if "bits" in options else {}
    inner = {"inner": "muon"} if options.pop("muon", False) else {}
    return {**options, **inner, **bits}


def _block(method: Method, *, with_name: bool = True) -> dict[str, Any]:
    """Return the exchange's settings as ``ExchangeSettings.from_dict`` reads them."""
    exchange = build_exchange(method.crossing, method.crossing_options, seed=0)
    options = {k: v for k, v in method.crossing_options.items() if not k.startswith("memory")}
    memory = exchange.memory
    if "memory" in method.crossing_options or options.keys() < method.crossing_options.keys():
        own = {
            name.removeprefix("memory_"): value
            for name, value in method.crossing_options.items()
            if name.startswith("memory_")
        }
        name = next((n for n, kind in MEMORIES.items() if type(memory) is kind), "none")
        options["memory"] = {"type": name, **own} if own else name
    return {"compressor": method.crossing, **options} if with_name else options


def _built(method: Method) -> Any:
    exchange = build_exchange(method.crossing, method.crossing_options, seed=0)
    # As many parameters as any number of fragments needs; vectors and matrices, as Muon wants both.
    named = [(str(index), nn.Parameter(torch.ones((1,) * (1 + index % 2)))) for index in range(256)]
    return OPTIMIZERS[method.optimizer].build(named, exchange, Settings(), method.optimizer_options)


def _arguments(method: Method, optimizer: Any) -> dict[str, Any]:
    """Return the options that were given, and those that the class cannot do without."""
    given = {k: v for k, v in method.optimizer_options.items() if k != "lr"}
    if isinstance(optimizer, LocalRounds):
        return {"local_steps": optimizer.local_steps, **given}
    if "beta1" in given:
        given["betas"] = given.pop("beta1"), optimizer.defaults["betas"][1]
    parameters = inspect.signature(type(optimizer)).parameters
    needed = {
        name: getattr(optimizer, name, optimizer.defaults.get(name))
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind is inspect.Parameter.KEYWORD_ONLY
        and name != "lr"
    }
    return {**needed, **given}


def _optimizer_line(method: Method) -> str:
    exchange = build_exchange(method.crossing, method.crossing_options, seed=0)
    arguments = [repr(exchange.compressor), *([repr(exchange.memory)] if exchange.memory else [])]
    defaults = ExchangeSettings(exchange.compressor)
    for name in ("collective", "min_numel", "min_ndim", "exempt_bits", "granularity"):
        value = getattr(exchange.settings, name)
        if value != getattr(defaults, name):
            arguments.append(f"{name}={value!r}")
    made = f"Exchange({', '.join(arguments)})"
    optimizer = _built(method)
    named = "model.named_parameters()"
    options = dict(method.optimizer_options)
    if type(optimizer) is LocalRounds:
        outer = {key: options.pop(key) for key in ("outer_lr", "outer_momentum") if key in options}
        server = []
        if outer:
            rates = {"lr": outer.get("outer_lr", 1.0), "momentum": outer.get("outer_momentum", 0.0)}
            server = [f"torch.optim.SGD(model.parameters(), {', '.join(_keywords(rates))})"]
        steps = [f"local_steps={optimizer.local_steps}"]
        fragments = [f"fragments={options['fragments']}"] if "fragments" in options else []
        ahead = [f"look_ahead={options['look_ahead']}"] if "look_ahead" in options else []
        betas = [f"betas=({options['beta1']}, 0.95)"] if "beta1" in options else []
        kind = "LaProp" if isinstance(optimizer.inner, LaProp) else "torch.optim.AdamW"
        inner = f"{kind}({', '.join([named, 'lr=lr', *betas])})"
        return f"LocalRounds({', '.join([inner, made, *server, *steps, *fragments, *ahead])})"
    keywords = _keywords(_arguments(method, optimizer))
    return f"{type(optimizer).__name__}({', '.join([named, made, 'lr=lr', *keywords])})"


def _keywords(values: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value!r}" for name, value in values.items()]
