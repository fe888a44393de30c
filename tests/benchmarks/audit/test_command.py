"""The command: its output and exit codes."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner, Result

from benchmarks.audit import Attack, Audit, __main__
from comm_hooks.optim.private.accounting import GaussianEvent, RDPAccountant

SETTINGS = {
    "noise_multiplier": 2.0,
    "max_grad_norm": 1.0,
    "sample_rate": 0.1,
    "steps": 30,
    "delta": 1e-5,
    "world_size": 4,
}
TOPK = {"compressor": "topk", "density": 0.01}


def command(*options: str) -> Result:
    return CliRunner().invoke(__main__.app, options)


def run(tmp_path: Path, *options: str, **changes: Any) -> Result:
    path = tmp_path / "private.json"
    path.write_text(json.dumps({**SETTINGS, **changes}))
    return command("--config", str(path), *options)


def test_a_valid_configuration_and_its_observers(tmp_path: Path) -> None:
    result = run(tmp_path, "--no-attack", placement="local", exchange=TOPK)
    assert result.exit_code == 0, result.output
    epsilon = RDPAccountant().epsilon([GaussianEvent(2.0, 0.1, 30)], 1e-5)
    assert "Rule 6: noise placement local, topk on 4 ranks, unit sample: valid" in result.output
    for observed in ("the model", "the model and its checkpoints", "the messages of single ranks"):
        assert f"observer of {observed}: epsilon {epsilon:.3f}" in result.output


def test_shares_promise_less_against_ranks_and_central_nothing(tmp_path: Path) -> None:
    mask = {"compressor": "random_k", "density": 0.1, "unbiased": False}
    remembering = run(tmp_path, "--no-attack", "--json", placement="shares", exchange=mask)
    claim = json.loads(remembering.output)["claim"]
    share = RDPAccountant().epsilon([GaussianEvent(1.0, 0.1, 30)], 1e-5)
    assert claim["rank_epsilon"] == claim["checkpoint_epsilon"] == pytest.approx(share)
    assert claim["epsilon"] < share
    assert "nothing (ranks and links are trusted)" in run(tmp_path, "--no-attack").output


def test_an_infinite_epsilon_is_not_valid(tmp_path: Path) -> None:
    result = run(tmp_path, "--no-attack", noise_multiplier=1e-9, steps=10**18)
    assert result.exit_code == 1
    assert "INVALID: no epsilon holds for 1000000000000000000 steps" in result.output


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"placement": "shares", "exchange": TOPK}, 5),
        ({"feedback": "before_noise"}, 10),
        ({"unit": "client", "placement": "central"}, 11),
        ({"optimizer": "DPAdamBC", "exchange": TOPK}, 17),
        (
            {
                "unit": "client",
                "placement": "aggregate",
                "clipping": "unit",
                "exchange": {"compressor": "count_sketch", "ratio": 0.1},
            },
            12,
        ),
    ],
)
def test_the_rules_read_every_setting(tmp_path: Path, changes: dict[str, Any], rule: int) -> None:
    result = run(tmp_path, **changes)
    assert result.exit_code == 1
    assert "INVALID: " in result.output
    assert f"rule {rule})" in result.output.replace("(rule\n", "(rule ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multipler": 1}, "did you mean 'noise_multiplier'?"),
        ({"noise_multiplier": 0}, "noise_multiplier must lie in (0, inf), got 0"),
        ({"sample_rate": 0}, "sample_rate must be in (0, 1], got 0"),
        ({"sample_rate": 10**400}, "sample_rate must lie in [0, 1], got 1000"),
        ({"delta": 1}, "delta must be at least 1e-12"),
        ({"steps": 1.5}, "steps must be an integer of at least 1"),
        ({"world_size": 0}, "world_size must be an integer of at least 1"),
        ({"placement": "sharez"}, "place must be one of central, shares, local, aggregate"),
        ({"exchange": {"compressor": "top_k"}}, "exchange.compressor: unknown compressor"),
        ({"optimizer": "DPAdm"}, "did you mean 'DPAdam'?"),
        ({"accountant": {"rdp": 1}}, "accountant must be one of rdp, pld, got {'rdp': 1}"),
    ],
)
def test_bad_settings(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    result = run(tmp_path, **changes)
    assert result.exit_code == 2
    assert message in result.output
    assert "private.json: " in result.output


def test_a_file_that_is_too_deep(tmp_path: Path) -> None:
    path = tmp_path / "private.json"
    path.write_text("[" * 20_000)
    result = command("--config", str(path))
    assert result.exit_code == 2
    assert "private.json: is not JSON: maximum recursion depth exceeded" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to audit: give --config or --script"),
        (["--config", "missing.json"], "missing.json: cannot be read"),
        (["--script", "missing.py"], "missing.py: there is no such file"),
        (["--script", "a.py", "--config", "b"], "leave out --config"),
        (["--script", "a.py", "--steps", "0"], "--steps must be positive, got 0"),
        (["--script", "a.py", "--nproc-per-node", "0"], "--nproc-per-node must be positive"),
        (["--script", "a.py", "--timeout", "-1"], "--timeout must be positive, got -1"),
        (["something"], "unexpected something: arguments are for --script"),
    ],
)
def test_bad_options(options: list[str], message: str) -> None:
    result = command(*options)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.slow
def test_an_attack_from_end_to_end(tmp_path: Path) -> None:
    result = run(tmp_path, "--json", world_size=1)
    content = json.loads(result.output)
    # The latter by chance, once in 20 runs.
    assert result.exit_code == (3 if content["suspicious"] else 0), result.output
    assert not content["violated"]
    assert content["problems"] == []
    assert content["attack"]["audited"] > 0


@pytest.mark.parametrize(
    ("audited", "alarm", "code", "message"),
    [
        (0.9, False, 0, "no violation found"),
        (1.1, False, 3, "run it again"),
        (1.1, True, 1, "VIOLATION: attack on 8 releases by 64 canaries: audited >= 1.100"),
    ],
)
def test_a_suspicious_result_has_an_exit_code_of_its_own(
    tmp_path: Path, audited: float, alarm: bool, code: int, message: str
) -> None:
    attack = Attack(audited, 1.0, alarm, mu=0.1, claimed_mu=0.1, steps=8, canaries=64)
    found = Audit(attack, [])
    with mock.patch.object(__main__, "audit_configuration", return_value=found):
        result = run(tmp_path)
    assert result.exit_code == code
    assert message in result.output


def test_clients_are_looked_up_only(tmp_path: Path) -> None:
    result = run(tmp_path, unit="client", placement="aggregate")
    assert result.exit_code == 0
    assert "not attacked: rounds of clients are not played" in result.output
