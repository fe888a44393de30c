"""A page whose blocks do not say what they are, or are never used, is refused."""

from pathlib import Path

import pytest

from tests.docs.pages import Page


def page_of(folder: Path, *blocks: tuple[str, str]) -> Page:
    """Return a page of fenced blocks, each with its first line's words and its text."""
    file = folder / "page.md"
    file.write_text("# Title\n\n" + "\n\n".join(f"```{i}\n{text}\n```" for i, text in blocks))
    return Page(file)


def test_blocks_are_what_they_say(tmp_path: Path) -> None:
    page = page_of(
        tmp_path,
        ('python title="folder/train.py"', "import helper"),
        ('python title="helper.py"', "open('settings.json')"),
        ('json title="settings.json"', "{}"),
        ('sh title="run"', "torchrun folder/train.py"),
        ("python", "x = 1"),
        ("text", "output"),
        ("", "tree"),
        ("{toctree}", "page"),
    )
    assert [block.title for block in page.blocks if block.is_file] == [
        "folder/train.py",
        "helper.py",
        "settings.json",
    ]
    assert [block.text for block in page.blocks if block.is_code] == ["x = 1\n"]
    assert [block.line for block in page.blocks][:2] == [4, 8]
    assert [block.text for block in page.blocks if block.is_run] == ["torchrun folder/train.py\n"]


@pytest.mark.parametrize(
    ("info", "complaint"),
    [
        ("python file=train.py", "is not a language with or without title"),
        ('python title="train.py" linenos', "is not a language with or without title"),
        ("python title=train.py", "is not a language with or without title"),
        ("py", "is not a language"),
        ("bash", "is not a language"),
        ("{code-block} python", "is not a language"),
        ('python title="run"', "is not the name of a python file"),
        ('json title="run"', "is not the name of a json file"),
        ('sh title="execute"', "is not the name of a sh file"),
        ('python title="../train.py"', "is not the name of a python file"),
        ('python title="/train.py"', "is not the name of a python file"),
        ('python title="train.json"', "is not the name of a python file"),
    ],
)
def test_an_unknown_kind_of_block_is_refused(tmp_path: Path, info: str, complaint: str) -> None:
    page = page_of(tmp_path, (info, "x"), ('sh title="run"', "python train.py"))
    with pytest.raises(ValueError, match=complaint):
        _ = page.blocks


@pytest.mark.parametrize(
    "command", ["python other_train.py", "python train.py.bak", "python trainer.py", "true"]
)
def test_a_file_that_nothing_uses_is_refused(tmp_path: Path, command: str) -> None:
    page = page_of(tmp_path, ('python title="train.py"', "x"), ('sh title="run"', command))
    with pytest.raises(ValueError, match=r"uses train.py \(line 4\)"):
        _ = page.blocks


def test_fences_in_lists_are_read(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("1. A step:\n\n   ```python\n   x = 1\n   ```\n")
    assert [block.text for block in Page(file).blocks] == ["x = 1\n"]
