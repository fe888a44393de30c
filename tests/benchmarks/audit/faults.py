"""All planted faults by name: mistakes in one part of a private step."""

from tests.benchmarks.audit import (
    faults_of_clipping,
    faults_of_memory,
    faults_of_noise,
    faults_of_sampling,
)
from tests.benchmarks.audit.parts import Fault

FAULTS: dict[str, Fault] = {
    **faults_of_clipping.FAULTS,
    **faults_of_noise.FAULTS,
    **faults_of_memory.FAULTS,
    **faults_of_sampling.FAULTS,
}
