"""The code of the pages works: every file, command and line of Python in them is executed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import Page, pages
from tests.docs.runner import missing_tools, run_code, run_commands
from tests.ranks import Ranks
from tests.torchrun import Torchrun

PAGES = pages()

# The commands of the first page run for every change.  Those of the others run before a release:
# the tests of frameworks, checkpoints and rounds cover them.  (``make release-check`` starts ranks
# as users start them; here they are forked.)
FIRST = "docs/index.md"
# The code of these pages trains for longer than five seconds.
SLOW_CODE = ("docs/audit.md", "docs/private.md")


def cases(has: Callable[[Page], bool], is_slow: Callable[[Page], bool]) -> list[object]:
    return [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if is_slow(page) else [])
        for page in PAGES
        if has(page)
    ]


def has_code(page: Page) -> bool:
    return any(block.is_code for block in page.blocks)


def has_commands(page: Page) -> bool:
    return any(block.is_run for block in page.blocks)


@pytest.mark.parametrize("page", cases(has_code, lambda page: page.name in SLOW_CODE))
@pytest.mark.timeout(600)
def test_code(page: Page, ranks_of: Callable[[int], Ranks], tmp_path: Path) -> None:
    _skip_if_missing(page)
    blocks = [block for block in page.blocks if block.is_code]
    ranks_of(1).run(run_code, blocks, page.name, str(tmp_path))


@pytest.mark.parametrize("page", cases(has_commands, lambda page: page.name != FIRST))
@pytest.mark.timeout(900)
def test_files_and_commands(page: Page, torchrun: Torchrun, tmp_path: Path) -> None:
    _skip_if_missing(page)
    for block in page.blocks:
        if block.is_file:
            assert block.title
            file = tmp_path / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
        elif block.is_run:
            run_commands(block, tmp_path, tools=torchrun.command.parent)


def test_the_pages_that_users_look_for_have_examples() -> None:
    with_code = {page.name for page in PAGES if has_code(page)}
    assert {"README.md", "docs/checkpoints.md", "docs/federated.md", *SLOW_CODE} <= with_code
    assert FIRST in {page.name for page in PAGES if has_commands(page)}


def _skip_if_missing(page: Page) -> None:
    missing = missing_tools(page)
    if missing:
        pytest.skip(f"{page.name} needs {', '.join(missing)}")
