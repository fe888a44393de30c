from unittest import mock

import torch

from comm_hooks.transfers import to_device


def test_on_the_cpu_nothing_is_copied() -> None:
    values = torch.ones(3)
    assert to_device(values, torch.device("cpu")) is values


def test_what_is_elsewhere_already_is_not_pinned() -> None:
    values = torch.ones(3, device="meta")
    with mock.patch.object(torch.Tensor, "pin_memory") as pin:
        assert to_device(values, torch.device("meta")) is values
    assert not pin.called


def test_memory_is_pinned_so_that_nobody_waits() -> None:
    gpu = torch.device("cuda", 0)
    with mock.patch.object(torch.Tensor, "pin_memory") as pin:
        copy = to_device(torch.ones(3), gpu)
    pin.return_value.to.assert_called_once_with(gpu, non_blocking=True)
    assert copy is pin.return_value.to.return_value
