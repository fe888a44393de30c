"""Texts: read as published, turned into tokens, and judged without their padding."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lab.tasks import Task, build_task
from benchmarks.lab.tasks.encoder import PADDING, Encoder, EncoderConfig
from benchmarks.lab.tasks.text_classification import START, tokenize


def test_sentences_are_read_as_published(tmp_path: Path) -> None:
    sentences = [("it 's a \"charming , funny", 1), ("one\x85line\u2028\ronly", 0), ("", 1)]
    lines = "".join(f"{sentence} \t{label}\n" for sentence, label in sentences)
    (tmp_path / "train.tsv").write_text(f"sentence\tlabel\n{lines}", encoding="utf-8")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nfine \t0\n")
    task = build_task("sst2", clients=1, data_dir=tmp_path, length=6)
    texts, labels = next(task.clients[0].in_order(10))
    order = task.clients[0].indices
    assert labels.tolist() == [sentences[i][1] for i in order]
    for row, i in zip(texts.tolist(), order.tolist(), strict=True):
        expected = tokenize(sentences[i][0], 10_000, 6)
        assert row == expected + [PADDING] * (6 - len(expected))
    assert len(task.held_out) == 1


def test_reviews_are_read_from_both_folders(small: Callable[..., Task]) -> None:
    task = small("imdb", clients=1)
    client = task.clients[0]
    assert client.targets.tolist() == [0] * 100 + [1] * 100
    assert task.held_out.targets.tolist() == [0] * 30 + [1] * 30
    telling = tokenize("great moving witty", 10_000, 16)[1:]
    tells = torch.isin(client.inputs, torch.tensor(telling)).any(1)
    assert torch.equal(tells.long(), client.targets)


@given(text=st.text(max_size=60), length=st.integers(1, 20), vocabulary=st.integers(3, 500))
def test_tokens_are_in_the_vocabulary(text: str, length: int, vocabulary: int) -> None:
    tokens = tokenize(text, vocabulary, length)
    assert tokens[0] == START
    assert 1 <= len(tokens) <= length
    assert all(START < token < vocabulary for token in tokens[1:])
    assert tokens == tokenize(text, vocabulary, 1000)[:length]


def test_words_have_tokens_of_their_own() -> None:
    words = ["the", "quick", "brown", "fox", "jumps", "lazy", "dog", ",", "!"]
    tokens = tokenize(" ".join(words), 10_000, 100)[1:]
    assert len(set(tokens)) == len(words)
    assert tokenize("The DOG, the dog!", 10_000, 100)[1:] == [
        tokens[words.index(word)] for word in ["the", "dog", ",", "the", "dog", "!"]
    ]


def test_the_encoder_does_not_see_padding() -> None:
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(width=32, length=24), classes=2).double()
    tokens = torch.randint(2, 1000, (3, 10))
    tokens[1, 4:] = PADDING
    tokens[2, 1:] = PADDING
    padded = torch.cat([tokens, torch.full((3, 14), PADDING)], dim=1)
    together = model(padded)
    torch.testing.assert_close(model(tokens), together)
    alone = torch.cat([model(row[row != PADDING][None]) for row in tokens])
    torch.testing.assert_close(alone, together)
    # It does see everything else.
    for place in range(10):
        changed = tokens.clone()
        changed[0, place] = 1001
        assert not torch.allclose(model(changed)[0], together[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text\tlabel\nfine\t1\n", r"begins with 'text\\tlabel'"),
        (b"sentence\tlabel\nfine\t1\ndull\t2\n", "line 3: the label is '2', not 0 or 1"),
        (b"sentence\tlabel\nno label\n", "line 2: the label is 'no label'"),
        (b"sentence\tlabel\n", "holds no texts"),
        (b"sentence\tlabel\ncaf\xe9\t1\n", "not UTF-8"),
    ],
)
def test_other_tables_are_refused(
    content: bytes, message: str, small: Callable[..., Task], tmp_path: Path
) -> None:
    small("sst2")
    (tmp_path / "sst2" / "SST-2" / "dev.tsv").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        small("sst2")
    assert str(caught.value).startswith("sst2: ")
    assert "dev.tsv" in str(caught.value)


def test_an_empty_folder_of_reviews_is_refused(small: Callable[..., Task], tmp_path: Path) -> None:
    small("imdb")
    folder = tmp_path / "imdb" / "aclImdb" / "test" / "pos"
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=f"^imdb: {folder} has no .txt files"):
        small("imdb")
