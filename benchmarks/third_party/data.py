"""Data that machines have, in the form in which each script expects its own."""

import gzip
import json
import pickle
import sysconfig
from pathlib import Path

import numpy as np

from benchmarks.lab.tasks.fashion_mnist import DEBIAN

HELD_OUT = 20
"""One of so many bytes of text is held out."""


def text() -> str:
    """Return the source of Python's standard library, its ASCII characters."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(f.read_bytes() for f in files).decode("ascii", "ignore")


def nano_gpt(folder: Path) -> None:
    """Write ``data/python``: two files of 16-bit numbers, and the number of characters."""
    data = np.frombuffer(text().encode(), dtype=np.uint8).astype(np.uint16)
    held_out = len(data) // HELD_OUT
    target = folder / "data" / "python"
    target.mkdir(parents=True, exist_ok=True)
    data[:held_out].tofile(target / "val.bin")
    data[held_out:].tofile(target / "train.bin")
    (target / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 128}))


def one_text(folder: Path) -> None:
    """Write ``text.txt``."""
    (folder / "text.txt").write_text(text())


def mnist_files(folder: Path) -> None:
    """Write Fashion-MNIST where torchvision looks for MNIST, which has the same format."""
    target = folder / "Datasets" / "MNIST" / "raw"
    target.mkdir(parents=True, exist_ok=True)
    for packed in DEBIAN.glob("*.gz"):
        (target / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))


def fashion_images(folder: Path, count: int = 8000) -> None:
    """Write ``images``: JPEG files named by class and number."""
    from torchvision.datasets import MNIST

    mnist_files(folder)
    target = folder / "images"
    target.mkdir(exist_ok=True)
    data = MNIST(folder / "Datasets", train=True)
    for index in range(count):
        image, label = data[index]
        image.save(target / f"class{label}_{index}.jpg")


def small_llama(folder: Path) -> None:
    """Write ``llama``, a model of 0.9 M random parameters with a tokenizer of bytes, and text."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    one_text(folder)
    target = folder / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(target)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: number for number, token in enumerate([*alphabet, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(target)
    rows = text().splitlines(keepends=True)
    stories = ["".join(rows[i : i + 40]) for i in range(0, len(rows), 40)]
    with (folder / "stories.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": story}) + "\n" for story in stories)


def fashion_in_colour(folder: Path) -> None:
    """Write ``colours.py``: Fashion-MNIST in the shape and under the name of CIFAR-10."""
    mnist_files(folder)
    (folder / "colours.py").write_text(
        "from pathlib import Path\n"
        "from PIL import Image\n"
        "from torchvision.datasets import MNIST\n\n\n"
        "class CIFAR10(MNIST):\n"
        "    def __init__(self, root, train, download, transform):\n"
        '        super().__init__("Datasets", train=train, transform=transform)\n\n'
        "    @property\n"
        "    def raw_folder(self):\n"
        '        return str(Path(__file__).parent / "Datasets" / "MNIST" / "raw")\n\n'
        "    def __getitem__(self, index):\n"
        "        image, label = self.data[index], int(self.targets[index])\n"
        '        picture = Image.fromarray(image.numpy()).convert("RGB").resize((32, 32))\n'
        "        return self.transform(picture), label\n"
    )
