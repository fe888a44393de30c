"""Verdicts on the papers' statements, by one rule; ``python -m benchmarks.studies.verdicts``."""

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from benchmarks.studies.claims import CLAIMS, Claim, Entry

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
PAGE, TABLE = ROOT / "docs/papers.md", RESULTS / "verdicts.md"
FEWEST_SEEDS = 5
CONFIDENCE = 0.95

SEEN, NOT_SEEN, REVERSED, OPEN = "seen", "not seen", "reversed", "open"

_HEAD = f"""\
# Verdicts on the papers' statements

Each statement is that one method ends below another. A verdict other than {OPEN} compares the
settings with the best mean over all seeds, beside which smaller and larger learning rates had runs
with all seeds, too: chosen on validation data where the task has them, in the toy regression by the
training loss that is reported. The difference is that of runs with the same seed, worse minus
better, with its {CONFIDENCE:.0%} interval (Student's t) over at least {FEWEST_SEEDS} seeds:

* **{SEEN}**: the interval lies above zero;
* **{REVERSED}**: it lies below zero;
* **{NOT_SEEN}**: it holds zero;
* **{OPEN}**: fewer seeds, a run that diverged, rates that were tuned on one run, more tries for the
  method that ends below, or other numbers of tries where nothing is seen.

Differences are in points of held-out error, or in loss; of a hundred verdicts a few are chance.
`python -m benchmarks.studies.verdicts` makes this table and the verdicts of `docs/papers.md` from
the records.

| paper, item | better, worse | record | seeds | difference | verdict |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Verdict:
    """What the records say of a claim.

    Args:
        claim: the claim.
        word: the verdict.
        seeds: of both methods.
        mean: of the differences, worse minus better; NaN where a run diverged.
        half: half the width of the confidence interval of the mean.
        reasons: why it is open.
    """

    claim: Claim
    word: str
    seeds: int
    mean: float
    half: float
    reasons: Sequence[str] = ()


def judge(
    claim: Claim,
    better: Sequence[float],
    worse: Sequence[float],
    tuned_on: int,
    tries: tuple[int, int],
) -> Verdict:
    """Return the verdict on a claim.

    Args:
        claim: the claim.
        better, worse: the values of both methods, by seed.
        tuned_on: the number of seeds over which the settings of both were chosen.
        tries: of their settings; 0 where a record does not have them.

    Example::

        >>> claim, better, worse = CLAIMS[0], [1.0, 1.1, 0.9, 1.0, 1.0], [2.0, 2.2, 1.9, 2.1, 2.0]
        >>> judge(claim, better, worse, tuned_on=5, tries=(6, 6)).word
        'seen'
        >>> judge(claim, better, worse, tuned_on=5, tries=(12, 6)).reasons
        ['12 tries against 6']
    """
    gaps = [w - b for b, w in zip(better, worse, strict=False)]  # seeds begin at 0 in both
    seeds, mean = len(gaps), statistics.mean(gaps or [math.nan])
    half = math.inf
    if seeds > 1 and math.isfinite(mean):
        quantile = student.ppf((1 + CONFIDENCE) / 2, seeds - 1)
        half = float(quantile) * statistics.stdev(gaps) / math.sqrt(seeds)
    word = SEEN if mean > half else REVERSED if mean < -half else NOT_SEEN
    below, above = tries if mean > 0 else tries[::-1]
    # Where nothing is seen, more tries for the one that ends above could have shown something.
    is_unequal = below > above or (word == NOT_SEEN and below < above)
    reasons = [
        *[f"{seeds} seeds"] * (seeds < FEWEST_SEEDS),
        *["rates tuned on one run"] * (tuned_on < 2),
        *["tries not recorded"] * (not all(tries)),
        *[f"{below} tries against {above}"] * (all(tries) and is_unequal),
        *["a run diverged"] * (seeds > 0 and not math.isfinite(mean)),
    ]
    return Verdict(claim, OPEN if reasons else word, seeds, mean, half, reasons)


class Records:
    """The published records of studies, each read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            (file,) = (self._folder / name).glob("*.json")
            self._known[name] = json.loads(file.read_text())
        return self._known[name]

    def verdict(self, claim: Claim) -> Verdict:
        """Return the verdict on a claim.

        Raises:
            ValueError: if a record does not have exactly one such method.
        """
        better, tuned = self._find(claim, claim.better)
        worse, worse_tuned = self._find(claim, claim.worse)
        values = _values(better, claim.measure), _values(worse, claim.measure)
        tries = len(better.get("tries", [])), len(worse.get("tries", []))
        return judge(claim, *values, min(tuned, worse_tuned), tries)

    def _find(self, claim: Claim, entry: Entry) -> tuple[Mapping[str, Any], int]:
        folder = entry.folder or claim.folder
        record = self[folder]
        methods = [
            method
            for method in record["methods"]
            if method["name"] == entry.name and entry.labels.items() <= method["labels"].items()
        ]
        if len(methods) != 1:
            raise ValueError(f"{folder}: {len(methods)} methods are {entry.name}, {entry.labels}")
        return methods[0], record.get("tuned_on", 1)


def _values(method: Mapping[str, Any], measure: str) -> list[float]:
    """Return a method's values by seed: errors in points, infinite where a run diverged."""
    scale = 100 if measure == "errors" else 1
    values = method.get(measure, [])
    return [
        math.inf if loss is None else scale * value
        for loss, value in zip(method["losses"], values, strict=bool(values))
    ]


def find_verdicts(folder: Path = RESULTS) -> list[Verdict]:
    """Return the verdicts on all claims."""
    records = Records(folder)
    return [records.verdict(claim) for claim in CLAIMS]


def make_table(verdicts: Sequence[Verdict]) -> str:
    """Return the page with a row for each verdict."""
    return _HEAD + "\n".join(map(_row, verdicts)) + "\n"


def _row(verdict: Verdict) -> str:
    claim = verdict.claim
    labels = ", ".join(f"{key} {value}" for key, value in claim.better.labels.items())
    mean, half = round(verdict.mean, 6) + 0.0, round(verdict.half, 6)
    gap = f"{mean:+.3g} ± {half:.2g}" if math.isfinite(half) else "-"
    reason = f" ({', '.join(verdict.reasons)})" if verdict.reasons else ""
    return (
        f"| {claim.paper}, {claim.item} | {_title(claim.better)}; {_title(claim.worse)} | "
        f"`{claim.folder}`, {labels} | {verdict.seeds} | {gap} | {verdict.word}{reason} |"
    )


def _title(entry: Entry) -> str:
    return entry.title or entry.name


def with_verdicts(page: str, verdicts: Sequence[Verdict]) -> str:
    """Return the page of the papers with the verdicts in the third cell of their rows.

    Raises:
        ValueError: if the page has no row, or more than one, for an item.
    """
    by_item: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        by_item.setdefault((verdict.claim.paper, verdict.claim.item), []).append(verdict)
    head, *sections = re.split(r"(?=\n## )", page)
    for (paper, item), own in by_item.items():
        index = next(i for i, text in enumerate(sections) if text.startswith(f"\n## {paper} "))
        row = re.compile(rf"^(\| {re.escape(item)} \| [^|]* \| [^|;]*)[^|]* \|", re.MULTILINE)
        found = list(row.finditer(sections[index]))
        if len(found) != 1:
            raise ValueError(f"{len(found)} rows of {paper!r} are {item!r}")
        cells = f"{found[0][1].rstrip()}; {summary(own)} |"
        begin, end = found[0].span()
        sections[index] = sections[index][:begin] + cells + sections[index][end:]
    return "".join([head, *sections])


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts on an item in words."""
    words = dict.fromkeys(verdict.word for verdict in verdicts)
    if len(words) == 1:
        (word,) = words
        reasons = dict.fromkeys(verdict.reasons[0] for verdict in verdicts if verdict.reasons)
        return f"**{word}**" + (f" ({', '.join(reasons)})" if reasons else "")
    return "; ".join(f"**{word}**: {_pairs(verdicts, word)}" for word in words)


def _pairs(verdicts: Sequence[Verdict], word: str) -> str:
    by_better: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.word == word:
            claim = verdict.claim
            label, value = next(iter(claim.better.labels.items()), ("", ""))
            place = f" ({label})" if value == "yes" else f" at {label} {value}" if label else ""
            by_better.setdefault(_title(claim.better) + place, []).append(_title(claim.worse))
    return "; ".join(f"{name} before {', '.join(others)}" for name, others in by_better.items())


def main() -> None:
    """Write the table, and the verdicts into the page of the papers."""
    verdicts = find_verdicts()
    TABLE.write_text(make_table(verdicts))
    PAGE.write_text(with_verdicts(PAGE.read_text(), verdicts))
    for word in dict.fromkeys(verdict.word for verdict in verdicts):
        print(f"{word}: {sum(verdict.word == word for verdict in verdicts)}")


if __name__ == "__main__":
    main()
