"""What an exchange queues on an accelerator: as many operations as is said, and none that reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import queued

MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements.md"


@pytest.mark.parametrize(("compressor", "collective", "options"), queued.CASES, ids=str)
def test_a_bucket_takes_what_the_page_says(
    compressor: str, collective: str, options: Mapping[str, Any]
) -> None:
    assert queued.row(compressor, collective, options) in MEASUREMENTS.read_text().splitlines()


def test_reading_a_value_is_an_error() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.empty(3, device="meta").sum().item()
