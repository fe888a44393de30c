"""What to make of the figures: the paragraphs below the table, in terminal and report."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.lab.clock import MOST_RANGE, MOST_STARVED
from benchmarks.lab.options import QUICK_STEPS
from benchmarks.lab.runs import BASELINE, Figures, LogSettings, Run, Settings
from benchmarks.report.groups import Group, conditions_of, group_runs
from benchmarks.report.logs import LAST_SHARE

NOISE = 0.03
"""Differences in loss below this say nothing: another seed makes as much."""

_GOOD = ("local_variance_adam", "local_adamw")
"""Optimizers that divide by the second moment before the exchange."""

_SLOW_LINK_BYTES_PER_SECOND = 100e6 / 8


def is_worse(figures: Figures, control: Figures | None) -> bool:
    """Tell whether a method lost against no communication at all, beyond noise."""
    return control is not None and figures.loss > control.loss + NOISE


def is_distorted(figures: Figures) -> bool:
    """Tell whether another load had a part in the milliseconds of a step."""
    is_uneven = (figures.step_range_ms or 0.0) > MOST_RANGE * figures.step_ms
    return is_uneven or (figures.starved or 0.0) > MOST_STARVED


def warn_of_few_steps(settings: Iterable[Settings | LogSettings]) -> list[str]:
    """Return a paragraph if some runs are too short to tell methods apart, else nothing."""
    few = [s for s in settings if isinstance(s, Settings) and s.steps < QUICK_STEPS]
    if not few:
        return []
    least = min(few, key=lambda s: s.steps)
    return [
        f"Too few steps: {least.steps}, of which the learning rate rises for {least.warmup}. "
        "Losses then say how a method begins, not which is better; one that exchanges every eighth "
        f"step has hardly done so. {QUICK_STEPS} steps give a first impression, {Settings.steps} a "
        "comparison."
    ]


def make_warnings(runs: list[Run]) -> list[str]:
    """Return what keeps runs from being compared with each other, one paragraph each."""
    letters = conditions_of(runs)
    warnings = warn_of_few_steps(run.settings for run in runs)
    if len(letters) > 1:
        settings = "; ".join(
            f"{letter}: {_describe(each, list(letters.values()))}"
            for letter, each in letters.items()
        )
        warnings.append(f"Mixed settings ({settings}): compare rows with the same letter only.")
    for name, figures in {"Machine": "times", "Versions": "losses and times"}.items():
        if len({run.facts[name] for run in runs if name in run.facts}) > 1:
            warnings.append(
                f"{name.removesuffix('s')}s differ, see the end of the report: mind this with "
                f"{figures}."
            )
    distorted = [g.name for g in group_runs(runs) if g.figures and is_distorted(g.figures)]
    if distorted:
        warnings.append(
            f"Milliseconds with a ~ are no figures ({', '.join(distorted)}): other programs, or "
            "more threads than there are cores, kept this machine busy meanwhile: a rank waited "
            f"for a core for more than {MOST_STARVED:.0%} of its time, or the middle half of its "
            f"steps differ by more than {MOST_RANGE:.0%}. Losses and bytes are not affected."
        )
    return warnings


def _describe(conditions: Mapping[str, Any], all_conditions: list[dict[str, Any]]) -> str:
    """Return what sets these conditions apart from the others."""
    if "log" in conditions:
        return "a training of your own"
    others = [each for each in all_conditions if "log" not in each]
    differing = [name for name in conditions if any(e[name] != conditions[name] for e in others)]
    return (
        ", ".join(f"{name} {conditions[name]}" for name in differing)
        or "python -m benchmarks.compare"
    )


def _explain_figures(runs: list[Run]) -> list[str]:
    paragraphs = []
    warmups = {run.settings.warmup for run in runs if isinstance(run.settings, Settings)}
    if warmups:
        steps = f"{warmups.pop()} warm-up steps" if len(warmups) == 1 else "steps of the warm-up"
        paragraphs += [
            "Loss is in nats per byte, on text of all ranks. Each rank trains on a part of its "
            "own, so what the others know reaches it over the wire or not at all; differences "
            f"under {NOISE} say nothing at one seed.",
            f"Bytes are those of one rank, per step after the {steps}; the total has these, too. "
            "Drift is the largest relative distance between replicas: exactly 0 wherever all "
            "ranks apply the same update.",
        ]
    if any(isinstance(run.settings, LogSettings) for run in runs):
        paragraphs.append(
            "The loss of a training of your own is the mean over the records of its last "
            f"{LAST_SHARE:.0%} of steps. Bytes are those of the rank that wrote the log; bytes and "
            "milliseconds per step are taken between its first and last record."
        )
    if any(len(group.runs) > 1 for group in group_runs(runs)):
        paragraphs.append(
            "A method with several seeds is shown as their mean, and below it each seed; it is "
            f"compared with {BASELINE} seed by seed."
        )
    return paragraphs


def make_conclusions(runs: list[Run]) -> list[str]:
    """Return what to make of the figures, one paragraph each."""
    groups = group_runs(runs)
    finished = {group.name: group.figures for group in groups if group.figures}
    paragraphs = _explain_figures(runs)
    moved = {name: figures.sent_per_step for name, figures in finished.items()}
    compressed = {name: count for name, count in moved.items() if count > 0}
    if len(compressed) > 1:
        most, least = (pick(compressed, key=lambda n: compressed[n]) for pick in (max, min))
        is_local = all(isinstance(run.settings, Settings) for run in runs)
        local = "The milliseconds are those of a machine where bytes cost next to nothing. "
        slow, fast = _link_ms(compressed[most]), _link_ms(compressed[least])
        paragraphs.append(
            f"{local if is_local else ''}On a link of 100 Mbit/s the bytes of one step alone take "
            f"{slow} ms for {most} and {fast} ms for {least}."
        )
    worse = [g for g in groups if g.figures and is_worse(g.figures, g.control)]
    if worse:
        paragraphs.append(_explain_worse(worse, bool(warn_of_few_steps(r.settings for r in runs))))
    return paragraphs


def _explain_worse(worse: Sequence[Group], is_short: bool) -> str:
    """Return what to make of methods that lost against no communication, which are not advice."""
    found = f"Worse than no communication at all: {', '.join(group.name for group in worse)}."
    if is_short:
        return f"{found} After so few steps that says nothing about them."
    good = [name for name in _GOOD if not any(name in group.method for group in worse)]
    remedy = f"; dividing before the exchange ({', '.join(good)}) avoids that" if good else ""
    return (
        f"{found} This is no bug but a warning about the pair of what is compressed and which "
        "optimizer uses it. Under Adam, for instance, error feedback turns a gradient into rare "
        f"pulses, to which the second moment answers with tiny steps{remedy}. A method may also "
        "need more steps than these to pay off."
    )


def _link_ms(count: float) -> str:
    milliseconds = 1e3 * count / _SLOW_LINK_BYTES_PER_SECOND
    return f"{milliseconds:,.0f}" if milliseconds >= 10 else f"{milliseconds:.1f}"
