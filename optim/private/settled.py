"""What stays as it was when the ledger was told."""

from typing import Any, ClassVar

from comm_hooks.optim.private.errors import PrivacyError


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
                "engine.change(optimizer, ...) for what may be changed, or make_private() anew"
            )
        super().__setattr__(name, value)


def resettle(settled: object, name: str, value: Any) -> None:
    """Change a setting nevertheless: for who tells the ledger."""
    object.__setattr__(settled, name, value)
