"""What rounds of local work refuse before anything is sent, and how they cut the model."""

import heapq
from collections.abc import Sequence

from torch.optim import SGD, Adagrad, Optimizer, RMSprop

from comm_hooks.exchange import Exchange
from comm_hooks.optim.base import parameters_of
from comm_hooks.optim.frozen import trains
from comm_hooks.optim.rounds.participation import ClientSampling
from comm_hooks.optim.rounds.shared_moments import SharesStatistics
from comm_hooks.requirements import require_kind, require_positive, require_whole
from comm_hooks.shards import is_held_by_all, require_part_for_all, whole

_COUPLED = (SGD, RMSprop, Adagrad)
"""Optimizers that add weights to the gradient, and do not tell."""


def check_rounds(
    owner: object,
    inner: Optimizer,
    exchange: Exchange,
    server: Optimizer | None,
    local_steps: int | None,
    fragments: int,
    participation: ClientSampling | None,
) -> None:
    """Raise ``ValueError`` for rounds of local work that cannot be."""
    name = type(owner).__name__
    require_kind(owner, "inner", inner, Optimizer)
    parameters = [p for p in parameters_of(inner.param_groups) if trains(p)]
    for parameter in parameters:
        require_whole(parameter)
    require_part_for_all(owner, parameters_of(inner.param_groups))
    if not parameters:
        raise ValueError(f"{name}: the parameters are frozen (requires_grad=False)")
    require_kind(owner, "exchange", exchange, Exchange)
    if participation is not None:
        require_kind(owner, "participation", participation, ClientSampling)
    if exchange.memory is not None and exchange.memory.sends_changes:
        raise ValueError(
            f"{name}: {exchange.memory} sends changes of a vector, but every round's delta is "
            "a new one: use ErrorFeedback() or no memory"
        )
    if participation is not None and not exchange.compressor.adds_up:
        raise ValueError(
            f"{name}: {exchange.compressor} divides by how many ranks sent an element, which "
            "depends on who plays which client: use overlap=0"
        )
    if server is not None:
        require_kind(owner, "server", server, Optimizer)
        if set(parameters) != set(filter(trains, parameters_of(server.param_groups))):
            raise ValueError(
                f"{name}: server and inner must hold the same parameters: make both from "
                "one list, such as list(model.named_parameters())"
            )
    if (
        participation is not None
        and not participation.averages_statistics
        and isinstance(inner, SharesStatistics)
    ):
        raise ValueError(
            f"{name}: {type(participation).__name__} averages deltas only, not the statistics of "
            f"{type(inner).__name__}: use SAFL, FedAvg, or LocalRounds with an inner optimizer "
            "whose moments stay with each client, such as AdamW"
        )
    if local_steps is not None:
        require_positive(owner, "local_steps", local_steps)
    elif participation is None:
        raise ValueError(f"{name}: local_steps is needed: the steps between two exchanges")
    require_positive(owner, "fragments", fragments)
    if fragments > 1 and participation is not None:
        raise ValueError(f"{name}: fragments cannot be combined with participation")
    if local_steps is not None and fragments > local_steps:
        raise ValueError(
            f"{name}: {fragments} fragments cannot each have a step of their own in "
            f"{local_steps} local steps: at most fragments={local_steps}"
        )
    # The same on all ranks, though some may hold nothing of a small parameter.
    count = sum(map(is_held_by_all, map(whole, parameters)))
    if fragments > count:
        raise ValueError(f"{name}: {count} parameters cannot be dealt into {fragments} fragments")


def check_shared_decay(
    owner: object, inner: Optimizer, participation: ClientSampling | None
) -> None:
    """Raise ``ValueError`` where decay cannot be taken at the model that ranks share."""
    name = type(owner).__name__
    if participation is not None:
        raise ValueError(
            f"{name}: shared_decay cannot go with participation: clients may take different "
            "numbers of steps"
        )
    for group in inner.param_groups:
        coupled = isinstance(inner, _COUPLED) or group.get("decoupled_weight_decay") is False
        if "weight_decay" not in group or coupled:
            raise ValueError(
                f"{name}: shared_decay needs an inner optimizer whose weight_decay is decoupled, "
                f"such as AdamW, not {type(inner).__name__}"
            )


def cut(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Deal items into ``count`` non-empty parts of nearly equal total size.

    The largest first, each to the smallest part: the parts differ by one item's size at most.

    Args:
        sizes: of the items; at least ``count`` of them.

    Returns:
        The indices in each part, ascending.
    """
    parts: list[tuple[int, int, list[int]]] = [(0, index, []) for index in range(count)]
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        total, index, members = parts[0]
        heapq.heapreplace(parts, (total + max(1, sizes[item]), index, [*members, item]))
    return [sorted(members) for _, _, members in sorted(parts, key=lambda part: part[1])]
