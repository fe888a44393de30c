"""The cases of a matrix that run by default; the others are slow."""

from collections.abc import Iterable
from typing import Any

from tests.optim.scenarios import rarely


def by_default(usual: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Return the values for ``pytest.mark.parametrize``, the others marked slow."""
    return [*usual, *rarely(*others)]
