"""The faults: what one rank does, or what happens to it, and how the run must end."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.faults.injections import (
    Inject,
    change_hyperparameter,
    change_parameter,
    change_parameter_in_rounds,
    come_late,
    exchange_something_else,
    flip_received_bit,
    flip_sent_bit,
    kill,
    leave_step_out,
    load_own_state,
    load_state_of_another_run,
    make_twin,
    other,
    other_collective,
    other_compressor,
    other_model,
    poison_a_layer,
    poison_with,
    record_payload,
    remake,
    replace_parameters,
    roll_everything_back,
    roll_exchange_back,
    run_out_of_memory,
    save,
    send_last_payload,
    step_in_another_order,
    stop_the_store,
    swap_payloads,
    with_scaler,
)
from tests.faults.methods import HOOKS, METHODS, OPTIMIZERS, ROUNDS, SHARDED, Method
from tests.faults.training import Settings

SEEDS = range(2)
EARLIEST = 3
"""The first step at which there are faults: DDP has rebuilt its buckets."""


@dataclass(frozen=True)
class Case:
    """One fault in one run, drawn from the names and the seed."""

    method: Method
    kind: "Kind"
    seed: int = 0

    def __reduce__(self) -> Any:
        # By name: kinds have local functions.
        return _case, (self.method.name, self.kind.name, self.seed)

    @property
    def name(self) -> str:
        return f"{self.kind.name} | {self.method.name} | {self.seed}"

    @property
    def _random(self) -> random.Random:
        return random.Random(self.name)

    @property
    def culprit(self) -> int:
        return self._random.randrange(self.method.ranks)

    @property
    def step(self) -> int:
        if self.kind.is_late:
            return self.method.steps - 1
        return EARLIEST + random.Random(f"step of {self.name}").randrange(4)

    def choose(self, choices: list[Any]) -> Any:
        """Return one of several ways, by the seed."""
        return random.Random(f"way of {self.name}").choice(choices)


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Args:
        name: the row of the table.
        inject: called on the culprit before the step of the fault.
        settings: gives the culprit others from the start.
        everywhere: ``inject`` is called on all ranks.
        before: called on the culprit two steps earlier, with the same effect on nothing.
        prepares: ``before`` is called on all ranks.
        recovers: whether all ranks must go on, alike; otherwise all that are there must refuse.
        suits: the methods that can have it.
        survives: whether the culprit must end with an error of this library, too; one that has
            failed by itself, or is dead, need not.
        names_anybody: whether it cannot be known on which of several ranks something went wrong.
        may_finish: whether the culprit may finish before the others.
        may_recover: whether all ranks may go on, alike; otherwise they refuse.
        may_do_nothing: whether all ranks may end as without the fault; otherwise they refuse.
        needs_store: whether the run has a store of its own.
        is_late: whether it comes in the last step.
        reason: a regular expression that every rank's message must fit.
    """

    name: str
    inject: Inject | None = None
    settings: Callable[[Case], Settings] | None = None
    everywhere: bool = False
    before: Inject | None = None
    prepares: bool = False
    recovers: bool = False
    suits: Callable[[Method], bool] = lambda method: True
    survives: bool = True
    names_anybody: bool = False
    may_finish: bool = False
    may_recover: bool = False
    may_do_nothing: bool = False
    needs_store: bool = False
    is_late: bool = False
    reason: str = ""


def _case(method: str, kind: str, seed: int) -> Case:
    return Case(METHODS[method], {**KINDS, NOTHING.name: NOTHING}[kind], seed)


def cases() -> list[Case]:
    """Return all cases."""
    return [
        Case(method, kind, seed)
        for seed in SEEDS
        for kind in KINDS.values()
        for method in METHODS.values()
        if kind.suits(method)
    ]


def _is(*groups: str) -> Callable[[Method], bool]:
    return lambda method: method.group in groups


def _has_server(method: Method) -> bool:
    return method.group == ROUNDS or (method.group == SHARDED and "local steps" in method.traits)


def _changes_parameters(method: Method) -> bool:
    """Return whether an exchange finds the parameters as the last one has left them."""
    return not _has_server(method)


def _not(*traits: str) -> Callable[[Method], bool]:
    return lambda method: not set(traits) & method.traits


def _gathers(method: Method) -> bool:
    compressor = method.settings.exchange["compressor"]
    return not compressor.linear


_DIFFERENT = "configured differently|made with other settings|because rank"
_GONE = r"did not take part|too late|because rank"
_DRIFT = r"the parameters of|because rank|hyperparameters|did not take part"

FAMILIES = {
    "comes late, stops or fails": [
        Kind("comes later than the timeout", come_late, reason=_GONE),
        Kind("is killed", kill, survives=False, reason=_GONE),
        Kind(
            "has no memory left in a round",
            run_out_of_memory,
            survives=False,
            reason=r"MemoryError|did not take part",
        ),
        Kind(
            "keeps the store, and is stopped",
            stop_the_store,
            needs_store=True,
            may_recover=True,
            names_anybody=True,
            reason="key-value store",
        ),
    ],
    "has gradients that are not finite": [
        Kind("meets a NaN", poison_with(float("nan")), recovers=True),
        Kind("meets a NaN in one layer", poison_a_layer, recovers=True),
        Kind(
            "overflows under a GradScaler",
            poison_with(float("inf")),
            with_scaler,
            recovers=True,
            suits=_not("closure"),
        ),
    ],
    "restores a state by itself": [
        Kind(
            "goes back to an older state of the exchange",
            roll_exchange_back,
            before=save,
            reason="belongs to step|has loaded a(nother)? state|because rank",
        ),
        Kind(
            "goes back to an older checkpoint of everything",
            roll_everything_back,
            before=save,
            reason="belongs to step|has loaded a(nother)? state|because rank",
        ),
        Kind(
            "loads its own state by itself",
            load_own_state,
            reason="has loaded a(nother)? state|because rank",
        ),
        Kind(
            "loads the state of another run",
            load_state_of_another_run,
            everywhere=True,
            reason="another state|of the run|because rank",
        ),
    ],
    # Not ranks that share a model: FSDP's own collectives no longer fit then, and gloo ends the
    # process.
    "takes other steps": [
        Kind(
            "leaves a step out",
            leave_step_out,
            suits=_is(HOOKS, OPTIMIZERS, ROUNDS),
            may_finish=True,
            reason=_DRIFT,
        ),
    ],
    "exchanges by itself": [
        Kind("exchanges something else", exchange_something_else),
        Kind(
            "exchanges again what all have exchanged",
            exchange_something_else,
            before=exchange_something_else,
            prepares=True,
        ),
        Kind(
            "exchanges for two models in the other order",
            step_in_another_order,
            everywhere=True,
            before=make_twin,
            prepares=True,
        ),
        Kind(
            "makes its optimizer anew",
            remake,
            suits=_is(OPTIMIZERS, ROUNDS, SHARDED),
        ),
    ],
    "has other hyperparameters or another model": [
        Kind(
            "has another learning rate later on",
            change_hyperparameter("lr", 0.033),
            suits=_not("clients"),
            reason=_DRIFT,
        ),
        Kind(
            "starts from another model",
            settings=other_model(model_seed=1),
            suits=_is(OPTIMIZERS, ROUNDS, SHARDED),
            reason="checksum of the initial model",
        ),
        Kind(
            "has a parameter changed",
            change_parameter,
            suits=_changes_parameters,
            reason=_DRIFT,
        ),
        Kind(
            "has a parameter changed in the last step",
            change_parameter,
            suits=_changes_parameters,
            is_late=True,
            reason=_DRIFT,
        ),
        Kind(
            "has a parameter of the server changed in the last step",
            change_parameter_in_rounds,
            suits=_has_server,
            is_late=True,
            reason=_DRIFT,
        ),
        Kind("has its parameters replaced", replace_parameters, suits=_is(HOOKS, SHARDED)),
        Kind(
            "has a parameter of the server changed",
            change_parameter_in_rounds,
            suits=_has_server,
            reason=_DRIFT,
        ),
        Kind(
            "has a model of another shape",
            settings=other_model(hidden=40),
            suits=_is(OPTIMIZERS, ROUNDS),
        ),
        Kind(
            "gives its parameters in another order",
            settings=other_model(reverses=True),
            suits=_is(OPTIMIZERS, ROUNDS),
        ),
    ],
    "has other settings": [
        Kind("has another compressor", settings=other_compressor, reason=_DIFFERENT),
        Kind("has another seed", settings=other(seed=7), reason="seed|because rank"),
        Kind("has another collective", settings=other_collective, reason="collective|because rank"),
    ],
    "sends or gets a wrong payload": [
        Kind(
            "sends a flipped bit",
            flip_sent_bit,
            may_do_nothing=True,  # the last bit of a number that counts only rounded
            reason="damaged|not one of|because rank",
        ),
        Kind(
            "receives a flipped bit",
            flip_received_bit,
            may_do_nothing=True,
            names_anybody=True,
            reason="damaged|not one of",
        ),
        Kind(
            "gets another rank's payload in its place",
            swap_payloads,
            everywhere=True,
            suits=_gathers,
            reason="in the place of|because rank",
        ),
        Kind(
            "sends an older payload again",
            send_last_payload,
            before=record_payload,
            reason="belongs to step|damaged|because rank",
        ),
    ],
}
NOTHING = Kind("nothing happens", recovers=True)
KINDS = {kind.name: kind for kinds in FAMILIES.values() for kind in kinds}
