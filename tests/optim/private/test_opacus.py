import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("opacus", reason='needs Opacus: pip install "comm-hooks[dp]"')

from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleExpandedWeights as ExpandedModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping as GhostModule

from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.gradients.clipping import ClippedSum, PublicTransform
from comm_hooks.optim.private.gradients.opacus import OpacusGradients
from comm_hooks.optim.private.gradients.per_sample import PerSampleGradients
from tests.optim.private.clipped_sums import Batch, distance, draw, make, norm, sample_losses
from tests.optim.private.dependence import DEPENDENT
from tests.optim.scenarios import rarely
from tests.ranks import Ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:the gradients of"),
    pytest.mark.filterwarnings("ignore:In CPU autocast"),
]
every = pytest.mark.parametrize("kind", [PerSampleGradients, OpacusGradients])


def ours(
    model: nn.Module,
    batch: Any,
    transform: PublicTransform | None = None,
    loss: Any = sample_losses,
    max_grad_norm: float = 0.4,
) -> ClippedSum:
    gradients = PerSampleGradients(copy.deepcopy(model), loss, max_grad_norm)
    gradients.transform = transform
    gradients.backward(batch)
    return gradients.take()


def agree(a: ClippedSum, b: ClippedSum) -> None:
    assert (a.samples, a.not_finite) == (b.samples, b.not_finite)
    for s, t in zip(a.tensors, b.tensors, strict=True):
        assert s.dtype == t.dtype == torch.float32
        torch.testing.assert_close(s, t, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "transformed"), [("mlp", False), ("cnn", True), ("tied", True)])
def test_it_gives_what_ours_gives(name: str, transformed: bool) -> None:
    model, batch = make(name), draw(9)
    transform = None
    if transformed:
        shapes = [p.shape for p in model.parameters()]
        scales = [torch.rand(s) for s in shapes]
        transform = PublicTransform(scales, [torch.rand(s) / 9 for s in shapes])
    expected = ours(model, batch, transform)
    gradients = OpacusGradients(model, sample_losses, 0.4)
    gradients.transform = transform
    for _ in range(2):
        gradients.backward(batch)
        assert all(p.grad is None and p.grad_sample is None for p in model.parameters())
        agree(gradients.take(), expected)
    assert norm(gradients.take().tensors) == 0


def weighted(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels, weights = batch
    return sample_losses(model, (inputs, labels)) * weights


@every
@pytest.mark.parametrize("micro_batch_size", [None, 1, 4])
def test_batches_and_parts_of_them(kind: Any, micro_batch_size: int | None) -> None:
    model, (inputs, labels) = make("cnn"), draw(9)
    expected = ours(model, (inputs, labels))
    gradients = kind(model, sample_losses, 0.4, micro_batch_size=micro_batch_size)
    for part in (slice(0, 4), slice(4, 4), slice(4, 9)):
        batch = inputs[part], labels[part]
        loss = gradients.backward(batch)
        if len(batch[0]):
            torch.testing.assert_close(loss, sample_losses(model, batch).detach().mean())
        else:
            assert loss.isnan()
    agree(gradients.take(), expected)
    assert gradients.take().samples == 0


def test_a_model_may_be_trained_again() -> None:
    model, batch = make("mlp"), draw(5)
    expected = ours(model, batch)
    for _ in range(2):
        gradients = OpacusGradients(model, sample_losses, 0.4)
        assert sum(len(layer._forward_hooks) for layer in model.modules()) == 2
        gradients.backward(batch)
        agree(gradients.take(), expected)
    # As a part of another model, and in the wrappers of Opacus, whatever their mode.
    wrapped = [nn.Sequential(model), GradSampleModule(make("mlp"), loss_reduction="mean")]
    wrapped += [wrap(make("mlp")) for wrap in (GhostModule, ExpandedModule)]
    for module in wrapped:
        gradients = OpacusGradients(module, sample_losses, 0.4)
        gradients.backward(batch)
        agree(gradients.take(), expected)


@every
@pytest.mark.parametrize("poison", [float("nan"), 1e30])
@pytest.mark.parametrize("first", [False, True])
def test_samples_that_are_not_finite_are_left_out(kind: Any, poison: float, first: bool) -> None:
    model, (inputs, labels) = make("mlp"), draw(6)
    expected = ours(model, (inputs[[0, 1, 3, 4, 5]], labels[[0, 1, 3, 4, 5]]))
    weights = torch.ones(6)
    gradients = kind(model, weighted, 0.4)
    if not first:
        gradients.backward((inputs, labels, weights))
        gradients.take()
    weights[2] = poison
    gradients.backward((inputs, labels, weights))
    agree(gradients.take(), ClippedSum(expected.tensors, 5, 1))
    # Without a finite sample it goes on, too: an error would tell who was in the batch.
    gradients.backward((inputs * float("nan"), labels, torch.ones(6)))
    nothing = gradients.take()
    assert (nothing.samples, nothing.not_finite) == (0, 6)
    assert not any(tensor.any() for tensor in nothing.tensors)


def test_unused_parameters_are_named() -> None:
    model = nn.ModuleDict({"used": nn.Linear(12, 10), "spare": nn.Linear(12, 10)})
    uses_both = True

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        outputs = model["used"](batch[0])
        outputs = outputs + model["spare"](batch[0]) if uses_both else outputs
        return F.cross_entropy(outputs, batch[1], reduction="none")

    gradients = OpacusGradients(model, loss, 0.4)
    # What the spare layer leaves behind in one pass must not count in the next.
    gradients.backward(draw(3))
    gradients.take()
    uses_both = False
    with pytest.raises(ValueError, match=r"pure noise.*: spare\.weight, spare\.bias$"):
        gradients.backward(draw(3))
    with pytest.raises(ValueError, match=r"pure noise.*: weight, bias$"):
        OpacusGradients(nn.Linear(12, 10), lambda m, b: sample_losses(m, b).detach(), 0.4).backward(
            draw(3)
        )


class Flattens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(4, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        parts = self.second(self.first(inputs).reshape(-1, 4))
        return parts.reshape(len(inputs), 3, 10).mean(1)


def test_layers_that_disagree_on_what_a_sample_is() -> None:
    gradients = OpacusGradients(Flattens(), sample_losses, 0.4)
    with pytest.raises(ValueError, match=r"than the batch has samples, 3, .*second.weight: 9"):
        gradients.backward(draw(3))


def twice(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A siamese net: the same weights for both halves of what a sample has."""
    inputs, labels = batch
    one, other = (model(x) for x in (inputs, inputs.flip(1) + 1))
    return (one - other).square().sum(1) * (1 + labels)


def test_a_model_may_be_called_twice_on_the_same_samples() -> None:
    for name in ("mlp", "cnn", "tied"):
        model, batch = make(name), draw(9)
        expected = ours(model, batch, loss=twice)
        gradients = OpacusGradients(model, twice, 0.4)
        gradients.backward(batch)
        agree(gradients.take(), expected)


def in_another_order(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Every loss is of its own sample, but the rows of two calls are not the same samples."""
    inputs, _ = batch
    one = model(inputs)
    other = model(inputs.flip(0) + 1).flip(0)
    return (one - other).square().sum(1)


def sorted_by_length(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, labels = batch
    order = inputs.norm(dim=1).argsort()
    losses = F.cross_entropy(model(inputs[order]), labels[order], reduction="none")
    return losses[order.argsort()]


def stacked(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, _ = batch
    return model(torch.cat([inputs, inputs + 1])).square().sum(1).view(2, -1).sum(0)


def unused_call(model: nn.Module, batch: Batch) -> torch.Tensor:
    losses = sample_losses(model, batch)
    model(batch[0] + 1)
    return losses


def test_calls_whose_rows_are_not_the_samples_are_refused() -> None:
    """Each row would be clipped, and a sample be in two of them."""
    for loss in (in_another_order, sorted_by_length):
        with pytest.raises(PrivacyError, match="so it would be clipped wrongly"):
            OpacusGradients(make("mlp"), loss, 0.4).backward(draw(9))
    with pytest.raises(ValueError, match=r"than the batch has samples, 9.*: 18"):
        OpacusGradients(make("mlp"), stacked, 0.4).backward(draw(9))
    with pytest.raises(ValueError, match=r"was called with gradients that the loss does not use"):
        OpacusGradients(make("mlp"), unused_call, 0.4).backward(draw(9))


def test_calls_without_gradients_and_passes_elsewhere_do_no_harm() -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            model(batch[0] + 1)
        return sample_losses(model, batch)

    model, batch = make("mlp"), draw(5)
    expected = ours(model, batch)
    gradients = OpacusGradients(model, loss, 0.4)
    for rows in (3, 5, 7):
        model(torch.randn(rows, 12))
        with torch.no_grad():
            gradients.backward(batch)
        agree(gradients.take(), expected)
        sample_losses(model, draw(rows)).sum().backward()
        assert all(p.grad_sample is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, *rarely(torch.float16, torch.float64)])
def test_other_dtypes_and_autocast(dtype: torch.dtype) -> None:
    def under_autocast(model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            return sample_losses(model, batch)

    model, batch = make("mlp"), draw(9)
    expected = ours(model, batch)
    losses = [(model, under_autocast), (make("mlp", 0, dtype), sample_losses)]
    for trained, loss in losses[dtype is torch.float64 :]:
        inputs = batch[0].to(dtype if trained is not model else torch.float32)
        gradients = OpacusGradients(trained, loss, 0.4)
        gradients.backward((inputs, batch[1]))
        found = gradients.take()
        assert distance(found, expected) < 0.05 * norm(found.tensors)


@every
@pytest.mark.parametrize("cast", [True, *rarely(False)])
def test_one_sample_more_changes_a_sum_by_at_most_c(kind: Any, cast: bool) -> None:
    """Also where all gradients point the same way, and the sum is as large as it can be."""

    def losses(model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            outputs = model(batch[0])
        return nn.functional.cross_entropy(outputs.float(), batch[1], reduction="none")

    torch.manual_seed(0)
    model, size = nn.Linear(64, 4), 1024
    inputs = torch.randn(64) + 0.3 * torch.randn(size + 4, 64)
    labels = torch.zeros(size + 4, dtype=torch.long)
    gradients = kind(model, losses, 1.0)

    def total(rows: list[int]) -> torch.Tensor:
        gradients.backward((inputs[rows], labels[rows]))
        return torch.cat([t.double().flatten() for t in gradients.take().tensors])

    without = total([*range(size)])
    assert without.norm() > size / 2
    for extra in range(size, size + 4):
        assert (total([*range(size), extra]) - without).norm() < 1 + 1e-3


@every
def test_it_can_go_on_after_a_batch_that_failed(kind: Any) -> None:
    fails = False

    class Fails(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if fails:
                raise MemoryError
            return super().forward(inputs)

    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(12, 12), Fails(12, 10)), draw(5)
    expected = ours(model, batch)
    gradients = kind(model, sample_losses, 0.4)
    for fails in (False, True, False):
        if fails:
            with pytest.raises(MemoryError):
                gradients.backward(batch)
        else:
            gradients.backward(batch)
            agree(gradients.take(), expected)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_scalar_is_refused(rows: int) -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(ValueError, match=rf'shape \({rows},\), got \(\): use reduction="none"'):
        OpacusGradients(make("mlp"), loss, 0.4).backward(draw(rows))
    with pytest.raises(ValueError, match=r"got \(3, 10\)"):
        OpacusGradients(make("mlp"), lambda model, batch: model(batch[0]), 0.4).backward(draw(3))


@pytest.mark.parametrize("name", ["batch norm in training", "contrastive"])
def test_samples_that_depend_on_each_other_are_refused(name: str) -> None:
    torch.manual_seed(0)
    make_model, loss = DEPENDENT[name]
    inputs, labels = draw(9)
    labels = labels % 5
    gradients = OpacusGradients(make_model(), loss, 0.4)
    for rows in range(2):  # of one sample nobody can tell
        gradients.backward((inputs[:rows], labels[:rows]))
    gradients.take()
    with pytest.raises(
        PrivacyError, match=r"depends on other samples|alone, and of .* in its batch"
    ):
        gradients.backward((inputs, labels))
    assert gradients.take().samples == 0


class Keeps(nn.Module):
    """Keeps what it has seen, each time another way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 10)
        self.way = way
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("size", torch.ones(12))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        seen = inputs.detach().mean(0)
        if self.way == "written":
            self.mean.mul_(0.9).add_(seen)
        elif self.way == "replaced":
            self.mean = 0.9 * self.mean + seen
        elif self.way == "new":
            self.register_buffer("last", seen)
        elif self.way == "data":
            self.mean.data.add_(seen)
        elif self.way == "batch norm":
            F.batch_norm(inputs, self.mean, self.size, training=True)
        return self.layer(inputs)


@pytest.mark.parametrize(
    ("way", "late"),
    [*((way, False) for way in ("replaced", "new", "data", "batch norm")), ("written", True)],
)
def test_a_buffer_that_keeps_what_it_saw_is_refused(way: str, late: bool) -> None:
    model = nn.Sequential(nn.Identity(), inner := Keeps("none" if late else way))
    batch = draw(5)
    gradients = OpacusGradients(model, sample_losses, 0.4)
    if late:
        gradients.backward(batch)
        gradients.take()
        inner.way = way
    mean = inner.mean
    with pytest.raises(PrivacyError, match=r"writes to the model.*without noise: 1\."):
        gradients.backward(batch)
    assert inner.mean is mean
    assert sorted(inner._buffers) == ["mean", "size"]
    assert mean.tolist() == [0.0] * 12
    assert inner.size.tolist() == [1.0] * 12
    assert gradients.take().samples == 0
    inner.way = "none"
    gradients.backward(batch)
    assert gradients.take().samples == 5
    rescaled = nn.Sequential(nn.Embedding(20, 8, max_norm=0.1), nn.Linear(8, 5))
    with pytest.raises(PrivacyError, match=r"writes to the model.*: 0\.weight"):
        OpacusGradients(rescaled, lambda m, b: m(b).square().sum(1), 0.4).backward(torch.arange(4))


def under_ddp() -> tuple[bool, int, float]:
    """Return whether p.grad is None, how often DDP asked its hook, and how far off the sum is."""
    calls: list[int] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(1)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = make("mlp")
    batch = draw(4 + dist.get_rank(), dist.get_rank())
    expected = ours(model, batch)
    ddp_model = DistributedDataParallel(model)
    ddp_model.register_comm_hook(None, hook)
    gradients = OpacusGradients(ddp_model, sample_losses, 0.4)
    gradients.backward(batch)
    partly = nn.Sequential(DistributedDataParallel(nn.Linear(12, 4)), nn.Linear(4, 10))
    with pytest.raises(ValueError, match="wrap the whole model"):
        OpacusGradients(partly, sample_losses, 0.4)
    is_none = all(p.grad is None for p in model.parameters())
    return is_none, len(calls), distance(gradients.take(), expected)


def test_ddp_averages_nothing(ranks_of: Callable[[int], Ranks]) -> None:
    for is_none, calls, off in ranks_of(2).run(under_ddp):
        assert is_none
        assert calls == 0
        assert off < 1e-6


@pytest.mark.parametrize(
    ("layer", "instead"),
    [
        (nn.LSTM(4, 4), r"opacus\.layers\.DPLSTM"),
        (nn.GRU(4, 4), r"opacus\.layers\.DPGRU$"),
        (nn.TransformerEncoderLayer(4, 2), r"opacus\.layers\.DPMultiheadAttention"),
        (nn.EmbeddingBag(4, 2), 'grad_sample_mode="functorch"$'),
    ],
    ids=["LSTM", "GRU", "attention", "bag"],
)
def test_layers_that_hooks_cannot_see_at_work_are_named(layer: nn.Module, instead: str) -> None:
    with pytest.raises(ValueError, match=f"use {instead}"):
        OpacusGradients(nn.Sequential(layer), lambda model, batch: model(batch), 1.0)
