"""Verses of the King James Bible as bags of words, to be told by the part they come from."""

import bisect
import functools
import re
import zlib

import torch
from torch import Tensor, nn

from benchmarks.lab.corpus import CorpusError, read_verses
from benchmarks.lab.tasks.partition import partition_labelled
from benchmarks.lab.tasks.task import Shard, Task

PARTS = {
    "law": "Genesis",
    "history": "Joshua",
    "poetry": "Job",
    "prophets": "Isaiah",
    "gospels and acts": "Matthew",
    "letters and revelation": "Romans",
}
"""The classes, each with its first book."""

_LENGTH = 112  # words and marks; the longest verse has 104
_HELD_OUT = 0.1

PADDING, START = 0, 1
_RESERVED = 2  # PADDING and START
_WORD = re.compile(r"\w+|[^\w\s]")


def tokenize(text: str, vocabulary: int, length: int) -> list[int]:
    """Return the first ``length`` tokens of a text: START, then one per word or punctuation mark.

    A lower-case word's token is its CRC-32 modulo the vocabulary (hashing, Weinberger et al., ICML
    2009): there is nothing to build or to share between clients, and rare words collide.

    Example::

        >>> tokenize("Good, good!", vocabulary=1000, length=8)
        [1, 712, 832, 712, 381]
    """
    words = (match[0] for match in _WORD.finditer(text.lower()))
    tokens = [START]
    for word in words:
        if len(tokens) == length:
            break
        tokens.append(_RESERVED + zlib.crc32(word.encode()) % (vocabulary - _RESERVED))
    return tokens


def verses(
    *,
    clients: int,
    seed: int,
    partition: str = "iid",
    vocabulary: int = 8192,
) -> Task:
    """Return the task: 27,993 verses to train on, 3,110 held out, six classes.

    The model is a logistic regression on counts of words, which are rare and frequent as words are:
    half of those that occur do so in three verses or fewer.  A word's column is its hash (see
    :func:`tokenize`): a list of words would tell of the training data.

    Args:
        clients: how many share the training verses.
        seed: of the partition; what is held out is always the same.
        partition: ``"iid"``, or ``"contiguous"``: each client has neighbouring chapters.
        vocabulary: columns, at least 3.

    Raises:
        ValueError: for values out of range, unknown names, and without the package that brings the
            text.
    """
    if vocabulary < 3:
        raise ValueError(f"verses: vocabulary must be at least 3, got {vocabulary!r}")
    tokens, labels = _load(vocabulary)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, training = order.tensor_split([round(_HELD_OUT * len(order))])
    training = training.sort().values
    parts = partition_labelled(labels[training], partition, clients=clients, seed=seed)
    prepare = functools.partial(_counts, vocabulary)
    return Task(
        name="verses",
        make_model=lambda: nn.Linear(vocabulary, len(PARTS)),
        clients=[Shard(tokens, labels, training[part], prepare) for part in parts],
        held_out=Shard(tokens, labels, held_out, prepare),
    )


def _load(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return tokens (count, length) and labels."""
    try:
        found = read_verses()
    except CorpusError as error:
        raise ValueError(str(error).replace("prose:", "verses:").partition(", or")[0]) from None
    books = list(dict.fromkeys(book for book, _ in found))
    firsts = [books.index(book) for book in PARTS.values()]
    part = {book: bisect.bisect(firsts, place) - 1 for place, book in enumerate(books)}
    tokens = torch.full((len(found), _LENGTH), PADDING, dtype=torch.int32)
    for row, (_, text) in zip(tokens, found, strict=True):
        words = torch.tensor(tokenize(text, vocabulary, _LENGTH))
        row[: len(words)] = words
    return tokens, torch.tensor([part[book] for book, _ in found])


def _counts(vocabulary: int, tokens: Tensor) -> Tensor:
    """Return how often each word occurs, (batch, vocabulary)."""
    counts = torch.zeros(len(tokens), vocabulary)
    counts.scatter_add_(1, tokens.long(), torch.ones(1).expand(tokens.shape))
    counts[:, [PADDING, START]] = 0
    return counts
