import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("opacus", reason='needs Opacus: pip install "comm-hooks[dp]"')

from opacus import GradSampleModule
from opacus.grad_sample import (
    GradSampleHooks,
    GradSampleModuleExpandedWeights,
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

from comm_hooks.optim.private.clipped_sum import ClippedSum, PublicTransform
from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.opacus import OpacusGhostGradients, OpacusGradients, wrap
from comm_hooks.optim.private.per_sample import PerSampleGradients
from tests.optim.private.clipped_sums import Batch, draw, loss_function, make, norm

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:the gradients of"),
    pytest.mark.filterwarnings("ignore:In CPU autocast"),
]


def ours(model: nn.Module, batch: Batch, transform: PublicTransform | None = None) -> ClippedSum:
    gradients = PerSampleGradients(copy.deepcopy(model), loss_function, 0.4)
    gradients.transform = transform
    gradients.backward(batch)
    return gradients.take()


def agree(a: ClippedSum, b: ClippedSum) -> None:
    assert (a.samples, a.not_finite) == (b.samples, b.not_finite)
    for s, t in zip(a.tensors, b.tensors, strict=True):
        assert s.dtype == t.dtype == torch.float32
        torch.testing.assert_close(s, t, rtol=1e-6, atol=1e-6)


def losses(module: nn.Module, batch: Batch, reduction: str = "none") -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(module(inputs), labels, reduction=reduction)


@pytest.mark.parametrize("name", ["mlp", "cnn", "tied"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("force_functorch", [False, True])
@pytest.mark.parametrize("transformed", [False, True])
def test_hooks_give_what_ours_gives(
    name: str, reduction: str, force_functorch: bool, transformed: bool
) -> None:
    model, batch = make(name), draw(9)
    module = GradSampleModule(
        copy.deepcopy(model), loss_reduction=reduction, force_functorch=force_functorch
    )
    transform = None
    if transformed:
        shapes = [p.shape for p in model.parameters()]
        transform = PublicTransform(
            [torch.rand(s) for s in shapes], [torch.rand(s) / 9 for s in shapes]
        )
    gradients = OpacusGradients(module, 0.4)
    gradients.transform = transform
    losses(module, batch, reduction).backward()
    gradients.accumulate()
    assert all(p.grad is None and p.grad_sample is None for p in module.parameters())
    agree(gradients.take(), ours(model, batch, transform))
    assert norm(gradients.take().tensors) == 0


def test_what_opacus_itself_sums_is_the_same() -> None:
    model, batch = make("cnn"), draw(9)
    module = GradSampleModule(copy.deepcopy(model))
    losses(module, batch, "mean").backward()
    samples = [p.grad_sample for p in module.parameters()]
    norms = torch.stack([s.flatten(1).norm(dim=1) for s in samples]).norm(dim=0)
    # We leave a margin for rounding.
    factors = (0.4 * (1 - 2**-16) / (norms + 1e-6)).clamp(max=1)
    expected = [torch.einsum("i,i...", factors, s) for s in samples]
    agree(ClippedSum(expected, 9), ours(model, batch))


def test_several_backward_passes() -> None:
    model, (inputs, labels) = make("tied"), draw(9)
    module = GradSampleModule(copy.deepcopy(model))
    gradients = OpacusGradients(module, 0.4)
    for part in (slice(0, 4), slice(4, 4), slice(4, 9)):
        losses(module, (inputs[part], labels[part]), "mean").backward()
        assert gradients.accumulate() == len(labels[part])
    agree(gradients.take(), ours(model, (inputs, labels)))
    assert gradients.take().samples == 0


def test_backward_passes_that_may_be_of_the_same_samples_are_refused() -> None:
    model, batch = make("tied"), draw(9)
    module = GradSampleModule(copy.deepcopy(model))
    gradients = OpacusGradients(module, 0.4)
    for _ in range(2):
        losses(module, batch, "mean").backward()
    with pytest.raises(PrivacyError, match=r"loss\.backward\(\) was called 2 times"):
        gradients.take()
    losses(module, batch, "mean").backward()
    agree(gradients.take(), ours(model, batch))


def test_hooks_on_a_model_that_is_not_wrapped() -> None:
    model, batch = make("mlp"), draw(5)
    expected = ours(model, batch)
    gradients = OpacusGradients(GradSampleHooks(model), 0.4)
    losses(model, batch, "mean").backward()
    agree(gradients.take(), expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_hooks_leave_out_samples_that_are_not_finite(poison: float) -> None:
    model, (inputs, labels) = make("mlp"), draw(6)
    weights = torch.ones(6)
    weights[2] = poison
    module = GradSampleModule(copy.deepcopy(model))
    gradients = OpacusGradients(module, 0.4)
    (losses(module, (inputs, labels)) * weights).mean().backward()
    expected = ours(model, (inputs[[0, 1, 3, 4, 5]], labels[[0, 1, 3, 4, 5]]))
    agree(gradients.take(), ClippedSum(expected.tensors, 5, 1))


def test_accumulating_nothing_or_too_late() -> None:
    module = GradSampleModule(make("mlp"))
    gradients = OpacusGradients(module, 0.4)
    with pytest.raises(ValueError, match=r"after loss.backward\(\), before zero_grad"):
        gradients.accumulate()
    losses(module, draw(3), "mean").backward()
    module.zero_grad()
    with pytest.raises(ValueError, match=r"after loss.backward\(\), before zero_grad"):
        gradients.accumulate()
    assert gradients.take().samples == 0


@pytest.mark.parametrize("ghost", [False, True])
def test_unused_parameters_are_named(ghost: bool) -> None:
    model = nn.ModuleDict({"used": nn.Linear(12, 10), "spare": nn.Linear(12, 10)})
    kind = GradSampleModuleFastGradientClipping if ghost else GradSampleModule
    module: Any = kind(model)
    used, spare = model["used"], model["spare"]
    if ghost:
        gradients: Any = OpacusGhostGradients(module, 0.4)
        # What the spare layer leaves behind in one pass must not count in the next.
        gradients.backward(losses(lambda x: used(x) + spare(x), draw(3)))
        gradients.take()
        with pytest.raises(ValueError, match=r"nothing but noise.*: spare\.weight, spare\.bias$"):
            gradients.backward(losses(used, draw(3)))
    else:
        gradients = OpacusGradients(module, 0.4)
        losses(used, draw(3), "mean").backward()
        with pytest.raises(ValueError, match=r"nothing but noise.*: spare\.weight, spare\.bias$"):
            gradients.take()


def test_layers_that_disagree_on_what_a_sample_is() -> None:
    class Flattens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(12, 12), nn.Linear(4, 10)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            parts = self.second(self.first(inputs).reshape(-1, 4))
            return parts.reshape(len(inputs), 3, 10).mean(1)

    module = GradSampleModule(Flattens())
    gradients = OpacusGradients(module, 0.4)
    losses(module, draw(3), "mean").backward()
    with pytest.raises(
        ValueError, match=r"different numbers of samples.*first.weight: \[3\].*\[9\]"
    ):
        gradients.accumulate()


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ghost_clipping_gives_what_ours_gives(name: str, reduction: str) -> None:
    model, (inputs, labels) = make(name), draw(9)
    module = GradSampleModuleFastGradientClipping(
        copy.deepcopy(model), loss_reduction=reduction, max_grad_norm=77.0
    )
    gradients = OpacusGhostGradients(module, 0.4)
    for part in (slice(0, 4), slice(4, 4), slice(4, 9)):
        batch = inputs[part], labels[part]
        loss = gradients.backward(losses(module, batch))
        if len(batch[0]):
            torch.testing.assert_close(loss, loss_function(model, batch).detach())
        else:
            assert loss.isnan()
    assert all(p.grad is None for p in module.parameters())
    agree(gradients.take(), ours(model, (inputs, labels)))


def test_ghost_clipping_takes_the_loss_of_opacus() -> None:
    model, (inputs, labels) = make("mlp"), draw(5)
    module = GradSampleModuleFastGradientClipping(copy.deepcopy(model))
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=5,
    )
    criterion = DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss())
    gradients = OpacusGhostGradients(module, 0.4)
    gradients.backward(criterion(module(inputs), labels))
    agree(gradients.take(), ours(model, (inputs, labels)))


def test_ghost_clipping_leaves_out_a_sample_of_too_large_a_norm() -> None:
    model, (inputs, labels) = make("mlp"), draw(6)
    weights = torch.ones(6)
    weights[2] = 1e30
    module = GradSampleModuleFastGradientClipping(copy.deepcopy(model))
    gradients = OpacusGhostGradients(module, 0.4)
    gradients.backward(losses(module, (inputs, labels)) * weights)
    expected = ours(model, (inputs[[0, 1, 3, 4, 5]], labels[[0, 1, 3, 4, 5]]))
    agree(gradients.take(), ClippedSum(expected.tensors, 5, 1))


def test_ghost_clipping_stops_where_it_cannot_leave_out_a_sample() -> None:
    model, (inputs, labels) = make("mlp"), draw(6)
    module = GradSampleModuleFastGradientClipping(copy.deepcopy(model))
    gradients = OpacusGhostGradients(module, 0.4)
    bad = inputs.clone()
    bad[2] = float("inf")
    with pytest.raises(RuntimeError, match="ghost clipping cannot leave it out"):
        gradients.backward(losses(module, (bad, labels)))
    # It can go on afterwards.
    gradients.backward(losses(module, (inputs, labels)))
    agree(gradients.take(), ours(model, (inputs, labels)))


def test_ghost_clipping_refuses_what_it_cannot_do() -> None:
    module = GradSampleModuleFastGradientClipping(make("mlp"))
    gradients = OpacusGhostGradients(module, 0.4)
    with pytest.raises(ValueError, match=r"one number per sample, shape \(B,\), got \(\)"):
        gradients.backward(losses(module, draw(3), "mean"))
    module = GradSampleModuleFastGradientClipping(make("mlp"))
    gradients = OpacusGhostGradients(module, 0.4)
    gradients.transform = PublicTransform([torch.ones(p.shape) for p in module.parameters()])
    with pytest.raises(ValueError, match="cannot be transformed before it is clipped"):
        gradients.backward(losses(module, draw(3)))


@pytest.mark.parametrize("difference", [0.0, 1e-5, 1e-4, 1e-3])
def test_sequences_whose_gradients_nearly_cancel_are_clipped(difference: float) -> None:
    # The Gram matrices of ghost clipping give a norm of 0 for 1e-4, and a clipped one of 690 C.
    torch.manual_seed(0)
    model = nn.Linear(16, 4, bias=False)
    first = torch.randn(1, 1, 16) * 30
    inputs = torch.cat([first, first * (1 + difference)], 1)

    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return (model(inputs).sum(-1) * torch.tensor([300.0, -300.0])).sum(-1).mean()

    module = GradSampleModule(copy.deepcopy(model))
    by_hooks = OpacusGradients(module, 0.01)
    loss(module, inputs).backward()
    by_vmap = PerSampleGradients(model, loss, 0.01)
    by_vmap.backward(inputs)
    for gradients in (by_hooks, by_vmap):
        assert norm(gradients.take().tensors) <= 0.01


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Linear(16, 4), torch.randn(3, 5, 16)),
        (nn.Embedding(9, 4), torch.randint(9, (3, 5))),
        (nn.Sequential(nn.Unflatten(1, (4, 4)), nn.Linear(4, 4)), torch.randn(3, 16)),
    ],
    ids=["linear", "embedding", "inside"],
)
def test_ghost_clipping_refuses_sequences(model: nn.Module, inputs: torch.Tensor) -> None:
    module = GradSampleModuleFastGradientClipping(model)
    OpacusGhostGradients(module, 0.01)
    with torch.no_grad():
        module(inputs)  # an evaluation releases nothing
    with pytest.raises(PrivacyError, match=r'ghost clipping of sequences.*"hooks" or "functorch"'):
        module(inputs)


class Normalizes(nn.Module):
    """A batch normalization that nobody knows by its class."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs - inputs.mean(0)) / (inputs.var(0, correction=0) + 1.0)


def contrastive(outputs: torch.Tensor) -> torch.Tensor:
    return -torch.log_softmax(outputs @ outputs.T, dim=1).diagonal()


def squared(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().sum(1)


@pytest.mark.parametrize(
    ("layer", "loss"), [(Normalizes(), squared), (nn.ReLU(), contrastive)], ids=["model", "loss"]
)
def test_ghost_clipping_refuses_samples_that_depend_on_each_other(
    layer: nn.Module, loss: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = nn.Sequential(nn.Linear(16, 8), layer, nn.Linear(8, 4))
    module = GradSampleModuleFastGradientClipping(model)
    gradients = OpacusGhostGradients(module, 0.4)
    gradients.backward(squared(module(torch.randn(1, 16))))  # of one sample nobody can tell
    gradients.take()
    with pytest.raises(PrivacyError, match="the loss of a sample depends on other samples"):
        gradients.backward(loss(module(torch.randn(5, 16))))
    assert gradients.take().samples == 0


def test_modules_of_the_wrong_kind() -> None:
    with pytest.raises(PrivacyError, match='"ew" adds up the samples of several backward passes'):
        OpacusGradients(GradSampleModuleExpandedWeights(make("mlp")), 1.0)
    with pytest.raises(ValueError, match="must be Opacus's GradSampleModule, got Sequential"):
        OpacusGradients(make("mlp"), 1.0)
    with pytest.raises(ValueError, match="OpacusGhostGradients is for the other mode"):
        OpacusGradients(GradSampleModuleFastGradientClipping(make("mlp")), 1.0)
    with pytest.raises(ValueError, match="OpacusGradients is for the other mode"):
        OpacusGhostGradients(GradSampleModule(make("mlp")), 1.0)


@pytest.mark.parametrize("ghost", [False, True])
def test_wrapping(ghost: bool) -> None:
    model, batch = make("mlp"), draw(5)
    expected = ours(model, batch)
    module, gradients = wrap(model, 0.4, ghost=ghost)
    if ghost:
        gradients.backward(losses(module, batch))  # type: ignore[attr-defined]
    else:
        losses(module, batch, "mean").backward()
    agree(gradients.take(), expected)
    assert wrap(module, 0.4, ghost=ghost)[0] is module
