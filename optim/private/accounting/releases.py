"""The releases on which a saved state depends, to compare with the ledger."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from comm_hooks.optim.private.accounting.events import GaussianEvent, steps_by
from comm_hooks.optim.private.accounting.ledger import Ledger
from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.requirements import in_one_line

_of_parameter: Any = WeakIdKeyDictionary()
"""The counts of the releases that made each parameter."""


class Releases:
    """The releases on which a state depends: an exchange's residuals, moments, or parameters.

    They are saved with the state: each kind of event, of each run, with its number of steps.  A
    state without releases was not saved by private training, and may hold gradients without noise;
    with releases that the ledger lacks, epsilon would be too small.

    Args:
        only: the placement of noise that a loaded state must have been saved with; None for any.

    Attributes:
        steps: the number of steps of each event.
        needs_entry: whether each release must have been entered before.

    Example::

        >>> from comm_hooks.optim.private.accounting import GaussianEvent
        >>> from comm_hooks.optim.private.accounting.releases import Releases
        >>> releases = Releases(only="local")
        >>> releases.enter(GaussianEvent(1.1, 0.01, placement="local"), "3f2a")
        >>> releases.add("local", 1.1)
        >>> [(event.run, steps) for event, steps in releases.steps.items()]
        [('3f2a', 1)]
        >>> releases.check(None)
        Traceback (most recent call last):
        ...
        comm_hooks.optim.private.errors.PrivacyError: load_state_dict: the state was not saved...
    """

    def __init__(self, only: str | None = None) -> None:
        self.steps: Counter[GaussianEvent] = Counter()
        self._only = only
        self._entered: GaussianEvent | None = None
        self.needs_entry = False
        self._counted_by: str | None = None

    def enter(self, event: GaussianEvent, run: str) -> None:
        """Note what the ledger of a run has recorded for the next release."""
        self._entered = replace(event, run=run)

    def add(self, placement: str, noise_multiplier: float) -> None:
        """Count one more release; without an entry in a ledger, as of every sample.

        Raises:
            PrivacyError: without an entry, if :attr:`needs_entry`.
        """
        if self._entered is None and self.needs_entry:
            raise PrivacyError(
                "this release would not be in the ledger: take steps with the optimizer that "
                "make_private() returned, and do not call its mechanism"
            )
        event = self._entered or GaussianEvent(noise_multiplier, 1.0, placement=placement)
        self._entered = None
        self.steps[event] += 1

    def saved(self) -> dict[str, Any]:
        """Return the releases as plain values, to save with the state."""
        events = [replace(event, steps=steps) for event, steps in self.steps.items()]
        return saved_history(events)

    def check(self, found: object) -> None:
        """Raise unless a state with these releases may be loaded.

        Args:
            found: the releases as :meth:`saved` returned them; None if the state has none.

        Raises:
            PrivacyError: for a state without releases, and for noise of another placement.
            ValueError: for releases that :meth:`saved` cannot have returned.
        """
        if found is None:
            raise PrivacyError(
                "load_state_dict: the state was not saved by private training: it may hold "
                "gradients without noise, which the next steps would release. Load a state that "
                "private training has saved; load moments of public data into optimizer.inner"
            )
        others = {str(event.placement) for event in read_history(found)} - {self._only}
        if others and self._only is not None:
            raise PrivacyError(
                f"load_state_dict: the state was saved with placement {min(others)!r}, and the "
                f"present one is {self._only!r}: residuals have another amount of noise. Begin "
                "with a new Exchange without this state, or keep the placement"
            )

    def adopt(self, found: object) -> None:
        """Continue from the releases of a loaded state, which :meth:`check` has accepted."""
        self.steps |= steps_by(lambda event: event.one, read_history(found))
        self._counted_by = None

    def require_counted(self, ledger: Ledger) -> None:
        """Raise ``PrivacyError`` if the ledger lacks some of the releases."""
        if self._counted_by == ledger.run:
            return
        counted = steps_by(lambda event: event.one, ledger.history())
        for event, steps in self.steps.items():
            if steps > counted[event]:
                raise PrivacyError(
                    f"this model, or a state that was loaded, comes from {steps} releases with "
                    f"noise_multiplier {event.noise_multiplier:g}, sample_rate "
                    f"{event.sample_rate:g} and placement {event.placement!r}, and the ledger has "
                    f"only {counted[event]} of them: epsilon would be too small. Train a model "
                    "with one PrivacyEngine; pass it the ledger of the run that saved the state, "
                    "or load the state_dict() of its PrivacyEngine"
                )
        self._counted_by = ledger.run


def releases_of(parameters: Iterable[torch.Tensor]) -> list[Releases]:
    """Return the counts of the releases that made parameters: new for those without any.

    A model that several engines train has one epsilon, of all their releases.
    """
    new = Releases()
    return [*dict.fromkeys(_of_parameter.setdefault(each, new) for each in parameters)]


def saved_history(events: Iterable[GaussianEvent]) -> dict[str, Any]:
    """Return events as plain values."""
    return {"events": [asdict(event) for event in events]}


def read_history(found: Any) -> list[GaussianEvent]:
    """Return the events that :func:`saved_history` made plain.

    Raises:
        ValueError: for other values.
    """
    try:
        return [GaussianEvent(**event) for event in found["events"]]
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            "releases in a saved state must be a mapping with 'events', as private training saves "
            f"them, got {in_one_line(found)}: load another checkpoint"
        ) from None
