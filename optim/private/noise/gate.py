"""A private exchange sends what its engine releases, and nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager

from comm_hooks.optim.private.errors import PrivacyError


class Gate:
    """Refuses the rounds of an exchange, except within :meth:`open`.

    A round of raw values would release them; their residuals would leave with later, private steps.
    """

    def __init__(self) -> None:
        self._is_open = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Return the context of a private round."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def require_open(self) -> None:
        """Raise ``PrivacyError`` outside of a private round."""
        if not self._is_open:
            raise PrivacyError(
                "this exchange belongs to private training, and sends what that releases only: "
                "average anything else with an exchange of its own, or torch.distributed"
            )
