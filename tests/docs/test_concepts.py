"""The page of concepts leads to the code."""

import re

from tests.docs.pages import ROOT, Page

_QUESTIONS = 10
_MOST_DOORS = 2


def test_every_question_is_answered_behind_two_doors_at_most() -> None:
    rows = [row for row in Page(ROOT / "docs/concepts.md").table_rows() if row[0].endswith("?")]
    assert len(rows) == _QUESTIONS
    for question, answer in rows:
        doors = re.findall(r"`([^`]+)`", answer)
        assert 1 <= len(doors) <= _MOST_DOORS, question
        assert all((ROOT / door).exists() for door in doors), answer
