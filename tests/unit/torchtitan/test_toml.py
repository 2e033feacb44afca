"""TOML files and command line -> trainer configuration; every kind of error in its own words, all at once."""

import dataclasses

import pytest
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import InterleavedHuggingFaceTextDataLoader

from slimpipe.torchtitan.config import ConfigError, SlimPipeTrainerConfig
from slimpipe.torchtitan.toml import TomlConfigManager, load_toml

MODEL = '[model]\nflavor = "debugmodel"\n'


@pytest.fixture
def load(tmp_path):
    def load(text, *overrides):
        file = tmp_path / "test.toml"
        file.write_text(text)
        return load_toml(str(file), overrides)

    return load


@pytest.fixture
def errors(load):
    def errors(text, *overrides):
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        return list(caught.value.errors)

    return errors


def test_values_reach_their_fields_and_the_rest_keeps_its_default(load):
    config = load(
        'dump_folder = "here"\n' + MODEL + "[training]\nsteps = 3\nmax_norm = 2\n"
        '[slimpipe]\nnum_slices = 4\nkernel = "reference"\n'
        "[lr_scheduler]\nmin_lr_factor = 1\n[validator.dataloader]\ninfinite = true\n"
    )
    assert isinstance(config, SlimPipeTrainerConfig)
    assert (config.dump_folder, config.training.steps, config.training.max_norm) == ("here", 3, 2)
    assert (config.slimpipe.num_slices, config.slimpipe.kernel, config.slimpipe.stages_per_rank) == (
        4,
        "reference",
        None,
    )
    assert type(config.lr_scheduler.min_lr_factor) is float
    assert config.validator.dataloader.infinite
    assert config.validator.dataloader.dataset == "c4_validation"
    assert config.training.seq_len == 2048
    assert isinstance(config.loss, CrossEntropyLoss.Config)
    assert config.loss.global_vocab_size == 2048


def test_config_takes_everything_from_a_function(load):
    config = load('[model]\nname = "llama3"\nconfig = "llama3_debugmodel"\n')
    assert isinstance(config.loss, ChunkedLossWrapper.Config)
    assert config.lr_scheduler.warmup_steps == 2
    config = load('[model]\nconfig = "slimpipe.torchtitan.config_registry:llama3_debug"\n[slimpipe]\nnum_slices = 16\n')
    assert config.slimpipe.num_slices == 16
    assert config.slimpipe.measure_memory


def test_choices_by_their_command_line_name(load):
    modes = {"full": FullAC.Config, "selective": SelectiveAC.Config, "none": type(None)}
    for mode, cls in modes.items():
        assert type(load(f'{MODEL}[activation_checkpoint]\nmode = "{mode}"\n').activation_checkpoint) is cls
    config = load(f'{MODEL}[activation_checkpoint]\nmode = "full"\npreserve_rng_state = false\n')
    assert not config.activation_checkpoint.preserve_rng_state
    config = load(f"{MODEL}[activation_checkpoint]\ndebug = true\n")
    assert isinstance(config.activation_checkpoint, SelectiveAC.Config)
    assert config.activation_checkpoint.debug


def test_other_classes_by_module_and_name(load, errors):
    place = "torchtitan.hf_datasets.text_datasets:InterleavedHuggingFaceTextDataLoader"
    config = load(f'{MODEL}[dataloader]\ntype = "{place}"\nseed = 3\n[[dataloader.sources]]\ndataset_path = "x"\n')
    assert isinstance(config.dataloader, InterleavedHuggingFaceTextDataLoader.Config)
    assert (config.dataloader.seed, config.dataloader.sources[0].dataset_path) == (3, "x")
    assert errors(f'{MODEL}[dataloader]\ntype = "os:path"\n') == ['dataloader.type: "os:path" is not a BaseDataLoader']
    (error,) = errors(f'{MODEL}[dataloader]\ntype = "nowhere:Class"\n')
    assert error.startswith('dataloader.type: cannot import "nowhere:Class"')


def test_parameter_groups_as_tables(load, errors):
    table = '[[optimizer.param_groups]]\npattern = ".*"\noptimizer_name = "Adam"\noptimizer_kwargs = { lr = 0.5 }\n'
    (group,) = load(MODEL + table).optimizer.param_groups
    assert (group.optimizer_name, group.optimizer_kwargs) == ("Adam", {"lr": 0.5})
    (error,) = errors(MODEL + '[[optimizer.param_groups]]\npatern = ".*"\noptimizer_name = "Adam"\n')
    assert error.startswith('optimizer.param_groups.patern: no such key; did you mean "pattern"?')


def test_command_line_wins_in_every_spelling(load):
    text = MODEL + "[training]\nsteps = 3\nseq_len = 64\ndisable_cuda_graphs = false\n[metrics]\nenable_wandb = true\n"
    config = load(
        text,
        *(
            "--training.steps",
            "5",
            "--training.seq-len=128",
            "--training.disable_cuda_graphs",
            "--metrics.no-enable-wandb",
        ),
        *("--compile.components", "model", "loss", "--debug.seed", "None", "--training.global_batch_size", "-1"),
        *("--activation_checkpoint.mode", "none", "--dump_folder", "9", "--slimpipe.num_slices=2"),
    )
    assert (config.training.steps, config.training.seq_len, config.training.global_batch_size) == (5, 128, -1)
    assert config.training.disable_cuda_graphs
    assert not config.metrics.enable_wandb
    assert config.compile.components == ["model", "loss"]
    assert config.activation_checkpoint is None
    assert (config.dump_folder, config.slimpipe.num_slices, config.debug.seed) == ("9", 2, None)
    assert load(text, "--training.steps", "5", "--training.steps", "6").training.steps == 6
    assert load(text, "--model.config", "llama3_debugmodel").metrics.log_freq == 1
    assert load(text, "--training.disable_cuda_graphs", "true").training.disable_cuda_graphs


def test_a_file_that_only_the_command_line_makes_valid(load, errors):
    text = MODEL + "[parallelism]\npipeline_parallel_degree = 2\n"
    assert errors(text) == ["CUDA graphs do not support pipeline parallelism yet. Set --training.disable_cuda_graphs."]
    assert load(text, "--training.disable_cuda_graphs").parallelism.pipeline_parallel_degree == 2


def test_all_errors_at_once(errors):
    text = (
        'unknown = 1\n[model]\nflavor = "debugmodel"\n[training]\nsteps = "x"\nsequence_len = 1\nlog_freq = 2\n'
        '[trainng]\nsteps = 1\n[slimpipe]\nkernel = "flash"\n[optimizer]\nlr = "high"\n[float8]\na = 1\n'
        '[activation_checkpoint]\nmode = "ful"\n[parallelism]\nspmd_backend = "dtensor"\n'
    )
    found = errors(text, "--metrics.enable_wandb", "7", "--training.steps.x", "1", "--profiling")
    wanted = [
        "float8: a name of torchtitan 0.2; quantization is part of the model now",
        'optimizer.lr: must be a number, for example 0.5, not "high"',
        "unknown: no such table or key; known: model, hf_assets_path",
        "training.steps: must be an integer, for example 8, not {",
        'training.sequence_len: no such key; did you mean "seq_len"? known: local_batch_size',
        "training.log_freq: no such key here; did you mean metrics.log_freq?",
        'trainng: no such table or key; did you mean "training"?',
        "slimpipe.kernel = 'flash': it must be one of auto",
        'activation_checkpoint.mode: no mode "ful"; did you mean "full"? known: selective, full, memory-budget, none',
        'parallelism.spmd_backend: must be one of "partial_dtensor"',
        "metrics.enable_wandb: must be true or false, not 7",
        "profiling: no such table or key; ",
    ]
    for start in wanted:
        assert any(error.startswith(start) for error in found), start
    assert len(found) == len(wanted)


def test_text_of_the_exception_is_the_whole_list(load):
    with pytest.raises(ConfigError) as caught:
        load(MODEL + "[training]\na = 1\nb = 2\n")
    first, *rest = str(caught.value).splitlines()
    assert first.endswith("test.toml: 2 errors")
    assert rest == [f"  - {error}" for error in caught.value.errors]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[model]\n", "model: needs either flavor or config"),
        ("", "model: needs either flavor or config"),
        ("model = 1\n", "model: must be a table, not 1"),
        ('[model]\nflavor = "a"\nconfig = "b"\n', "model: needs either flavor or config"),
        ("[model]\nflavor = 8\n", "model.flavor: must be a string, not 8"),
        ('[model]\nflavour = "8B"\nflavor = "8B"\n', 'model.flavour: no such key; did you mean "flavor"?'),
        ('[model]\nflavor = "debugmodl"\n', 'model.flavor: no flavor "debugmodl"; did you mean "debugmodel"? known: '),
        ('[model]\nname = "lama3"\nflavor = "8B"\n', 'model.name: no model "lama3"; did you mean "llama3"? known: '),
        (
            '[model]\nconfig = "llama3_debugmode"\n',
            'model.config: no function "llama3_debugmode"; did you mean "llama3_debug',
        ),
        ('[model]\nconfig = "nowhere:f"\n', 'model.config: cannot import "nowhere"'),
        ("training = 3\n" + MODEL, "training: must be a table [training], not 3"),
        (
            "activation_checkpoint = 3\n" + MODEL,
            "activation_checkpoint: must be a table [activation_checkpoint], not 3",
        ),
        (
            MODEL + "[activation_checkpoint]\nmode = 'none'\ndebug = true\n",
            'activation_checkpoint.debug: mode "none" takes',
        ),
        (MODEL + "[training]\nsteps = { a = 1 }\n", "training.steps: must be an integer, for example 8, not {'a': 1}"),
        (MODEL + "[model_spec]\nname = 'x'\n", "model_spec: no such table or key"),
        (MODEL + "[checkpoint]\nkeep_latest_k = 1\n", "checkpoint: We need to maintain at least 2 checkpoint replicas"),
        (
            MODEL + "[slimpipe]\nnum_slices = 0\n",
            "slimpipe.num_slices = 0: it must be at least 1; nearest legal value: 1",
        ),
        (
            MODEL + "[training]\nlocal_batch_size = 3\ndisable_cuda_graphs = true\n[parallelism]\n"
            "pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 2\n",
            "training.local_batch_size = 3: it must be a positive multiple of "
            "parallelism.pipeline_parallel_microbatch_size = 2; nearest legal value: 4",
        ),
    ],
)
def test_one_error(errors, text, error):
    (found,) = errors(text)
    assert found.startswith(error)


def test_unreadable_files(errors, tmp_path):
    (error,) = errors("[model\n")
    assert error.startswith("not TOML: ")
    assert "line 1" in error
    with pytest.raises(ConfigError, match=r"no\.toml: 1 error\n  - cannot read the file: No such file"):
        load_toml(str(tmp_path / "no.toml"))


def test_words_that_are_no_options(errors):
    assert errors(MODEL, "full") == ['"full": not an option; write --section.key value']
    clash = errors(MODEL, "--training", "1", "--training.steps", "2")
    assert clash[0] == "--training.steps: clashes with another option"


def test_rebuilding_runs_post_init_of_every_level(load, monkeypatch):
    config = load(MODEL + "[checkpoint]\ninitial_load_path = ' /a '\n")
    assert config.checkpoint.initial_load_path == "/a"  # CheckpointManager.Config strips it
    seen = []
    stock = SlimPipeTrainerConfig.__post_init__
    monkeypatch.setattr(
        SlimPipeTrainerConfig, "__post_init__", lambda self: (seen.append(self.training.steps), stock(self))
    )
    load(MODEL + "[training]\nsteps = 4\n")
    assert seen[-1] == 4


def test_manager_reads_toml_and_torchtitans_own_arguments(tmp_path):
    file = tmp_path / "test.toml"
    file.write_text(MODEL)
    config = TomlConfigManager().parse_args([str(file), "--training.steps=4"])
    assert config.training.steps == 4
    assert config.model_spec.flavor == "debugmodel"
    args = "--module llama3 --config llama3_debugmodel --slimpipe.num_slices 4 --training.seq_len 4096"
    config = TomlConfigManager().parse_args(args.split())
    assert (config.slimpipe.num_slices, config.training.seq_len) == (4, 4096)


def test_help_lists_our_section(tmp_path, capsys):
    file = tmp_path / "test.toml"
    file.write_text(MODEL)
    with pytest.raises(SystemExit) as caught:
        TomlConfigManager().parse_args([str(file), "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(
        f"--slimpipe.{field.name.replace('_', '-')}" in shown
        for field in dataclasses.fields(load_toml(str(file)).slimpipe)
    )
