"""A private exchange sends what its engine releases, and nothing else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from comm_hooks.exchange.layout import Layout
from comm_hooks.exchange.noise_hook import NoiseHook
from comm_hooks.optim.private.errors import PrivacyError

Protect = Callable[[Layout], NoiseHook | None]


class Gate:
    """Refuses the rounds of an exchange, except within :meth:`open`.

    A round of raw values would release them; their residuals would leave with later, private steps.
    """

    def __init__(self) -> None:
        self._protect: Protect | None = None

    @contextmanager
    def open(self, protect: Protect) -> Iterator[None]:
        """Return the context of a private round, whose vectors are passed to ``protect``."""
        self._protect = protect
        try:
            yield
        finally:
            self._protect = None

    def protect(self, layout: Layout) -> NoiseHook | None:
        """Protect a round's vectors; see :class:`~comm_hooks.exchange.noise_hook.Gate`."""
        assert self._protect is not None, "require_open() comes first"
        return self._protect(layout)

    def require_open(self, *, protects: bool) -> None:
        """Raise ``PrivacyError`` outside of a private round."""
        if self._protect is None or not protects:
            raise PrivacyError(
                "this exchange belongs to private training, and sends what that releases only: "
                "average anything else with an exchange of its own, or torch.distributed"
            )
