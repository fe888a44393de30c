"""The table of docs/fine_tuning.md: which models of transformers train privately, and how."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from comm_hooks.optim.private import DPAdam, PrivacyEngine

PAGE = Path(__file__).parents[3] / "docs" / "fine_tuning.md"


class Lines(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(3, 30, (), generator=generator))
        return torch.randint(1, 200, (length,), generator=generator)


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def of_language(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    targets, counts = batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:]
    losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="none")
    return (losses * counts).sum(1) / counts.sum(1).clamp(min=1)


def of_classes(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    labels = batch["input_ids"][:, 0] % 2
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def four_dimensional(model: str, mask: torch.Tensor) -> torch.Tensor:
    seen = mask.bool()[:, None, None, :]
    length = mask.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return seen & causal if model == "GPT-2" else seen.expand(-1, -1, length, -1)


def train(model_name: str, trained: str, attention: str, mask: str, mode: str) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="needs transformers")
    peft: Any = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    if model_name == "GPT-2":
        config = transformers.GPT2Config(
            vocab_size=200, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
            eos_token_id=0, attn_implementation=attention,
        )  # fmt: skip
        model, targets = transformers.GPT2LMHeadModel(config), ["c_attn"]
    else:
        config = transformers.BertConfig(
            vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=64, attn_implementation=attention,
        )  # fmt: skip
        model, targets = transformers.BertForSequenceClassification(config), ["query", "value"]
    if trained == "LoRA":
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))

    def loss_function(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen = batch["attention_mask"]
        if mask == "4":
            seen = four_dimensional(model_name, seen)
        logits = model(input_ids=batch["input_ids"], attention_mask=seen).logits
        return (of_language if model_name == "GPT-2" else of_classes)(logits, batch)

    _, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=DPAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2),
        data_loader=DataLoader(Lines(), collate_fn=collate),
        loss_function=loss_function,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.2,
        expected_batch_size=12,
        grad_sample_mode=mode,
    )
    for batch in loader:
        optimizer.zero_grad()
        optimizer.backward(batch)
        optimizer.step()


def rows() -> list[Any]:
    """Return the cells of the page: model, trained, attention, mask, and whether each mode does."""
    found = re.findall(r"^\| (GPT-2|BERT) \| (\w+) \| `(\w+)` \| (\d) \| (.+?) \| (.+?) \|$",
                       PAGE.read_text(), re.MULTILINE)  # fmt: skip
    cells = []
    for *row, functorch, hooks in found:
        for mode, cell in (("functorch", functorch), ("hooks", hooks)):
            # One of each kind at every run.
            is_usual = row[1] == "LoRA" and row[0] == ("GPT-2" if row[3] == "4" else "BERT")
            marks = [] if is_usual and row[2] == "sdpa" else [pytest.mark.slow]
            cells.append(pytest.param(*row, mode, cell == "yes", marks=marks))
    return cells


def test_the_table_is_complete() -> None:
    assert len(rows()) == 2 * 2 * 2 * 2 * 2 - 2 * 2 * 2, "no 4 dimensions with eager attention"


@pytest.mark.parametrize(("model", "trained", "attention", "mask", "mode", "works"), rows())
def test_a_cell_of_the_table(
    model: str, trained: str, attention: str, mask: str, mode: str, works: bool
) -> None:
    if works:
        train(model, trained, attention, mask, mode)
        return
    with pytest.raises(ValueError, match=r"functorch|hooks") as error:
        train(model, trained, attention, mask, mode)
    assert "\n" not in str(error.value)
