"""Names of torchtitan 0.2's TOML files."""

import pytest

from slimpipe.torchtitan.config import ConfigError
from slimpipe.torchtitan.legacy import _GONE, _MOVED, put, translate_names
from slimpipe.torchtitan.toml import _paths, load_toml

OLD = """
[job]
dump_folder = "here"
[model]
name = "llama3"
flavor = "debugmodel"
tokenizer_path = "tokens"
[optimizer]
name = "Adam"
lr = 1e-3
beta2 = 0.99
implementation = "foreach"
[lr_scheduler]
lr_min = 0.1
[training]
dataset = "c4"
dataset_path = "data"
batch_size = 4
seed = 7
[checkpoint]
enable_checkpoint = true
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[validation]
enable = true
dataset = "c4_test"
[profiling]
profile_freq = 3
"""


@pytest.fixture
def load(tmp_path):
    def load(text, *overrides):
        file = tmp_path / "old.toml"
        file.write_text(text)
        return load_toml(str(file), overrides)

    return load


def test_an_old_file_means_what_it_meant(load):
    config = load(OLD)
    assert (config.dump_folder, config.hf_assets_path) == ("here", "tokens")
    (group,) = config.optimizer.param_groups
    assert group.optimizer_name == "Adam"
    assert group.optimizer_kwargs == {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    assert config.optimizer.implementation == "foreach"
    assert config.lr_scheduler.min_lr_factor == 0.1
    assert (config.dataloader.dataset, config.dataloader.dataset_path) == ("c4", "data")
    assert (config.training.local_batch_size, config.debug.seed, config.checkpoint.enable) == (4, 7, True)
    assert (config.validator.enable, config.validator.dataloader.dataset) == (True, "c4_test")
    assert config.profiler.profile_freq == 3


def test_old_names_on_the_command_line_win_over_new_ones_in_the_file(load):
    text = '[model]\nflavor = "debugmodel"\n[dataloader]\ndataset = "c4"\n'
    config = load(text, "--training.dataset", "c4_test", "--optimizer.lr", "0.5")
    assert config.dataloader.dataset == "c4_test"
    assert config.optimizer.param_groups[0].optimizer_kwargs["lr"] == 0.5


def test_new_places_exist(load):
    settings = set(_paths(load(OLD)))
    assert {new for new in _MOVED.values() if new not in settings} == set()


@pytest.mark.parametrize("path", _GONE)
def test_names_without_meaning_are_answered(path):
    tables = {}
    put(tables, path, 0)
    (error,) = translate_names(tables)
    assert error == f"{path}: a name of torchtitan 0.2; {_GONE[path]}"
    assert tables == {}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "[activation_checkpoint]\nselective_ac_option = '2'\n",
            "activation_checkpoint.selective_ac_option: torchtitan now",
        ),
        (
            "[training]\ndataset = 'a'\n[dataloader]\ndataset = 'b'\n",
            "training.dataset: torchtitan 0.2's name of dataloader",
        ),
        (
            "[optimizer]\nname = 'AdmW'\n",
            'optimizer.name: no optimizer "AdmW"; did you mean "AdamW"? known: Adam, AdamW',
        ),
        ("[optimizer]\nlr = true\n", "optimizer.lr: must be a number, for example 0.5, not true"),
        (
            "[optimizer]\nlr = 1.0\n[[optimizer.param_groups]]\npattern = '.*'\noptimizer_name = 'Adam'\n",
            "optimizer.lr: there are several parameter groups",
        ),
    ],
)
def test_unclear_meaning_is_an_error(load, text, error):
    with pytest.raises(ConfigError) as caught:
        load('[model]\nflavor = "debugmodel"\n' + text)
    (found,) = caught.value.errors
    assert found.startswith(error)
