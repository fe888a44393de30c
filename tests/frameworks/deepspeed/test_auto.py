"""One import, and engines that others make attach themselves."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.frameworks.deepspeed.common import (
    BATCH,
    INPUTS,
    OUTPUTS,
    TOPK,
    config,
    digest,
    import_deepspeed,
    net,
    train,
)
from tests.frameworks.selection import by_default
from tests.ranks import Ranks

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install deepspeed")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Processes of their own, since the import concerns all engines of a process."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def through(make: Callable[..., Any], settings: dict[str, Any]) -> Any:
    return make(model=net(), config=copy.deepcopy(settings))[0]


def in_all_ways(stage: int) -> dict[str, Any]:
    deepspeed = import_deepspeed()
    from comm_hooks.frameworks.deepspeed import initialize

    settings = config(stage, TOPK)
    ends = {}
    if not hasattr(deepspeed.DeepSpeedEngine.__init__, "__wrapped__"):
        stock = through(deepspeed.initialize, settings)
        assert "comm_hooks" not in stock.__dict__
        by_hand = through(initialize, settings)
        train(by_hand, 3)
        ends["before"] = digest(by_hand)

    import comm_hooks.frameworks.deepspeed.auto  # noqa: F401

    for name, make in {"auto": deepspeed.initialize, "both": initialize}.items():
        engine = through(make, settings)
        train(engine, 3)
        assert engine.comm_hooks.stats()["steps"] == 3
        ends[name] = digest(engine)
    plain = through(deepspeed.initialize, config(stage))
    assert "comm_hooks" not in plain.__dict__
    return ends


@pytest.mark.parametrize("stage", by_default([1], [0]))
def test_an_import_does_what_initialize_does(ranks: Ranks, stage: int) -> None:
    for ends in ranks.run(in_all_ways, stage):
        assert len(set(ends.values())) == 1


def pipeline() -> float:
    deepspeed = import_deepspeed()
    import comm_hooks.frameworks.deepspeed.auto  # noqa: F401

    deepspeed.init_distributed("gloo")
    layers = [nn.Linear(INPUTS, 32), nn.ReLU(), nn.Linear(32, OUTPUTS)]
    model = deepspeed.pipe.PipelineModule(layers, num_stages=1, loss_fn=nn.functional.cross_entropy)
    engine = deepspeed.initialize(model=model, config=config(1, TOPK, accumulation=2))[0]
    batches = ((torch.randn(BATCH, INPUTS), torch.zeros(BATCH, dtype=torch.long)) for _ in range(9))
    for _ in range(2):
        engine.train_batch(batches)
    return engine.comm_hooks.stats()["compression_ratio"]


def test_a_pipeline(ranks: Ranks) -> None:
    assert min(ranks.run(pipeline)) > 2


def by_trainer(folder: str) -> dict[str, float]:
    import_deepspeed()
    from transformers import Trainer, TrainingArguments

    import comm_hooks.frameworks.deepspeed.auto  # noqa: F401
    from comm_hooks.frameworks.deepspeed import require

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 4 * BATCH

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            generator = torch.Generator().manual_seed(index)
            return {
                "x": torch.randn(INPUTS, generator=generator),
                "labels": torch.tensor(index % 6),
            }

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=config(
            1, TOPK, optimizer={"type": "AdamW", "params": {"lr": 5e-5, "torch_adam": True}}
        ),
        per_device_train_batch_size=BATCH,
        num_train_epochs=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        max_grad_norm=0.0,
        save_steps=2,
    )
    trainer = Trainer(WithLoss(), arguments, train_dataset=Rows())
    trainer.train()
    return require(trainer.model_wrapped).stats()


def test_the_trainer_of_transformers(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    for stats in ranks.run(by_trainer, str(tmp_path)):
        assert stats["steps"] == 4
        assert stats["compression_ratio"] > 2
    assert len(list(tmp_path.glob("checkpoint-2/global_step2/comm_hooks/rank*"))) == 2
