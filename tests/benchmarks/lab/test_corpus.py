"""The text: found in a fixed order, checked, cut into contiguous shards."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lab import corpus
from benchmarks.lab.corpus import (
    CorpusError,
    check_length,
    load_corpus,
    shard_bounds,
    window_starts,
)


@given(length=st.integers(0, 10**7), shards=st.integers(1, 64))
def test_shards_are_contiguous_disjoint_and_cover_everything(length: int, shards: int) -> None:
    bounds = shard_bounds(length, shards)
    assert len(bounds) == shards
    assert bounds[0][0] == 0
    assert bounds[-1][1] == length
    assert all(stop == start for (_, stop), (start, _) in pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1


@given(window=st.integers(1, 200), slack=st.integers(0, 10**6), count=st.integers(2, 100))
def test_windows_reach_from_end_to_end_and_never_past(window: int, slack: int, count: int) -> None:
    length = window + slack
    starts = window_starts(length, window, count)
    assert len(starts) == count
    assert starts[0] == 0
    assert starts[-1] + window == length
    gaps = [b - a for a, b in pairwise(starts)]
    assert max(gaps) - min(gaps) <= 1


@given(length=st.integers(0, 2000), shards=st.integers(1, 8), window=st.integers(1, 200))
def test_a_text_is_accepted_exactly_when_every_shard_holds_a_window(
    length: int, shards: int, window: int
) -> None:
    fits = all(stop - start >= window for start, stop in shard_bounds(length, shards))
    text = corpus.Corpus(b"x" * length, "a text")
    if fits:
        check_length(text, shards, window)
    else:
        with pytest.raises(CorpusError, match=f"{length} bytes of text are too few"):
            check_length(text, shards, window)


def test_the_standard_library_is_the_default_and_the_same_every_time() -> None:
    text = load_corpus(None)
    assert text == load_corpus(None)
    assert 1_000_000 < len(text.content) <= corpus.MAX_BYTES
    assert b"import" in text.content
    assert "standard library" in text.description


def test_a_directory_is_read_in_the_order_of_names_without_what_is_not_text(
    tmp_path: Path,
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "sub" / "c.txt").write_text("third ")
    (tmp_path / "b.txt").write_text("sécond ", encoding="utf-8")
    (tmp_path / "a.txt").write_text("first ")
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".hidden").write_text("hidden")
    text = load_corpus(tmp_path)
    assert text.content.decode() == "first sécond third "
    assert "from 3 files, 2 not text" in text.description


def test_a_long_text_is_cut_between_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "MAX_BYTES", 5)
    path = tmp_path / "long.txt"
    path.write_text("ééééé", encoding="utf-8")
    text = load_corpus(path)
    assert text.content.decode() == "éé"
    assert "the first" in text.description
    assert load_corpus(tmp_path).content == text.content


def test_a_text_that_ends_within_a_character_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "torn.txt"
    path.write_bytes("é".encode()[:1])
    with pytest.raises(CorpusError, match="not text"):
        load_corpus(path)


def test_a_directory_that_loops_back_to_itself_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("once")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert load_corpus(tmp_path).content == b"once"


def test_what_is_neither_file_nor_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no such file or directory"):
        load_corpus(tmp_path / "absent")
    with pytest.raises(CorpusError, match="no text in this directory; give"):
        load_corpus(tmp_path)
    (tmp_path / "zeros").write_bytes(bytes(100))
    with pytest.raises(CorpusError, match="1 files are not UTF-8"):
        load_corpus(tmp_path)
    with pytest.raises(CorpusError, match="not text"):
        load_corpus(tmp_path / "zeros")
