"""Injects all faults: ``python -m tests.faults``.  Goes on where it was interrupted."""

import argparse
import json
import random
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict

from tests.faults.harness import run
from tests.faults.kinds import cases
from tests.faults.table import PAGE, RECORDS, page, read_records, table, totals
from tests.ranks import CONTEXT


def main() -> None:
    """Run the cases without a record, and write the page after the last one."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--jobs", type=int, default=4, help="how many cases at a time")
    parser.add_argument("--only", default="", help="cases with this in their names")
    arguments = parser.parse_args()
    # Failed cases are tried again.
    records = [record for record in read_records(RECORDS) if not record["details"]]
    RECORDS.write_text("".join(json.dumps(record) + "\n" for record in records))
    done = {(record["fault"], record["method"], record["seed"]) for record in records}
    everything = cases()
    pending = [
        case
        for case in everything
        if (case.kind.name, case.method.name, case.seed) not in done and arguments.only in case.name
    ]
    # So that an interrupted run has cases of all kinds.
    random.Random(0).shuffle(pending)
    print(f"{len(pending)} of {len(everything)} cases are left", flush=True)
    verdicts: Counter[str] = Counter()
    begin = time.monotonic()
    with (
        ProcessPoolExecutor(arguments.jobs, CONTEXT) as pool,
        RECORDS.open("a") as file,
    ):
        futures = [pool.submit(run, case) for case in pending]
        for number, future in enumerate(as_completed(futures), 1):
            outcome = future.result()
            file.write(json.dumps(asdict(outcome)) + "\n")
            file.flush()
            verdicts[outcome.verdict if outcome.is_good else "failed"] += 1
            if not outcome.is_good or number % 20 == 0 or number == len(pending):
                print(
                    f"{number}/{len(pending)} in {time.monotonic() - begin:.0f} s: "
                    f"{dict(verdicts)}; {outcome.fault} | {outcome.method}: {outcome.verdict}",
                    flush=True,
                )
    found = read_records(RECORDS)
    print(f"\n{table(found)}\n\n{totals(found)}")
    if len(found) == len(everything):
        found.sort(key=lambda record: (record["fault"], record["method"], record["seed"]))
        RECORDS.write_text("".join(json.dumps(record) + "\n" for record in found))
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
