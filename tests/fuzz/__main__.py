"""Feeds inputs of any bytes to all readers of foreign data.

    python -m tests.fuzz                               # a million inputs, about 5 minutes
    python -m tests.fuzz --only ledgers,places --times 10 --seed 1
    python -m tests.fuzz --only payloads --replay 0a1b2c

Nothing may come out but a ``ValueError`` of one line in our own words.  Prints how many inputs each
target had, and of each kind of finding the shortest input, a file for the folder ``corpus/TARGET``.
Fails if there is a finding.
"""

import argparse
import itertools
import sys
import time
import warnings

import torch

from tests.fuzz.fuzzing import Finding, Target
from tests.fuzz.targets import TARGETS


def main() -> None:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="targets, separated by commas")
    parser.add_argument("--times", type=float, default=1.0, help="factor on the numbers of inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", help="one input, in hexadecimal digits")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = arguments.only.split(",") if arguments.only else list(TARGETS)
    if strange := [name for name in chosen if name not in TARGETS]:
        parser.error(f"no target {strange[0]!r}: choose from {', '.join(TARGETS)}")
    if arguments.replay is not None:
        for name in chosen:
            TARGETS[name].check(bytes.fromhex(arguments.replay))
        return
    total = found = 0
    for name in chosen:
        count = round(arguments.times * TARGETS[name].inputs)
        total += count
        found += _fuzz(TARGETS[name], count, arguments.seed)
    print(f"{total:,} inputs, {found} kinds of findings")
    sys.exit(found > 0)


def _fuzz(target: Target, count: int, seed: int) -> int:
    """Try so many inputs; print the kinds of findings, and return their number."""
    started = time.perf_counter()
    shortest: dict[str, tuple[str, bytes]] = {}
    corpus = target.corpus()
    for data in itertools.chain(corpus, itertools.islice(target.generate(seed), count)):
        try:
            target.check(data)
        except Finding as finding:
            text = str(finding)
            kind = text.partition(":")[0] + text.rpartition(" at ")[2]
            if kind not in shortest or len(data) < len(shortest[kind][1]):
                shortest[kind] = str(finding), data
    seconds = time.perf_counter() - started
    print(f"{target.name}: {count:,} inputs, {len(corpus)} kept, {seconds:.0f} s", flush=True)
    for text, data in shortest.values():
        print(f"  {text}\n    --only {target.name} --replay {data.hex()[:2000]}", flush=True)
    return len(shortest)


if __name__ == "__main__":
    main()
