"""The command: what it says, and with which exit code."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner, Result

from benchmarks.audit import audit_one_run
from benchmarks.audit import run as command
from benchmarks.audit.audit import Attack, Audit
from comm_hooks.launchers.main import app
from comm_hooks.optim.private import DPSGD, Ledger, PrivacyEngine
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


def run(tmp_path: Path, *options: str, **changes: Any) -> Result:
    path = tmp_path / "private.json"
    path.write_text(json.dumps({**SETTINGS, **changes}))
    return CliRunner().invoke(app, ["audit", "--config", str(path), *options])


def test_a_valid_configuration_and_both_observers(tmp_path: Path) -> None:
    result = run(tmp_path, "--no-attack", placement="local", exchange=TOPK)
    assert result.exit_code == 0, result.output
    events = [GaussianEvent(2.0, 0.1, 30)]
    epsilon = RDPAccountant().epsilon(events, 1e-5)
    assert "Rule 6: noise placement local, topk on 4 ranks, unit sample: valid" in result.output
    assert f"checkpoints: epsilon {epsilon:.3f}" in result.output
    assert f"sees the model: epsilon {epsilon:.3f}" in result.output
    assert f"single ranks send: epsilon {epsilon:.3f}" in result.output


def test_shares_promise_less_to_who_sees_ranks_and_central_nothing(tmp_path: Path) -> None:
    result = run(tmp_path, "--no-attack", "--json", placement="shares")
    claim = json.loads(result.output)["claim"]
    share = RDPAccountant().epsilon([GaussianEvent(1.0, 0.1, 30)], 1e-5)
    assert claim["rank_epsilon"] == pytest.approx(share)
    assert claim["checkpoint_epsilon"] == claim["epsilon"]
    mask = {"compressor": "random_k", "density": 0.1, "unbiased": False}
    remembering = run(tmp_path, "--no-attack", placement="shares", exchange=mask)
    assert f"the model and its checkpoints: epsilon {share:.3f}" in remembering.output
    assert f"sees the model: epsilon {claim['epsilon']:.3f}" in remembering.output
    assert "nothing (ranks and links are trusted)" in run(tmp_path, "--no-attack").output


def test_what_no_epsilon_holds_for_is_not_valid(tmp_path: Path) -> None:
    result = run(tmp_path, "--no-attack", noise_multiplier=1e-9, steps=10**20)
    assert result.exit_code == 1
    assert "INVALID: no epsilon holds for 100000000000000000000 steps" in result.output


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"placement": "rank_0", "exchange": TOPK}, 3),
        ({"placement": "shares", "exchange": TOPK}, 5),
        ({"placement": "aggregate", "exchange": {**TOPK, "memory": "none"}}, 8),
        ({"placement": "aggregate", "exchange": TOPK}, 10),
        ({"feedback": "before_noise"}, 10),
        ({"unit": "client", "placement": "aggregate", "weights": "examples"}, 11),
        ({"scaling": "private"}, 16),
        ({"optimizer": "DPAdamBC", "exchange": TOPK}, 17),
        ({"clipping": "micro_batch"}, 18),
        ({"divisor": "actual"}, 19),
    ],
)
def test_what_is_not_valid(tmp_path: Path, changes: dict[str, Any], rule: int) -> None:
    result = run(tmp_path, **changes)
    assert result.exit_code == 1
    assert "INVALID: " in result.output
    assert f"rule {rule})" in result.output.replace("(rule\n", "(rule ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multipler": 1}, "did you mean 'noise_multiplier'?"),
        ({"noise_multiplier": 0}, "noise_multiplier must be a positive number, got 0"),
        ({"max_grad_norm": -1}, "max_grad_norm must be a positive number"),
        ({"sample_rate": 0}, "sample_rate must be in (0, 1], got 0"),
        ({"sample_rate": 2}, "sample_rate must be from 0 to 1"),
        ({"delta": 1}, "delta must be between 0 and 1"),
        ({"steps": 1.5}, "steps must be a whole number"),
        ({"world_size": 0}, "world_size must be at least 1"),
        ({"placement": "sharez"}, "did you mean 'shares'?"),
        ({"exchange": {"compressor": "top_k"}}, "exchange.compressor: unknown compressor"),
        ({"optimizer": "DPAdm"}, "did you mean 'DPAdam'?"),
        ({"accountant": {"rdp": 1}}, "accountant: unknown value {'rdp': 1}"),
        ({"sample_rate": 10**400}, "sample_rate must be from 0 to 1, got inf"),
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
    result = CliRunner().invoke(app, ["audit", "--config", str(path)])
    assert result.exit_code == 2
    assert "private.json: is not JSON: maximum recursion depth exceeded" in result.output


def test_a_ledger_of_a_run_that_is_going_on(tmp_path: Path) -> None:
    path = tmp_path / "privacy.jsonl"
    with Ledger(path) as ledger:
        ledger.record(
            GaussianEvent(
                *(1.5, 0.02, 700),
                placement="shares",
                checkpoint_multiplier=0.5,
                rank_multiplier=0.25,
            )
        )
        before = path.read_bytes()
        options = ["audit", "--ledger", str(path), "--delta", "1e-6"]
        result = CliRunner().invoke(app, options)
        assert path.read_bytes() == before
    assert result.exit_code == 0, result.output
    for what, share in (("the model", 1), ("checkpoints", 0.5), ("single ranks send", 0.25)):
        epsilon = RDPAccountant().epsilon([GaussianEvent(1.5 * share, 0.02, 700)], 1e-6)
        assert f"{what}: epsilon {epsilon:.3f}" in result.output
    assert "Claimed for 700 steps" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to audit: give --config, --ledger or --script"),
        (["--ledger", "missing.jsonl", "--delta", "1e-5"], "there is no such file"),
        (["--ledger", "x"], "--ledger without --config needs --delta"),
        (["--config", "missing.json"], "missing.json: cannot be read"),
        (["--config", "missing.json", "--confidence", "1"], "--confidence must be between"),
    ],
)
def test_bad_options(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["audit", *options])
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
    releases, training = content["attacks"]
    assert releases["audited"] > 0
    assert training["claimed"] == pytest.approx(content["claim"]["epsilon"])


@pytest.mark.parametrize(
    ("audited", "alarm", "code", "says"),
    [
        (0.9, False, 0, "no violation found"),
        (1.1, False, 3, "run it again"),
        (1.1, True, 1, "VIOLATION: releases"),
    ],
)
def test_what_is_suspicious_has_a_code_of_its_own(
    tmp_path: Path, audited: float, alarm: bool, code: int, says: str
) -> None:
    details = {"steps": 1, "canaries": 1, "guesses": 1, "correct": 1}
    found = Audit([Attack("releases, by hand", audited, 1.0, alarm, details)], [])
    with mock.patch.object(command, "audit_configuration", return_value=found):
        result = run(tmp_path)
    assert result.exit_code == code
    assert says in result.output


def test_clients_are_looked_up_only(tmp_path: Path) -> None:
    result = run(tmp_path, unit="client", placement="aggregate")
    assert result.exit_code == 0
    assert "not attacked: rounds of clients are not played" in result.output


@pytest.mark.parametrize("noise_multiplier", [8.0, 1e-3])
def test_one_run_of_the_real_engine(noise_multiplier: float) -> None:
    """A bound below the claim, and with next to no noise one far above that of the first."""
    canaries, steps = 1024, 10
    delta = 1e-8
    events = [GaussianEvent(8.0, 0.5, steps)]
    claimed = RDPAccountant().epsilon(events, delta)

    def train(included: torch.Tensor) -> torch.Tensor:
        inputs = torch.eye(canaries)[included]
        model = nn.Linear(canaries, 1, bias=False)
        start = model.weight.detach().clone()
        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private(  # type: ignore[assignment]
            module=model,
            optimizer=DPSGD(model.named_parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(inputs)),
            loss_function=lambda model, batch: model(batch[0]).mean(),
            noise_multiplier=noise_multiplier,
            max_grad_norm=1.0,
            sample_rate=0.5,
            expected_batch_size=64,
        )
        for _ in range(steps // len(loader)):
            for batch in loader:
                optimizer.backward(batch)
                optimizer.step()
        return (start - model.weight.detach()).flatten()

    found = audit_one_run(train, canaries, delta=delta, confidence=0.9999)
    assert (found.epsilon > claimed) == (noise_multiplier < 1)


def test_scores_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="canaries must be at least 32, got 8"):
        audit_one_run(lambda included: included.float(), 8, delta=1e-5)
    with pytest.raises(ValueError, match=r"of shape \(64,\) or \(ways, 64\), got \(3,\)"):
        audit_one_run(lambda included: included[:3].float(), 64, delta=1e-5)
