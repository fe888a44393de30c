"""What one rank does, or what happens to it, and how it is made otherwise than the others."""

from __future__ import annotations

import copy
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from comm_hooks.exchange.layout import Layout
from comm_hooks.exchange.payload import PayloadFormat
from comm_hooks.shards import local_shards
from comm_hooks.wire.gathered_header import GatheredHeader
from comm_hooks.wire.header import Header
from comm_hooks.wire.summed_header import SummedHeader
from tests.faults.training import TIMEOUT_SECONDS, Settings, Training

if TYPE_CHECKING:
    from tests.faults.kinds import Case

_MOST_LOCAL_STEPS = 4
"""In so many steps every method exchanges."""
Inject = Callable[[Training, "Case"], None]


# Of processes.


def come_late(training: Training, case: Case) -> None:
    time.sleep(TIMEOUT_SECONDS + 2.5)


def kill(training: Training, case: Case) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_the_store(training: Training, case: Case) -> None:
    os.kill(training.store_process, signal.SIGSTOP)


def run_out_of_memory(training: Training, case: Case) -> None:
    owner, name = case.choose([(Layout, "load"), (Layout, "store"), (PayloadFormat, "encode_all")])
    original = getattr(owner, name)

    def fail(*args: Any, **kwargs: Any) -> None:
        setattr(owner, name, original)
        raise MemoryError("no memory left, on purpose")

    setattr(owner, name, fail)


# Of gradients.


def poison_with(value: float) -> Inject:
    def inject(training: Training, case: Case) -> None:
        training.poison = value

    return inject


def poison_a_layer(training: Training, case: Case) -> None:
    """Let the gradients of the first layer be NaN in the next backward pass, and no others."""

    def spoil(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        handle.remove()
        output.register_hook(lambda gradient: gradient * torch.nan)

    handle = training.model[0].register_forward_hook(spoil)  # type: ignore[index]


def with_scaler(case: Case) -> Settings:
    return replace(case.method.settings, scales=True)


# Of states.


def save(training: Training, case: Case) -> None:
    # A tensor in it may be the one that goes on changing.
    training.saved = copy.deepcopy(  # type: ignore[attr-defined]
        {
            "exchange": training.exchange.state_dict(),
            "method": training.state_dict(),
            "optimizer": training.optimizer.state_dict(),
            "model": training.model.state_dict(),
        }
    )


def roll_exchange_back(training: Training, case: Case) -> None:
    training.exchange.load_state_dict(training.saved["exchange"])  # type: ignore[attr-defined]


def roll_everything_back(training: Training, case: Case) -> None:
    saved: dict[str, Any] = training.saved  # type: ignore[attr-defined]
    training.model.load_state_dict(saved["model"])
    training.optimizer.load_state_dict(saved["optimizer"])
    training.load_state_dict(saved["method"])


def load_own_state(training: Training, case: Case) -> None:
    training.load_state_dict(training.state_dict())


def load_state_of_another_run(training: Training, case: Case) -> None:
    """Load a state of this run, or on the culprit that of another one at the same step."""
    another = case.method.make(case.method.settings)
    for index in range(case.step):
        another.step(index)
    is_culprit = dist.get_rank() == case.culprit
    state = (another if is_culprit else training).state_dict()
    training.load_state_dict(copy.deepcopy(state))


# Of the training loop.


def make_twin(training: Training, case: Case) -> None:
    """Begin to train another model in the same processes."""
    training.twin = case.method.make(case.method.settings)  # type: ignore[attr-defined]


def step_in_another_order(training: Training, case: Case) -> None:
    """Let both runs exchange, in the opposite order on the culprit."""
    order = [training, training.twin]  # type: ignore[attr-defined]
    for each in order[::-1] if dist.get_rank() == case.culprit else order:
        for index in range(_MOST_LOCAL_STEPS):
            each.step(1000 + index)


def replace_parameters(training: Training, case: Case) -> None:
    values = {name: value.clone() for name, value in training.model.state_dict().items()}
    training.model.load_state_dict(values, assign=True)


def leave_step_out(training: Training, case: Case) -> None:
    training.skipped = True  # type: ignore[attr-defined]


def exchange_something_else(training: Training, case: Case) -> None:
    training.exchange.average_({"something else": torch.ones(40, 40)})


def remake(training: Training, case: Case) -> None:
    training.remake()


def change_hyperparameter(name: str, value: Any) -> Inject:
    def inject(training: Training, case: Case) -> None:
        for group in training.optimizer.param_groups:
            group[name] = value

    return inject


def change_parameter(training: Training, case: Case) -> None:
    parameter = case.choose(local_shards(training.parameters))
    with torch.no_grad():
        parameter.view(-1)[0] += 1.0


def change_parameter_in_rounds(training: Training, case: Case) -> None:
    # Local progress may be anything; all must have the shared model in common.
    values = training.rounds.round_state.model.values  # type: ignore[attr-defined]
    with torch.no_grad():
        values[0].view(-1)[0] += 1.0


# Of settings.


def other(**changed: Any) -> Callable[[Case], Settings]:
    return lambda case: case.method.settings.with_exchange(**changed)


def other_compressor(case: Case) -> Settings:
    return case.method.settings.with_exchange(compressor=case.method.other)


def other_collective(case: Case) -> Settings:
    present = case.method.settings.exchange.get("collective", "auto")
    return case.method.settings.with_exchange(
        collective="all_gather" if present != "all_gather" else "auto", ranks_per_node=None
    )


def other_model(**changed: Any) -> Callable[[Case], Settings]:
    return lambda case: replace(case.method.settings, **changed)


# On the wire.


def _once_in(owner: Any, name: str, change: Callable[..., None], *, after: bool) -> None:
    """Let a method of a class be changed at its next call: its arguments, or its result."""
    original = getattr(owner, name)

    def changed(self: Any, payloads: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, original)
        if not after:
            change(self, payloads)
        result = original(self, payloads, *args, **kwargs)
        if after:
            change(self, payloads)
        return result

    setattr(owner, name, changed)


def _covers_body(header: Header) -> bool:
    """Return whether damage to what follows the header can be told.

    The true sum is unknown, and vectors inside a node are not checked.
    """
    return isinstance(header, GatheredHeader) and header._covers_body


def _flip(case: Case, *, is_received: bool) -> None:
    draw = random.Random(f"bit of {case.name}")

    def flip(header: Any, payloads: torch.Tensor) -> None:
        first = 4 if isinstance(header, SummedHeader) else 0
        last = payloads.shape[1] if _covers_body(header) else header.nbytes
        rows = range(len(payloads))
        for row in [draw.choice(rows)] if is_received else rows:
            octet = draw.randrange(first, last)
            payloads[row, octet] ^= 1 << draw.randrange(8)

    for kind in (GatheredHeader, SummedHeader):
        _once_in(kind, "check" if is_received else "write_", flip, after=not is_received)


def flip_sent_bit(training: Training, case: Case) -> None:
    _flip(case, is_received=False)


def flip_received_bit(training: Training, case: Case) -> None:
    _flip(case, is_received=True)


def swap_payloads(training: Training, case: Case) -> None:
    def swap(header: Any, payloads: torch.Tensor) -> None:
        if case.culprit in header._ranks:
            place = list(header._ranks).index(case.culprit)
            payloads[place] = payloads[(place + 1) % len(payloads)]

    _once_in(GatheredHeader, "check", swap, after=False)


def send_last_payload(training: Training, case: Case) -> None:
    training.replays = True  # type: ignore[attr-defined]


def record_payload(training: Training, case: Case) -> None:
    """Keep the next payload of every size, and send it once more when told so."""
    original = PayloadFormat.encode_all
    kept: dict[tuple[int, ...], torch.Tensor] = {}

    def encode_all(self: PayloadFormat, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = original(self, *args, **kwargs)
        shape = tuple(out.shape)
        if getattr(training, "replays", False) and shape in kept:
            out.copy_(kept[shape])
        else:
            kept.setdefault(shape, out.clone())
        return out

    PayloadFormat.encode_all = encode_all  # type: ignore[method-assign]
