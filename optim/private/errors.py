"""What is refused because the guarantee would not hold."""

from typing import Any, ClassVar


class PrivacyError(ValueError):
    """What was asked for would not give the guarantee that it claims.

    The message names the rule that is broken and what would be valid instead.  Raised before any
    private data has been used.
    """


class Settled:
    """Refuses that its settings are changed once they have been made.

    What a step costs is written down before it, from these settings: another value would change
    the noise, or what one sample can do, and not the ledger.

    Attributes:
        settled: the names of the settings.
    """

    settled: ClassVar[frozenset[str]] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.settled and hasattr(self, name):
            raise PrivacyError(
                f"{type(self).__name__}.{name} is settled, since the ledger counts on it: call "
                "engine.change(optimizer, ...) for what may be changed, or make_private() or "
                "private_participation() anew"
            )
        super().__setattr__(name, value)


def resettle(settled: object, name: str, value: Any) -> None:
    """Change a setting nevertheless; the caller tells the ledger."""
    object.__setattr__(settled, name, value)
