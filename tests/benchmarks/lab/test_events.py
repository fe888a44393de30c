"""What ranks tell, read while it is being written."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lab.events import EventReader, StalledError, reporting


@given(st.lists(st.text(), min_size=1, max_size=5), st.data())
def test_lines_are_read_once_they_are_whole(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], data: st.DataObject
) -> None:
    events = [{"event": text} for text in texts]
    written = "".join(json.dumps(event) + "\n" for event in events)
    cut = data.draw(st.integers(0, len(written)))
    folder = tmp_path_factory.mktemp("events")
    path = folder / "events.jsonl"
    reader = EventReader(folder)
    path.write_text(written[:cut])
    first = list(reader.new_events())
    assert first == events[: written[:cut].count("\n")]
    with path.open("a") as file:
        file.write(written[cut:])
    assert first + list(reader.new_events()) == events
    reader.close()


def test_what_was_told_before_the_end_is_read_after_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = EventReader(tmp_path)

    def is_running() -> bool:
        path.write_text('{"event": "last"}\n')
        return False

    assert list(reader.follow(is_running, 60)) == [{"event": "last"}]
    reader.close()


def test_silence_is_an_error(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    with pytest.raises(StalledError, match="hung: no progress for 0"):
        list(reader.follow(lambda: True, 0.2))
    reader.close()


def test_an_error_has_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = EventReader(tmp_path)

    def fail(rank: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        with reporting(tmp_path) as report:
            report({"event": "step"})
            raise OSError("no disk\nat all")

    for rank in (0, 3):
        with pytest.raises(OSError, match="no disk"):
            fail(rank)
    of_first, of_other = (
        [
            {"event": "process", "rank": rank, "pid": os.getpid()},
            {"event": "step"},
            {"event": "error", "rank": rank, "reason": "OSError: no disk"},
        ]
        for rank in (0, 3)
    )
    assert list(reader.new_events()) == [*of_first, of_other[0], of_other[2]]
    reader.close()
