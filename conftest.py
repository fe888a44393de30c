"""What the examples in docstrings find: a process group of one, and a model under DDP."""

import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Modules that cannot be imported without a package which need not be installed.
_OPTIONAL = {
    "accelerate.py": ["accelerate"],
    "lightning.py": ["lightning", "pytorch_lightning"],
    "transformers.py": ["transformers"],
}
collect_ignore = [
    f"comm_hooks/frameworks/{module}"
    for module, packages in _OPTIONAL.items()
    if not any(map(find_spec, packages))
]
if not find_spec("mpi4py"):
    collect_ignore.append("comm_hooks/collectives/mpi.py")
if not find_spec("dp_accounting"):
    collect_ignore.append("comm_hooks/optim/private/accounting/pld.py")
if not find_spec("opacus"):
    collect_ignore += [
        "comm_hooks/optim/private/gradients/opacus.py",
        "benchmarks/micro/per_sample_gradients.py",
    ]
if not find_spec("triton"):
    kernels = Path(__file__).parent / "comm_hooks/kernels/triton"
    collect_ignore += [
        str(module)
        for module in kernels.glob("*.py")
        if module.name not in ("__init__.py", "launching.py")
    ]
# Importing these changes DeepSpeed for the whole process.
collect_ignore.append("comm_hooks/frameworks/deepspeed/auto.py")
collect_ignore.append("tests/frameworks/deepspeed/without_compiler")


# Audits a whole configuration, which takes half a minute.
_SLOW = {"benchmarks.audit.audit.audit_configuration"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave long examples of docstrings to the slow tests."""
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.name in _SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _doctest_world(request: pytest.FixtureRequest) -> Iterator[None]:
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    namespace: dict[str, Any] = request.getfixturevalue("doctest_namespace")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    namespace["model"] = nn.Linear(8, 8)
    namespace["ddp_model"] = DistributedDataParallel(namespace["model"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="world size is 1")
        yield
    dist.destroy_process_group()
