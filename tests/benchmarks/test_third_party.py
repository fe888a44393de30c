"""Edits of other projects' scripts, and the page with their results."""

from pathlib import Path

import pytest

from benchmarks.third_party.__main__ import edited, recorded, table
from benchmarks.third_party.scripts import SCRIPTS, Edit

PAGE = Path(__file__).parents[2] / "docs" / "frameworks" / "third_party.md"
TEXT = """\
import torch
import torch.nn as nn
if True:
    optimizer = torch.optim.Adam(x)
    step()
"""


def test_lines_are_replaced_where_they_stand_and_how_they_are_indented() -> None:
    edits = [
        Edit("import torch", "import torch\nimport comm_hooks"),
        Edit("optimizer =", "optimizer = other()\nregister()"),
        Edit("step()", "more()", after=True),
    ]
    assert edited(TEXT, edits, "train.py").splitlines() == [
        "import torch",
        "import comm_hooks",
        "import torch.nn as nn",
        "if True:",
        "    optimizer = other()",
        "    register()",
        "    step()",
        "    more()",
    ]


@pytest.mark.parametrize(("at", "count"), [("import", 2), ("nothing", 0)])
def test_sources_of_another_version_are_refused(at: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"train.py has {count} lines that begin with '{at}'"):
        edited(TEXT, [Edit(at, "")], "train.py")


def test_two_lines_are_enough_for_fifty_times_fewer_bytes() -> None:
    outcomes, page = recorded(), PAGE.read_text()
    assert {o["script"] for o in outcomes} == {script.name for script in SCRIPTS}
    for outcome in outcomes:
        assert outcome["lines"] <= 2
        assert outcome["fewer"] >= (50 if outcome["ours"] else 1)
    assert table(outcomes) in page
    assert all(edit.new in page for script in SCRIPTS for edit in script.edits)
