"""Run a script as if nothing were around it, and say at the end what the rounds have sent.

torchrun ... measured.py SEED SCRIPT ARGUMENTS

What the script gives ``torch.manual_seed`` is moved by the seed, so that scripts that write theirs
down can be repeated with others.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from comm_hooks.optim import LocalRounds

MARK = "times fewer bytes:"


def main(seed: int, script: str) -> None:
    """Run the script, and print the rounds' counts on the first rank."""
    made: list[LocalRounds] = []
    initialize = LocalRounds.__init__
    seeded = torch.manual_seed

    def remember(rounds: LocalRounds, *args: Any, **kwargs: Any) -> None:
        made.append(rounds)
        initialize(rounds, *args, **kwargs)

    LocalRounds.__init__ = remember  # type: ignore[assignment, method-assign]
    torch.manual_seed = lambda number: seeded(int(number) + 1000 * seed)  # type: ignore[assignment]
    torch.manual_seed(0)
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
    for rounds in made:
        if os.environ["RANK"] == "0":  # the script may have left its group
            print(MARK, rounds.stats()["compression_ratio"], flush=True)


if __name__ == "__main__":
    del sys.argv[0]
    seed = int(sys.argv.pop(0))
    main(seed, sys.argv[0])
