"""The demo data: made whole or not at all, the same each time, and readable by torchtitan's own classes."""

import json
import threading

import pytest
import torch

from tools import make_demo_data

SEQ_LEN = 2048


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    make_demo_data.main(["--out", str(out)])
    return out


def _files(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_corpus_is_json_lines_within_the_cap(data):
    texts = [json.loads(line)["text"] for line in (data / "corpus" / "data.jsonl").read_text().splitlines()]
    assert len(texts) > 50
    assert 1_000_000 < sum(len(text.encode()) for text in texts) <= make_demo_data.MAX_CORPUS_BYTES
    for text in texts[:20]:
        compile(text, "module", "exec")


def test_second_run_changes_nothing_and_another_folder_gets_the_same_bytes(data, tmp_path, capsys):
    before = {file: file.stat().st_mtime_ns for file in data.rglob("*")}
    make_demo_data.main(["--out", str(data)])
    assert {file: file.stat().st_mtime_ns for file in data.rglob("*")} == before
    assert capsys.readouterr().out == ""
    make_demo_data.main(["--out", str(tmp_path)])
    assert _files(tmp_path) == _files(data)


def test_a_missing_folder_is_made_again(data, tmp_path):
    documents = ["import this\n" * 50]
    make_demo_data.publish(tmp_path / "corpus", lambda folder: make_demo_data.write_corpus(folder, documents))
    make_demo_data.main(["--out", str(tmp_path)])
    assert json.loads((tmp_path / "corpus" / "data.jsonl").read_text())["text"] == documents[0]
    assert _files(tmp_path / "tokenizer") == _files(data / "tokenizer")


def test_of_racing_runs_one_wins_and_nothing_else_is_left(tmp_path):
    barrier = threading.Barrier(3)
    made = []

    def write(folder):
        (folder / "whole").write_text("yes")
        barrier.wait()  # all have written before the first one renames

    def run():
        made.append(make_demo_data.publish(tmp_path / "corpus", write))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False, False, True]
    assert _files(tmp_path).keys() == {(tmp_path / "corpus" / "whole").relative_to(tmp_path)}
    assert [entry.name for entry in tmp_path.iterdir()] == ["corpus"]


def test_an_interrupted_run_leaves_nothing(tmp_path):
    def write(folder):
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_demo_data.publish(tmp_path / "corpus", write)
    assert list(tmp_path.iterdir()) == []


def test_torchtitan_reads_it(data, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    tokenizer = HuggingFaceTokenizer.Config().build(tokenizer_path=str(data / "tokenizer"))
    assert tokenizer.get_vocab_size() == make_demo_data.VOCAB_SIZE
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    text = "def f(x):\n    return x  # ünïcode\n"
    ids = tokenizer.encode(text, add_bos=True, add_eos=True)
    assert (ids[0], ids[-1]) == (0, 1)
    assert tokenizer.decode(ids[1:-1]) == text

    config = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=str(data / "corpus"))
    batches = []
    for rank in range(2):
        loader = config.build(dp_world_size=2, dp_rank=rank, tokenizer=tokenizer, seq_len=SEQ_LEN, local_batch_size=4)
        batches += [batch for batch, _ in zip(loader, range(5), strict=False)]
    tokens = torch.cat([inputs["input"] for inputs, _ in batches])
    positions = torch.cat([inputs["positions"] for inputs, _ in batches])
    assert tokens.shape == positions.shape == (2 * 5 * 4, SEQ_LEN)
    assert tokens.min() >= 0
    assert tokens.max() < make_demo_data.VOCAB_SIZE

    steps = positions[:, 1:] - positions[:, :-1]
    assert torch.all((steps == 1) | (positions[:, 1:] == 0))
    boundaries = (positions[:, 1:] == 0).sum(dim=1)
    assert boundaries.max() >= 2, "some sequences must hold several documents"
    assert torch.all(tokens[:, 1:][positions[:, 1:] == 0] == tokenizer.bos_id)
    assert boundaries.min() == 0, "some sequences must be one document that is long enough for every slice"
