"""YAML and overrides: what is read, and the one line that each fault becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from deeploop_model import ExponentRule
from pretrain.config_file import as_tree, check_config, load_config
from pretrain.errors import ConfigError
from tests.support.runs import REPOSITORY, small_tree, write_tree

CONFIGS = REPOSITORY / "pretrain" / "configs"


@pytest.fixture
def file(dataset: Path, tmp_path: Path) -> Path:
    return write_tree(tmp_path / "run.yaml", small_tree(tmp_path / "out", dataset))


def test_vocabulary_comes_from_the_data(file: Path) -> None:
    assert load_config(file).model.vocab_size == 61
    assert load_config(file, ["model.vocab_size=100"]).model.vocab_size == 100


def test_overrides_are_yaml_values(file: Path) -> None:
    config = load_config(
        file, ["optimizer.lr=6e-4", "optimizer.betas=[0.8, 0.9]", "model.residual={p: 0.45}", "schedule.kind=wsd"]
    )
    assert config.optimizer.lr == 6e-4
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.model.residual == ExponentRule(p=0.45)
    assert config.schedule.kind == "wsd"


def test_preset_then_own_keys(file: Path) -> None:
    config = load_config(file, ["model={preset: gpt2-small, num_rounds: 3, context_length: 16}"])
    assert (config.model.num_blocks, config.model.d_model, config.model.num_rounds) == (12, 768, 3)
    assert config.model.context_length == 16


def test_resolved_tree_reads_back_as_itself(file: Path) -> None:
    stages = "[{from_step: 0, rounds: fixed}, {from_step: 5, rounds: {distribution: poisson_lognormal, mean: 2}}]"
    model = ["model.residual={p: 0.45}", "model.num_kv_heads=1", "model.injection=concat-linear"]
    config = load_config(file, [*model, f"train.rounds={stages}"])
    assert (config.model.num_kv_heads, config.model.injection, config.model.d_ff) == (1, "concat-linear", None)
    assert check_config(as_tree(config), "again") == config


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_shipped_configurations_are_valid(name: str, dataset: Path) -> None:
    """Each with the test's data in place of its own, which is too small to validate on at their context lengths."""
    config = load_config(CONFIGS / name, [f"data.path={dataset}", "train.validate_every=0"])
    assert config.model.num_rounds > 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=3", "train.stepz: unknown key; did you mean 'steps'?"),
        ("trian.steps=3", "trian: unknown key; did you mean 'train'?"),
        ("model.width=3", "model.width: unknown key; known here: preset, num_blocks, num_rounds"),
        ("model.residual={q: 1}", "model.residual.q: unknown key; known here: p, c, d"),
        ("train.steps=abc", "train.steps: 'abc' must be a valid integer"),
        ("train.steps=true", "train.steps: True must be a valid integer"),
        ("train.steps=0", "train.steps: 0 must be greater than or equal to 1"),
        ("train.global_batch_size=15.5", "train.global_batch_size: 15.5 must be a valid integer"),
        ("optimizer.lr=-1", "optimizer.lr: -1 must be greater than 0"),
        ("optimizer.lr=.inf", "optimizer.lr: inf must be a finite number"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1: is required and missing"),
        ("model.tie_embeddings=1", "model.tie_embeddings: 1 must be a valid boolean"),
        ("model.residual=deeplop", "model.residual: 'deeplop' must be 'deeploop', 'deepnorm', 'post_ln' or 'pre_ln'"),
        ("model.residual={p: -1}", "model.residual.p: -1.0 must be 0 or more"),
        ("model.injection=concat", "model.injection: 'concat' must be 'none', 'add' or 'concat-linear'"),
        ("model.num_kv_heads=[]", "model.num_kv_heads: [] must be a valid integer"),
        ("model={d_model: 32, num_heads: 2, num_kv_heads: 3}", "model.num_kv_heads: 3 does not divide num_heads 2"),
        ("model.num_heads=5", "model.num_heads: 5 does not cut d_model 32 into heads of even width, use 4"),
        ("model.preset=gpt3", "model.preset: 'gpt3' is unknown; use one of small-loop"),
        ("model=3", "model: 3 must be a section of keys"),
        ("schedule.kind=linear", "schedule.kind: 'linear' must be 'cosine' or 'wsd'"),
        ("schedule.warmup_steps=20", "schedule.warmup_steps: 20 leaves no step of train.steps 20"),
        (
            "train.recompute=reentrant",
            "train.recompute: 'reentrant' is unknown; use one of none, selective",
        ),
        (
            "train.recompute=segment",
            "train.recompute: 'segment' is unknown; use one of none, selective, block",
        ),
        ("train.recompute=segment:0", "train.recompute: 'segment:0' is unknown; use one of none, selective, block, "),
        ("train.recompute=round:2", "train.recompute: 'round:2' is unknown; use one of none, selective"),
        (
            "train.rounds=deep",
            "train.rounds: 'deep' must be fixed, a number, {distribution: uniform, low: 1, high: 8} or",
        ),
        ("train.rounds=0", "train.rounds: 0 must be greater than or equal to 1"),
        ("train.rounds=true", "train.rounds: True must be a valid integer"),
        ("train.rounds={distribution: normal}", "train.rounds: {'distribution': 'normal'} must be fixed, a number, "),
        ("train.rounds={distribution: uniform, low: 0, high: 3}", "train.rounds.low: 0 must be greater than or equal"),
        ("train.rounds={distribution: uniform, low: 5, high: 3}", "train.rounds: low 5 is more than high 3"),
        ("train.rounds={distribution: uniform, hihg: 3}", "train.rounds.hihg: unknown key; did you mean 'high'?"),
        ("train.rounds={distribution: poisson_lognormal}", "train.rounds.mean: is required and missing"),
        ("train.rounds={distribution: poisson_lognormal, mean: 0}", "train.rounds.mean: 0 must be greater than 0"),
        ("train.rounds=[]", "train.rounds.0.from_step: an empty list: the first stage must begin at step 0"),
        ("train.rounds=[{from_step: 3, rounds: 1}]", "train.rounds.0.from_step: 3: the first stage must begin at step"),
        ("train.rounds=[{from_step: 0, round: 1}]", "train.rounds.0.round: unknown key; did you mean 'rounds'?"),
        ("train.rounds=[{from_step: 0, rounds: []}]", "train.rounds.0.rounds: [] must be fixed, a number, {distribut"),
        (
            "train.rounds=[{from_step: 0, rounds: 1}, {from_step: 0, rounds: 2}]",
            "train.rounds.1.from_step: 0 must be more than 0, where the stage before begins",
        ),
        ("train.round_loss=all", "train.round_loss: 'all' must be 'last', 'uniform' or 'linear' or a valid array"),
        ("train.round_loss=[1, 1, 1]", "train.round_loss: 3 weights were given for 2 rounds"),
        (
            "train.rounds={distribution: poisson_lognormal, mean: 1e19, high: 3}",
            "train.rounds.mean: 1e+19 must be less than or equal to 10000",
        ),
        ("checkpoint.resume=''", "checkpoint.resume: '' must"),
        ("train.initial_weights=''", "train.initial_weights: '' must"),
        ("train.backprop_rounds=0", "train.backprop_rounds: 0 must be greater than or equal to 1"),
        ("model.vocab_size=10", "model.vocab_size: 10 is smaller than the vocabulary of"),
        ("data={}", "data.path: is required and missing"),
    ],
)
def test_each_fault_names_key_value_and_what_would_work(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override])
    line = str(caught.value)
    assert line.startswith(f"{file}: {message}")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.round_loss=[1, 2]", "train.rounds={distribution: uniform, low: 1, high: 2}"],
            "train.round_loss: weights by number need a fixed train.rounds; use uniform or linear",
        ),
        (
            ["train.frozen=['*.weight']"],
            "train.frozen: ['*.weight'] leaves nothing of train.trainable ['*'] to train",
        ),
        (
            ["train.trainable=[block.*]"],
            "train.trainable: 'block.*' names no weight of this model; its weights are emb",
        ),
    ],
)
def test_combinations_that_cannot_train(file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert str(caught.value).startswith(f"{file}: {message}")


@pytest.mark.parametrize(
    ("overrides", "frozen", "name"),
    [
        ([], "embedding_norm.*", "embedding_norm.weight"),
        (["model.position=learned"], "embedding_norm.*", "position_embedding.weight"),
        (["model.num_prelude_blocks=1"], "embedding_norm.*", "prelude.0.attention.qkv.weight"),
        (["model.tie_embeddings=false"], "embedding_norm.*", "embedding.weight"),
    ],
)
def test_truncation_must_leave_no_trained_weight_without_a_gradient(
    file: Path, overrides: list[str], frozen: str, name: str
) -> None:
    truncated = ["train.backprop_rounds=1", *overrides]
    freeze_one = [] if frozen.startswith(name.split(".")[0]) else [f"train.frozen=['{frozen}']"]
    with pytest.raises(ConfigError) as caught:
        load_config(file, [*truncated, *freeze_one])
    assert str(caught.value).startswith(
        f"{file}: train.backprop_rounds: 1: without model.injection no gradient reaches {name}; set model.injection"
    )
    assert load_config(file, [*truncated, "model.injection=add"])
    assert load_config(file, [*truncated, "train.backprop_rounds=2"])  # of 2 rounds, no truncation
    assert load_config(file, [*truncated, f"train.frozen=['{frozen}', '{name.split('.')[0]}.*']"])


@pytest.mark.parametrize("override", ["nonsense", "=3", "train.steps.more=3", "train.steps=[1"])
def test_overrides_that_are_none(file: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        load_config(file, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: [1", "line 1"),
        ("- a\n- b", "must hold sections"),
        ("", "must hold sections"),
        ("a: !!python/object:os.system {}", "line 1"),
    ],
)
def test_files_that_hold_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"bad.yaml: {message}"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")
