"""Releases as events: steps of the Poisson-sampled Gaussian mechanism, and their history."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.requirements import require_kind, require_positive, require_within

_KNOWN = ("noise_multiplier", "sample_rate")
_INTERVALS = {
    "noise_multiplier": "(0, inf)",
    "sample_rate": "[0, 1]",
    "checkpoint_multiplier": "[0, 1]",
    "rank_multiplier": "[0, 1]",
}


@dataclass(frozen=True)
class GaussianEvent:
    """One or more steps of the Gaussian mechanism with Poisson sampling, all with equal settings.

    In each step every sample (or client) is in the batch with probability ``sample_rate``,
    independently of all others (Poisson sampling), and changes a sum by at most C in Euclidean
    norm; the sum plus N(0, (noise_multiplier C)^2) in every coordinate is released.

    Attributes:
        noise_multiplier: the noise's standard deviation divided by C; positive.
        sample_rate: the probability, from 0 to 1.  At 1 every batch has all samples; at 0
            batches are empty and epsilon does not grow.
        steps: the number of such steps, at least 1.
        placement: where the noise was added, such as ``"central"``; None if it is not known.
        checkpoint_multiplier: the fraction of the noise multiplier that protects from observers of
            single ranks' checkpoints, from 0 (no protection) to 1; None if it is not known.
        rank_multiplier: the same for observers of single ranks' messages.
        run: the name of the run that takes these steps, as in its ledger; None if it is not known.

    Raises:
        ValueError: for values out of range, naming the field.

    Not supported: batches of a fixed size, shuffling and sampling with replacement.  Accounting for
    them as for Poisson sampling gives an epsilon that is too small.

    Example::

        >>> from comm_hooks.optim.private.accounting import GaussianEvent
        >>> GaussianEvent(noise_multiplier=1.1, sample_rate=0.01, steps=100)
        GaussianEvent(noise_multiplier=1.1, sample_rate=0.01, steps=100)
    """

    noise_multiplier: float
    sample_rate: float
    steps: int = 1
    placement: str | None = field(default=None, repr=False)
    checkpoint_multiplier: float | None = field(default=None, repr=False)
    rank_multiplier: float | None = field(default=None, repr=False)
    run: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.run is not None:
            require_kind(self, "run", self.run, str)
        require_positive(self, "steps", self.steps)
        for name, interval in _INTERVALS.items():
            if (value := getattr(self, name)) is not None or name in _KNOWN:
                require_within(self, name, value, interval)
                # Plain numbers, so that equal events are equal and go into JSON.
                object.__setattr__(self, name, float(value))

    @property
    def mechanism(self) -> tuple[float, float]:
        """The pair (noise multiplier, sample rate)."""
        return self.noise_multiplier, self.sample_rate

    @property
    def one(self) -> "GaussianEvent":
        """The event of a single one of these steps: a copy with ``steps=1``."""
        return replace(self, steps=1)


def joined(events: Iterable[GaussianEvent]) -> list[GaussianEvent]:
    """Return the events in order, of which neighbours that differ only in ``steps`` are one."""
    groups = itertools.groupby(events, key=lambda event: event.one)
    return [replace(one, steps=sum(event.steps for event in group)) for one, group in groups]


def steps_by(kind: Callable[[GaussianEvent], Any], events: Iterable[GaussianEvent]) -> Counter[Any]:
    """Return the number of steps for each value of ``kind(event)``."""
    steps: Counter[Any] = Counter()
    for event in events:
        steps[kind(event)] += event.steps
    return steps


def seen_by(observer: str, events: Iterable[GaussianEvent]) -> list[GaussianEvent]:
    """Return the events with the noise multipliers that protect from an observer.

    Args:
        observer: ``"model"`` sees the model at every step; ``"checkpoint"`` also the saved states
            of single ranks; ``"rank"`` the messages of single ranks.
        events: the history, with the multipliers of each event's placement.

    Raises:
        PrivacyError: if the protection from the observer is zero or unknown for an event.
    """
    if observer == "model":
        return list(events)
    seen_files, instead = _OBSERVERS[observer]
    seen = []
    for event in events:
        multiplier = getattr(event, f"{observer}_multiplier")
        if not multiplier:
            place = "that is not known" if multiplier is None else repr(event.placement)
            raise PrivacyError(
                f"observer {observer!r}: {seen_files} of single ranks carry no noise of their own "
                f"with placement {place}: ranks and links are trusted. Valid instead: {instead}"
            )
        seen.append(replace(event, noise_multiplier=event.noise_multiplier * multiplier))
    return seen


_OBSERVERS = {
    "checkpoint": ("saved states", "to publish release_state_dict() and nothing else"),
    "rank": ("messages", "placement 'local' (or 'shares', with less noise per rank)"),
}
