"""Privacy accounting: epsilon of a history, and the noise or the steps of a budget."""

from comm_hooks.optim.private.accounting.accountant import (
    DEFAULT_ORDERS,
    OPACUS_ORDERS,
    Accountant,
    RDPAccountant,
)
from comm_hooks.optim.private.accounting.calibration import (
    ACCOUNTANTS,
    build_accountant,
    max_steps,
    noise_multiplier_for,
)
from comm_hooks.optim.private.accounting.events import GaussianEvent
from comm_hooks.optim.private.accounting.pld import PLDAccountant

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "DEFAULT_ORDERS",
    "GaussianEvent",
    "OPACUS_ORDERS",
    "PLDAccountant",
    "RDPAccountant",
    "build_accountant",
    "max_steps",
    "noise_multiplier_for",
]
