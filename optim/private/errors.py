"""Errors for requests with which the privacy guarantee would not hold."""

from typing import Any, ClassVar


class PrivacyError(ValueError):
    """Raised for a request with which the claimed privacy guarantee would not hold.

    The message names the broken rule and a valid alternative.  Raised before any private data has
    been used.
    """


class Settled:
    """A base class with attributes that cannot be changed once they are set.

    The cost of a step is written to the ledger before the step, from these settings: a changed
    value would change the noise, or the influence of one sample, and not the ledger.

    Attributes:
        settled: the names of these attributes.
    """

    settled: ClassVar[frozenset[str]] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.settled and hasattr(self, name):
            raise PrivacyError(
                f"{type(self).__name__}.{name} is settled, since the ledger counts on it: call "
                "engine.change(optimizer, ...) for settings that may be changed, or make_private() "
                "or private_participation() anew"
            )
        super().__setattr__(name, value)


def resettle(settled: object, name: str, value: Any) -> None:
    """Change an attribute of a :class:`Settled` object; the caller must update the ledger."""
    object.__setattr__(settled, name, value)
