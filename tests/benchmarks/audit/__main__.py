"""Audit every planted fault, and correct trainings, and print the results.

``python -m tests.benchmarks.audit [--correct N] [--only WORD]``
"""

import argparse
import random
import time
import warnings

import torch

from benchmarks.audit import Stages, audit_configuration
from tests.benchmarks.audit.correct import ODD, correct_settings
from tests.benchmarks.audit.faults import FAULTS
from tests.benchmarks.audit.parts import stages_of


def _first_problem(stages: Stages) -> str:
    audit = audit_configuration(stages.configuration, stages=stages)
    attack = ["the attack on releases"] if audit.attack.outcome == "violation" else []
    return [*audit.problems, *attack, ""][0]


def main() -> int:
    """Return the number of wrong audits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--correct", type=int, default=40, help="random correct configurations")
    parser.add_argument("--only", default="", help="faults with this in their names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    faults = {name: fault for name, fault in FAULTS.items() if options.only in name}
    cases = [*faults.items(), *(ODD.items() if options.correct else ())]
    rng = random.Random()
    cases += [(f"correct: {n}", (correct_settings(rng), Stages)) for n in range(options.correct)]
    wrong, longest = 0, 0.0
    for name, fault in cases:
        start = time.perf_counter()
        problem = _first_problem(stages_of(fault))
        seconds = time.perf_counter() - start
        longest = max(longest, seconds)
        is_right = bool(problem) == (name in faults)
        wrong += not is_right
        verdict, settings = ("ok", "") if is_right else ("WRONG", f" {fault[0]}")
        print(f"{verdict:5} {seconds:5.1f} s  {name}{settings}: {problem}", flush=True)
    print(f"{wrong} wrong audits, {longest:.1f} s at most")
    return wrong


if __name__ == "__main__":
    raise SystemExit(min(1, main()))
