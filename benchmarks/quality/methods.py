"""The methods of the page: as ``comm-hooks compare`` takes them, and where their tuning starts."""

from collections.abc import Mapping

from comm_hooks.launchers.lab.runs import BASELINE, CONTROL

METHODS: Mapping[str, float] = {
    BASELINE: 4e-3,
    CONTROL: 4e-3,
    "local_adamw:fragments=8": 4e-3,
    "topk:density=1/40:value_bits=1:index_code=rice:exempt_bits=16+local_adamw:local_steps=4:fragments=4:outer_lr=2": 4e-3,
    "sign+local_variance_adam": 4e-3,
}
"""The first learning rate of each."""
