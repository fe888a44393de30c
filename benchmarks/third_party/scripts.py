"""The scripts: where they are, what a machine without GPUs and hubs needs, and the edited lines."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.third_party import data

Prepare = Callable[[Path], None]


@dataclass(frozen=True)
class Edit:
    """A line that takes the place of another, or follows it.

    Attributes:
        at: the line of the script, or how it begins, without its indentation.
        new: the new line, indented like that line; several with line breaks.
        after: keep the line and write the new one behind it.
        file: another file than the script itself, relative to the script's folder.
    """

    at: str
    new: str
    after: bool = False
    file: str | None = None


@dataclass(frozen=True)
class Script:
    """A training script of another project.

    Attributes:
        name: in tables.
        framework: that it is an example of.
        repository: the folder of its clone; ``owner/name`` without the owner.
        path: of the script in it.
        port: edits for CPU, for data that machines have, and to print a held-out loss; made in the
            script as it is, too.
        edits: for comm-hooks.
        arguments: of the script.
        prepare: writes the data into the script's folder.
        loss: a regular expression; the last match in what it prints is the held-out loss.
        ranks: processes.
    """

    name: str
    framework: str
    repository: str
    path: str
    edits: tuple[Edit, ...]
    prepare: Prepare
    loss: str
    port: tuple[Edit, ...] = ()
    arguments: tuple[str, ...] = ()
    ranks: int = 2


_DEVICE = "device = f'cuda:{ddp_local_rank}'"
_NANO_GPT_PORT = (
    Edit(_DEVICE, "device = 'cpu'"),
    Edit("torch.cuda.set_device(device)", "pass"),
    Edit("model = DDP(model, device_ids", "model = DDP(model)"),
)
_NANO_GPT_EDITS = (
    Edit(
        "raw_model = model.module",
        "import comm_hooks; "
        "optimizer = comm_hooks.replace(model, optimizer, total_steps=max_iters)",
        after=True,
    ),
)
_NANO_GPT_ARGUMENTS = (
    "config/train_shakespeare_char.py",
    "--dataset=python",
    "--device=cpu",
    "--backend=gloo",
    "--block_size=64",
    "--batch_size=12",
    "--n_layer=4",
    "--n_head=4",
    "--n_embd=128",
    "--dropout=0.0",
    "--eval_iters=200",
)
SCRIPTS = (
    Script(
        name="nanoGPT `train.py`",
        framework="DDP",
        repository="nanoGPT",
        path="train.py",
        port=_NANO_GPT_PORT,
        edits=_NANO_GPT_EDITS,
        prepare=data.nano_gpt,
        arguments=(
            *_NANO_GPT_ARGUMENTS,
            "--compile=False",
            "--gradient_accumulation_steps=2",
            "--max_iters=1000",
            "--lr_decay_iters=1000",
            "--eval_interval=1000",
        ),
        loss=r"step \d+: .*val loss ([\d.]+)",
    ),
    Script(
        name="nanoGPT `train.py`, compiled, two micro-batches",
        framework="torch.compile",
        repository="nanoGPT",
        path="train.py",
        port=_NANO_GPT_PORT,
        edits=_NANO_GPT_EDITS,
        prepare=data.nano_gpt,
        arguments=(
            *_NANO_GPT_ARGUMENTS,
            "--compile=True",
            "--gradient_accumulation_steps=4",
            "--max_iters=500",
            "--lr_decay_iters=500",
            "--eval_interval=500",
        ),
        loss=r"step \d+: .*val loss ([\d.]+)",
    ),
    Script(
        name="FSDP2 `example.py`, as two nodes of two",
        framework="FSDP2",
        repository="examples",
        path="distributed/FSDP2/example.py",
        ranks=4,
        port=(
            Edit("_min_gpu_count = 2", "_min_gpu_count = 0"),
            Edit("return has_gpu and", "return True"),
            Edit(
                "torch.distributed.init_process_group",
                "torch.distributed.init_process_group('gloo')",
            ),
            Edit("batch_size = 32", "batch_size = 8"),
            Edit(  # reset_parameters() of the model leaves out its blocks
                "model.reset_parameters()",
                "for module in model.modules():\n"
                "    if module is not model and hasattr(module, 'reset_parameters'):\n"
                "        module.reset_parameters()",
            ),
            Edit(
                "checkpointer = Checkpointer(",
                'checkpointer = Checkpointer("checkpoints", dcp_api=args.dcp_api)\n'
                "text = open('text.txt', 'rb').read()\n"
                "tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()\n"
                "held_out, tokens = tokens[: len(tokens) // 20], tokens[len(tokens) // 20 :]\n"
                "def rows(of, count):\n"
                "    starts = torch.randint(len(of) - seq_len - 1, (count,))\n"
                "    return torch.stack([of[i : i + seq_len + 1] for i in starts])\n"
                "def loss_of(x):\n"
                "    logits = model(x[:, :-1])\n"
                "    targets = x[:, 1:].flatten()\n"
                "    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)",
            ),
            Edit("for _ in range(10):", "torch.manual_seed(1 + rank)\nfor _ in range(300):"),
            Edit("x = torch.randint(", "x = rows(tokens, batch_size)"),
            Edit("loss = model(x).sum()", "loss = loss_of(x)"),
            Edit(
                "checkpointer.save(model, optim)",
                "model.eval()\n"
                "torch.manual_seed(1)\n"
                "with torch.no_grad():\n"
                "    loss = sum(loss_of(rows(held_out, 64)).item() for _ in range(10)) / 10\n"
                "model.train()\n"
                "if rank == 0:\n"
                "    print(f'held-out loss {loss:.4f}', flush=True)",
            ),
        ),
        edits=(
            Edit(
                "fsdp_kwargs = {}",
                'fsdp_kwargs = {"mesh": (mesh := torch.distributed.init_device_mesh("cpu", (2, 2), '
                'mesh_dim_names=("nodes", "ranks")))["ranks"]}',
            ),
            Edit(
                "optim = torch.optim.Adam(",
                "import comm_hooks; optim = comm_hooks.replace(model, optim, "
                'process_group=mesh["nodes"].get_group())',
                after=True,
            ),
        ),
        prepare=data.one_text,
        loss=r"held-out loss ([\d.]+)",
    ),
    Script(
        name="Accelerate's `cv_example.py`, ResNet",
        framework="Accelerate",
        repository="accelerate",
        path="examples/cv_example.py",
        port=(
            Edit(
                'model = create_model("resnet50d"',
                'model = create_model("resnet10t", pretrained=False, num_classes=len(label_to_id))',
            ),
            Edit("param.requires_grad = False", "pass"),
            Edit(
                'config = {"lr"',
                'config = {"lr": 3e-3, "num_epochs": 4, "seed": 42, '
                '"batch_size": 16, "image_size": 32}',
            ),
            Edit("accurate = 0", "accurate = total = 0"),
            Edit(
                "predictions = outputs.argmax",
                "total += torch.nn.functional.cross_entropy(outputs, batch['label']) "
                "/ len(eval_dataloader)\npredictions = outputs.argmax(dim=-1)",
            ),
            Edit('accelerator.print(f"epoch', "accelerator.print(f'held-out loss {total:.4f}')"),
        ),
        edits=(
            Edit(
                "# Now we train the model",
                "from comm_hooks.frameworks.accelerate import register; "
                "register(accelerator, model, optimizer)",
                after=True,
            ),
        ),
        prepare=data.fashion_images,
        arguments=("--data_dir", "images", "--cpu"),
        loss=r"held-out loss ([\d.]+)",
    ),
    Script(
        name="Accelerate's `nd_parallel_trainer.py`, a Llama",
        framework="Trainer of transformers",
        repository="accelerate",
        path="examples/torch_native_parallelism/nd_parallel_trainer.py",
        port=(
            Edit("pc = ParallelismConfig()", "pc = None"),
            Edit("if pc.tp_enabled:", "if False:"),
            Edit(
                "packed_dataset = get_dataset",
                "packed_dataset = get_dataset(tokenizer, args.sequence_length)"
                ".remove_columns(['shift_labels', 'position_ids'])\n"
                "parts = packed_dataset.train_test_split(test_size=500, seed=1)\n"
                "packed_dataset = parts['train']",
            ),
            Edit(
                "parallelism_config=pc",
                "use_cpu=True, max_steps=1500, report_to=[], save_strategy="
                "'no', disable_tqdm=True, lr_scheduler_type='cosine', warmup_steps=100,",
            ),
            Edit("per_device_train_batch_size", "per_device_train_batch_size=8,"),
            Edit("learning_rate=5e-5", "learning_rate=2e-3, adam_beta2=0.95, weight_decay=0.1,"),
            Edit(
                "train_dataset=packed_dataset",
                "train_dataset=packed_dataset, eval_dataset=parts['test'],",
            ),
            Edit(
                "trainer.save_model()",
                "print(f\"held-out loss {trainer.evaluate()['eval_loss']:.4f}\", flush=True)",
            ),
            Edit(
                "raw_dataset = load_dataset(",
                "raw_dataset = load_dataset('json', data_files='stories.jsonl', split='train')",
                file="utils.py",
            ),
        ),
        edits=(
            Edit(
                "trainer.train()",
                "from comm_hooks.frameworks import transformers; "
                "transformers.register(trainer, total_steps=1500)\ntrainer.train()",
            ),
        ),
        prepare=data.small_llama,
        arguments=("--model-name", "llama", "--sequence-length", "64", "--device-type", "cpu"),
        loss=r"held-out loss ([\d.]+)",
    ),
    Script(
        name="Lightning's `autoencoder.py`, with LightningCLI",
        framework="Lightning",
        repository="pytorch-lightning",
        path="examples/pytorch/basics/autoencoder.py",
        port=(
            Edit("DATASETS_PATH = ", "DATASETS_PATH = 'Datasets'"),
            Edit(
                "from lightning.pytorch.demos.mnist_datamodule",
                "from torchvision.datasets import MNIST",
            ),
        ),
        edits=(
            Edit("import torch", "import torch\nimport comm_hooks.frameworks.lightning"),
            Edit(
                "trainer_defaults=",
                'trainer_defaults={"callbacks": [ImageSampler(), '
                'comm_hooks.frameworks.lightning.CompressionCallback()], "max_epochs": 10},',
            ),
        ),
        prepare=data.mnist_files,
        arguments=(
            "--trainer.accelerator=cpu",
            "--trainer.devices=2",
            "--trainer.strategy=ddp",
            "--trainer.max_epochs=2",
            "--trainer.enable_progress_bar=false",
        ),
        loss=r"test_loss\D*([\d.]+)",
    ),
    Script(
        name="Fabric's `train_fabric.py`, a CNN",
        framework="Fabric",
        repository="pytorch-lightning",
        path="examples/fabric/image_classifier/train_fabric.py",
        port=(
            Edit("DATASETS_PATH = ", "DATASETS_PATH = 'Datasets'"),
            Edit(
                "fabric = Fabric()",
                "fabric = Fabric(accelerator='cpu', devices=2, strategy='ddp')\nfabric.launch()",
            ),
        ),
        edits=(
            Edit(
                "optimizer = optim.Adadelta(",
                "optimizer = optim.Adam(model.parameters(), lr=1e-3)",
            ),
            Edit(
                "scheduler = StepLR(",
                "import comm_hooks; comm_hooks.replace(model, optimizer)\n"
                "scheduler = StepLR(optimizer, step_size=1, gamma=hparams.gamma)",
            ),
        ),
        prepare=data.mnist_files,
        arguments=("--epochs=1", "--batch-size=32"),
        loss=r"Average loss: ([\d.]+)",
    ),
    Script(
        name="DeepSpeedExamples' `cifar10_deepspeed.py`",
        framework="DeepSpeed",
        repository="DeepSpeedExamples",
        path="training/cifar/cifar10_deepspeed.py",
        port=(
            Edit(
                "import torchvision",
                "import torchvision, colours\ntorchvision.datasets.CIFAR10 = colours.CIFAR10",
            ),
            Edit("correct, total = 0, 0", "correct, total, losses = 0, 0, []"),
            Edit(
                "_, predicted = torch.max",
                "losses.append(F.cross_entropy(outputs, labels).item())\n"
                "_, predicted = torch.max(outputs.data, 1)",
            ),
            Edit(
                "if model_engine.local_rank == 0:",
                "if model_engine.local_rank == 0:\n"
                "    print(f'held-out loss {sum(losses) / len(losses):.4f}', flush=True)",
            ),
        ),
        edits=(
            Edit(
                "import deepspeed", "import deepspeed\nimport comm_hooks.frameworks.deepspeed.auto"
            ),
            Edit(
                '"train_batch_size": 16,',
                '"train_batch_size": 16,\n"comm_hooks": {"method": "low_communication"},',
            ),
        ),
        prepare=data.fashion_in_colour,
        arguments=("--dtype=fp32", "--epochs=1", "--log-interval=500"),
        loss=r"held-out loss ([\d.]+)",
    ),
)
"""Seven of five repositories, nanoGPT's in two ways."""
