"""What an exchange queues on an accelerator: few operations, and nothing that reads a value."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from benchmarks import queued


@pytest.mark.parametrize(("compressor", "collective", "options"), queued.CASES, ids=str)
def test_a_bucket(compressor: str, collective: str, options: Mapping[str, Any]) -> None:
    limit = 350 if collective == "sharded" or options.get("index_code") == "rice" else 260
    assert 30 < queued.count(compressor, collective, options) < limit


def test_reading_a_value_is_an_error() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.empty(3, device="meta").sum().item()
