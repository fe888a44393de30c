"""What executes the pages notices what fails, and leaves nothing behind."""

import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.docs import runner
from tests.docs.pages import Block, Page
from tests.docs.runner import missing_tools, run_code, run_commands
from tests.ranks import Ranks


def commands(text: str) -> Block:
    return Block("sh", "run", text, 1)


def code(*texts: str) -> list[Block]:
    return [Block("python", None, text, 10 * (i + 1)) for i, text in enumerate(texts)]


def running(argument: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if argument in (process.info["cmdline"] or ()):
            found.append(process)
    return found


@pytest.mark.parametrize("text", ["false\ntrue", "echo $ABSENT", "false | cat", "exit 3"])
def test_a_command_that_fails_is_noticed(tmp_path: Path, text: str) -> None:
    with pytest.raises(AssertionError, match="exit status"):
        run_commands(commands(text), tmp_path)


def test_all_that_a_command_started_is_ended_at_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_GRACE_SECONDS", 0.5)
    monkeypatch.setattr(runner, "_LAST_WORDS_SECONDS", 0)
    seconds = _unique_seconds()
    with pytest.raises(AssertionError, match="still running"):
        run_commands(
            commands(f"trap '' TERM; setsid sleep {seconds} & wait; wait"), tmp_path, timeout=1
        )
    assert not running(seconds)


@pytest.fixture
def rank(ranks_of: Callable[[int], Ranks]) -> Ranks:
    return ranks_of(1)


def test_code_that_fails_is_told_with_its_line_on_the_page(rank: Ranks, tmp_path: Path) -> None:
    blocks = code("x = 1", "y = 2\nassert x == y")
    outcome = rank.outcomes(run_code, blocks, "page.md", str(tmp_path))[0]
    assert isinstance(outcome.error, AssertionError)
    assert 'File "page.md", line 21' in outcome.trace


def test_a_second_hook_gets_a_new_model_and_an_only_one_does_not(
    rank: Ranks, tmp_path: Path
) -> None:
    start = "from comm_hooks import register\nfirst = ddp_model"
    registers = "register(ddp_model, 'topk')\n"
    only = code(start, registers + "assert ddp_model is first", "assert ddp_model is first")
    rank.run(run_code, only, "page.md", str(tmp_path))
    second = code(start, registers, registers + "assert ddp_model is not first")
    rank.run(run_code, second, "page.md", str(tmp_path))


def test_what_a_block_sets_up_is_used(rank: Ranks, tmp_path: Path) -> None:
    hook = "def hook(state, bucket):\n    raise OSError\nddp_model.register_comm_hook(None, hook)"
    optimizer = "class Broken:\n    def step(self):\n        raise OSError\noptimizer = Broken()"
    for text in (hook, optimizer):
        outcome = rank.outcomes(run_code, code(text), "page.md", str(tmp_path))[0]
        assert "OSError" in outcome.trace


def test_optional_tools_are_found_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "page.md"
    file.write_text(
        "```python\nfrom comm_hooks.frameworks.deepspeed import initialize\n"
        "import comm_hooks.absent\n```\n"
        '```sh title="run"\nmpirun -n 2 true\nabsent-command\n```\n'
    )
    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(runner.shutil, "which", lambda name, path: None)
    assert missing_tools(Page(file)) == ["deepspeed", "mpirun"]


def _unique_seconds() -> str:
    """Return an argument of ``sleep`` by which it is told from all others."""
    return f"{10_000 + uuid.uuid4().int % 10_000_000}.{time.time_ns() % 1000}"
