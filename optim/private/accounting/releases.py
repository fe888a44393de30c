"""Counts of the releases on which a saved state depends, to compare with the ledger."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from comm_hooks.optim.private.accounting.events import GaussianEvent, steps_by
from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.requirements import in_one_line

# Where the noise was added, and its multiplier.
_Kind = tuple[str, float]


class Releases:
    """Counts of the releases on which a state depends: an exchange's residuals, or moments.

    The counts are saved with the state.  A state without counts was not saved by private training,
    and may hold gradients without noise; with more releases than the ledger has, epsilon would be
    too small.

    Args:
        only: the placement of noise that a loaded state must have been saved with; None for any.

    Attributes:
        steps: the number of releases by placement and noise multiplier.

    Example::

        >>> from comm_hooks.optim.private.accounting.releases import Releases
        >>> releases = Releases(only="local")
        >>> releases.add("local", 1.1)
        >>> releases.saved()
        {'steps': [['local', 1.1, 1]]}
        >>> releases.check(None)
        Traceback (most recent call last):
        ...
        comm_hooks.optim.private.errors.PrivacyError: load_state_dict: the state was not saved...
    """

    def __init__(self, only: str | None = None) -> None:
        self.steps: Counter[_Kind] = Counter()
        self._only = only
        self._must_be_counted = False

    def add(self, placement: str, noise_multiplier: float) -> None:
        """Count one more release with this placement and noise multiplier."""
        self.steps[placement, float(noise_multiplier)] += 1

    def saved(self) -> dict[str, Any]:
        """Return the counts as plain values, to save with the state."""
        return {"steps": [[*kind, steps] for kind, steps in self.steps.items()]}

    def check(self, found: object) -> None:
        """Raise unless a state with these counts may be loaded.

        Args:
            found: the counts as :meth:`saved` returned them; None if the state has none.

        Raises:
            PrivacyError: for a state without counts, and for noise of another placement.
            ValueError: for counts that :meth:`saved` cannot have returned.
        """
        if found is None:
            raise PrivacyError(
                "load_state_dict: the state was not saved by private training: it may hold "
                "gradients without noise, which the next steps would release. Load a state that "
                "private training has saved; load moments of public data into optimizer.inner"
            )
        others = {placement for placement, _ in _steps_in(found)} - {self._only}
        if others and self._only is not None:
            raise PrivacyError(
                f"load_state_dict: the state was saved with placement {sorted(others)[0]!r}, and "
                f"the present one is {self._only!r}: residuals have another amount of noise. Begin "
                "with a new Exchange without this state, or keep the placement"
            )

    def adopt(self, found: object) -> None:
        """Continue from the counts of a loaded state, which :meth:`check` has accepted."""
        for kind, steps in _steps_in(found).items():
            self.steps[kind] = max(steps, self.steps[kind])
        self._must_be_counted = True

    def require_counted(self, history: Callable[[], Iterable[GaussianEvent]]) -> None:
        """Raise ``PrivacyError`` if a state was loaded and a ledger lacks some of its releases.

        Args:
            history: a function that returns the events of the ledger.
        """
        if not self._must_be_counted:
            return
        counted = steps_by(lambda e: (e.placement or "", e.noise_multiplier), history())
        for (placement, noise_multiplier), steps in self.steps.items():
            found = counted[placement, noise_multiplier]
            if steps > found:
                raise PrivacyError(
                    f"a state was loaded that {steps} releases with noise_multiplier "
                    f"{noise_multiplier:g} and placement {placement!r} have made, and the ledger "
                    f"has only {found} of them: epsilon would be too small. Pass the ledger of the "
                    "run that saved the state to PrivacyEngine, or load the state_dict() of its "
                    "PrivacyEngine"
                )
        self._must_be_counted = False


def _steps_in(found: object) -> dict[_Kind, int]:
    try:
        steps: dict[_Kind, int] = {}
        for placement, noise_multiplier, count in found["steps"]:  # type: ignore[index]
            if not isinstance(placement, str) or type(count) is not int or count < 0:
                raise TypeError
            steps[placement, float(noise_multiplier)] = count
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            "the releases in a loaded state, under 'steps', must be a list of [placement, noise "
            f"multiplier, steps], got {in_one_line(found)}: load another checkpoint"
        ) from None
    return steps
