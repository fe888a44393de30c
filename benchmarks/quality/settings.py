"""What is trained: a task, by how many ranks, in how large batches, and for how long."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.lab.tasks import Task, build_task

COSINE = "cosine"
_CONTEXT = 64
_PATCHES = 49


@dataclass(frozen=True)
class Preset:
    """A task with a model, skewed shards, and its unit of data.

    Args:
        title: what it is, for readers.
        task: a name of :data:`~benchmarks.lab.tasks.TASKS`.
        options: of that task.
        tokens: of one sample: bytes of text, patches of an image.
        parameters: of the model, so that records can be read where the data is missing.
        start: the learning rate at which every search starts.
    """

    title: str
    task: str
    options: Mapping[str, Any]
    tokens: int
    parameters: int
    start: float = 4e-3


_GPT = {"layers": 3, "width": 128, "heads": 4, "context": _CONTEXT, "eval_windows": 256}
_SMALL_GPT = {**_GPT, "width": 64}
_LSTM = {"model": "lstm", "layers": 1, "width": 256, "context": _CONTEXT, "eval_windows": 256}
_IMAGES = {"partition": "dirichlet", "concentration": 0.3, "judged": 2000}

PRESETS: Mapping[str, Preset] = {
    "python": Preset(
        "Python source, GPT", "gpt_text", {"text": "python", **_GPT}, _CONTEXT, 634_496
    ),
    "c": Preset("C headers, GPT", "gpt_text", {"text": "c", **_GPT}, _CONTEXT, 634_496),
    "perl": Preset("Perl source, GPT", "gpt_text", {"text": "perl", **_GPT}, _CONTEXT, 634_496),
    "perl_gru": Preset(
        "Perl source, GRU",
        "gpt_text",
        {"text": "perl", **_LSTM, "model": "gru"},
        _CONTEXT,
        460_800,
        16e-3,
    ),
    "perl_experts": Preset(
        "Perl source, GPT of experts",
        "gpt_text",
        {"text": "perl", **_GPT, "layers": 2, "width": 96, "experts": 4},
        _CONTEXT,
        699_840,
    ),
    "prose": Preset(
        "English prose, LSTM", "gpt_text", {"text": "prose", **_LSTM}, _CONTEXT, 592_384, 16e-3
    ),
    "images": Preset(
        "Fashion-MNIST, ViT", "fashion_mnist", {"model": "vit", **_IMAGES}, _PATCHES, 604_810, 2e-3
    ),
    "images_resnet": Preset(
        "Fashion-MNIST, ResNet",
        "fashion_mnist",
        {"model": "resnet", "width": 48, **_IMAGES},
        _PATCHES,
        251_098,
        16e-3,
    ),
    "python_large": Preset(
        "Python source, GPT of 4.8 M",
        "gpt_text",
        {"text": "python", "layers": 6, "width": 256, "heads": 8, "context": 128},
        128,
        4_831_232,
    ),
    "python_small": Preset(
        "Python source, small GPT",
        "gpt_text",
        {"text": "python", **_SMALL_GPT},
        _CONTEXT,
        169_792,
        8e-3,
    ),
    "c_small": Preset(
        "C headers, small GPT", "gpt_text", {"text": "c", **_SMALL_GPT}, _CONTEXT, 169_792, 8e-3
    ),
    "prose_small": Preset(
        "English prose, small LSTM",
        "gpt_text",
        {"text": "prose", **_LSTM, "width": 128},
        _CONTEXT,
        165_120,
        16e-3,
    ),
    "images_small": Preset(
        "Fashion-MNIST, small ViT",
        "fashion_mnist",
        {"model": "vit", "width": 64, **_IMAGES},
        _PATCHES,
        154_954,
    ),
}
"""By name.  Each rank has another part of the text, or a Dirichlet split of the classes.

Models have 0.5 to 0.7 million parameters, the ResNet 0.25 and small ones 0.16: 20 tokens for each
are then a matter of minutes, not of an hour.
"""


@dataclass(frozen=True, order=True)
class Setting:
    """What all methods share.

    Args:
        task: a name of :data:`PRESETS`.
        ranks: how many there are.
        batch: samples per step and rank.
        tokens: of training, all ranks together, per parameter of the model.
        schedule: of the learning rate after the warm-up.
    """

    task: str
    ranks: int
    batch: int
    tokens: float
    schedule: str = COSINE

    def __post_init__(self) -> None:
        # Records are found by their text, in which 2 and 2.0 differ.
        object.__setattr__(self, "tokens", float(self.tokens))

    def __str__(self) -> str:
        size = f"{self.task}, {self.ranks} x {self.batch}, {self.tokens:g} tokens/parameter"
        return size if self.schedule == COSINE else f"{size}, {self.schedule}"

    @property
    def steps(self) -> int:
        """Steps of the training; at least 20."""
        preset = PRESETS[self.task]
        per_step = self.ranks * self.batch * preset.tokens
        return max(20, round(self.tokens * preset.parameters / per_step))


@functools.lru_cache(maxsize=2)
def build(name: str, ranks: int) -> Task:
    """Return the task of a preset, divided over the ranks.

    Raises:
        ValueError: if its data is missing; says which package or folder it wants.
    """
    preset = PRESETS[name]
    return build_task(preset.task, clients=ranks, seed=0, **preset.options)
