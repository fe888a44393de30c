"""The command, see ``--help``: its options, its table and its plot."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.table import Table
from torch import nn

from benchmarks.lab.outcomes import Advance
from benchmarks.lab.plots import new_figure, save, style
from benchmarks.lab.tables import make_table
from benchmarks.lab.tasks import Task, build_task
from benchmarks.lab.training import batch_generator, known_warnings_ignored, new_model
from benchmarks.studies import cli
from benchmarks.studies.safl_spectrum.lanczos import Spectrum, hessian_product, spectrum
from comm_hooks.collectives import Simulated
from comm_hooks.compressors import CountSketch
from comm_hooks.exchange import Exchange
from comm_hooks.optim import SAFL

_BETAS = (0.9, 0.99)
_NEAR = 0.01
"""Eigenvalues that are called near zero: below this fraction of the largest."""


@dataclass(frozen=True)
class Row:
    """What the Hessian is like after some rounds."""

    round: int
    loss: float
    error: float
    largest: float
    smallest: float
    absolute_sum: float
    standard_error: float
    intrinsic_dimension: float
    near_zero: float


def safl_spectrum(
    task: cli.TaskName,
    data_dir: cli.DataDir,
    task_option: cli.TaskOptions,
    rounds: Annotated[int, cli.Option("Rounds of training.", 300, 20, least=1)],
    at: Annotated[
        list[int],
        cli.Option("Rounds after which to measure.", "0,30,100,300", "0,20", least=0, each=int),
    ],
    batch: Annotated[int, cli.Option("Samples per round.", 80, least=1)],
    ratio: Annotated[float, cli.Option("Of the Count-Sketch.", 0.01, check=cli.fraction)],
    lr: Annotated[float, cli.Option("Of the server.", 0.004, check=cli.positive)],
    samples: Annotated[
        int, cli.Option("Training samples whose loss has the Hessian.", 512, 64, least=1)
    ],
    steps: Annotated[int, cli.Option("Of Lanczos's iteration.", 80, 15, least=2)],
    probes: Annotated[int, cli.Option("Random vectors.", 4, 2, least=2)],
    seed: Annotated[int, cli.Option("Of weights, batches and vectors.", 0, least=0)],
    quick: cli.Quick,
) -> cli.Measurement:
    """Measure the Hessian's spectrum of a network while SAFL trains it.

    Writes safl_spectrum.json and a plot to --out. Exit codes: 0, 2 for bad input, 130 if
    interrupted (what is finished is reported).
    """
    due = sorted(set(at))
    if due[-1] > rounds:
        raise ValueError(f"--at: there are only {rounds} rounds, got {due[-1]}")
    options = dict(task_option)
    if task == "digits":
        options.setdefault("model", "mlp" if quick else "resnet")
    built = build_task(task, clients=1, seed=seed, data_dir=data_dir, **options)
    model = new_model(built, seed, "cpu")
    numel = sum(p.numel() for p in model.parameters())

    found: list[Spectrum] = []

    def rows(advance: Advance) -> Iterator[Row]:
        train = _training(built, model, batch=batch, ratio=ratio, lr=lr, seed=seed)
        for round_ in range(rounds + 1):
            if round_ in due:
                product = _product(built, model, samples)
                found.append(spectrum(product, numel, steps=steps, probes=probes, seed=seed))
                yield _row(round_, built, model, found[-1])
            if round_ < rounds:
                train()
                advance()

    return cli.Measurement(
        rounds,
        rows,
        lambda rows: [make_rows_table(rows, numel)],
        lambda rows: {"rows": [asdict(row) for row in rows]},
        lambda rows, out: [write_plot(rows, found, out)],
        {"task_options": options, "betas": _BETAS, "parameters": numel},
    )


def _training(
    task: Task, model: nn.Module, *, batch: int, ratio: float, lr: float, seed: int
) -> Callable[[], None]:
    """Return what takes one round of SAFL with one client: sketches are linear."""
    exchange = Exchange(
        CountSketch(ratio),
        transport=Simulated(1)[0],
        granularity="bucket",
        min_numel=1,
        min_ndim=1,
        seed=seed,
    )
    safl = SAFL(
        model.named_parameters(), exchange, lr=lr, local_lr=0.1, local_steps=1, betas=_BETAS
    )
    batches = task.clients[0].batches(batch, batch_generator(seed, 0))

    def train() -> None:
        with known_warnings_ignored():
            task.loss(model, next(batches)).backward()
            safl.step()
            safl.zero_grad()

    return train


def _product(task: Task, model: nn.Module, samples: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what multiplies with the Hessian of the loss on the first training samples."""
    fixed = next(itertools.islice(task.clients[0].in_order(samples), 1))
    model.eval()
    return hessian_product(lambda: task.loss(model, fixed), list(model.parameters()))


def _row(round_: int, task: Task, model: nn.Module, found: Spectrum) -> Row:
    judged = task.evaluate(model)
    model.train()
    return Row(
        round_,
        judged["loss"],
        judged["error"],
        found.largest,
        found.smallest,
        found.absolute_sum,
        found.standard_error,
        found.intrinsic_dimension,
        found.share_within(_NEAR),
    )


def make_rows_table(rows: Sequence[Row], numel: int) -> Table:
    """Return the table."""
    cells = [
        (
            str(row.round),
            f"{row.loss:.3f}",
            f"{row.largest:.3g}",
            f"{row.smallest:.3g}",
            f"{row.absolute_sum:.4g} ± {row.standard_error:.2g}",
            f"{row.intrinsic_dimension:.1f}",
            f"{100 * row.near_zero:.2f}",
        )
        for row in rows
    ]
    near = f"% within {_NEAR:g}"
    columns = ("round", "loss", "largest", "smallest", "sum", "intrinsic dimension", near)
    return make_table(f"The Hessian's eigenvalues, {numel:,} parameters", columns, cells)


def write_plot(rows: Sequence[Row], found: Sequence[Spectrum], out: Path) -> Path:
    """Write how many eigenvalues are larger than x, for each round; return the path."""
    figure, (axes,) = new_figure(width=6)
    for index, (row, each) in enumerate(zip(rows, found, strict=True)):
        nodes, order = each.nodes.abs().flatten().sort(descending=True)
        weights = each.weights.flatten()[order] / len(each.nodes)
        look: dict[str, Any] = style(index)
        axes.plot(
            nodes.tolist(),
            (each.numel * weights.cumsum(0)).tolist(),
            label=f"round {row.round}",
            **look,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("absolute value of an eigenvalue")
    axes.set_ylabel("eigenvalues that are larger")
    return save(figure, out / "spectrum.png")


app = cli.study(safl_spectrum)

if __name__ == "__main__":
    app()
