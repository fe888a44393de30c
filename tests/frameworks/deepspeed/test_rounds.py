"""Rounds of local steps in a DeepSpeed engine, named in the JSON or passed, against a bare loop."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")

from comm_hooks import ErrorFeedback, Exchange, TopK, register
from comm_hooks.exchange import ExchangeSettings
from comm_hooks.optim import LocalRounds, Participation, low_communication
from comm_hooks.optim.registry import OPTIMIZERS
from tests.frameworks.deepspeed.optimizer_runs import (
    loss_of,
    minibatches,
    new_engine,
    new_model,
    settings,
    train,
    values,
)
from tests.ranks import RanksOf

STEPS, STOP, CLIP_NORM = 6, 3, 0.2
SKETCH = {"compressor": "count_sketch", "ratio": 0.25, "min_numel": 16}
BLOCKS: dict[str, dict[str, Any]] = {
    "low_communication": {"bits_per_parameter": 1.0},
    "safl": {"local_steps": 4, "local_lr": 0.05, **SKETCH},
    "fed_avg": {"local_steps": 4},
    "fed_lamb": {"local_steps": 4, "bits": 32},
    "diloco": {"local_steps": 4, "fragments": 1},
    "sparse_loco": {"local_steps": 4, "density": 0.25, "compressor": "topk", "min_numel": 16},
}
PARAMS = {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.05}
SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {"warmup_num_steps": 3, "total_num_steps": 8, "warmup_type": "linear"},
}


def configuration(method: str) -> dict[str, Any]:
    block = {"method": method, **BLOCKS[method]}
    params = {k: v for k, v in PARAMS.items() if k in OPTIMIZERS[method].options}
    config = settings("AdamW", params, comm_hooks=block, scheduler=SCHEDULE)
    return {**config, "gradient_clipping": CLIP_NORM}


def made(method: str, named: Any) -> Any:
    """Return the optimizer that the block asks for."""
    entry, block = OPTIMIZERS[method], BLOCKS[method]
    options = {**PARAMS, **block}
    options = {k: v for k, v in options.items() if k in entry.options}
    if entry.averages == "own":
        return entry.make(named, **options)
    rest = {k: v for k, v in block.items() if k not in entry.options}
    published = entry.needs if "compressor" in rest else entry.published or {}
    exchange = Exchange(ExchangeSettings.from_dict({**published, **rest}))
    return entry.build(named, exchange, **options)


def bare(method: str, rates: list[float]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train without DeepSpeed, with the learning rates that its schedule had."""
    model = new_model()
    optimizer = made(method, model.named_parameters())
    register(model, optimizer)
    for rate, step in zip(rates, minibatches(STEPS), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for inputs, targets in step:
            (loss_of(model, inputs, targets) / len(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return values(model), values(model.eval())


def train_and_watch(engine: Any, steps: list[Any]) -> list[float]:
    rates = []
    for step in steps:
        rates.append(engine.optimizer.param_groups[0]["lr"])
        train(engine, [step])
    return rates


def runs(folder: str, method: str) -> Any:
    engine = new_engine(configuration(method))
    rates = train_and_watch(engine, minibatches(STEPS))
    own = values(engine.module)
    engine.eval()
    shared = values(engine.module)
    engine.train()
    assert all(map(torch.equal, values(engine.module), own))

    part = new_engine(configuration(method))
    train(part, minibatches(STEPS)[:STOP])
    part.save_checkpoint(folder)
    resumed = new_engine(configuration(method))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        resumed.load_checkpoint(folder)
    train(resumed, minibatches(STEPS)[STOP:])
    return own, shared, values(resumed.module), bare(method, rates), engine.comm_hooks.stats()


@pytest.mark.parametrize("method", BLOCKS)
def test_the_json_asks_for_rounds(ranks_of: RanksOf, tmp_path: Path, method: str) -> None:
    outcomes = ranks_of(2).run(runs, str(tmp_path), method)
    for own, shared, resumed, (expected, evaluated), stats in outcomes:
        for value, other, later in zip(own, expected, resumed, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
            assert torch.equal(value, later)
        for value, other in zip(shared, evaluated, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
        assert stats["steps"] == STEPS
        assert stats["compression_ratio"] > (20 if method == "low_communication" else 1.4)
    assert all(map(torch.equal, outcomes[0][1], outcomes[1][1]))
    assert not all(map(torch.equal, outcomes[0][0], outcomes[1][0]))


def passed() -> tuple[list[torch.Tensor], bool]:
    """Pass the rounds as an object, compute in bfloat16."""
    model = new_model()
    optimizer = low_communication(model.named_parameters(), lr=0.01, bits_per_parameter=1.0)
    config = settings("AdamW", torch_autocast={"enabled": True, "dtype": "bfloat16"})
    del config["optimizer"]
    before = values(model)
    engine = new_engine(config, model=model, optimizer=optimizer)
    train(engine, minibatches(4))
    optimizer.synchronize()
    moved = not all(map(torch.equal, values(model), before))
    return values(engine.module), moved


def test_rounds_can_be_passed(ranks_of: RanksOf) -> None:
    (first, moved), (second, _) = ranks_of(2).run(passed)
    assert moved
    assert all(map(torch.equal, first, second))


def engine_with_clients(accumulation: int = 1) -> tuple[Any, LocalRounds]:
    """Return an engine whose rounds have three clients, of which rank 0 plays two."""
    model = new_model()
    exchange = Exchange(TopK(density=1 / 4), ErrorFeedback(), min_numel=16)
    rounds = LocalRounds(
        torch.optim.SGD(model.named_parameters(), lr=0.1),
        exchange,
        participation=Participation(clients=3),
    )
    config = settings("AdamW", accumulation=accumulation)
    del config["optimizer"]
    return new_engine(config, model=model, optimizer=rounds), rounds


def play(engine: Any, rounds: LocalRounds, count: int) -> None:
    for _ in range(count):
        for client in rounds.clients():
            generator = torch.Generator().manual_seed(100 * rounds.round_index + client)
            for _ in range(2):
                inputs = torch.randn(8, 40, generator=generator)
                engine.backward(engine(inputs).square().mean())
                engine.step()


def clients_go_on(folder: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the model of four rounds, and that of two and two with a checkpoint between."""
    engine, rounds = engine_with_clients()
    play(engine, rounds, 2)
    engine.save_checkpoint(folder)
    play(engine, rounds, 2)
    other, other_rounds = engine_with_clients()
    other.load_checkpoint(folder)
    play(other, other_rounds, 2)
    return values(engine.module), values(other.module)


def test_rounds_of_clients_go_on_bit_for_bit(ranks_of: RanksOf, tmp_path: Path) -> None:
    """Though the ranks have taken different numbers of steps."""
    ends = ranks_of(2).run(clients_go_on, str(tmp_path))
    for whole, resumed in ends:
        assert all(map(torch.equal, whole, resumed))
        assert all(map(torch.equal, whole, ends[0][0]))
    assert [f.name for f in tmp_path.iterdir() if f.is_dir()] == ["round2"]


def refused() -> None:
    model = new_model()
    optimizer = low_communication(model.named_parameters(), lr=0.01, bits_per_parameter=1.0)
    config = settings("AdamW", bf16={"enabled": True})
    del config["optimizer"]
    with pytest.raises(ValueError, match="keeps a copy of the model in float32"):
        new_engine(config, model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match="gradient_accumulation_steps: must be 1"):
        engine_with_clients(accumulation=2)


def test_copies_in_16_bits_and_accumulation_across_clients_are_refused(ranks_of: RanksOf) -> None:
    ranks_of(2).run(refused)
