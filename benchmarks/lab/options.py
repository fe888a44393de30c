"""What ``python -m benchmarks.compare`` and ``python -m benchmarks.bench`` check, describe and write alike."""

import platform

import torch

import comm_hooks
from benchmarks.lab.model import GPT, GPTConfig, count
from benchmarks.lab.runs import Settings

_QUICK_MODEL = GPTConfig(layers=2)
QUICK_STEPS = 60
"""Fewer compare nothing: most of them would be warm-up."""


def make_settings(
    nproc: int, steps: int | None, seed: int, eval_every: int | None, quick: bool
) -> Settings:
    """Return the settings of these options.

    Raises:
        ValueError: for a number that cannot be; the message names the option.
    """
    if steps is None:
        steps = QUICK_STEPS if quick else Settings.steps
    for option, value in {"--nproc": nproc, "--steps": steps, "--eval-every": eval_every}.items():
        if value is not None and value < 1:
            raise ValueError(f"{option} must be at least 1, got {value}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed must lie between 0 and 2**32 - 1, got {seed}")
    return Settings(
        nproc=nproc,
        steps=steps,
        seed=seed,
        eval_every=eval_every or max(1, steps // 5),
        # A short run needs steps after the warm-up, too: some methods only then compress.
        warmup=min(Settings.warmup, max(1, steps // 2)),
        model=_QUICK_MODEL if quick else GPTConfig(),
    )


def count_parameters(model: GPTConfig) -> int:
    """Return the number of parameters of a GPT, without making it."""
    return count(lambda: GPT(model))


def describe_training(settings: Settings) -> dict[str, str]:
    """Return the model and how it is trained, one line each."""
    model = settings.model
    return {
        "Model": f"GPT over bytes, {count_parameters(model) / 1e6:.2f} M parameters: "
        f"{model.layers} layers, width {model.width}, {model.heads} heads, context {model.context}",
        "Training": f"{settings.steps} steps, batch {settings.batch} per rank, learning rate "
        f"{settings.learning_rate:g} after {settings.warmup} steps of warm-up, then "
        f"{settings.schedule}, betas {settings.betas}, weight decay {settings.weight_decay:g}",
    }


def versions() -> str:
    """Return which comm-hooks, torch and Python this is, in one line."""
    return (
        f"comm-hooks {comm_hooks.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}"
    )
