"""What methods cost in loss, over several seeds, as a Markdown table.

    python benchmarks/losses.py                      # 8 methods x 3 seeds, about 20 minutes
    python benchmarks/losses.py --steps 450 --hooks all_reduce,none,local_adamw:fragments=8

Runs ``comm-hooks compare`` once per seed and puts its records side by side: losses are compared
with all-reduce of the same seed, which has the same weights and batches.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HOOKS = (
    "all_reduce,none,local_adamw,local_adamw:fragments=8,"
    "topk:density=0.0222+local_adamw:local_steps=30:outer_lr=2,"
    "local_variance_adam,sign+local_variance_adam,count_sketch:ratio=0.017+safl"
)


def run(seed: int, hooks: str, steps: int, out: Path) -> dict[str, dict[str, Any]]:
    """Return the final figures of each method."""
    folder = out / f"seed{seed}"
    subprocess.run(
        [
            *(sys.executable, "-m", "comm_hooks.launchers.main", "compare"),
            *("--hooks", hooks, "--steps", str(steps), "--seed", str(seed), "--out", str(folder)),
        ],
        check=True,
        stdout=sys.stderr,
    )
    lines = (folder / "runs.jsonl").read_text().splitlines()
    return {record["method"]: record["figures"] for record in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Losses of methods over several seeds.")
    parser.add_argument("--hooks", default=HOOKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("comm-hooks-report"))
    arguments = parser.parse_args()
    runs = [run(seed, arguments.hooks, arguments.steps, arguments.out) for seed in arguments.seeds]
    seeds = ", ".join(map(str, arguments.seeds))
    print(f"\n{arguments.steps} steps, seeds {seeds}; loss on all data, minus that of all-reduce\n")
    print(
        "| method | loss, mean | each seed | minus all-reduce, mean | each seed "
        "| sent per step, whole run | after warm-up |"
    )
    print("|---|---|---|---|---|---|---|")
    for method in runs[0]:
        losses = [figures[method]["loss"] for figures in runs]
        gaps = [figures[method]["loss"] - figures["all_reduce"]["loss"] for figures in runs]
        print(
            f"| {method} | {statistics.mean(losses):.3f} "
            f"| {', '.join(f'{loss:.3f}' for loss in losses)} | {statistics.mean(gaps):+.3f} "
            f"| {', '.join(f'{gap:+.3f}' for gap in gaps)} "
            f"| {runs[0][method]['bytes_sent'] / arguments.steps / 1e3:,.1f} kB "
            f"| {runs[0][method]['sent_per_step'] / 1e3:,.1f} kB |"
        )


if __name__ == "__main__":
    main()
