"""What the pages show works: every file, command and line of Python in them is executed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import Page, pages
from tests.docs.runner import missing_tools, run_code, run_commands
from tests.ranks import Ranks
from tests.torchrun import Torchrun

PAGES = pages()

# Whose commands are started as users start them; those of other pages are forked, which is faster.
FROM_NOTHING = ("docs/index.md",)

# That wait for nodes to find each other, or train for half a minute.
SLOW = (
    "docs/advise.md",
    "docs/audit.md",
    "docs/frameworks/accelerate.md",
    "docs/frameworks/deepspeed.md",
    "docs/frameworks/deepspeed_optimizers.md",
    "docs/frameworks/lightning.md",
    "docs/frameworks/mpi.md",
    "docs/launching.md",
    "docs/private.md",
)


class _World:
    """A process that is the only rank of its group, started when the first page needs it."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None

    def ranks(self) -> Ranks:
        if self._ranks is None or not self._ranks.usable:
            self._ranks = Ranks(1)
        return self._ranks

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()


@pytest.fixture(scope="module")
def world() -> Iterator[_World]:
    world = _World()
    yield world
    world.close()


def try_page(page: Page, world: _World, torchrun: Torchrun, folder: Path) -> None:
    """Execute all blocks of a page.

    Raises:
        AssertionError: if one of them fails.
        ValueError: if one of them does not say what it is.
    """
    code = [block for block in page.blocks if block.is_code]
    if code:
        (folder / "code").mkdir()
        world.ranks().run(run_code, code, page.name, str(folder / "code"))
    (folder / "files").mkdir()
    for block in page.blocks:
        if block.is_file:
            assert block.title
            file = folder / "files" / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
        elif block.is_run:
            tools = None if page.name in FROM_NOTHING else torchrun.command.parent
            run_commands(block, folder / "files", tools=tools)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW else [])
        for page in PAGES
    ],
)
@pytest.mark.timeout(900)
def test_page(page: Page, world: _World, torchrun: Torchrun, tmp_path: Path) -> None:
    missing = missing_tools(page)
    if missing:
        pytest.skip(f"{page.name} needs {', '.join(missing)}")
    try_page(page, world, torchrun, tmp_path)


def test_the_pages_that_users_look_for_have_examples() -> None:
    assert {*FROM_NOTHING, *SLOW} <= {page.name for page in PAGES}
    with_code = {page.name for page in PAGES if any(b.is_code or b.is_run for b in page.blocks)}
    assert {"README.md", "docs/index.md", "docs/checkpoints.md", "docs/federated.md"} <= with_code
