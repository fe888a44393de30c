import re
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.gradients.clipping import ClippedSum, PublicTransform, sample_norms
from comm_hooks.optim.private.gradients.per_sample import PerSampleGradients
from tests.optim.private.clipped_sums import (
    MODELS,
    Batch,
    clipped_sum,
    distance,
    draw,
    loss_function,
    make,
    norm,
    sample_gradients,
    sample_losses,
)


def taken(model: nn.Module, batch: Batch, max_grad_norm: float = 1.0, **options: Any) -> ClippedSum:
    gradients = PerSampleGradients(model, loss_function, max_grad_norm, **options)
    gradients.backward(batch)
    return gradients.take()


def public(model: nn.Module, *, shift: bool, seed: int = 5) -> PublicTransform:
    generator = torch.Generator().manual_seed(seed)
    shapes = [p.shape for p in model.parameters() if p.requires_grad]
    scale = [torch.rand(shape, generator=generator) * 3 for shape in shapes]
    moved = [torch.randn(shape, generator=generator) / 10 for shape in shapes]
    return PublicTransform(scale, moved if shift else None)


@given(
    name=st.sampled_from(sorted(MODELS)),
    samples=st.integers(1, 9),
    micro_batch_size=st.none() | st.integers(1, 10),
    max_grad_norm=st.sampled_from([1e-3, 0.5, 2.0, 100.0]),
    transform=st.sampled_from(["none", "scale", "scale and shift"]),
)
def test_sum_is_that_of_a_loop_over_samples(
    name: str,
    samples: int,
    micro_batch_size: int | None,
    max_grad_norm: float,
    transform: str,
) -> None:
    model, batch = make(name, samples), draw(samples, samples)
    gradients = PerSampleGradients(
        model, loss_function, max_grad_norm, micro_batch_size=micro_batch_size
    )
    scale = shift = None
    if transform != "none":
        gradients.transform = public(model, shift="shift" in transform)
        scale = [t.double().numpy() for t in gradients.transform.scale]
        shift = [t.double().numpy() for t in gradients.transform.shift or ()] or None
    loss = gradients.backward(batch)
    result = gradients.take()
    expected = clipped_sum(sample_gradients(model, batch), max_grad_norm, scale, shift)
    assert (result.samples, result.not_finite) == (samples, 0)
    torch.testing.assert_close(loss, loss_function(model, batch).detach())
    size = np.sqrt(sum(np.square(e).sum() for e in expected))
    for tensor, value in zip(result.tensors, expected, strict=True):
        assert tensor.dtype == torch.float32
        np.testing.assert_allclose(tensor.numpy(), value, rtol=3e-5, atol=2e-6 * size)
    assert all(p.grad is None for p in model.parameters())


POISON = [1.0, 0.0, 1e-30, 1e4, 1e18, 1e30, float("inf"), float("nan")]


@given(
    name=st.sampled_from(["mlp", "cnn"]),
    poison=st.sampled_from(POISON),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    transform=st.booleans(),
    max_grad_norm=st.sampled_from([1e-6, 0.3, 50.0]),
    seed=st.integers(0, 5),
)
@pytest.mark.filterwarnings("ignore:the gradients of")
def test_one_sample_changes_the_sum_by_at_most_the_bound(
    name: str, poison: float, dtype: torch.dtype, transform: bool, max_grad_norm: float, seed: int
) -> None:
    model, (inputs, labels) = make(name, seed, dtype), draw(7, seed, dtype)
    inputs[3] *= poison

    def summed(*samples: int) -> ClippedSum:
        gradients = PerSampleGradients(model, loss_function, max_grad_norm)
        gradients.transform = public(model, shift=True) if transform else None
        gradients.backward((inputs[list(samples)], labels[list(samples)]))
        return gradients.take()

    # Alone there is no rounding of a sum: the bound holds as it stands.
    assert norm(summed(3).tensors) <= max_grad_norm
    with_it, without = summed(*range(7)), summed(0, 1, 2, 4, 5, 6)
    assert distance(with_it, without) <= max_grad_norm * (1 + 49 * 2.0**-24)
    assert with_it.samples + with_it.not_finite == 7
    assert all(t.dtype == torch.float32 and t.isfinite().all() for t in with_it.tensors)


@pytest.mark.parametrize("value", [0.1, 1e15])
def test_norm_of_many_equal_elements_is_exact(value: float) -> None:
    # torch.linalg.vector_norm in float32 is 0.9 % off here.
    many = torch.full((1, 1 << 12, 1 << 12), value)
    expected = float(many[0, 0, 0].double()) * 2.0**12
    assert sample_norms([many]).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 700])
def test_norm_counts_every_element_of_every_parameter(rows: int) -> None:
    gradients = [torch.rand(4, rows, 3), torch.rand(4), torch.rand(4, 0)]
    expected = (gradients[0].double().square().sum((1, 2)) + gradients[1].double().square()).sqrt()
    torch.testing.assert_close(sample_norms(gradients), expected, rtol=1e-6, atol=0)


def test_unused_parameters_are_named_at_the_first_sample() -> None:
    model = make("mlp")
    model.forgotten = nn.Linear(2, 3)
    model.frozen = nn.Linear(2, 3).requires_grad_(False)
    gradients = PerSampleGradients(model, lambda m, b: loss_function(m[:3], b), 1.0)
    inputs, labels = draw(3)
    gradients.backward((inputs[:0], labels[:0]))
    with pytest.raises(ValueError, match=r"pure noise.*: forgotten\.weight, forgotten\.bias$"):
        gradients.backward((inputs, labels))
    assert gradients.take().samples == 0
    model.forgotten.requires_grad_(False)
    gradients = PerSampleGradients(model, lambda m, b: loss_function(m[:3], b), 1.0)
    gradients.backward((inputs, labels))
    assert len(gradients.take().tensors) == 4


def test_frozen_parameters_stay_out() -> None:
    model, batch = make("mlp"), draw(5)
    model[0].weight.requires_grad_(False)
    result = taken(model, batch, 0.3)
    expected = clipped_sum(sample_gradients(model, batch), 0.3)
    assert len(result.tensors) == 3
    for tensor, value in zip(result.tensors, expected, strict=True):
        np.testing.assert_allclose(tensor.numpy(), value, rtol=3e-5, atol=1e-6)


class KeepsMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 10)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("order", torch.arange(12).flip(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean + inputs.mean()
        return self.layer(inputs[:, self.order]) + self.mean


def test_buffers_learn_nothing_of_the_samples() -> None:
    model = KeepsMean()
    taken(model, draw(4))
    assert model.mean.item() == 0

    class Writes(KeepsMean):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.mean.add_(inputs.mean())
            return self.layer(inputs)

    model = Writes()
    with pytest.raises(ValueError, match=r"writes to buffers.*: mean\. Use"):
        taken(model, draw(4))
    assert model.mean.item() == 0

    class WritesLater(KeepsMean):
        calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 1:
                self.mean.add_(1)
            return self.layer(inputs)

    model = WritesLater()
    taken(model, draw(4))
    assert model.mean.item() == 0
    assert model.calls > 2


class KeepsTensor(nn.Module):
    """Keeps something in an ordinary attribute: of all it has seen, or what depends on nothing."""

    def __init__(self, carries: bool) -> None:
        super().__init__()
        self.linear, self.carries = nn.Linear(4, 4), carries
        self.kept: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.ones(4)
        hidden = self.linear(inputs)
        if self.carries:
            self.kept = 0.5 * self.kept + 0.5 * hidden.detach().mean(0)
        return hidden * self.kept


@pytest.mark.parametrize("rows", [1, 3])
def test_what_a_module_keeps_in_an_attribute_is_noticed(rows: int) -> None:
    for carries in (True, False):
        gradients = PerSampleGradients(
            KeepsTensor(carries), lambda model, batch: model(batch).square().sum(1), 1.0
        )
        if carries:
            with pytest.raises(PrivacyError, match="changes with the samples before it"):
                gradients.backward(torch.randn(rows, 4))
        else:
            gradients.backward(torch.randn(rows, 4))


def test_dropout_draws_for_each_sample() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(12, 10))
    inputs, labels = draw(1)
    result = taken(model, (inputs.expand(2, -1), labels.expand(2)), 100.0)
    dropped = (result.tensors[0] == 0).all(0)
    # Alike, both samples would drop half of the inputs; a quarter is dropped by both.
    masks = model.train()[0](torch.ones(2, 1000)) > 0
    assert 0 < dropped.sum() < 6
    assert not torch.equal(masks[0], masks[1])


def test_half_precision_is_added_in_float32() -> None:
    model = nn.Linear(12, 10, bias=False, dtype=torch.bfloat16)
    inputs, labels = torch.ones(300, 12, dtype=torch.bfloat16), torch.zeros(300, dtype=torch.long)
    one = taken(model, (inputs[:1], labels[:1]))
    many = taken(model, (inputs, labels), micro_batch_size=1)
    # In bfloat16 a sum of equal terms stops growing at 256 of them.
    torch.testing.assert_close(many.tensors[0], one.tensors[0] * 300, rtol=1e-4, atol=0)


def test_batches_may_be_nested() -> None:
    model = make("mlp")

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_function(model, (batch["x"]["inputs"], batch["y"][0]))

    inputs, labels = draw(5)
    gradients = PerSampleGradients(model, loss, 1.0, micro_batch_size=2)
    gradients.backward({"x": {"inputs": inputs}, "y": [labels]})
    assert distance(gradients.take(), taken(model, (inputs, labels))) < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a finite number"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be a finite number"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm must be a finite number"),
        ({"max_grad_norm": 1e-12}, "max_grad_norm must be a finite number"),
        ({"micro_batch_size": 0}, "micro_batch_size must be an integer of at least 1"),
        ({"model": make("mlp").requires_grad_(False)}, "no parameters with requires_grad=True"),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerSampleGradients(
            **{
                "model": make("mlp"),
                "loss_function": loss_function,
                "max_grad_norm": 1.0,
                **options,
            }
        )


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(3, 12), torch.zeros(2, dtype=torch.long)), r"\(3, 12\), \(2,\)"),
        ((torch.zeros(3, 12), torch.tensor(1)), "common leading dimension"),
        ((torch.zeros(3, 12), 7), "found int"),
        ((), "common leading dimension"),
    ],
)
def test_bad_batches(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerSampleGradients(make("mlp"), loss_function, 1.0).backward(batch)


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda m, b: m(b[0]), "(1, 10)"),
        (lambda m, b: m(b[0]).square(), "(1, 10)"),
        (lambda m, b: 3.0, "float"),
    ],
)
def test_loss_must_be_one_number_per_sample(loss: Any, got: str) -> None:
    message = rf"loss of each sample.*\(1,\) or \(\), got {re.escape(got)}"
    with pytest.raises(ValueError, match=message):
        PerSampleGradients(make("mlp"), loss, 1.0).backward(draw(3))


@pytest.mark.parametrize(
    "transform",
    [
        PublicTransform([torch.ones(10)]),
        PublicTransform([torch.ones(p.shape) for p in make("mlp").parameters()], [torch.ones(1)]),
    ],
)
def test_transform_of_another_shape(transform: PublicTransform) -> None:
    gradients = PerSampleGradients(make("mlp"), loss_function, 1.0)
    gradients.transform = transform
    with pytest.raises(ValueError, match=r"transform\..* one tensor per trainable parameter"):
        gradients.backward(draw(3))


class Branches(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2 if x.sum() > 0 else x)


class Picks(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * len(x.nonzero())


class Writes(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(1, 12)
        total[:] = x
        return super().forward(total)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


class Custom(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Double.apply(super().forward(x))  # type: ignore[no-any-return]


class Reads(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * sum(x.flatten().tolist())


class Checkpoints(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, checkpoint(super().forward, x, use_reentrant=False))


class CheckpointsReentrantly(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, checkpoint(super().forward, x, use_reentrant=True))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.layer = kind(12, 10, batch_first=True, **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(self.layer(x[:, None])[0][:, -1], (0, 5))


CANNOT: dict[str, tuple[nn.Module, str]] = {
    "branches": (Branches(12, 10), r"use torch\.where .*4 dimensions.* or .*\"hooks\""),
    "picks": (Picks(12, 10), "multiply by a mask"),
    "writes": (Writes(12, 10), "new_zeros of a sample"),
    "autograd function": (Custom(12, 10), r"setup_context\(\), and generate_vmap_rule=True"),
    "reads": (Reads(12, 10), "stay in torch"),
    "checkpoints": (Checkpoints(12, 10), r"gradient_checkpointing_disable\(\)"),
    "checkpoints, reentrant": (CheckpointsReentrantly(12, 10), "leave out activation checkpointi"),
    "GRU": (Recurrent(nn.GRU), r"use opacus\.layers\.DPGRU$"),
    "RNN": (Recurrent(nn.RNN), r"use opacus\.layers\.DPRNN$"),
    "LSTM with projections": (Recurrent(nn.LSTM, proj_size=5), r"use opacus\.layers\.DPLSTM$"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", CANNOT)
def test_what_vmap_cannot_run_is_told_with_a_way_out(name: str) -> None:
    model, way = CANNOT[name]
    gradients = PerSampleGradients(model, loss_function, 1.0)
    with pytest.raises(ValueError, match=way) as error:
        gradients.backward(draw(4))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["GRU", "RNN", "LSTM"])
@pytest.mark.parametrize("mode", ["functorch", "hooks"])
def test_the_ways_out_of_recurrent_layers_lead_out(kind: str, mode: str) -> None:
    opacus = pytest.importorskip("opacus.layers", reason='needs "comm-hooks[dp]"')
    from comm_hooks.optim.private.gradients.opacus import OpacusGradients

    sources = {"functorch": PerSampleGradients, "hooks": OpacusGradients}
    model = Recurrent(getattr(opacus, f"DP{kind}"))
    gradients = sources[mode](model, sample_losses, 1.0)  # type: ignore[abstract]
    gradients.backward(draw(4))
    assert gradients.take().samples == 4
