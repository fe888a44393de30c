"""Who gets which samples: every sample goes to exactly one client, and every client gets some."""

import random

import torch
from torch import Tensor

from benchmarks.lab.corpus import shard_bounds
from comm_hooks.config import unknown

LABELLED = ("iid", "contiguous", "classes", "dirichlet")
"""The partitions of data with labels, by name."""


def partition_labelled(
    labels: Tensor,
    partition: str,
    *,
    clients: int,
    seed: int,
    classes_per_client: int = 2,
    concentration: float = 0.3,
) -> list[Tensor]:
    """Return each client's sample indices under the partition of that name.

    Args:
        labels: the class of each sample.
        partition: ``"iid"`` (:func:`iid`), ``"contiguous"`` (:func:`contiguous`), ``"classes"``
            (:func:`by_class`) or ``"dirichlet"`` (:func:`dirichlet`).
        clients: how many there are.
        seed: what the random choices follow from.
        classes_per_client: for ``"classes"`` only.
        concentration: for ``"dirichlet"`` only.

    Raises:
        ValueError: for an unknown name, and for what cannot be divided as asked.
    """
    if partition not in LABELLED:
        raise ValueError(unknown("partition", partition, LABELLED))
    if partition == "iid":
        return iid(len(labels), clients=clients, seed=seed)
    if partition == "contiguous":
        return contiguous(len(labels), clients=clients)
    if partition == "dirichlet":
        return dirichlet(labels, clients=clients, concentration=concentration, seed=seed)
    return by_class(labels, clients=clients, classes_per_client=classes_per_client, seed=seed)


def iid(count: int, *, clients: int, seed: int) -> list[Tensor]:
    """Divide ``count`` shuffled samples into parts of equal size, to within one sample.

    Raises:
        ValueError: if there are more clients than samples.

    Example::

        >>> [len(part) for part in iid(10, clients=3, seed=0)]
        [3, 3, 4]
    """
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return [shuffled[part] for part in contiguous(count, clients=clients)]


def contiguous(count: int, *, clients: int) -> list[Tensor]:
    """Divide ``count`` samples, in their order, into parts of equal size, to within one sample.

    Raises:
        ValueError: if there are more clients than samples.

    Example::

        >>> contiguous(5, clients=2)
        [tensor([0, 1]), tensor([2, 3, 4])]
    """
    _check_clients(clients, count)
    return [torch.arange(start, stop) for start, stop in shard_bounds(count, clients)]


def by_class(labels: Tensor, *, clients: int, classes_per_client: int, seed: int) -> list[Tensor]:
    """Give every client samples of ``classes_per_client`` different classes.

    The "pathological" partition of McMahan et al. (AISTATS 2017, section 3):

    1. the clients times ``classes_per_client`` pieces to be handed out are apportioned to the
       classes: one each, then always one more to the class whose pieces are largest;
    2. each class is shuffled and cut into its number of pieces, alike to within one sample;
    3. client after client takes a piece from each of the ``classes_per_client`` classes with the
       most pieces left, ties broken at random.

    The published pieces ("shards") are cut from the samples sorted by class without regard to where
    a class ends, so that a client may see up to twice as many classes; here it is exactly
    ``classes_per_client``.  The price is that clients differ in size where classes do.

    Args:
        labels: the class of each sample.
        clients: how many there are.
        classes_per_client: how many different classes each of them has.
        seed: what all random choices follow from.

    Raises:
        ValueError: if no such partition exists: too many clients or classes per client for the
            samples, or too few for every class to be somewhere.

    Example::

        >>> labels = torch.tensor([0, 1, 2, 3] * 6)
        >>> parts = by_class(labels, clients=6, classes_per_client=2, seed=0)
        >>> [(len(part), len(labels[part].unique())) for part in parts]
        [(4, 2), (4, 2), (4, 2), (4, 2), (4, 2), (4, 2)]
    """
    _check_clients(clients, len(labels))
    classes, counts = labels.unique(return_counts=True)
    sizes = counts.tolist()
    _check_classes(sizes, clients, classes_per_client)

    generator = torch.Generator().manual_seed(seed)
    ties = random.Random(seed)
    waiting: list[list[Tensor]] = []
    for label, pieces in zip(classes, _apportion(sizes, clients, classes_per_client), strict=True):
        members = (labels == label).nonzero().flatten()
        shuffled = members[torch.randperm(len(members), generator=generator)]
        waiting.append(list(shuffled.tensor_split(pieces)))

    parts = []
    for _ in range(clients):
        # Taking from the classes with the most left never leaves a later client with too few
        # classes to choose from (the argument of Havel and Hakimi, and of Gale and Ryser).
        ties.shuffle(waiting)
        waiting.sort(key=len, reverse=True)
        parts.append(torch.cat([pieces.pop() for pieces in waiting[:classes_per_client]]))
    return parts


def dirichlet(labels: Tensor, *, clients: int, concentration: float, seed: int) -> list[Tensor]:
    """Divide each class in proportions drawn from a Dirichlet distribution.

    As in Hsu, Qi & Brown (2019), the other way round (Yurochkin et al., ICML 2019): per class,

    1. draw the clients' proportions from Dirichlet(concentration, ..., concentration);
    2. shuffle the class and cut it in these proportions.

    A client that got nothing then takes one sample from the one that has most.

    Args:
        labels: the class of each sample.
        clients: how many there are.
        concentration: above 0; small ones give each class to few clients, large ones are nearly
            iid.
        seed: what all random choices follow from.

    Raises:
        ValueError: for a concentration that is not positive, and more clients than samples.

    Example::

        >>> labels = torch.arange(600) % 10
        >>> parts = dirichlet(labels, clients=3, concentration=0.3, seed=0)
        >>> sum(map(len, parts)), len(parts[0].unique()) == len(parts[0])
        (600, True)
    """
    _check_clients(clients, len(labels))
    if not 0 < concentration < float("inf"):
        raise ValueError(f"concentration must be positive, got {concentration!r}")
    generator = torch.Generator().manual_seed(seed)
    parts: list[list[Tensor]] = [[] for _ in range(clients)]
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        shuffled = members[torch.randperm(len(members), generator=generator)]
        # Gamma variables over their sum; in float64 since small concentrations underflow.
        shape = torch.full((clients,), concentration, dtype=torch.float64)
        weights = torch._standard_gamma(shape, generator=generator) + 1e-300
        cuts = (weights / weights.sum()).cumsum(0)[:-1].mul(len(members)).round().long()
        for part, piece in zip(parts, shuffled.tensor_split(cuts), strict=True):
            part.append(piece)
    joined = [torch.cat(pieces) for pieces in parts]
    for client in range(clients):
        if not len(joined[client]):
            most = max(range(clients), key=lambda other: len(joined[other]))
            joined[client], joined[most] = joined[most][:1], joined[most][1:]
    return joined


def _apportion(sizes: list[int], clients: int, classes_per_client: int) -> list[int]:
    """Return how many pieces each class is cut into: at most one per client and per sample."""
    pieces = [1] * len(sizes)
    for _ in range(clients * classes_per_client - len(sizes)):
        divisible = [i for i, size in enumerate(sizes) if pieces[i] < min(clients, size)]
        pieces[max(divisible, key=lambda i: sizes[i] / pieces[i])] += 1
    return pieces


def _check_clients(clients: int, samples: int) -> None:
    if clients < 1:
        raise ValueError(f"clients must be at least 1, got {clients}")
    if clients > samples:
        raise ValueError(
            f"{samples} training samples cannot be divided over {clients} clients: take fewer"
        )


def _check_classes(sizes: list[int], clients: int, classes_per_client: int) -> None:
    if not 1 <= classes_per_client <= len(sizes):
        raise ValueError(
            f"classes_per_client must lie between 1 and {len(sizes)}, the number of classes, "
            f"got {classes_per_client}"
        )
    wanted = clients * classes_per_client
    if wanted < len(sizes):
        raise ValueError(
            f"{clients} clients with {classes_per_client} classes each leave out some of the "
            f"{len(sizes)} classes: take more clients or more classes per client"
        )
    available = sum(min(clients, size) for size in sizes)
    if wanted > available:
        raise ValueError(
            f"{clients} clients cannot have {classes_per_client} classes each: classes of "
            f"{', '.join(map(str, sizes))} samples are too small; take fewer clients"
        )
