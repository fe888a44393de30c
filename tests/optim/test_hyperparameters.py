"""What is refused in hyperparameters, and in which words."""

import re
from typing import Any

import pytest
import torch

from comm_hooks.optim.hyperparameters import check_hyperparameters


class Lion:
    pass


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": -1.0}, "Lion: lr must lie in [0, inf), got -1.0"),
        ({"lr": 1e-3, "eps": float("nan")}, "Lion: eps must lie in [0, inf), got nan"),
        ({"clip": float("inf")}, "Lion: clip must lie in [0, inf), got inf"),
        ({"lr": "1e-3"}, "Lion: lr must lie in [0, inf), got '1e-3'"),
        ({"lr": None}, "Lion: lr must lie in [0, inf), got None"),
        ({"weight_decay": True}, "Lion: weight_decay must lie in [0, inf), got True"),
        ({"lr": torch.tensor(0.5)}, "Lion: lr must lie in [0, inf), got tensor(0.5000)"),
        ({"lr": 10**400}, f"Lion: lr must lie in [0, inf), got {10**400}"),
        ({"betas": 0.9}, "Lion: betas must be a tuple of 2 numbers, got 0.9"),
        ({"betas": (0.9,)}, "Lion: betas must be a tuple of 2 numbers, got (0.9,)"),
        ({"betas": (0.9, "x")}, "Lion: betas must lie in [0, 1), got 'x'"),
        ({"momentum": 1.0}, "Lion: momentum must lie in [0, 1), got 1.0"),
        ({"betas": (0.9, 1.0)}, "Lion: betas must lie in [0, 1), got 1.0"),
        ({"betas": (-0.1, 0.9)}, "Lion: betas must lie in [0, 1), got -0.1"),
        ({"betas": (0.9, float("nan"))}, "Lion: betas must lie in [0, 1), got nan"),
    ],
    ids=str,
)
def test_what_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_hyperparameters(Lion(), **values)


def test_the_ends_of_the_ranges_are_accepted() -> None:
    check_hyperparameters(Lion())
    betas = (0, 0.0, 0.9999999)
    check_hyperparameters(
        Lion(), beta_count=3, betas=betas, momentum=0, lr=0, eps=0.0, weight_decay=5
    )
