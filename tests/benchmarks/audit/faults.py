"""Private steps with a fault in one part, each of which somebody has made or could have made.

``FAULTS`` has them all by name: which check is to find it, the configuration, and the stages.
"""

from typing import Any

from benchmarks.audit import Configuration, Stages
from tests.benchmarks.audit import (
    faults_of_clipping,
    faults_of_memory,
    faults_of_noise,
    faults_of_sampling,
)

Fault = tuple[dict[str, Any], type[Stages]]

BY_CHECK: dict[str, dict[str, Fault]] = {
    "clipping": faults_of_clipping.FAULTS,
    "noise": faults_of_noise.FAULTS,
    "memory": faults_of_memory.FAULTS,
    "sampling": faults_of_sampling.FAULTS,
}
FAULTS: dict[str, Fault] = {
    name: fault for faults in BY_CHECK.values() for name, fault in faults.items()
}


def stages_of(fault: Fault) -> Stages:
    """Return what is to be audited."""
    settings, stages = fault
    return stages(configuration(**settings))


def configuration(**changes: Any) -> Configuration:
    settings: dict[str, Any] = {
        "noise_multiplier": 2.0,
        "max_grad_norm": 0.5,
        "sample_rate": 0.05,
        "expected_batch_size": 10.0,
        "steps": 60,
        "delta": 1e-5,
        "world_size": 2,
    }
    return Configuration(**{**settings, **changes})
