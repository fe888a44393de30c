"""Training scripts with a fault in the loop, and correct ones."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.audit import Job, ScriptAudit, ScriptFailed, audit_script

TEMPLATE = """
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from comm_hooks import ErrorFeedback, Exchange, RandomK, TopK
from comm_hooks.optim.private import DPSGD, DPAdam, PrivacyEngine, Secret

# init
torch.manual_seed(0)
inputs = torch.randn(400, 12)
labels = (inputs @ torch.randn(12, 4)).argmax(1)
# data
dataset = TensorDataset(inputs, labels)
public = torch.randn(64, 12)
model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4))


def loss_function(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


engine = PrivacyEngine(ledger="privacy.jsonl")
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=DPAdam(model.parameters(), lr=5e-3),
    data_loader=DataLoader(dataset),
    loss_function=loss_function,
    noise_multiplier=1.0,
    sample_rate=0.05,
    expected_batch_size=20,
    max_grad_norm=1.0,
)
# private
for epoch in range(3):
    for batch in loader:
        # batch
        optimizer.zero_grad()
        loss = optimizer.backward(batch)
        # backward
        optimizer.step()
        # step
    # epoch
"""

CLIENTS = """
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks import CountSketch, Exchange
from comm_hooks.optim import SAFL
from comm_hooks.optim.private import PrivacyEngine

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(8, 4)
engine = PrivacyEngine(ledger="privacy.jsonl")
participation = engine.private_participation(
    clients=60, sample_rate=0.1, noise_multiplier=0.8, max_norm=0.5
)
exchange = Exchange(CountSketch(ratio=0.5), granularity="bucket")
rounds = SAFL(model.named_parameters(), exchange, local_lr=0.1, participation=participation)
seen = 0.0
for round_index in range(12):
    for client in rounds.clients():
        for step in range(3):
            generator = torch.Generator().manual_seed(100 * client + step)
            loss = model(torch.randn(8, 8, generator=generator)).square().mean()
            loss.backward()
            rounds.step()
            rounds.zero_grad()
            # client
    # round
"""


@dataclass(frozen=True)
class Script:
    """A script.

    Attributes:
        edits: replacements, by their place in the template.
        found: a part of the message that tells of the fault; empty for a correct script.
        processes: ranks.
        template: the script without the edits.
    """

    edits: dict[str, str] = field(default_factory=dict)
    found: str = ""
    processes: int | None = None
    template: str = TEMPLATE

    def text(self) -> str:
        text = self.template
        for place, new in self.edits.items():
            old = f"# {place}\n" if f"# {place}\n" in text else place
            assert text.count(old) == 1, place
            if old != place:
                line = next(line for line in text.splitlines(True) if line.endswith(old))
                indent = line[: -len(old)]
                new = "".join(f"{indent}{part}\n" for part in new.splitlines()).lstrip(" ")
            text = text.replace(old, new)
        return text


_ADAM = "optimizer=DPAdam(model.parameters(), lr=5e-3),"
_INIT = 'dist.init_process_group("gloo")'
_LOSS = "nn.functional.cross_entropy(model(inputs), labels)"
_LAST = "    max_grad_norm=1.0,\n"

_UNIFORM = """
from comm_hooks.optim.private.noise import mechanism


def uniform(tensors, std, stream):
    for tensor in tensors:
        drawn = torch.from_numpy(stream.generator().random(tuple(tensor.shape)) - 0.5)
        tensor.add_((std * 12**0.5 * drawn).to(tensor))


mechanism.add_noise_ = uniform
"""
_DRAWS = """
from comm_hooks.optim.private.noise.secret import Stream

draw = Stream.draw


def others(stream, count, rate):
    found = draw(stream, count, rate)
    {}


Stream.draw = others
"""
_RATE = """
from comm_hooks.optim.private import engine as engines

event = engines.GaussianEvent
engines.GaussianEvent = lambda sigma, rate, **rest: event(sigma, rate / 2, **rest)
"""

FAULTS: dict[str, Script] = {
    "uniform noise": Script({"init": _UNIFORM}, "is not normal"),
    "a function in place of the library's": Script(
        {"init": _UNIFORM}, "replaces comm_hooks.optim.private.noise.mechanism.add_noise_"
    ),
    "a sample twice in a batch": Script(
        {"init": _DRAWS.format("return sorted(found + found[:1])")}, "drawn twice in a step"
    ),
    "batches of one size": Script(
        {
            "init": _DRAWS.format(
                "return found if len(found) == 20 else others(stream, count, rate)"
            )
        },
        "would vary more",
    ),
    "half of the rate in the ledger": Script({"init": _RATE}, "and the ledger has 0.025"),
    "side information of the data": Script(
        {
            "public = torch.randn(64, 12)": "from comm_hooks.optim.private import AdaDPS",
            _ADAM: (
                "optimizer=AdaDPS(\n"
                "        model.named_parameters(),\n"
                "        lr=5e-3,\n"
                "        side_information={'0.weight': inputs.abs().mean(0) + 1e-2},\n"
                "    ),"
            ),
        },
        "change the optimizer's",
    ),
    "a copy of the first batch in place of the next": Script(
        {
            "private": "first = None",
            "batch": (
                "first = batch if first is None and len(batch[0]) > 4 else first\n"
                "if first is not None and len(batch[0]) <= len(first[0]):\n"
                "    batch = [t[: len(batch[0])].clone() for t in first]"
            ),
        },
        "is not as the loader gave it",
    ),
    "a second optimizer on raw gradients": Script(
        {
            "private": "other = torch.optim.SGD(model.parameters(), lr=1e-3)",
            "step": "other.zero_grad()\nloss_function(model, batch).backward()\nother.step()",
        },
        "a step of its own would not be in the ledger",
    ),
    "steps that are not entered": Script(
        {"private": "optimizer._enter = lambda: None"}, "would not be in the ledger"
    ),
    "inputs normalized by the batch": Script(
        {"batch": "batch = [(batch[0] - batch[0].mean(0)) / (batch[0].std(0) + 1e-3), batch[1]]"},
        "is not as the loader gave it",
    ),
    "a learning rate that follows the loss": Script(
        {
            "private": (
                "plan = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)\n"
                "best = 9.0"
            ),
            "step": "plan.step(float(loss_function(model, batch)) if len(batch[0]) else 1.0)\n"
            "optimizer.param_groups[0]['weight_decay'] = 1e-3 * float(loss > 1.5)\n"
            "optimizer.param_groups[0]['lr'] = 5e-3 * float(loss_function(model, batch))",
        },
        "lr (",
    ),
    "running statistics of the batches": Script(
        {
            "model = nn.Sequential(": (
                "class Normed(nn.Module):\n"
                "    def __init__(self):\n"
                "        super().__init__()\n"
                "        self.register_buffer('mean', torch.zeros(12))\n\n"
                "    def forward(self, x):\n"
                "        return x - self.mean\n\n\n"
                "model = nn.Sequential(Normed(), "
            ),
            "batch": (
                "if len(batch[0]):\n    model[0].mean.mul_(0.9).add_(0.1 * batch[0].mean(0))"
            ),
        },
        "buffer 0.mean depends on sample",
    ),
    "a data set normalized by all samples": Script(
        {"data": "inputs = (inputs - inputs.mean(0)) / inputs.std(0)"},
        "samples: they depend on each other before training",
    ),
    "a model that began without privacy": Script(
        {
            "def loss_function(model, batch):": (
                "start = torch.optim.SGD(model.parameters(), lr=0.1)\n"
                "nn.functional.cross_entropy(model(inputs), labels).backward()\n"
                "start.step()\n"
                "start.zero_grad()\n\n\n"
                "def loss_function(model, batch):"
            )
        },
        "change parameter 0.weight (and 3 more), too: it depends on the data without privacy",
    ),
    "weights of classes by their counts": Script(
        {
            "data": "labels = torch.tensor(labels.tolist())",
            "def loss_function(model, batch):": (
                "counts = torch.bincount(labels, minlength=4).float()\n\n\n"
                "def loss_function(model, batch):"
            ),
            "cross_entropy(model(inputs), labels)": (
                "cross_entropy(model(inputs), labels, weight=1 / counts)"
            ),
        },
        "change the loss function's counts, too: it depends on the data without privacy",
    ),
    "weights of classes by the counts of random labels": Script(
        {
            "labels = (inputs @ torch.randn(12, 4)).argmax(1)\n": (
                "labels = torch.randint(4, (400,))\n"
                "counts = torch.bincount(labels, minlength=4).float()\n"
            ),
            "cross_entropy(model(inputs), labels)": (
                "cross_entropy(model(inputs), labels, weight=1 / counts)"
            ),
        },
        "change the loss function's counts, too: it depends on the data without privacy",
    ),
    "weights of classes by the counts of labels that follow from inputs": Script(
        {
            "data": "counts = torch.bincount(labels, minlength=4).float()",
            "cross_entropy(model(inputs), labels)": (
                "cross_entropy(model(inputs), labels, weight=1 / counts)"
            ),
        },
        "change the loss function's counts, too: it depends on the data without privacy",
    ),
    "one raw gradient in a moment": Script(
        {
            "private": "taken = 0",
            "step": (
                "taken += 1\n"
                "if taken == 6:\n"
                "    gradients = torch.autograd.grad(\n"
                "        loss_function(model, batch), list(model.parameters())\n"
                "    )\n"
                "    for p, g in zip(model.parameters(), gradients):\n"
                "        optimizer.inner.state[p]['exp_avg'].add_(g, alpha=0.01)"
            ),
        },
        "depends on one sample of a batch",
    ),
    "the last row of a batch in the next loss": Script(
        {
            "private": "last = [0.0]",
            _LOSS: "nn.functional.cross_entropy(model(inputs) + last[0], labels)",
            "step": "last[0] = batch[0][-1, :4].clone() if len(batch[0]) else 0.0",
        },
        "one sample of a batch",
    ),
    "the model with the smallest training loss": Script(
        {
            "private": "best, kept = 99.0, copy.deepcopy(model.state_dict())",
            "step": (
                "if loss < best:\n    best, kept = float(loss), copy.deepcopy(model.state_dict())\n"
                "else:\n    model.load_state_dict(kept)"
            ),
        },
        "depends on one sample of a batch",
    ),
    "no clipping": Script(
        {
            "private": (
                "def add(gradients):\n"
                "    for total, g in zip(optimizer.gradients._sums, gradients):\n"
                "        total.add_(g.detach().sum(0))\n"
                "    optimizer.gradients._samples += len(gradients[0])\n\n\n"
                "optimizer.gradients._add_samples = add"
            )
        },
        "something else has changed the sum",
    ),
    "noise from a seed": Script(
        {"private": "optimizer.mechanism._secret = Secret(b'42')"}, "follows from a seed"
    ),
    "the same noise in every step": Script(
        {"step": "optimizer.mechanism._step = 0"}, "their difference shows the data"
    ),
    "less noise than in the ledger": Script(
        {"private": "optimizer.mechanism._std = lambda s, n: 0.8 * s"},
        "times the standard deviation that the ledger has",
    ),
    "no noise on the biases": Script(
        {
            "private": (
                "def add(tensors, s, n, stream, add=optimizer.mechanism._add_noise_):\n"
                "    kept = [t.clone() for t in tensors]\n"
                "    add(tensors, s, n, stream)\n"
                "    for t, k in zip(tensors, kept):\n"
                "        t.view(-1)[-4:] = k.view(-1)[-4:]\n\n\n"
                "optimizer.mechanism._add_noise_ = add"
            )
        },
        "noise",
    ),
    "sampling from a seed": Script(
        {"private": "loader.batch_sampler._secret = Secret(b'42')"}, "the draws follow from a seed"
    ),
    "more samples than the ledger has": Script(
        {"private": "object.__setattr__(loader.batch_sampler, 'sample_rate', 0.1)"},
        "samples are drawn with probability",
    ),
    "divided by the number of samples drawn": Script(
        {"batch": "engine.change(optimizer, expected_batch_size=max(1, len(batch[0])))"},
        "expected_batch_size (",
    ),
    "batches left out whose loss is not finite": Script(
        {"backward": "if not loss < 100:\n    continue"}, "zero_grad() would dis"
    ),
    "a weight changed in place": Script(
        {"batch": "model[0].bias.data.add_(1e-3 * batch[0].sum())"}, "not by a step of an optimizer"
    ),
    "a loader made anew": Script(
        {"private": "loader = DataLoader(dataset, batch_size=20)"}, "PrivacyError"
    ),
    "on two ranks, steps of the first alone": Script(
        {
            "init": _INIT,
            "private": "other = torch.optim.SGD(model.parameters(), lr=1e-3)",
            "step": (
                "other.zero_grad()\nif dist.get_rank() == 0 and len(batch[0]):\n"
                "    loss_function(model, batch).backward()\n    other.step()"
            ),
        },
        "a step of its own would not be in the ledger",
        processes=2,
    ),
    "a loss that compares samples": Script(
        {
            _LOSS: (
                "nn.functional.cross_entropy(model(inputs) - model(inputs).mean(0), labels, "
                "reduction='none')"
            ),
            _LAST: "    max_grad_norm=1.0,\n    grad_sample_mode='hooks',\n",
        },
        "PrivacyError",
    ),
    "clients that leave something in the model": Script(
        {
            "client": "seen += float(loss)",
            "round": "model.weight.data[0, 0] += 1e-3 * seen",
        },
        "depends on client",
        processes=1,
        template=CLIENTS,
    ),
}

CORRECT: dict[str, Script] = {
    "inputs of random lengths": Script(
        {
            "data": (
                "lengths = torch.randint(2, 13, (400,))\n"
                "rows = [torch.randn(n) for n in lengths.tolist()]\n"
                "inputs = torch.stack([nn.functional.pad(r, (0, 12 - len(r))) for r in rows])"
            )
        }
    ),
    "Opacus's hooks": Script(
        {
            _LOSS: "nn.functional.cross_entropy(model(inputs), labels, reduction='none')",
            _LAST: "    max_grad_norm=1.0,\n    grad_sample_mode='hooks',\n",
        }
    ),
    "micro-batches, and torch's own optimizer": Script(
        {
            _ADAM: "optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),",
            _LAST: "    max_grad_norm=1.0,\n    micro_batch_size=8,\n",
        }
    ),
    "dropout, noise on inputs and an average of weights": Script(
        {
            "nn.Tanh(), ": "nn.Tanh(), nn.Dropout(0.2), ",
            "private": "average = copy.deepcopy(model)",
            "inputs, labels = batch\n    return": (
                "inputs, labels = batch\n"
                "    inputs = inputs + 0.1 * torch.randn_like(inputs)\n"
                "    return"
            ),
            "step": (
                "with torch.no_grad():\n"
                "    for a, p in zip(average.parameters(), model.parameters()):\n"
                "        a.lerp_(p, 0.1)"
            ),
        }
    ),
    "a transformer": Script(
        {
            "inputs = torch.randn(400, 12)\nlabels = (inputs @ torch.randn(12, 4)).argmax(1)": (
                "inputs = torch.randint(20, (400, 8))\nlabels = inputs.sum(1) % 4"
            ),
            "nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4))": (
                "nn.Sequential(nn.Embedding(20, 16), nn.TransformerEncoderLayer("
                "16, 2, 32, 0.0, batch_first=True), nn.Flatten(), nn.Linear(128, 4))"
            ),
            _LAST: "    max_grad_norm=1.0,\n    micro_batch_size=16,\n",
        }
    ),
    "checkpoints, saved and loaded": Script(
        {
            "step": (
                "torch.save([model.state_dict(), optimizer.state_dict()], 'checkpoint.pt')\n"
                "saved = torch.load('checkpoint.pt')\n"
                "model.load_state_dict(saved[0])\n"
                "optimizer.load_state_dict(saved[1])"
            )
        }
    ),
    "noise by a budget, discrete": Script(
        {
            "engine.make_private(": "engine.make_private_with_epsilon(",
            "    noise_multiplier=1.0,\n": (
                "    target_epsilon=5.0,\n    target_delta=1e-4,\n    steps=60,\n"
                "    noise='discrete',\n"
            ),
        }
    ),
    "workers that load ahead": Script(
        {"DataLoader(dataset)": "DataLoader(dataset, num_workers=1)"}
    ),
    **{
        f"augmentation by {drawn}": Script(
            {
                "dataset = TensorDataset(inputs, labels)": (
                    "import numpy as np\n\n\n"
                    "class Augmented(Dataset):\n"
                    "    def __len__(self):\n"
                    "        return 400\n\n"
                    "    def __getitem__(self, index):\n"
                    f"        return inputs[index] + 0.1 * {drawn}, labels[index]\n\n\n"
                    "dataset = Augmented()"
                )
            }
        )
        for drawn in ("torch.randn(12)", "np.float32(np.random.randn(12))")
    },
    "augmentation from the operating system": Script(
        {
            "dataset = TensorDataset(inputs, labels)": (
                "class Augmented(TensorDataset):\n"
                "    def __getitem__(self, index):\n"
                "        inputs, label = super().__getitem__(index)\n"
                "        return inputs + os.urandom(1)[0] / 256, label\n\n\n"
                "dataset = Augmented(inputs, labels)"
            )
        }
    ),
    "two ranks, central, top-k": Script(
        {
            "init": _INIT,
            _LAST: (
                "    max_grad_norm=1.0,\n"
                "    exchange=Exchange(TopK(density=0.25), ErrorFeedback(), min_numel=1),\n"
            ),
        },
        processes=2,
    ),
    "two ranks, local, top-k": Script(
        {
            "init": _INIT,
            _LAST: (
                "    max_grad_norm=1.0,\n    placement='local',\n"
                "    exchange=Exchange(TopK(density=0.25), ErrorFeedback(), min_numel=1),\n"
            ),
        },
        processes=2,
    ),
    "two ranks, shares, a mask": Script(
        {
            "init": _INIT,
            _LAST: (
                "    max_grad_norm=1.0,\n    placement='shares',\n"
                "    exchange=Exchange(RandomK(density=0.25, unbiased=False), min_numel=1),\n"
            ),
        },
        processes=2,
    ),
    "two ranks, clients": Script(processes=2, template=CLIENTS),
}


@contextmanager
def written(script: Script) -> Iterator[Path]:
    """Write a script into a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(script.text())
        before = os.getcwd()
        os.chdir(folder)
        try:
            yield path
        finally:
            os.chdir(before)


def messages_of(script: Script, *, steps: int = 20) -> tuple[list[str], ScriptAudit | None]:
    """Audit a script; return its problems and doubts, and the audit."""
    with written(script) as path:
        try:
            audit = audit_script(Job(path, processes=script.processes, steps=steps))
        except ScriptFailed as failed:
            refused = [f"PrivacyError: {failed.refused}"] if failed.refused else []
            return refused or [f"{failed}\n{failed.trace}"], None
    return [*audit.problems, *audit.doubts], audit
