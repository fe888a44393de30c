"""The page of the third-party scripts: what they ended at, and the edited lines."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.third_party.running import Outcome
from benchmarks.third_party.scripts import SCRIPTS, Script

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks" / "third_party.md"

_TOP = """\
# Other people's scripts

Eight training scripts of five repositories, as they are and with at most three edited lines, which
put `low_communication` in the place of their optimizer. `make third-party SOURCES=FOLDER` runs them
on clones in that folder and writes this page.

Two processes (four with FSDP2) on one machine, joined by gloo. In both variants CPUs took the place
of GPUs; the source of Python's standard library, Fashion-MNIST and small models with random weights
took that of data sets and weights from hubs; and sizes, batches and numbers of steps are such that
two cores train them. `port` and `arguments` in `benchmarks/third_party/scripts.py` are all of these
changes. Losses are held out: the mean over the seeds that both variants have, and their range.

"""


def page_of(outcomes: Sequence[Outcome]) -> str:
    """Return the page, in Markdown."""
    parts = [_TOP + _table(outcomes)]
    parts += [_edits(script) for script in SCRIPTS]
    return "\n".join(parts)


def _table(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "| script | framework | lines | times fewer bytes | seeds | unchanged loss | edited loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for script in SCRIPTS:
        plain, ours = (
            {o.seed: o for o in outcomes if o.script == script.name and o.ours == is_edited}
            for is_edited in (False, True)
        )
        if seeds := sorted(plain.keys() & ours.keys()):
            edited = [ours[seed] for seed in seeds]
            fewer = f"{statistics.mean(o.fewer for o in edited):.0f}"
            unchanged = _losses(plain[seed] for seed in seeds)
            cells = [f"{edited[0].lines}", fewer, f"{len(seeds)}", unchanged, _losses(edited)]
            lines.append(f"| {script.name} | {script.framework} | {' | '.join(cells)} |")
    commits = sorted({(_repository(o.script), o.commit) for o in outcomes})
    versions = sorted({o.torch for o in outcomes})
    clones = ", ".join(f"{name} at `{commit}`" for name, commit in commits)
    lines += ["", f"PyTorch {', '.join(versions)}; {clones}."]
    return "\n".join(lines) + "\n"


def _repository(name: str) -> str:
    return next((script.repository for script in SCRIPTS if script.name == name), name)


def _losses(outcomes: Iterable[Outcome]) -> str:
    losses = [o.loss for o in outcomes]
    spread = f" ({min(losses):.3f} to {max(losses):.3f})" if len(losses) > 1 else ""
    return f"{statistics.mean(losses):.3f}{spread}"


def _edits(script: Script) -> str:
    lines = [
        f"## {script.name}",
        "",
        f"`{script.path}` of {script.repository}. {script.note}".strip(),
    ]
    for edit in script.edits:
        where = f" of `{edit.file}`" if edit.file else ""
        what = "After" if edit.after else "In place of"
        lines += ["", f"{what} `{edit.at}`{where}:", "", "```text", edit.new, "```"]
    return "\n".join(lines) + "\n"
