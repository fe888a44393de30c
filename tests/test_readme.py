"""The README's Python examples run."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import CompressionState, TopK

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda code: code.splitlines()[0])
@pytest.mark.filterwarnings("ignore:world size is 1")
def test_example_runs(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(64, 64)
        names: dict[str, Any] = {
            "torch": torch,
            "DistributedDataParallel": DistributedDataParallel,
            "model": model,
            "ddp_model": DistributedDataParallel(model),
            "state": CompressionState(TopK()),
            "rank": 0,
        }
        exec(example, names)
        names["ddp_model"](torch.ones(2, 64)).sum().backward()
        if "optimizer" in names:
            names["optimizer"].step()
    finally:
        dist.destroy_process_group()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4
