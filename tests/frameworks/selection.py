"""The cases of a matrix that run by default; the others are slow."""

from collections.abc import Iterable
from typing import Any

import pytest


def by_default(usual: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Return the values for ``pytest.mark.parametrize``, the others marked slow."""
    slow = [
        pytest.param(*case, marks=pytest.mark.slow)
        if isinstance(case, tuple)
        else pytest.param(case, marks=pytest.mark.slow)
        for case in others
    ]
    return [*usual, *slow]
