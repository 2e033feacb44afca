"""Make a small training corpus and a tokenizer from the Python standard library's own source files.

    python tools/make_demo_data.py [--out build/demo]

Every machine has these files, so nothing is downloaded. Writes

    <out>/corpus/data.jsonl      one module per line, {"text": ...}: what torchtitan's "c4_test" dataset reads
    <out>/tokenizer/             byte-level BPE, 2048 tokens (the vocabulary of torchtitan's llama3 debug model)

Each folder appears whole or not at all, also when two runs race; a folder that exists is left as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

VOCAB_SIZE = 2048
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
MAX_CORPUS_BYTES = 4_000_000
MAX_FILE_BYTES = 40_000  # a few sequences of 2048 tokens; one huge module shall not be a large share of the corpus
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}


def read_documents(folder: Path, max_bytes: int = MAX_CORPUS_BYTES) -> Iterator[str]:
    """Yield the text of the Python files under `folder`, in sorted order, up to `max_bytes` in all."""
    for file in sorted(folder.rglob("*.py")):
        if (
            _SKIPPED_FOLDERS.intersection(file.relative_to(folder).parts)
            or not 0 < file.stat().st_size < MAX_FILE_BYTES
        ):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        max_bytes -= len(text.encode())
        if max_bytes < 0:
            return
        yield text


def write_corpus(folder: Path, documents: list[str]) -> None:
    """Write `documents` as JSON lines into `folder`."""
    with (folder / "data.jsonl").open("w", encoding="utf-8") as file:
        for text in documents:
            file.write(json.dumps({"text": text}) + "\n")


def write_tokenizer(folder: Path, documents: list[str]) -> None:
    """Train a byte-level BPE tokenizer on `documents` and write it as Hugging Face files into `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def publish(target: Path, write: Callable[[Path], None]) -> bool:
    """Make the folder `target` with what `write` puts into it, unless it exists.

    `write` works on a temporary folder beside `target` that is renamed at the end. Returns whether this call made it.
    """
    if target.exists():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        folder = Path(temporary) / target.name
        folder.mkdir()
        write(folder)
        try:
            os.rename(folder, target)
        except OSError:
            if not target.exists():
                raise
            return False  # another run was faster
    return True


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Make the demo corpus and tokenizer from the standard library's source."
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo"), help="folder to write to (default: %(default)s)"
    )
    out = parser.parse_args(argv).out
    writers = {out / "corpus": write_corpus, out / "tokenizer": write_tokenizer}
    if all(target.exists() for target in writers):
        return
    stdlib = Path(sysconfig.get_path("stdlib"))
    documents = list(read_documents(stdlib))
    if not documents:
        parser.error(f"no Python source files in {stdlib}: this Python comes without them")
    for target, write in writers.items():
        if publish(target, partial(write, documents=documents)):
            print(f"made {target} from {len(documents)} files of the Python standard library")


if __name__ == "__main__":
    main()
