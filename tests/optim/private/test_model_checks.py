from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import register, skip_hook
from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.gradients.model_checks import check_model, replace_batch_norm
from tests.optim.private.clipped_sums import MODELS, make
from tests.ranks import Ranks


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_that_can_be_private(name: str) -> None:
    check_model(make(name))
    check_model(nn.Sequential(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4), nn.LayerNorm(3)))


class Convolutional(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), norm)


@pytest.mark.parametrize(
    ("norm", "advice"),
    [
        (nn.BatchNorm1d(4), "replace_batch_norm"),
        (nn.BatchNorm2d(4, track_running_stats=False), "replace_batch_norm"),
        (nn.BatchNorm3d(4, affine=False), "replace_batch_norm"),
        (nn.SyncBatchNorm(4), "replace_batch_norm"),
        (nn.LazyBatchNorm2d(), "replace_batch_norm"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "track_running_stats=False"),
        (nn.Embedding(9, 4, max_norm=1.0), "Leave max_norm out"),
        (nn.EmbeddingBag(9, 4, max_norm=1.0), "Leave max_norm out"),
    ],
)
def test_modules_that_mix_or_keep_samples_are_named(norm: nn.Module, advice: str) -> None:
    with pytest.raises(PrivacyError, match=rf"stem\.1.*{advice}"):
        check_model(Convolutional(norm))


def test_batch_norm_becomes_group_norm() -> None:
    shared = nn.BatchNorm2d(48, eps=1e-3)
    model = nn.Sequential(
        nn.Conv2d(3, 48, 1),
        shared,
        nn.Sequential(nn.BatchNorm2d(48, affine=False), shared),
        nn.BatchNorm2d(7).double().eval(),
    )
    nn.init.uniform_(shared.weight)
    shared.bias.requires_grad_(False)
    kept = shared.weight
    assert replace_batch_norm(model) is model
    check_model(model)
    assert all(isinstance(m, nn.GroupNorm) for m in (model[1], model[2][0], model[3]))
    assert model[1] is model[2][1]
    assert (model[1].num_groups, model[1].num_channels, model[1].eps) == (16, 48, 1e-3)
    assert model[1].weight is kept
    assert not model[1].bias.requires_grad
    assert model[2][0].weight is None
    assert (model[3].num_groups, model[3].training) == (1, False)
    assert model[3].weight.dtype == torch.float64
    assert replace_batch_norm(nn.BatchNorm1d(8), groups=2).num_groups == 2
    with pytest.raises(ValueError, match="groups must be positive"):
        replace_batch_norm(model, groups=0)


def test_parameters_that_cannot_be_trained() -> None:
    model = make("mlp")
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match="complex parameters are not supported: phase"):
        check_model(model)
    model.phase.requires_grad_(False)
    check_model(model)


def refusals() -> list[str]:
    """Return what is said of each model with a hook, '' if nothing."""
    ddp: Callable[[], Any] = lambda: DistributedDataParallel(make("mlp"))  # noqa: E731
    models: list[Any] = []
    for _ in range(4):
        models.append(ddp())
    register(models[1], "topk")
    models[2].register_comm_hook(None, skip_hook)
    models[3]._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    inside = nn.Sequential(ddp())
    register(inside[0], "sign")
    compiled = ddp()
    register(compiled, "sign")
    models += [inside, torch.compile(compiled)]
    said = []
    for model in models:
        try:
            check_model(model)
        except PrivacyError as error:
            said.append(str(error))
        else:
            said.append("")
    return said


def test_hooks_that_would_see_raw_gradients_are_refused(ranks_of: Callable[[int], Ranks]) -> None:
    for said in ranks_of(2).run(refusals):
        names = ["", "compression_hook", "", "FP16_COMPRESS", *["compression_hook"] * 2]
        assert len(said) == len(names)
        for message, name in zip(said, names, strict=True):
            assert (name in message and "raw gradient" in message) if name else not message


def test_an_engine_of_deepspeed_is_refused() -> None:
    deepspeed = pytest.importorskip("deepspeed")
    engine = deepspeed.DeepSpeedEngine.__new__(deepspeed.DeepSpeedEngine)
    with pytest.raises(ValueError, match="train the engine's module without DeepSpeed"):
        check_model(engine)
