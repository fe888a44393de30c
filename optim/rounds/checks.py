"""Checks of the settings of optimizers of local steps, before anything is sent."""

from torch.optim import SGD, Adagrad, Optimizer, RMSprop

from comm_hooks.exchange import Exchange
from comm_hooks.optim.base import parameters_of
from comm_hooks.optim.frozen import trains
from comm_hooks.optim.rounds.participation import ClientSampling
from comm_hooks.optim.rounds.shared_moments import LocalAMSGrad
from comm_hooks.requirements import (
    require_choice,
    require_flag,
    require_kind,
    require_positive,
    require_whole,
    require_within,
)
from comm_hooks.shards import is_held_by_all, require_part_for_all, whole

_COUPLED = (SGD, RMSprop, Adagrad)
"""Optimizers that add weight decay to the gradient, without a group setting that says so."""


def check_rounds(
    owner: object,
    inner: Optimizer,
    exchange: Exchange,
    server: Optimizer | None,
    *,
    local_steps: int | None,
    fragments: int,
    participation: ClientSampling | None,
    client_state: str,
    look_ahead: float,
    shared_decay: bool,
) -> None:
    """Raise ``ValueError`` for arguments of LocalRounds that are invalid or exclude each other."""
    require_kind(owner, "inner", inner, Optimizer)
    members = parameters_of(inner.param_groups)
    parameters = [p for p in members if trains(p)]
    for parameter in parameters:
        require_whole(parameter)
    require_part_for_all(owner, members)
    name = type(owner).__name__
    if not parameters:
        raise ValueError(f"{name}: all the parameters are frozen (requires_grad=False)")
    require_kind(owner, "exchange", exchange, Exchange)
    if participation is not None:
        require_kind(owner, "participation", participation, ClientSampling)
    if server is not None:
        require_kind(owner, "server", server, Optimizer)
    if local_steps is not None:
        require_positive(owner, "local_steps", local_steps)
    require_positive(owner, "fragments", fragments)
    require_choice(owner, "client_state", client_state, ("keep", "reset"))
    require_within(owner, "look_ahead", look_ahead, "[0, inf)")
    require_flag(owner, "shared_decay", shared_decay)

    memory, compressor = exchange.memory, exchange.compressor
    has_clients = participation is not None
    in_server = set() if server is None else set(parameters_of(server.param_groups))
    # The same on all ranks, though some may hold nothing of a small parameter.
    count = sum(map(is_held_by_all, map(whole, parameters)))
    refused = {
        f"memory={memory} sends changes of a vector, but every round has a new displacement: use "
        "ErrorFeedback() or no memory": memory is not None and memory.sends_changes,
        f"{compressor} divides by the number of ranks that sent an element, which depends on the "
        "clients of each rank: use overlap=0": has_clients and not compressor.adds_up,
        "server and inner must hold the same parameters: make both from one list, such as "
        "list(model.named_parameters())": server is not None
        and set(parameters) != set(filter(trains, in_server)),
        f"{type(participation).__name__} averages displacements, not the second moments of "
        f"{type(inner).__name__}: use SAFL, FedAvg, or LocalRounds with an inner optimizer with "
        "moments that stay with each client, such as AdamW": participation is not None
        and not participation.averages_statistics
        and isinstance(inner, LocalAMSGrad),
        "local_steps is needed: the number of steps between two exchanges": local_steps is None
        and not has_clients,
        "fragments cannot be combined with participation": fragments > 1 and has_clients,
        f"fragments={fragments} exceeds local_steps={local_steps}, but each fragment is exchanged "
        f"after another step: use at most fragments={local_steps}": local_steps is not None
        and fragments > local_steps,
        f"{count} parameters cannot be divided into {fragments} fragments": fragments > count,
        "look_ahead cannot be combined with participation: a rank has several residuals": look_ahead
        and has_clients,
        "look_ahead is a share of the residual, and the exchange has none: give it "
        "ErrorFeedback()": look_ahead and memory is None,
        "look_ahead cannot be combined with collective='hierarchical', where a rank has the "
        "residual of a shard only: leave one of the two out": look_ahead
        and exchange.settings.collective == "hierarchical",
        "shared_decay cannot be combined with participation: clients may take different numbers "
        "of steps": shared_decay and has_clients,
        "shared_decay needs an inner optimizer with a decoupled weight_decay, such as AdamW, not "
        f"{type(inner).__name__}": shared_decay and not _is_decoupled(inner),
    }
    for why, is_refused in refused.items():
        if is_refused:
            raise ValueError(f"{name}: {why}")


def _is_decoupled(inner: Optimizer) -> bool:
    return not isinstance(inner, _COUPLED) and all(
        "weight_decay" in group and group.get("decoupled_weight_decay") is not False
        for group in inner.param_groups
    )
