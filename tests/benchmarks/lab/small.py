"""The smallest version of each task that still learns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.lab.published import write_fashion_mnist


def write_text(folder: Path) -> None:
    (folder / "rhyme.txt").write_text("".join(f"{i} bottles on the wall, " for i in range(400)))


# The smallest of each kind that still learns: (what to write, options, steps, final error).
SMALL: dict[str, tuple[Callable[[Path], Any] | None, dict[str, Any], int, float]] = {
    "digits": (None, {"model": "mlp"}, 100, 0.15),
    "fashion_mnist": (write_fashion_mnist, {"model": "resnet", "width": 16}, 40, 0.15),
    "autoencoder": (write_fashion_mnist, {"widths": "32,8"}, 60, 0.6),
    "gpt_text": (write_text, {"layers": 1, "width": 32, "heads": 2, "context": 32}, 100, 0.5),
    "verses": (None, {}, 60, 0.5),
}
