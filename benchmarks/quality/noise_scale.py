"""Where the gradient noise scale lies in the settings of the page, and how skewed their shards are.

While all-reduce trains with its best learning rate::

    python -m benchmarks.quality.noise_scale
"""

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from benchmarks.lab.runs import BASELINE, RunStore, Settings
from benchmarks.lab.tables import make_table
from benchmarks.lab.tasks import Task
from benchmarks.lab.training import batches_of, new_model
from benchmarks.quality.methods import METHODS
from benchmarks.quality.options import RESULTS, Batches, Ranks, Tasks, Tokens, parse_settings
from benchmarks.quality.runs import BETAS, CLIP_NORM, make_method, make_plan, make_tuning
from benchmarks.quality.settings import Setting, build
from comm_hooks.launchers.output import make_console, refusing

_BATCH = 8
"""Samples of the gradients that are compared."""
_OTHER_BATCHES = 1_000
"""A seed that no run has, so that gradients are not those that trained the model."""


@dataclass(frozen=True)
class Scale:
    """What gradients are like at one point of a training.

    Args:
        step: of so many.
        loss: on held-out data.
        noise_scale: tr(S) / |G|^2 in samples, S the covariance of a sample's gradient within a
            rank's data, G the gradient of all ranks' data: of a batch of so many samples half the
            squared length is noise (McCandlish et al., 2018, equation 2.9).  None if G is too small
            to be told from noise.
        skew: mean squared distance of a rank's gradient to G, over |G|^2: 0 where data is divided
            at random, 1 where what only this rank sees is as long as G.  None likewise.
    """

    step: int
    loss: float
    noise_scale: float | None
    skew: float | None


def estimate(gradients: Sequence[Tensor], batch: int) -> tuple[float, float, float]:
    """Return unbiased estimates of tr(S), of |G|^2 and of the ranks' variance around G.

    Args:
        gradients: of each rank, of (n, d): n batches of so many samples.
        batch: samples in each.

    Example::

        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> ranks = [1 + center + torch.randn(5_000, 4) / 8**0.5 for center in (-1.0, 1.0)]
        >>> [round(value, 1) for value in estimate(ranks, batch=8)]  # 4 elements of variance 1
        [4.0, 4.0, 8.0]
    """
    means = torch.stack([rank.mean(0) for rank in gradients])
    count = min(len(rank) for rank in gradients)
    variance = torch.stack([rank.var(0).sum() for rank in gradients]).mean()  # of a batch
    between = means.var(0).sum() - variance / count
    squared = means.mean(0).square().sum() - variance / count / len(gradients)
    return batch * float(variance), float(squared), float(between)


def scales(setting: Setting, lr: float, points: int, samples: int) -> Iterator[Scale]:
    """Train with all-reduce, and yield what gradients are like, so many times, evenly spread.

    Args:
        setting: what is trained.
        lr: the largest learning rate.
        points: how often.
        samples: of all ranks, that each estimate is made of.
    """
    task = build(setting.task, setting.ranks)
    model = new_model(task, 0, "cpu")
    plan = replace(make_plan(setting), points=points)
    decay = Settings.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=BETAS, weight_decay=decay)
    batches = batches_of(task, setting.batch, seed=0)
    for step in range(1, plan.rounds + 1):
        optimizer.param_groups[0]["lr"] = lr * plan.schedule((step - 1) / plan.rounds)
        optimizer.zero_grad()
        for own in batches:
            (task.loss(model, next(own)) / setting.ranks).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if plan.is_due(step):
            yield _measure(task, model, step, samples)


def _measure(task: Task, model: nn.Module, step: int, samples: int) -> Scale:
    count = samples // (_BATCH * len(task.clients))
    parameters = list(model.parameters())
    gradients = [
        torch.stack(
            [
                parameters_to_vector(torch.autograd.grad(task.loss(model, batch), parameters))
                for batch in itertools.islice(own, count)
            ]
        )
        for own in batches_of(task, _BATCH, seed=_OTHER_BATCHES)
    ]
    noise, squared, between = estimate(gradients, _BATCH)
    told = squared > noise / samples  # what G's estimate has of noise is shorter than G
    return Scale(
        step,
        task.evaluate(model)["loss"],
        noise_scale=noise / squared if told else None,
        skew=max(0.0, between) / squared if told else None,
    )


def best_rate(setting: Setting, runs: RunStore) -> float:
    """Return all-reduce's best learning rate.

    Raises:
        ValueError: if its runs are missing.
    """
    method = make_method(setting, BASELINE, METHODS[BASELINE])
    outcome = make_tuning(tries=3, seeds=1).outcome(method, runs)
    if outcome is None:
        raise ValueError(f"{setting}: all-reduce has no learning rate yet: run benchmarks.quality")
    return outcome.settings["lr"]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def noise_scale(
    tasks: Tasks = "python,c,prose,images",
    ranks: Ranks = "4",
    batches: Batches = "6",
    tokens: Tokens = "2",
    points: Annotated[int, typer.Option(min=1, help="Measurements, evenly spread.")] = 4,
    samples: Annotated[int, typer.Option(min=256, help="Of each measurement.")] = 4096,
    out: Annotated[Path, typer.Option(help="Where noise_scale.json is written.")] = RESULTS,
) -> None:
    """Measure the gradient noise scale while all-reduce trains: two minutes for each setting.

    Exit codes: 0, 2 for bad input or missing data.
    """
    with refusing("noise_scale"):
        settings = parse_settings(tasks, ranks, batches, tokens)
        runs = RunStore(RESULTS / "records.jsonl")
        rates = [best_rate(setting, runs) for setting in settings]
        for setting in settings:
            build(setting.task, setting.ranks)
    torch.set_num_threads(1)
    cells, rows = [], []
    for setting, lr in zip(settings, rates, strict=True):
        found = []
        for scale in scales(setting, lr, points, samples):
            print(f"{setting}: {scale}", file=sys.stderr, flush=True)
            found.append(scale)
            rows.append((str(setting), *_cells(scale, setting)))
        cells.append({**asdict(setting), "lr": lr, "points": [asdict(each) for each in found]})
    columns = ("setting", "step", "loss", "samples per step", "noise scale, samples", "skew")
    make_console().print(make_table("Gradient noise scale", columns, rows))
    out.mkdir(parents=True, exist_ok=True)
    record = {"samples": samples, "settings": cells}
    (out / "noise_scale.json").write_text(json.dumps(record, indent=1) + "\n")


def _cells(scale: Scale, setting: Setting) -> tuple[str, ...]:
    noise = "-" if scale.noise_scale is None else f"{scale.noise_scale:,.0f}"
    skew = "-" if scale.skew is None else f"{scale.skew:.2f}"
    per_step = setting.ranks * setting.batch
    return f"{scale.step} of {setting.steps}", f"{scale.loss:.3f}", str(per_step), noise, skew


if __name__ == "__main__":
    app()
