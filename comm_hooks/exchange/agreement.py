"""Compare the settings of all ranks: by value before the first exchange, later by digests."""

import uuid
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from comm_hooks.collectives.failure_detection import ranks_by_value
from comm_hooks.collectives.requests import AllGatherObject, Round
from comm_hooks.errors import ConfigMismatchError
from comm_hooks.exchange.layout import Segment
from comm_hooks.wire.checksum import fingerprint
from comm_hooks.wire.stamp import digest

_SCALARS = (bool, int, float, str, type(None))


class Owner(Protocol):
    """The optimizer or hook that uses an exchange; its settings must be equal on all ranks."""

    def hyperparameters(self) -> Mapping[str, Any]:
        """Return the hyperparameters of the next step as plain values; ranks compare them."""

    def replica(self) -> Sequence[torch.Tensor]:
        """Return the tensors, such as parameters, that must be bit-identical on all ranks."""

    def names(self) -> Collection[str] | None:
        """Return the names of all tensors that are ever exchanged; None if they are unknown."""


class Agreement:
    """The settings that the ranks of an exchange compare, and whether they have done so.

    Attributes:
        settings: the settings of the owner (optimizer or hook), besides those of the exchange.
        number: the number of earlier exchanges like this one that got an owner in this process:
            models that are equal are told apart by the order in which they were made.
        identity: a random name, the same on all ranks, which no other exchange has; None before
            ranks have compared their settings.
        epoch: the epoch in which they last did: a failure may have kept some ranks from it.
    """

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.number: int | None = None
        self.identity: str | None = None
        self.epoch: int | None = None
        self._initial: dict[str, int] | None = None
        self._owner: weakref.ref[Owner] | None = None

    def __copy__(self) -> "Agreement":
        """Return a copy without owner and identity: it will belong to another exchange."""
        duplicate = Agreement()
        duplicate.settings = dict(self.settings)
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle: all but the owner, since it is a weak reference."""
        return {**self.__dict__, "_owner": None}

    @property
    def owner(self) -> Owner | None:
        """The optimizer or hook that uses the exchange; None without one, or if it was deleted."""
        return self._owner() if self._owner else None

    @owner.setter
    def owner(self, owner: Owner | None) -> None:
        # Weak: an owner has its exchange, and a circle would keep ledgers and memories alive.
        self._owner = weakref.ref(owner) if owner else None

    def reach(self, config: Mapping[str, Any], ranks: Sequence[int], epoch: int) -> Round[None]:
        """Return a round of collectives that compares the settings of all ranks.

        Args:
            config: the settings of the exchange on this rank; those of the owner are added.
            ranks: the global ranks of all members.
            epoch: the present epoch of the transport.

        Raises:
            ConfigMismatchError: on all ranks, naming the settings that differ, and the ranks.
            PeerError: on all ranks, if some ranks compare the names of tensors at this moment.
        """
        own = dict(config)
        if (owner := self.owner) is not None:
            own |= owner.hyperparameters()
            if self._initial is None:  # later a hook has more parameters
                replica = owner.replica()
                self._initial = {}
                if replica:
                    self._initial["checksum of the initial model"] = int(fingerprint(replica))
            own |= self._initial
        if self.number is not None:
            own["number of the exchange among equal ones"] = self.number
        named = [own, self.identity or uuid.uuid4().hex]
        found = yield AllGatherObject(named, about="settings", may_be_alone=True)
        check_agreement([config for config, _ in found], ranks)
        self.identity, self.epoch = found[0][1], epoch


def hyperparameters_of(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the plain values in an optimizer's parameter groups, by names for error messages.

    Tensors on accelerators are left out: reading them would block.
    """
    found = {}
    for index, group in enumerate(groups):
        where = f" of parameter group {index}" if len(groups) > 1 else ""
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.dim():
                value = value.item()
            values = value if isinstance(value, tuple | list) else (value,)
            is_plain = all(isinstance(each, _SCALARS) for each in values)
            if is_plain and key not in ("params", "param_names"):
                found[f"{key}{where}"] = value
    return found


def compare_tensors(segments: Sequence[Segment], ranks: Sequence[int]) -> Round[None]:
    """Return a round of collectives that compares the tensors' names and shapes on all ranks.

    Raises:
        ConfigMismatchError: on all ranks, naming the first tensor that differs, and the ranks.
    """
    digests = yield AllGatherObject(digest(segments), about="tensors", may_be_alone=True)
    if len(set(digests)) == 1:
        return
    listings = yield AllGatherObject(
        [f"{s.name!r} {s.shape}{' uncompressed' if s.exempt else ''}" for s in segments]
    )
    counts = [{"number of tensors": len(listing)} for listing in listings]
    for place in range(min(map(len, listings))):
        at_place = [listing[place] for listing in listings]
        if len(set(at_place)) > 1:
            raise ConfigMismatchError(
                f"Exchange: ranks average different tensors: tensor number {place} "
                f"{differences(at_place, ranks)}. Give every rank the same tensors in the same "
                "order"
            )
    check_agreement(counts, ranks)


def check_agreement(configs: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> None:
    """Raise ``ConfigMismatchError``, naming settings and ranks, if any settings differ.

    Args:
        configs: the settings by name, one mapping for each rank.
        ranks: the global ranks, in the same order.
    """
    found = []
    for setting in dict.fromkeys(key for config in configs for key in config):
        values = [repr(config[setting]) if setting in config else "absent" for config in configs]
        if len(set(values)) > 1:
            found.append(f"{setting} {differences(values, ranks)}")
    if found:
        raise ConfigMismatchError(
            "ranks are configured differently: "
            + "; ".join(found)
            + ". Give every rank the same settings"
        )


def differences(values: Sequence[str], ranks: Sequence[int]) -> str:
    """Return in words which ranks have which value."""
    found = ranks_by_value(dict(zip(ranks, values, strict=True)))
    return "is " + ", ".join(f"{value} on {having}" for value, having in found.items())
