"""Method specs: what they parse to, and what is said about those that do not parse."""

import re

import pytest
import torch
from torch import nn

from benchmarks.compare.__main__ import DEFAULT_METHODS
from benchmarks.lab.methods import (
    Stepper,
    parse_method,
    parse_methods,
)
from benchmarks.lab.runs import Settings
from comm_hooks.collectives import Simulated
from comm_hooks.config import COMPRESSORS
from comm_hooks.optim.registry import OPTIMIZERS


def test_the_default_list_parses_and_has_both_controls() -> None:
    names = [method.spec for method in parse_methods(DEFAULT_METHODS)]
    assert ",".join(names) == DEFAULT_METHODS
    assert names[:3] == ["all_reduce", "none", "low_communication"]


def test_the_optimizer_is_adamw_unless_named() -> None:
    assert parse_method("sign").optimizer == "adamw"
    assert parse_method("sign+one_bit_adam").optimizer == "one_bit_adam"


def test_values_may_be_whole_decimal_fractions_words_or_truth_values() -> None:
    method = parse_method("topk:density=1/64:value_bits=1:collective=sharded")
    expected = {"density": 1 / 64, "value_bits": 1, "collective": "sharded"}
    assert method.communication_options == expected
    method = parse_method("srht:ratio=2e-2+safl:amsgrad=false:local_steps=7:lr=1e+0")
    assert method.communication_options["ratio"] == 0.02
    assert method.optimizer_options == {"amsgrad": False, "local_steps": 7, "lr": 1.0}


def test_options_given_win_over_published_ones() -> None:
    assert parse_method("topk").communication_options == {}
    assert parse_method("local_variance_adam").communication_options["value_bits"] == 1
    assert parse_method("topk+local_variance_adam").communication_options["index_code"] == "rice"
    given = parse_method("topk:value_bits=32+local_variance_adam").communication_options
    assert given["value_bits"] == 32
    assert given["index_code"] == "rice"
    assert parse_method("sign+one_bit_lamb").communication_options["collective"] == "sharded"


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_of_the_core_is_a_method(name: str) -> None:
    method = parse_method(name)
    assert method.communication == name
    assert "error feedback" in method.note or "ErrorFeedback" in method.note


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_a_method_of_its_own(name: str) -> None:
    method = parse_method(name)
    assert method.optimizer == name
    alone = {"before": "all_reduce", "own": "none"}
    if expected := alone.get(OPTIMIZERS[name].averages):
        assert method.communication == expected
    else:
        assert method.communication in COMPRESSORS
    method.check(Settings())


def test_what_makes_its_exchange_is_named_alone() -> None:
    with pytest.raises(ValueError, match="name it without"):
        parse_method("topk+low_communication")
    options = parse_method("lowcommunication:bits=0.05:muon=true").optimizer_options
    assert options == {"bits_per_parameter": 0.05, "inner": "muon"}


@pytest.mark.parametrize("spec", ["all_reduce", "none", "topk", "sign+local_variance_adam"])
def test_methods_attach_to_any_transport(spec: str) -> None:
    method = parse_method(spec)
    named = [("w", nn.Parameter(torch.ones(40, 40)))]
    client = method.attach(named, Settings(), Simulated(2)[1])
    assert isinstance(client.steps, Stepper)
    assert client.agrees == (spec != "none")
    assert (client.steps.average is None) == (spec not in ("all_reduce", "topk"))
    assert client.traffic.stats() == {"bytes_sent": 0, "bytes_received": 0}


def test_only_ddp_has_its_own_hooks() -> None:
    with pytest.raises(ValueError, match="needs DDP"):
        parse_method("powersgd").attach([], Settings(), Simulated(2)[0])


def test_underscores_do_not_matter_and_options_go_to_what_is_named() -> None:
    method = parse_method("fetchsgd:density=0.1")
    assert (method.communication, method.optimizer) == ("count_sketch", "fetch_sgd")
    assert method.optimizer_options == {"density": 0.1}
    method = parse_method("srht:ratio=0.1+safl:local_steps=4")
    assert method.communication_options == {"ratio": 0.1}
    assert method.optimizer_options == {"local_steps": 4}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("one_bit_lamb:freeze_step=150", "freeze_step"),
        ("one_bit_adam:freeze_step=999", "freeze_step"),
        ("topk:memory=none+cd_adam", "Differences"),
        ("sign+safl", "is no sketch"),
        ("topk:memory=error_feedback:memory.decay=1.0+sparse_loco", "decay"),
        ("local_adamw:local_steps=4:fragments=8", "at most fragments=4"),
        ("local_adamw:local_steps=100:fragments=99", "cannot be divided into 99 fragments"),
        ("topk+fetch_sgd", "sketch"),
        ("topk+marina", "unbiased"),
    ],
)
def test_methods_that_cannot_train_are_found_before_anything_is_run(
    spec: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_method(spec).check(Settings(steps=150))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("powersdg", "unknown method 'powersdg': did you mean 'powersgd'?"),
        ("", "unknown method '': known are all_reduce"),
        (
            "topk+one_bit_adm",
            "unknown optimizer 'one_bit_adm': did you mean 'one_bit_adam",
        ),
        ("topk+adamw+adamw", "at most one optimizer"),
        ("topk:dnsity=0.1", "density"),
        ("topk:density=2", "density"),
        ("topk:density", "options are written topk:option=value"),
        ("topk:memory=forever", "memory"),
        ("none:rank=1", "unknown option of none 'rank'"),
        ("powersgd:rnk=1", "unknown option of powersgd 'rnk': did you mean 'rank'?"),
        ("powersgd:rank=0", "powersgd:rank must be a positive integer, got 0"),
        ("powersgd:rank=true", "powersgd:rank must be a positive integer, got True"),
        ("sign+adamw:lr=nan", "adamw:lr must be positive, got nan"),
        ("sign+adamw:lr=1/0", "adamw: lr must be a number"),
        ("srht+safl:amsgrad=1", "safl: amsgrad must be true or false"),
        ("bf16+one_bit_adam", "needs a compressor before the '+'"),
        ("sign,bf16,sign", "'sign' is named twice"),
        ("sign,,bf16", "unknown method ''"),
    ],
)
def test_a_bad_spec_gets_one_line_that_says_what_would_be_right(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_methods(spec)
    assert "\n" not in str(caught.value)
