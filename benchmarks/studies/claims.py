"""What the papers state about pairs of methods, and the records in which it is looked for."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Labels = Mapping[str, Any]
Measure = Literal["errors", "losses", "training"]


@dataclass(frozen=True)
class Entry:
    """One method in a record.

    Args:
        name: of the method.
        labels: some of its labels, as the record has them.
        folder: of the record, in ``benchmarks/results``; by default the claim's.
        title: what readers call it, where that is not its name.
    """

    name: str
    labels: Labels
    folder: str = ""
    title: str = ""


@dataclass(frozen=True)
class Claim:
    """A paper's statement that one method ends below another.

    Args:
        paper: the heading of the paper in ``docs/papers.md``, or its beginning.
        item: the first cell of the row there.
        folder: of the record, in ``benchmarks/results``.
        better, worse: the methods.
        measure: held-out errors or losses at the end, or the loss on training samples.
    """

    paper: str
    item: str
    folder: str
    better: Entry
    worse: Entry
    measure: Measure = "errors"


def _ahead(
    paper: str,
    items: str | Sequence[str],
    folder: str,
    labels: Labels,
    better: str,
    worse: Sequence[str],
    measure: Measure = "errors",
) -> Iterator[Claim]:
    """Yield the claims that a method is ahead of several others, for each item."""
    for item in [items] if isinstance(items, str) else items:
        for name in worse:
            pair = Entry(better, labels), Entry(name, labels)
            yield Claim(paper, item, folder, *pair, measure)


_MICRO, _BC, _LAMB, _SAFL, _DPS = "DP-MicroAdam", "DP-AdamBC", "FED-LAMB", "SAFL", "AdaDPS"
_DIGITS, _VERSES, _NO_PRIVACY = "private_optimizers", "private_verses", {"sigma": None}


def _fed_lamb(item: str, folder: str, partition: str, steps: int) -> Iterator[Claim]:
    labels = {"partition": partition, "T": steps}
    yield from _ahead(_LAMB, item, folder, labels, "fed_lamb", ["fed_ams", "fed_sgd"])
    yield from _ahead(_LAMB, item, folder, labels, "fed_ams", ["fed_sgd"])


def _sketches(item: str, measure: Measure, order: Sequence[float | None]) -> Iterator[Claim]:
    """Yield the claims that sketches of these sizes, None for no sketch, end in this order."""
    entries = [
        Entry("safl count_sketch" if size else "fed_opt", {"ratio": size, "K": 1}, "", title)
        for size, title in ((size, f"{100 * (size or 1):g} %") for size in order)
    ]
    for better, worse in itertools.pairwise(entries):
        yield Claim(_SAFL, item, "safl_sizes", better, worse, measure)


def _regression(item: str, worse: Sequence[str]) -> Iterator[Claim]:
    folder = "private_toy_regression"
    yield from _ahead(_DPS, item, folder, {"private": "yes"}, "AdaDPS", worse, "losses")


def _claims() -> Iterator[Claim]:
    for sigma in (0.6, 1.0):  # the largest epsilons
        yield from _ahead(
            *(_MICRO, "Table 1", _DIGITS, {"sigma": sigma}, "DP-MicroAdam"),
            ["DP-SGD", "DP-Adam", "DP-AdamBC", "scale-then-privatize"],
        )
        yield from _ahead(
            _BC, "Table 1, CIFAR10", _DIGITS, {"sigma": sigma}, "DP-SGD", ["DP-Adam", "DP-AdamBC"]
        )
        yield from _ahead(
            _BC, "Table 1, CIFAR10", _DIGITS, {"sigma": sigma}, "DP-AdamBC", ["DP-Adam"]
        )
    for name in ("DP-SGD", "DP-Adam", "DP-AdamBC"):
        yield from _ahead(_BC, "Figure 10 left", _DIGITS, {"sigma": 1.0}, name, ["DP2"])
    yield from _ahead(
        *(_BC, "Section 5", "private_verses_corrected", {"sigma": 1.0}, "DP-AdamBC"),
        ["DP-Adam", "DP-SGD"],
    )
    yield from _fed_lamb("Figure 1", "fed_lamb_cnn", "classes", 1)
    yield from _fed_lamb("Figure 2", "fed_lamb_mlp", "classes", 5)
    yield from _fed_lamb("Figure 3", "fed_lamb_cnn_iid", "iid", 1)
    yield from _fed_lamb("Figure 4", "fed_lamb_resnet", "iid", 1)
    for ratio, peers in (
        (0.01, ["cd_adam", "cocktail_sgd", "fetch_sgd", "marina"]),
        (0.1, ["cd_adam", "fetch_sgd"]),
    ):
        yield from _ahead(
            *(_SAFL, "Figure 1, first two panels", "safl", {"ratio": ratio, "K": 1}),
            *("safl count_sketch", peers),
        )
    yield from _sketches("Figure 1, third panel", "errors", (0.001, 0.01, 0.1, None))
    yield from _sketches("Figure 1, fourth panel", "training", (None, 0.1, 0.01, 0.001, 0.0001))
    yield from _sketches("Figure 6, ResNet", "errors", (0.01, 0.001, 0.0001))

    yield from _regression("Figure 3", ["DP-SGD", "DP-Adam", "DP-RMSProp"])
    yield from _regression("Section 6.2", ["A after the noise"])
    words = {"sigma": 1.0}
    yield from _ahead(_DPS, "Figure 1", _VERSES, words, "AdaDPS, token frequency", ["DP-Adam"])
    public = ["DP-SGD", "DP-Adam", "DP-R-Pub"]
    for name in ("AdaDPS", "AdaDPS, Adam"):
        yield from _ahead(_DPS, "Figure 4", _VERSES, words, name, public)
        yield from _ahead(_DPS, "Table 2", _VERSES, words, name, ["PDA-DPMD"])
        yield from _ahead(_DPS, "Table 7", _VERSES, words, name, ["warm start, DP-SGD"])
        yield from _ahead(_DPS, "Table 8", _VERSES, words, name, ["DP-Adam-Pub"])
    yield from _ahead(_DPS, "Table 6, other rows", _VERSES, words, "AdaDPS", ["DP-RMSProp"])
    yield from _ahead(_DPS, "Figure 5", _VERSES, words, "AdaDPS, token frequency", ["DP-SGD"])
    for name in ("AdaDPS, token frequency", "AdaDPS, TF-IDF"):
        yield from _ahead(_DPS, "Table 4", _VERSES, words, name, ["DP-SGD", "DP-Adam"])
    yield from _ahead(_DPS, "Table 9", _VERSES, _NO_PRIVACY, "Adam", ["SGD"])
    yield from _ahead(_DPS, "Table 9", _VERSES, _NO_PRIVACY, "AdaS", ["SGD"])
    yield from _ahead(
        *(_DPS, "Table 9", "private_autoencoder", _NO_PRIVACY, "Adam", ["AdaS", "SGD"], "losses")
    )
    autoencoder = "private_autoencoder", words
    yield from _ahead(_DPS, "Table 1", *autoencoder, "AdaDPS", ["DP-Adam", "DP-SGD"], "losses")
    yield from _ahead(_DPS, "Table 1", *autoencoder, "DP-Adam", ["DP-SGD"], "losses")
    for sigma in (0.6, 1.0, 2.0, 4.0):
        yield from _ahead(
            *(_DPS, "Table 6, MNIST classes", _DIGITS, {"sigma": sigma}, "AdaDPS, Adam"),
            ["DP-SGD", "DP-Adam", "DP-RMSProp"],
        )
    for share in ("0.002", "0.0004"):
        less = Entry("AdaDPS", words, f"{_VERSES}_public_{share}", f"AdaDPS, {share}")
        more = Entry("AdaDPS", words, title="AdaDPS, 0.01")
        yield Claim(_DPS, "Table 10", _VERSES, more, less)
    yield from _ahead(
        *(_DPS, "Figure 6", "private_federated", {"private": "yes"}, "AdaDPS"),
        ["DP-FedAdam", "DP-FedAvg"],
    )
    yield from _ahead(
        *(_DPS, "Section 6.2", "private_federated", {"private": "yes"}, "AdaDPS"),
        ["A at the server"],
    )


CLAIMS: Sequence[Claim] = tuple(_claims())
