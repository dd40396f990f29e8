"""config.py: which value counts, what is refused and in which words, and that a file brings the same options back."""

import math
import re
from dataclasses import asdict, fields
from typing import get_args

import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_logicmix import cli
from gpu_logicmix.train.config import OPTION_TYPES, PRESETS, Config, changed, make_config, read_toml, to_toml


# ----------------------------------------------------------------------------------------------------------- precedence
def test_command_line_over_file_over_preset_over_default(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text('preset = "paper-voc"\nk_max = 5\nlr = 1\nmix = "mixup"\n')
    config = make_config({"mix": "none"}, file=file)
    assert config.mix == "none"  # given
    assert (config.k_max, config.lr) == (5, 1.0)  # the file
    assert (config.k_min, config.theta_pos, config.theta_neg) == (3, 2.5, -1.0)  # the preset that the file names
    assert config.epochs == 60  # the default
    assert make_config({}, "paper-vg", file).theta_pos == 2.0  # a preset that is given, not the one of the file
    assert isinstance(config.lr, float)


def test_the_papers_settings():
    """Section 4 of the paper and the authors' code."""
    for name, k, thetas in (
        ("paper-coco", (2, 3), (2.0, -2.0)),
        ("paper-vg", (2, 3), (2.0, -1.0)),
        ("paper-voc", (3, 4), (2.5, -1.0)),
    ):
        c = make_config({}, name)
        assert (c.k_min, c.k_max) == k
        assert (c.theta_pos, c.theta_neg) == thetas
        assert (c.model, c.head, c.size, c.normalisation) == ("resnet101", "mlp", 448, "none")
        assert (c.epochs, c.batch_size, c.accumulate) == (60, 32, 4)
        assert (c.lr, c.weight_decay, c.schedule, c.warmup) == (2e-4, 1e-4, "onecycle", 0.2)
        assert (c.ema_decay, c.ema_warmup) == (0.999, False)
        assert (c.mix, c.p, c.flip, c.randaugment, c.ra_n, c.ra_m) == ("logicmix", 0.5, True, True, 2, 9)
        assert (c.loss, c.loss_option) == ("asl", None)  # its own defaults: gamma_neg 4, gamma_pos 0, clip 0.05
        assert c.cl
        assert c.cft
    assert {"paper-coco", "paper-voc", "paper-vg"} <= set(PRESETS)
    for name in PRESETS:
        make_config({}, name)  # every option of every preset is a valid one


def test_every_option_is_on_the_command_line_and_in_its_help():
    command = cli.load_command("fit")
    parameters = {p.name: p for p in command.params}
    for f in fields(Config):
        assert f.name in parameters, f.name
        if f.name != "data":
            assert f"--{f.name.replace('_', '-')}" in parameters[f.name].opts
            assert parameters[f.name].help
        if OPTION_TYPES[f.name] is bool:
            assert parameters[f.name].secondary_opts == [f"--no-{f.name.replace('_', '-')}"]
        assert parameters[f.name].default is None  # a default here would overrule a file


# ---------------------------------------------------------------------------------------------------------------- files
def value_for(f):
    rules, kind = f.metadata, OPTION_TYPES[f.name]
    kinds = get_args(kind) if get_args(kind) and kind != list[str] else (kind,)
    if "choices" in rules:
        return st.sampled_from(rules["choices"])
    text = st.text(st.characters(exclude_categories=("Cs",)))
    low, high = rules.get("low", rules.get("above")), rules.get("high")
    makers = {
        bool: st.booleans(),
        int: st.integers(low, high),
        float: st.floats(low, high, allow_nan=False, allow_infinity=False, exclude_min="above" in rules),
        str: text,
        list[str]: st.lists(text),
        type(None): st.none(),
    }
    return st.one_of([makers[k] for k in kinds])


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_a_written_file_gives_an_equal_config(tmp_path_factory, data):
    chosen = data.draw(st.sets(st.sampled_from([f.name for f in fields(Config)])))
    values = {f.name: data.draw(value_for(f), f.name) for f in fields(Config) if f.name in chosen}
    try:
        config = Config(**values)
    except ValueError:
        return  # rules between options
    file = tmp_path_factory.mktemp("toml") / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    again = make_config({}, file=file)
    assert asdict(again) == asdict(config)
    assert {k: type(v) for k, v in asdict(again).items()} == {k: type(v) for k, v in asdict(config).items()}
    assert Config(**changed(config)) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batchsize = 3", "there is no option 'batchsize'; did you mean batch_size?"),
        ("batch-size = 3", "there is no option 'batch-size'; did you mean batch_size?"),
        ("frobnicate = 3", "there is no option 'frobnicate'"),
        ("[run]\nseed = 1", "there is no option 'run'"),
        ("epochs = 2.5", "epochs=2.5: must be int"),
        ('epochs = "2"', "epochs='2': must be int"),
        ("epochs = true", "epochs=True: must be int"),
        ("flip = 1", "flip=1: must be bool"),
        ("lr = nan", "lr=nan: must be finite"),
        ("lr = inf", "lr=inf: must be finite"),
        ("lr = 0", "lr=0: must be above 0"),
        ("epochs = 0", "epochs=0: must be at least 1"),
        ("p = 1.5", "p=1.5: must be at most 1"),
        ('mix = "logicmx"', "mix='logicmx': must be one of logicmix, mixup"),
        ("option = 3", "option=3: must be a list of strings"),
        ("option = [3]", "option=[3]: must be a list of strings"),
        ("k_min = 4", "k_max=3: must not be below k_min=4"),
        ("clean_epochs = 60", "clean_epochs=60: must be below epochs=60"),
        ("mix_start = 61", "mix_start=61: must not be above epochs=60"),
        ("theta_pos = -3", "theta_neg=-2.0: must not be above theta_pos=-3.0"),
        ("known = 0", "known=0: must be above 0 and at most 1"),
        ("known = 1.5", "known=1.5: must be above 0 and at most 1"),
        ('known = 2.5\nprotocol = "per-class"', "known=2.5: with protocol=per-class it is a number of labels"),
        ('val = "shapes"\nholdout = 0.1', "val='shapes' and holdout=0.1: choose one"),
        ('preset = "paper"', "preset='paper': must be one of paper-coco"),
        ("preset = [1]", "preset=[1]: must be one of paper-coco"),
        ("lr = ", "not TOML"),
        ("lr = 1\nlr = 2", "not TOML"),
        ("\xff", "not TOML"),
    ],
)
def test_mistakes_in_a_file(tmp_path, text, words):
    file = tmp_path / "options.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        make_config({}, file=file)
    assert "\n" not in str(error.value)


def test_characters_that_toml_wants_escaped(tmp_path):
    config = Config(data="csv:" + "".join(map(chr, range(256))), option=['quote="', "back\\slash", "😀"])
    (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    assert make_config({}, file=tmp_path / "config.toml") == config


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"none\.toml: no such file"):
        read_toml(tmp_path / "none.toml")


def test_every_default_is_allowed():
    for f in fields(Config):
        assert "panel" in f.metadata
        assert f.metadata["help"].endswith((".", "..."))
        if "choices" in f.metadata:
            assert f.default in f.metadata["choices"]
    assert not any(isinstance(v, float) and not math.isfinite(v) for v in asdict(Config()).values())
