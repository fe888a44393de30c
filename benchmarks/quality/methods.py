"""The methods of the page: as ``comm-hooks compare`` takes them, and where their tuning starts."""

from collections.abc import Mapping

from comm_hooks.launchers.lab.runs import BASELINE, CONTROL

METHODS: Mapping[str, float] = {
    BASELINE: 4e-3,
    CONTROL: 4e-3,
    "local_adamw:fragments=8": 4e-3,
    "sign+local_variance_adam": 4e-3,
}
"""The first learning rate of each."""
