"""Predicting the bytes of a text, each client with a part of the text of its own."""

from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.lab.corpus import (
    CORPORA,
    CorpusError,
    load_corpus,
    shard_bounds,
    window_starts,
)
from benchmarks.lab.model import GPT, GPTConfig
from benchmarks.lab.tasks.partition import contiguous
from benchmarks.lab.tasks.recurrent import CELLS, RecurrentText
from benchmarks.lab.tasks.task import Shard, Task
from comm_hooks.config import unknown

MODELS = ("gpt", *CELLS)

# Text is held out at this many places, far enough apart to be of all kinds, and long enough each
# that little of it continues what the model was trained on.
_PLACES = 20
_HELD_OUT = 10  # one window in so many


def gpt_text(
    *,
    clients: int,
    seed: int,
    data_dir: Path | None = None,
    text: str = "python",
    model: str = "gpt",
    layers: int = 2,
    width: int = GPTConfig.width,
    heads: int = GPTConfig.heads,
    context: int = GPTConfig.context,
    experts: int = GPTConfig.experts,
    eval_windows: int = 128,
) -> Task:
    """Return the task: predict each byte of a text from those before it.

    1. the text is cut into windows of ``context`` bytes;
    2. the last tenth of each of 20 equal parts is held out, the same for any number of clients;
    3. the rest is divided over the clients, neighbouring windows each: only then are clients so
       different that not communicating costs.

    Args:
        clients: how many share the text.
        seed: not used: each client has a part of the text of its own.
        data_dir: a text file, or a folder whose UTF-8 files are read, in place of ``text``.
        text: ``"python"``, the source of the standard library, ``"c"``, the system's headers,
            ``"perl"``, its Perl modules, or ``"prose"``, the King James Bible.
        model: ``"gpt"``, that of ``python -m benchmarks.compare``, ``"lstm"`` or ``"gru"``.
        layers: of the model: a GPT has 1.7 M parameters with 2, and with 6, as in ``compare``,
            4.8 M.
        width: of its hidden states.
        heads: of a GPT's attention; a divisor of ``width``.
        context: bytes that it sees.
        experts: MLPs of each block of a GPT, of which each token has two.
        eval_windows: held-out windows it is judged on, spread evenly, if there are so many.

    Raises:
        ValueError: for values out of range, unknown names, and text that is missing or too short.
    """
    sizes = {
        "layers": layers,
        "width": width,
        "heads": heads,
        "context": context,
        "experts": experts,
    }
    for name, value in {**sizes, "eval_windows": eval_windows}.items():
        if value < 1:
            raise ValueError(f"gpt_text: {name} must be at least 1, got {value!r}")
    if width % heads:
        raise ValueError(f"gpt_text: width {width} is not a multiple of the {heads} heads")
    if model not in MODELS:
        raise ValueError(unknown("model of gpt_text", model, MODELS))
    if text not in CORPORA:
        raise ValueError(unknown("text", text, CORPORA))
    windows = _load(data_dir, text, context)
    training, held_out = _hold_out(len(windows))
    judged = window_starts(len(held_out), 1, min(eval_windows, len(held_out)))
    inputs, targets = windows[:, :-1], windows[:, 1:]

    def make_model() -> nn.Module:
        if model in CELLS:
            return RecurrentText(cell=model, layers=layers, width=width)
        return NextByte(GPTConfig(**sizes))

    return Task(
        name="gpt_text",
        make_model=make_model,
        clients=[
            Shard(inputs, targets, training[part])
            for part in contiguous(len(training), clients=clients)
        ],
        held_out=Shard(inputs, targets, held_out[judged]),
    )


class NextByte(nn.Module):
    """The GPT as a model from bytes (batch, time) to logits (batch, time, 256)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gpt = GPT(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the byte after each of ``tokens``."""
        return self.gpt.logits(tokens)


def _load(path: Path | None, text: str, context: int) -> Tensor:
    """Return the text's windows (count, context + 1); each begins with the last byte of another."""
    try:
        content = (load_corpus(path) if path else CORPORA[text]()).content
    except CorpusError as error:
        # It speaks of the option as compare calls it.
        raise ValueError(f"gpt_text: {error}".replace("--data", "--data-dir", 1)) from None
    needed = 2 * _PLACES * context + 1
    if len(content) < needed:
        raise ValueError(
            f"gpt_text: {len(content)} bytes of text are too few for a context of {context}: "
            f"give {needed} or more as --data-dir, or a smaller context"
        )
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    return tokens.unfold(0, context + 1, context)


def _hold_out(count: int) -> tuple[Tensor, Tensor]:
    """Return which of ``count`` windows are to be trained on and which are held out."""
    held_out = torch.zeros(count, dtype=torch.bool)
    for start, stop in shard_bounds(count, _PLACES):
        held_out[stop - max(1, (stop - start) // _HELD_OUT) : stop] = True
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()
