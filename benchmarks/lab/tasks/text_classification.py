"""Sentiment of sentences (SST-2, as in GLUE) and of film reviews (IMDB), from local files."""

import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.lab.tasks.criterion import Classification
from benchmarks.lab.tasks.encoder import PADDING, Encoder, EncoderConfig
from benchmarks.lab.tasks.local_data import locate
from benchmarks.lab.tasks.partition import partition_labelled
from benchmarks.lab.tasks.task import Shard, Task

CLASSES = 2
START = 1
"""The token that every text begins with, so that an empty one has something to attend to."""

_RESERVED = 2  # PADDING and START
_WORD = re.compile(r"\w+|[^\w\s]")

Labelled = tuple[str, int]


@dataclass(frozen=True)
class DataSet:
    """A published collection of texts labelled 0 (negative) or 1 (positive)."""

    name: str
    folder: str
    archive: str
    training: str  # what is read, relative to the folder
    held_out: str
    read: Callable[[Path], Iterable[Labelled]]
    length: int  # tokens that most of its texts do not exceed


def read_tsv(path: Path) -> Iterator[Labelled]:
    """Yield the sentences of a file of GLUE: a header, then ``sentence<tab>label`` lines."""
    # Only "\n" ends a line, and quotes mean nothing: neither str.splitlines nor csv will do.
    with path.open(encoding="utf-8", newline="\n") as file:
        header = file.readline().rstrip("\r\n")
        if header != "sentence\tlabel":
            raise ValueError(f"{path} begins with {header!r} instead of 'sentence\\tlabel'")
        for number, line in enumerate(file, start=2):
            sentence, _, label = line.rstrip("\r\n").rpartition("\t")
            if label not in ("0", "1"):
                raise ValueError(f"{path}, line {number}: the label is {label!r}, not 0 or 1")
            yield sentence, int(label)


def read_folders(path: Path) -> Iterator[Labelled]:
    """Yield the texts in the folders ``neg`` and ``pos``, in the order of their names."""
    for label, name in enumerate(("neg", "pos")):
        files = sorted((path / name).glob("*.txt"))
        if not files:
            raise ValueError(f"{path / name} has no .txt files")
        for file in files:
            yield file.read_text(encoding="utf-8"), label


SST2 = DataSet("sst2", "SST-2", "SST-2.zip", "train.tsv", "dev.tsv", read_tsv, length=64)
IMDB = DataSet("imdb", "aclImdb", "aclImdb_v1.tar.gz", "train", "test", read_folders, length=256)


def text_classification(
    data: DataSet,
    *,
    clients: int,
    seed: int,
    data_dir: Path | None = None,
    partition: str = "iid",
    classes_per_client: int = 1,
    label_smoothing: float = 0.0,
    layers: int = EncoderConfig.layers,
    width: int = EncoderConfig.width,
    heads: int = EncoderConfig.heads,
    length: int | None = None,
    vocabulary: int = EncoderConfig.vocabulary,
) -> Task:
    """Return the task: texts to be told positive from negative.

    SST-2 has 67,349 sentences to train on and 872 held out (``dev.tsv``: the published test set has
    no labels); IMDB has 25,000 reviews to train on and as many held out.  The model is an
    :class:`~benchmarks.lab.tasks.encoder.Encoder`; the options for one of BERT-base's
    size are with :class:`~benchmarks.lab.tasks.encoder.EncoderConfig`.

    Args:
        data: :data:`SST2` or :data:`IMDB`.
        clients: how many share the training texts.
        seed: of the partition.
        data_dir: the data set's folder (``SST-2``, ``aclImdb``), or the one that holds it.
        partition: ``"iid"`` or ``"classes"``.
        classes_per_client: for ``"classes"``.
        label_smoothing: of the training loss.
        layers: of the encoder.
        width: of its hidden states.
        heads: of its attention; a divisor of ``width``.
        length: tokens kept of a text, by default 64 (SST-2) and 256 (IMDB).
        vocabulary: how many tokens there are; see :func:`tokenize`.

    Raises:
        ValueError: for values out of range, unknown names, and files that are missing or are not
            what was published.
    """
    try:
        config = EncoderConfig(
            layers, width, heads, data.length if length is None else length, vocabulary
        )
        if vocabulary <= _RESERVED:
            raise ValueError(f"vocabulary must be greater than {_RESERVED}, got {vocabulary}")
    except ValueError as error:
        raise ValueError(f"{data.name}: {error}") from None
    folder = locate(
        data.name,
        data_dir,
        folder=data.folder,
        archive=data.archive,
        contents=[data.training, data.held_out],
    )
    texts, labels = _load(data, folder / data.training, config)
    held_out_texts, held_out_labels = _load(data, folder / data.held_out, config)
    parts = partition_labelled(
        labels, partition, clients=clients, classes_per_client=classes_per_client, seed=seed
    )
    return Task(
        name=data.name,
        make_model=lambda: Encoder(config, CLASSES),
        clients=[Shard(texts, labels, indices, trimmed) for indices in parts],
        held_out=Shard(held_out_texts, held_out_labels, torch.arange(len(held_out_texts)), trimmed),
        criterion=Classification(label_smoothing),
    )


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


def trimmed(tokens: Tensor, generator: torch.Generator | None) -> Tensor:
    """Drop the columns that are padding in all texts of a batch."""
    return tokens[:, : int((tokens != PADDING).sum(1).max())]


def _load(data: DataSet, path: Path, config: EncoderConfig) -> tuple[Tensor, Tensor]:
    """Return tokens (count, length) and labels."""
    rows, labels = [], []
    try:
        for text, label in data.read(path):
            rows.append(torch.tensor(tokenize(text, config.vocabulary, config.length)))
            labels.append(label)
    except OSError as error:
        where = error.filename or path
        raise ValueError(f"{data.name}: cannot read {where}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{data.name}: {path} holds text that is not UTF-8: {error}") from None
    except ValueError as error:
        raise ValueError(f"{data.name}: {error}") from None
    if not rows:
        raise ValueError(f"{data.name}: {path} holds no texts")
    tokens = torch.full((len(rows), config.length), PADDING)
    for target, row in zip(tokens, rows, strict=True):
        target[: len(row)] = row
    return tokens, torch.tensor(labels)
