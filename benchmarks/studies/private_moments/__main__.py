"""The command, see ``--help``: its options, its tables and its plots."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
from matplotlib.axes import Axes
from rich.progress import Progress
from rich.table import Table

from benchmarks.lab.output import Interruption
from benchmarks.lab.plots import BLACK, COLOURS, new_figure, save, style
from benchmarks.lab.tables import make_table, tabulate
from benchmarks.studies import cli
from benchmarks.studies.private_moments.measure import (
    ALPHA,
    PAPERS_GAMMA,
    Moments,
    Quartiles,
    Row,
    Setup,
    Steps,
    effective_steps,
    quartiles,
    simulate,
    step_lengths,
    steps_by_floor,
)
from comm_hooks.launchers.output import make_console


def private_moments(
    coordinates: Annotated[int, cli.Option("With gradients of each strength.", 20_000, least=2)],
    strengths: Annotated[
        list[float],
        cli.Option(
            "Variances of the gradients, over that of the noise.",
            "0,0.00016,0.01,0.1,1",
            least=0,
            each=float,
        ),
    ],
    at: Annotated[
        list[int],
        cli.Option(
            "Steps after which to measure.", "10,100,1000,10000", "10,100", least=1, each=int
        ),
    ],
    sigma: Annotated[float, cli.Option("The noise multiplier.", 0.4, check=cli.positive)],
    max_grad_norm: Annotated[float, cli.Option("C.", 0.1, check=cli.positive)],
    batch: Annotated[float, cli.Option("B, the expected batch size.", 256.0, check=cli.positive)],
    beta2: Annotated[float, cli.Option("Decay of the second moment.", 0.999)],
    seed: Annotated[int, cli.Option("Of gradients and noise.", 0, least=0)],
) -> cli.Run:
    """Compare what noise does to Adam's moments with what theory says.

    sigma, C and B are those of the paper's experiment on SNLI, where gradients have a second moment
    of 0.00016 times the noise's in the mean. Writes private_moments.json and
    plots to --out. Exit codes: 0, 2 for bad input, 130 if interrupted (nothing is reported).
    """
    if not 0 <= beta2 < 1:
        raise ValueError(f"--beta2 must lie in [0, 1), got {beta2:g}")
    due = sorted(set(at))
    setup = Setup(coordinates, strengths, sigma, max_grad_norm, batch, beta2, seed)

    def run(place: cli.Place) -> None:
        console = make_console()
        bars = Progress(console=console, disable=not console.is_terminal)
        with Interruption() as interruption, bars as progress:
            bar = progress.add_task(place.name, total=due[-1])
            rows, moments = simulate(setup, due, lambda: progress.advance(bar))
        cli.end(place, interruption)
        lengths, spread = steps_by_floor(moments), quartiles(setup, moments)
        for table in make_tables(rows, lengths, spread, setup):
            console.print(table)
        record = {
            "settings": asdict(setup) | {"alpha": ALPHA, "noise_variance": setup.noise_variance},
            "moments": [asdict(row) for row in rows],
            "steps": [asdict(each) for each in lengths],
            "quartiles": [asdict(each) for each in spread],
        }
        cli.write_record(place, record, console, write_plots(rows, moments, setup, place.out))

    return run


def make_tables(
    rows: Sequence[Row], steps: Sequence[Steps], spread: Sequence[Quartiles], setup: Setup
) -> list[Table]:
    """Return the table of second moments, of the lengths of steps, and of quartiles."""
    columns: dict[str, Callable[[Row], str]] = {
        "step": lambda row: str(row.step),
        "clean/Phi": lambda row: f"{row.strength:g}",
        "v_hat": lambda row: f"{row.v_hat:.4f}",
        "bias": lambda row: f"{row.bias:+.4f}",
        "spread %": lambda row: f"{100 * row.spread:.3f}",
        "theory %": lambda row: f"{100 * row.theory:.3f}",
        "error": lambda row: f"{row.error:.4f}",
        "theory": lambda row: f"{row.error_theory:.4f}",
        "bound": lambda row: f"{row.bound:.4f}",
        f"{1 - ALPHA:.0%} within": lambda row: f"{row.quantile:.4f}",
        "beyond %": lambda row: f"{100 * row.beyond:.2f}",
        "floored %": lambda row: f"{100 * row.floored:.1f}",
    }
    title = (
        f"Second moments in units of Phi = {setup.noise_variance:.3e}; error: v_hat - Phi - clean"
    )
    lengths = [
        (
            "Adam without noise" if each.gamma is None else f"{each.gamma:g}",
            *(f"{length:.3f}" for length in each.lengths),
        )
        for each in steps
    ]
    return [
        tabulate(title, columns, rows, lambda row: row.step),
        make_table(
            "Root mean square of a step, in learning rates, by the strength of the gradients",
            ("gamma/Phi", *(f"{strength:g}" for strength in setup.strengths)),
            lengths,
        ),
        tabulate(
            f"Quartiles after step {rows[-1].step}, floor {PAPERS_GAMMA:.4f} Phi",
            {
                "clean/Phi": lambda each: f"{each.strength:g}",
                "method": lambda each: each.quantity,
                "mean": lambda each: f"{each.mean:.3e}",
                "25 %": lambda each: f"{each.lower:.3e}",
                "50 %": lambda each: f"{each.median:.3e}",
                "75 %": lambda each: f"{each.upper:.3e}",
            },
            spread,
            lambda each: each.strength,
        ),
    ]


def write_plots(rows: Sequence[Row], moments: Moments, setup: Setup, out: Path) -> list[Path]:
    """Write the histograms, and the spread against the steps; return their paths."""
    return [
        _histograms(moments, setup, out / "histograms.png"),
        _firsts(moments, setup, out / "first-moments.png"),
        _lengths(moments, setup, out / "steps.png"),
        _spread(rows, setup, out / "spread-vs-steps.png"),
    ]


def _histograms(moments: Moments, setup: Setup, path: Path) -> Path:
    """A panel per strength: v_hat, v_hat - Phi, and what it would be without noise."""
    figure, panels = new_figure(len(setup.strengths), width=3.2)
    for axes, strength, v, clean in zip(
        panels, setup.strengths, moments.v_hat, moments.clean_v, strict=True
    ):
        drawn = {"v_hat": v, "v_hat - Phi": v - 1, "without noise": clean}
        _draw_histogram(axes, drawn)
        axes.set_title(f"clean = {strength:g} Phi", fontsize="medium")
        axes.set_xlabel("second moment / Phi")
    panels[0].set_ylabel(f"coordinates of {setup.coordinates:,}")
    return save(figure, path)


def _firsts(moments: Moments, setup: Setup, path: Path) -> Path:
    """A panel per strength: m_hat with noise and without (Figure 1, left)."""
    figure, panels = new_figure(len(setup.strengths), width=3.2)
    for axes, strength, m, clean in zip(
        panels, setup.strengths, moments.m_hat, moments.clean_m, strict=True
    ):
        _draw_histogram(axes, {"m_hat": m, "without noise": clean})
        axes.set_title(f"clean = {strength:g} Phi", fontsize="medium")
        axes.set_xlabel("first moment / sqrt(Phi)")
    panels[0].set_ylabel(f"coordinates of {setup.coordinates:,}")
    return save(figure, path)


def _lengths(moments: Moments, setup: Setup, path: Path) -> Path:
    """A panel per strength: steps over the longest, with and without correction (Figure 4)."""
    figure, panels = new_figure(len(setup.strengths), width=3.2)
    lengths = step_lengths(moments)
    for index, (axes, strength) in enumerate(zip(panels, setup.strengths, strict=True)):
        own = {name: lengths[name][index] for name in ("DP-AdamBC", "DP-Adam")}
        _draw_histogram(axes, {name: step / step.abs().max() for name, step in own.items()})
        axes.set_title(f"clean = {strength:g} Phi", fontsize="medium")
        axes.set_xlabel("step / the longest")
    panels[0].set_ylabel(f"coordinates of {setup.coordinates:,}")
    return save(figure, path)


def _draw_histogram(axes: Axes, drawn: Mapping[str, torch.Tensor]) -> None:
    low = min(float(values.min()) for values in drawn.values())
    high = max(float(values.max()) for values in drawn.values())
    edges = torch.linspace(low, high + 1e-3 * (high - low), 121)
    for colour, (label, values) in zip(COLOURS, drawn.items(), strict=False):
        # Where there are no gradients, all values are the same.
        is_spread = float(values.std()) > (high - low) / 1000
        if is_spread:
            axes.hist(values.tolist(), edges.tolist(), color=colour, alpha=0.7, label=label)
        else:
            axes.axvline(float(values.mean()), color=colour, label=label)


def _spread(rows: Sequence[Row], setup: Setup, path: Path) -> Path:
    figure, (axes,) = new_figure(width=6)
    last = rows[-1].step
    grid = [round(math.exp(i / 40 * math.log(last))) for i in range(41)]
    theory = [100 * math.sqrt(2 / effective_steps(setup.beta2, t)) for t in grid]
    axes.plot(grid, theory, color=BLACK, label="sqrt(2 / n)")
    for index, strength in enumerate(setup.strengths):
        own = [row for row in rows if row.strength == strength]
        look = {**style(index), "linestyle": "none"}
        spread = [100 * row.spread for row in own]
        axes.plot([row.step for row in own], spread, "o", label=f"clean = {strength:g} Phi", **look)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("relative standard deviation of v_hat (%)")
    return save(figure, path)


app = cli.study(private_moments)

if __name__ == "__main__":
    app()
