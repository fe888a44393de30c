from collections.abc import Iterator

import pytest

from benchmarks.audit.world import fixed_secrets, user_seed


@pytest.fixture(autouse=True)
def _repeatable_chance() -> Iterator[None]:
    """Fix the draws of audits: one in a thousand accuses a correct training, or misses a fault."""
    with fixed_secrets(0), user_seed():
        yield
