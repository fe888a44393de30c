"""The methods of the page, and where their tuning starts."""

from collections.abc import Mapping

from benchmarks.lab.runs import BASELINE, CONTROL

METHODS: Mapping[str, float] = {
    BASELINE: 4e-3,
    CONTROL: 4e-3,
    "low_communication:bits=0.06": 8e-3,
    "low_communication": 8e-3,
    "low_communication:bits=0.12": 8e-3,
    "low_communication:bits=0.0073": 8e-3,
    "local_adamw:fragments=8": 4e-3,
    "sign+local_variance_adam": 4e-3,
    "identity:bits=16": 4e-3,
    "quantize:bits=2": 4e-3,
    "count_sketch": 4e-3,
    "powersgd": 4e-3,
    "diloco:local_steps=30": 4e-3,
    "topk:density=1/64+sparse_loco:local_steps=30": 4e-3,
    "mu_lo_co:local_steps=30": 4e-3,
    "all_reduce+laprop": 8e-3,
    "all_reduce+muon_adamw": 4e-3,
    "none+muon_adamw": 4e-3,
    "low_communication:muon=true": 8e-3,
}
"""The first learning rate of each."""
