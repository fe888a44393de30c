"""Audit every planted fault, and correct configurations, and print what was found.

``python -m tests.benchmarks.audit [--faults MODULE] [--correct N] [--only WORD]``, where the module
has ``FAULTS``, by name the settings and the stages, and perhaps ``CORRECT``, settings, and
``CORRECT_STAGES``, which look odd.
"""

import argparse
import importlib
import random
import time
import warnings
from typing import Any

import torch

from benchmarks.audit import Configuration, Stages, audit_configuration
from benchmarks.audit.audit import why_not_played
from tests.benchmarks.audit.correct import correct_settings
from tests.benchmarks.audit.faults import configuration


def _audited(stages: Stages) -> tuple[bool, float, str]:
    start = time.perf_counter()
    if why_not_played(stages.configuration):
        return False, 0.0, "looked up only"
    audit = audit_configuration(stages.configuration, stages=stages)
    seconds = time.perf_counter() - start
    words = [attack.name for attack in audit.attacks if attack.outcome == "violation"]
    return audit.violated, seconds, [*audit.problems, *words, ""][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", default="tests.benchmarks.audit.faults")
    parser.add_argument("--correct", type=int, default=40)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    module = importlib.import_module(options.faults)
    found = false_alarms = planted = correct = 0
    times = []
    for name, (settings, stages) in module.FAULTS.items():
        if options.only not in name:
            continue
        violated, seconds, why = _audited(stages(configuration(**settings)))
        planted += 1
        found += violated
        times.append(seconds)
        print(f"{'found ' if violated else 'MISSED'} {seconds:5.1f} s  {name}: {why}", flush=True)
    rng = random.Random(options.seed)
    cases: list[dict[str, Any]] = [
        getattr(module, "CORRECT", [])[i]
        if i < len(getattr(module, "CORRECT", []))
        else correct_settings(rng)
        for i in range(options.correct)
    ]
    quiet = [Stages(Configuration(**settings)) for settings in cases]
    if options.correct:
        odd = getattr(module, "CORRECT_STAGES", {})
        quiet += [stages(configuration(**settings)) for settings, stages in odd.values()]
    for stages in quiet:
        violated, seconds, why = _audited(stages)
        correct += 1
        false_alarms += violated
        times.append(seconds)
        what = f"{type(stages).__name__} {stages.configuration}"
        print(f"{'ALARM ' if violated else 'quiet '} {seconds:5.1f} s  {what}: {why}", flush=True)
    print(f"{found} of {planted} faults found, {false_alarms} false alarms in {correct} audits")
    print(
        f"{sum(times) / max(1, len(times)):.1f} s on average, {max(times, default=0):.1f} s at most"
    )


if __name__ == "__main__":
    main()
