"""The command, see ``--help``: its options, its tables and its plots."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
from matplotlib.axes import Axes
from rich.table import Table

from benchmarks.lab.outcomes import Advance
from benchmarks.lab.plots import COLOURS, new_figure, save
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
    quartiles,
    simulate,
    step_lengths,
    steps_by_floor,
)

_CORRECTED = ("DP-AdamBC", "DP-Adam")


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
) -> cli.Measurement:
    """Compare what noise does to Adam's moments with what theory says.

    sigma, C and B are those of the paper's experiment on SNLI, where gradients have a second moment
    of 0.00016 times the noise's in the mean. Writes private_moments.json and
    plots to --out. Exit codes: 0, 2 for bad input, 130 if interrupted (nothing is reported).
    """
    if not 0 <= beta2 < 1:
        raise ValueError(f"--beta2 must lie in [0, 1), got {beta2:g}")
    due = sorted(set(at))
    setup = Setup(coordinates, strengths, sigma, max_grad_norm, batch, beta2, seed)

    found: list[tuple[Sequence[Row], Moments]] = []

    def rows(advance: Advance) -> Iterator[Row]:
        measured, moments = simulate(setup, due, advance)
        found.append((measured, moments))
        yield from measured

    def record(rows: list[Row]) -> dict[str, Any]:
        moments = found[0][1]
        return {
            "settings": asdict(setup) | {"alpha": ALPHA, "noise_variance": setup.noise_variance},
            "moments": [asdict(row) for row in rows],
            "steps": [asdict(each) for each in steps_by_floor(moments)],
            "quartiles": [asdict(each) for each in quartiles(setup, moments)],
        }

    def tables(rows: list[Row]) -> list[Table]:
        moments = found[0][1]
        return make_tables(rows, steps_by_floor(moments), quartiles(setup, moments), setup)

    return cli.Measurement(
        due[-1], rows, tables, record, lambda rows, out: write_plots(found[0][1], setup, out)
    )


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


def write_plots(moments: Moments, setup: Setup, out: Path) -> list[Path]:
    """Write histograms with a panel per strength of the gradients; return their paths."""
    lengths = step_lengths(moments)
    drawn: dict[str, tuple[str, list[dict[str, torch.Tensor]]]] = {
        "histograms": (
            "second moment / Phi",
            [
                {"v_hat": v, "v_hat - Phi": v - 1, "without noise": clean}
                for v, clean in zip(moments.v_hat, moments.clean_v, strict=True)
            ],
        ),
        "first-moments": (
            "first moment / sqrt(Phi)",
            [
                {"m_hat": m, "without noise": clean}
                for m, clean in zip(moments.m_hat, moments.clean_m, strict=True)
            ],
        ),
        "steps": (
            "step / the longest",
            [
                {name: (step := lengths[name][i]) / step.abs().max() for name in _CORRECTED}
                for i in range(len(setup.strengths))
            ],
        ),
    }
    paths = []
    for name, (label, values) in drawn.items():
        figure, panels = new_figure(len(setup.strengths), width=3.2)
        for axes, strength, own in zip(panels, setup.strengths, values, strict=True):
            _draw_histogram(axes, own)
            axes.set_title(f"clean = {strength:g} Phi", fontsize="medium")
            axes.set_xlabel(label)
        panels[0].set_ylabel(f"coordinates of {setup.coordinates:,}")
        paths.append(save(figure, out / f"{name}.png"))
    return paths


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


app = cli.study(private_moments)

if __name__ == "__main__":
    app()
