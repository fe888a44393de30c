"""Errors for requests with which the privacy guarantee would not hold."""

from typing import Any, ClassVar


class PrivacyError(ValueError):
    """Raised for a request with which the claimed privacy guarantee would not hold.

    The message names the broken rule and a valid alternative.  Raised before private data is used.
    """


class Settled:
    """A base class with attributes that cannot be changed once they are set.

    The privacy cost of a step is written to the ledger, the record of all releases, from these
    settings: a later change would alter the noise or the influence of a sample, not the record.

    Attributes:
        settled: the names of these attributes.
    """

    settled: ClassVar[frozenset[str]] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.settled and hasattr(self, name):
            raise PrivacyError(
                f"{type(self).__name__}.{name} is settled, since the ledger relies on it: call "
                "engine.change(optimizer, ...) for noise_multiplier, max_grad_norm and "
                "expected_batch_size, else make_private() or private_participation() again"
            )
        super().__setattr__(name, value)


def resettle(settled: object, name: str, value: Any) -> None:
    """Change an attribute of a :class:`Settled` object; the caller must update the ledger."""
    object.__setattr__(settled, name, value)
