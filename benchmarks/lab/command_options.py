"""Options that ``python -m benchmarks.compare`` and ``python -m benchmarks.bench`` share."""

from pathlib import Path
from typing import Annotated

import typer

Steps = Annotated[
    int | None,
    typer.Option(help="Training steps per method. [default: 150, quick: 60]"),
]
Hooks = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Methods, separated by commas: CROSSING[:option=value...][+OPTIMIZER], for example "
        "topk:density=1/64+local_variance_adam.",
    ),
]
Seed = Annotated[int, typer.Option(help="For weights, batches and compressors.")]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Text to train on: a file, or a directory of UTF-8 files. "
        "[default: the source of Python's standard library]",
    ),
]
