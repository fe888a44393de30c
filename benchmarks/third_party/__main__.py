"""Train with the scripts of other projects, as they are and with a few edited lines.

    python -m benchmarks.third_party --sources FOLDER      # two hours on 2 cores

FOLDER has clones of karpathy/nanoGPT, pytorch/examples, huggingface/accelerate,
Lightning-AI/pytorch-lightning and microsoft/DeepSpeedExamples, under these names.  The scripts need
the packages of ``benchmarks/third_party/requirements.txt``.  Runs that are recorded in
``benchmarks/results/third_party`` are not repeated; the page is made of all of them.
"""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.third_party.page import PAGE, page_of
from benchmarks.third_party.running import loaded, record_of, run, saved
from benchmarks.third_party.scripts import SCRIPTS

RECORDS = Path(__file__).resolve().parents[1] / "results" / "third_party"


def main(
    sources: Annotated[
        Path, typer.Option(help="The folder of the clones.", exists=True, file_okay=False)
    ],
    only: Annotated[str, typer.Option(help="Part of a script's name.")] = "",
    seeds: Annotated[int, typer.Option(help="Per script and variant.", min=1)] = 3,
    work: Annotated[Path | None, typer.Option(help="For the copies; else a new folder.")] = None,
) -> None:
    """Run what is missing and write the page."""
    sources = sources.resolve()
    work = (work or Path(tempfile.mkdtemp(prefix="third-party-"))).resolve()
    failures: list[str] = []
    for script in SCRIPTS:
        for seed in range(seeds):
            for ours in (False, True):
                path = record_of(RECORDS, script, ours=ours, seed=seed)
                if only not in script.name or path.exists():
                    continue
                try:
                    outcome = run(script, ours=ours, seed=seed, sources=sources, work=work)
                except RuntimeError as error:
                    failures.append(str(error))
                    print(error, file=sys.stderr, flush=True)
                    continue
                saved(outcome, path)
                print(
                    f"{script.name}, {'edited' if ours else 'unchanged'}, seed {seed}: loss "
                    f"{outcome.loss:.3f}, {outcome.fewer:.0f} times fewer bytes, "
                    f"{outcome.seconds:.0f} s",
                    flush=True,
                )
    PAGE.write_text(page_of([loaded(path) for path in sorted(RECORDS.glob("*.json"))]))
    if failures:
        raise typer.Exit(1)


typer.run(main)
