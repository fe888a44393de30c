"""The page: one HTML file that needs no other and no network."""

import re
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from benchmarks.lab.runs import Run, Settings
from benchmarks.report.charts import MAX_POINTS, is_thinned, make_charts, make_series
from benchmarks.report.conclusions import make_conclusions, make_warnings
from benchmarks.report.groups import conditions_of
from benchmarks.report.table import make_table

# Columns of text; all others hold numbers.
_TEXT = ("method", "note")


def write_page(runs: list[Run], path: Path) -> None:
    """Write the page.

    Args:
        runs: the records, at least one, failed ones included.
        path: the file, in a folder that exists.

    Raises:
        OSError: if the file cannot be written.
    """
    path.write_text(render_page(runs), encoding="utf-8")


def render_page(runs: list[Run]) -> str:
    """Return the page as HTML; the same records always make the same page."""
    environment = Environment(
        loader=PackageLoader("benchmarks.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    series = make_series(runs)
    environment.filters["breakable"] = _breakable
    return environment.get_template("page.html.j2").render(
        table=make_table(runs),
        text_columns=_TEXT,
        lead=_make_lead(runs),
        warnings=make_warnings(runs),
        conclusions=make_conclusions(runs),
        series=series,
        charts=make_charts(series),
        plotly=Markup(get_plotlyjs()),
        has_seeds=any(len(each.seeds) > 1 for each in series),
        max_points=MAX_POINTS if is_thinned(runs) else None,
        facts=_merge_facts(runs),
    )


def _breakable(name: str) -> Markup:
    """Return a name that may be broken where its parts meet: ``topk:density=0.1+adamw``."""
    # str: a Markup would escape what is put into it.
    return Markup(re.sub(r"([_:/+=])", r"\1<wbr>", str(escape(name))))


def _make_lead(runs: list[Run]) -> str:
    """Return the sentence below the title."""
    settings = [run.settings for run in runs if isinstance(run.settings, Settings)]
    if len(settings) == len(runs) and len(conditions_of(runs)) == 1:
        return (
            f"The same small GPT, trained on {settings[0].nproc} ranks for {settings[0].steps} "
            "steps, once per method and seed. Every rank sees only its own part of the text; the "
            f"loss is measured on all of it, on the same {settings[0].eval_windows} windows each "
            "time."
        )
    methods = len({run.method for run in runs})
    return (
        f"{len(runs)} run{'s' * (len(runs) > 1)} of {methods} method{'s' * (methods > 1)}: "
        "what each has reached, and what it has sent and taken to get there."
    )


def _merge_facts(runs: list[Run]) -> dict[str, list[str]]:
    """Return how the runs were made: by name, every answer once."""
    facts: dict[str, list[str]] = {}
    for run in runs:
        for name, fact in run.facts.items():
            if fact not in facts.setdefault(name, []):
                facts[name].append(fact)
    seeds = sorted({run.settings.seed for run in runs if run.settings.seed is not None})
    if seeds:
        facts["Seeds" if len(seeds) > 1 else "Seed"] = [", ".join(map(str, seeds))]
    failed = sum(run.failure is not None for run in runs)
    facts["Runs"] = [f"{len(runs) - failed} finished, {failed} failed"]
    return facts
