"""rl/config/options.py on a small tree; what concerns the real tree is in test_config.py."""

import math
import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from rl.config.command_line import CommandLine, help_text, parse_command_line, tree_docs, way_to_name
from rl.config.options import ConfigError, build, flatten, load, read, to_yaml


@dataclass
class Adam:
    lr: float = 1e-3
    """Peak learning
    rate."""
    eps: float = 1e-8
    """Added to the denominator."""


@dataclass
class Train:
    tp: int = 1
    """Tensor parallel size."""
    mode: Literal["fast", "exact"] = "fast"
    """How."""
    adam: Adam = field(default_factory=Adam)


@dataclass
class Roll:
    tp: int = 1
    """Tensor parallel size of a replica."""
    eager: bool = False
    """No graphs."""
    stop: list[str] = field(default_factory=list)
    """Strings that end."""
    ids: list[int] = field(default_factory=list)
    """Tokens that end."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed on."""
    weights: dict[str, float] = field(default_factory=dict)
    """By name."""
    limit: int | None = None
    """Most of it."""
    label: str | None = None
    """A label."""
    anything: Any = 0
    """Whatever."""


@dataclass
class Tree:
    algorithm: Literal["grpo", "sft"] = "grpo"
    """Which."""
    name: str = "run"
    """Name."""
    train: Train = field(default_factory=Train)
    roll: Roll = field(default_factory=Roll)


@dataclass
class Child(Adam):
    beta: float = 0.9
    """Decay."""


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def from_overrides(*overrides):
    return load(Tree, None, overrides)


def message(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def override_error(*overrides):
    return message(from_overrides, *overrides)


# Layers


def test_without_any_source_the_tree_has_its_dataclass_defaults():
    assert load(Tree, None) == Tree()


def test_each_layer_wins_over_the_one_before(yaml_file):
    path = yaml_file("train:\n  tp: 3\n  adam: {lr: 0.3}\n")
    defaults = {"train.tp": 2, "train.adam.lr": 0.2, "roll.tp": 2}
    config = load(Tree, path, ["train.tp=4", "train.tp=5"], defaults)
    assert (config.train.tp, config.train.adam.lr, config.roll.tp, config.train.adam.eps) == (5, 0.3, 2, 1e-8)


def test_the_algorithm_is_read_before_its_defaults(yaml_file):
    raw = read(yaml_file("algorithm: grpo\ntrain: {mode: exact}\n"), ["algorithm=sft"])
    assert build(Tree, raw).algorithm == "sft"
    config = build(Tree, raw, {"train.mode": "fast", "roll.tp": 8})
    assert (config.algorithm, config.train.mode, config.roll.tp) == ("sft", "exact", 8)


def test_building_twice_shares_no_state(yaml_file):
    raw = read(yaml_file("roll: {kwargs: {a: {b: 1}}, stop: [x]}\n"), ["roll.kwargs.a.c=2"])
    first, second = build(Tree, raw), build(Tree, raw)
    first.roll.kwargs["a"]["b"] = 7
    first.roll.stop.append("y")
    assert second.roll.kwargs == {"a": {"b": 1, "c": 2}} and second.roll.stop == ["x"]
    assert build(Tree, raw) == second


def test_an_unknown_key_in_the_defaults_is_an_error():
    assert message(load, Tree, None, (), {"train.tpp": 1}) == (
        "Unknown key 'tpp' in section 'train' (defaults); did you mean train.tp?"
    )


def test_an_empty_file_changes_nothing(yaml_file):
    assert load(Tree, yaml_file("# only a comment\n")) == Tree()


# Files that cannot be used


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "absent.yaml"
    assert (
        message(load, Tree, path)
        == f"Config file {path} cannot be read: No such file or directory; correct the path."
    )


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    assert (
        message(load, Tree, tmp_path)
        == f"Config file {tmp_path} cannot be read: Is a directory; correct the path."
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_named(yaml_file):
    path = yaml_file("name: a\n")
    path.chmod(0)
    assert (
        message(load, Tree, path)
        == f"Config file {path} cannot be read: Permission denied; correct the path."
    )


def test_a_file_that_is_not_text_is_named(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"name: \xff\n")
    assert message(load, Tree, path) == f"Config file {path} is not UTF-8 text (byte 6); save it as UTF-8."


def test_a_control_character_is_an_error(yaml_file):
    assert "not YAML" in message(load, Tree, yaml_file("name: a\x00b\n"))


@pytest.mark.parametrize(
    "text, line, problem",
    [
        ("name: a\ntrain: [1, 2\n", 3, "expected ',' or ']'"),
        ("name: a\n\ttrain: 1\n", 2, "indent with spaces instead of tabs"),
        ("name: a\ntrain:\n  tp: 1\n  tp: 2\n", 4, "the key 'tp' occurs twice"),
        ("name: a\ntrain: {}\nname: b\n", 3, "the key 'name' occurs twice"),
        ("name: a\n---\nname: b\n", 2, "but found another document"),
        ("name: a\n? [b]\n: c\n", 2, "found unhashable key"),
        ("name: !!python/object:os.system a\n", 1, "could not determine a constructor"),
    ],
)
def test_a_yaml_error_gives_file_and_line(yaml_file, text, line, problem):
    path = yaml_file(text)
    error = message(load, Tree, path)
    assert error.startswith(f"{path}, line {line}: ") and problem in error


def test_the_same_key_in_two_sections_is_no_duplicate(yaml_file):
    config = load(Tree, yaml_file("train: {tp: 2}\nroll: {tp: 3}\n"))
    assert (config.train.tp, config.roll.tp) == (2, 3)


def test_a_merged_mapping_may_be_overridden(yaml_file):
    config = load(Tree, yaml_file("train: {adam: &a {lr: 1, eps: 2}}\nroll: {kwargs: {<<: *a, lr: 3}}\n"))
    assert config.roll.kwargs == {"lr": 3, "eps": 2}


def test_a_file_that_holds_no_mapping_is_an_error(yaml_file):
    path = yaml_file("- 1\n")
    assert (
        message(load, Tree, path)
        == f"{path}: found [1] (list), expected a mapping of sections and keys; write e.g. run: {{seed: 2}}."
    )


# Unknown keys


@pytest.mark.parametrize(
    "override, place, advice",
    [
        ("train.tpp=1", "'tpp' in section 'train'", "did you mean train.tp?"),
        ("train.adam.epz=1", "'epz' in section 'train.adam'", "did you mean train.adam.eps?"),
        ("trian.tp=1", "'trian' at the top level", "did you mean train.tp?"),
        ("trian={tp: 1}", "'trian' at the top level", "did you mean train?"),
        ("roll.lr=1", "'lr' in section 'roll'", "did you mean train.adam.lr?"),
        ("roll.learning_rate=1", "'learning_rate' in section 'roll'", "did you mean train.adam.lr?"),
        ("tp=1", "'tp' at the top level", "did you mean train.tp or roll.tp?"),
        ("optim.adam.lr=1", "'optim' at the top level", "did you mean train.adam.lr?"),
        ("Name=a", "'Name' at the top level", "did you mean name?"),
        ("adam={lr: 1}", "'adam' at the top level", "did you mean train.adam?"),
        ("train.zzz=1", "'zzz' in section 'train'", "the keys there are tp, mode and adam."),
        ("zzz=1", "'zzz' at the top level", "the keys there are algorithm, name, train and roll."),
        ("train.adam.sgd.x=1", "'sgd' in section 'train.adam'", "the keys there are lr and eps."),
        ("train..tp=1", "'' in section 'train'", "did you mean train.tp?"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_key(override, place, advice):
    assert override_error(override) == f"Unknown key {place} (override '{override}'); {advice}"


def test_an_unknown_key_in_a_file_names_the_file(yaml_file):
    path = yaml_file("train:\n  adam:\n    lrr: 1\n")
    expected = f"Unknown key 'lrr' in section 'train.adam' ({path}); did you mean train.adam.lr?"
    assert message(load, Tree, path) == expected


def test_a_dotted_key_in_a_file_is_told_to_nest(yaml_file):
    error = message(load, Tree, yaml_file("train.tp: 1\n"))
    assert error.startswith("Unknown key 'train.tp' at the top level") and "nest" in error


def test_a_key_that_is_no_string_is_an_error(yaml_file):
    assert "Unknown key '3' in section 'train'" in message(load, Tree, yaml_file("train: {3: 1}\n"))


def test_a_key_below_a_leaf_is_an_error():
    assert override_error("train.tp.x=1") == (
        "'train.tp' is int, not a section, so 'train.tp.x' (override 'train.tp.x=1') does not exist; "
        "set train.tp itself."
    )


# Overrides


@pytest.mark.parametrize("argument", ["train.tp", "=3", " =3"])
def test_an_override_without_key_or_equals_sign_is_an_error(argument):
    assert override_error(argument) == f"Override '{argument}' is not of the form key=value, e.g. run.seed=2."


def test_an_override_that_is_not_yaml_is_an_error():
    assert override_error("roll.ids=[1").startswith("override 'roll.ids=[1', line 1: expected ',' or ']'")


def test_an_override_may_set_lists_dicts_and_whole_sections():
    config = from_overrides(
        "roll.ids=[1, 2]", "roll.kwargs={a: {b: 1e-6}}", "train={tp: 2, adam: {lr: 5}}", "train.adam.eps=1"
    )
    assert config.roll.ids == [1, 2] and config.roll.kwargs == {"a": {"b": 1e-6}}
    assert config.train == Train(tp=2, adam=Adam(lr=5.0, eps=1.0))


def test_only_the_first_equals_sign_separates():
    assert from_overrides("name=a=b").name == "a=b"


@pytest.mark.parametrize("value, shown", [("3", "3 (int)"), ("[1]", "[1] (list)"), ("abc", '"abc" (str)')])
def test_a_section_needs_a_mapping(value, shown):
    assert override_error(f"train={value}").startswith(
        f"'train' (override 'train={value}') is a section and needs a mapping of its keys; found {shown}; "
    )


def test_null_for_a_section_is_an_error(yaml_file):
    path = yaml_file("train:\nname: a\n")
    error = message(load, Tree, path)
    assert error == f"Section 'train' ({path}) is null; give it at least one key or leave it out."
    assert "Section 'train.adam'" in override_error("train.adam=null")


@pytest.mark.parametrize(
    "text, value",
    [("42", "42"), ("1e-6", "1e-6"), ("true", "true"), ("", ""), ("'42'", "42"), ("a b", "a b")],
)
def test_a_str_takes_the_text_of_an_override(text, value):
    assert from_overrides(f"name={text}").name == value


@pytest.mark.parametrize(
    "override, value",
    [
        ("roll.stop=END", ["END"]),
        ("roll.stop=7", ["7"]),
        ("roll.stop=[]", []),
        ("roll.stop=[a, b]", ["a", "b"]),
    ],
)
def test_a_scalar_of_the_element_type_stands_for_a_list_of_one(override, value):
    assert from_overrides(override).roll.stop == value


@pytest.mark.parametrize(
    "value, shown",
    [("abc", '"abc" (str)'), ("1.5", "1.5 (float)"), ("true", "true (bool)"), ("{a: 1}", '{"a": 1} (dict)')],
)
def test_any_other_scalar_for_a_list_is_an_error(value, shown):
    assert f"found {shown}, expected list[int]" in override_error(f"roll.ids={value}")


def test_in_a_file_a_scalar_is_no_list(yaml_file):
    path = yaml_file("roll: {stop: END}\n")
    assert message(load, Tree, path) == f'roll.stop ({path}): found "END" (str), expected list[str].'


def test_an_override_reaches_into_a_dict(yaml_file):
    path = yaml_file("roll: {kwargs: {a: 1, b: {c: 2}}}\n")
    config = load(Tree, path, ["roll.kwargs.b.d=3", "roll.kwargs.e.f=x"])
    assert config.roll.kwargs == {"a": 1, "b": {"c": 2, "d": 3}, "e": {"f": "x"}}
    assert load(Tree, path, ["roll.kwargs={z: 1}"]).roll.kwargs == {"z": 1}
    assert "'roll.kwargs.a' is 1 (int), not a mapping" in message(load, Tree, path, ["roll.kwargs.a.x=1"])


# Types


@pytest.mark.parametrize(
    "text, value",
    [
        ("1", 1.0),
        ("1e-6", 1e-6),
        ("'1e-6'", 1e-6),
        ("1E+2", 100.0),
        (".5", 0.5),
        ("-2.", -2.0),
        ("1_0.5", 10.5),
        (".inf", math.inf),
    ],
)
def test_a_float_takes_numbers_and_strings_that_are_numbers(yaml_file, text, value):
    for config in (
        load(Tree, yaml_file(f"train: {{adam: {{lr: {text}}}}}\n")),
        from_overrides(f"train.adam.lr={text}"),
    ):
        assert config.train.adam.lr == value and type(config.train.adam.lr) is float


def test_a_number_in_an_untyped_dict_is_a_number(yaml_file):
    config = load(
        Tree,
        yaml_file("roll: {kwargs: {tolerance: 1e-6, flag: off, day: 2024-01-31, time: '1:30', t: 1:30}}\n"),
    )
    assert config.roll.kwargs == {
        "tolerance": 1e-6,
        "flag": "off",
        "day": "2024-01-31",
        "time": "1:30",
        "t": "1:30",
    }


@pytest.mark.parametrize(
    "yaml, key, complaint",
    [
        ("train: {tp: two}", "train.tp", 'found "two" (str), expected int; write a whole number.'),
        ("train: {tp: '2'}", "train.tp", 'found "2" (str), expected int; write a whole number.'),
        ("train: {tp: 010}", "train.tp", 'found "010" (str), expected int; write a whole number.'),
        ("train: {tp: true}", "train.tp", "found true (bool), expected int; write a whole number."),
        ("train: {tp: 1e3}", "train.tp", "found 1000.0 (float), expected int; write 1000."),
        ("train: {tp: 1.5}", "train.tp", "found 1.5 (float), expected int; write a whole number."),
        ("train: {tp: }", "train.tp", "found null, expected int; leave the key out to get its default."),
        ("train: {tp: [1]}", "train.tp", "found [1] (list), expected int; write a whole number."),
        ("train: {adam: {lr: true}}", "train.adam.lr", "found true (bool), expected float; write a number."),
        ("train: {adam: {lr: fast}}", "train.adam.lr", 'found "fast" (str), expected float; write a number.'),
        (
            f"train: {{adam: {{lr: 1{'0' * 400}}}}}",
            "train.adam.lr",
            f"found 1{'0' * 66}... (int), expected float; write a number.",
        ),
        ("train: {adam: {lr: 'nan'}}", "train.adam.lr", 'found "nan" (str), expected float; write a number.'),
        ("name: 42", "name", "found 42 (int), expected str; put it in quotes."),
        ("roll: {eager: 1}", "roll.eager", "found 1 (int), expected bool (true or false)."),
        ("roll: {eager: yes}", "roll.eager", 'found "yes" (str), expected bool (true or false).'),
        (
            "algorithm: gpro",
            "algorithm",
            'found "gpro" (str), expected one of "grpo", "sft"; did you mean "grpo"?',
        ),
        ("algorithm: dqn", "algorithm", 'found "dqn" (str), expected one of "grpo", "sft".'),
        ("algorithm: 1", "algorithm", 'found 1 (int), expected one of "grpo", "sft".'),
        ("roll: {stop: [a, 1]}", "roll.stop[1]", "found 1 (int), expected str; put it in quotes."),
        (
            "roll: {ids: [1, null]}",
            "roll.ids[1]",
            "found null, expected int; leave the key out to get its default.",
        ),
        ("roll: {kwargs: [1]}", "roll.kwargs", "found [1] (list), expected dict[str, Any]."),
        ("roll: {kwargs: {1: a}}", "roll.kwargs", "found the key 1 (int), expected keys of type str."),
        ("roll: {weights: {a: b}}", "roll.weights.a", 'found "b" (str), expected float; write a number.'),
        ("roll: {limit: x}", "roll.limit", 'found "x" (str), expected int or null; write a whole number.'),
    ],
)
def test_a_wrong_type_names_key_source_value_and_expectation(yaml_file, yaml, key, complaint):
    path = yaml_file(yaml + "\n")
    assert message(load, Tree, path) == f"{key} ({path}): {complaint}"


def test_values_of_the_right_type_are_taken(yaml_file):
    keys = "eager: true, stop: [a], ids: [3], weights: {a: 1, b: 1e-2}, limit: 3, label: x"
    config = load(Tree, yaml_file(f"roll: {{{keys}, anything: [1, {{b: c}}]}}\n"))
    assert config.roll == Roll(1, True, ["a"], [3], {}, {"a": 1.0, "b": 0.01}, 3, "x", [1, {"b": "c"}])
    assert type(config.roll.weights["a"]) is float


def test_null_is_a_value_of_an_optional_key(yaml_file):
    config = load(Tree, yaml_file("roll: {limit: 3, label: x}\n"), ["roll.limit=null", "roll.label=~"])
    assert config.roll.limit is None and config.roll.label is None
    assert from_overrides("roll.label=7", "roll.limit=7").roll.label == "7"


def test_a_long_value_is_cut_in_a_message():
    error = override_error(f"roll.ids={'x' * 500}")
    assert 'found "' + "x" * 66 + "... (str)" in error


# Out again


def test_flatten_lists_the_leaves_by_dotted_key_in_order():
    flat = flatten(from_overrides("roll.kwargs={a: 1}"))
    assert list(flat)[:6] == [
        "algorithm",
        "name",
        "train.tp",
        "train.mode",
        "train.adam.lr",
        "train.adam.eps",
    ]
    assert flat["roll.kwargs"] == {"a": 1} and "train" not in flat


AWKWARD = [
    "",
    "1e-6",
    "yes",
    "off",
    "010",
    "1_000",
    "2024-01-31",
    "1:30",
    "null",
    "~",
    "true",
    "a: b",
    "# x",
    " x ",
    "a\nb\t",
    "\u03bb",
    "<<",
    "=",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_a_string_survives_the_round_trip_through_yaml(yaml_file, text):
    config = Tree(name=text, roll=Roll(stop=[text], kwargs={text: {"k": text}}, label=text))
    assert load(Tree, yaml_file(to_yaml(config))) == config


@pytest.mark.parametrize("value", [1e-6, 1e-8, 0.0, -1.5, 1e22, 0.1, math.inf, 3.0])
def test_a_number_survives_the_round_trip_through_yaml(yaml_file, value):
    config = Tree(
        train=Train(adam=Adam(lr=value)), roll=Roll(kwargs={"x": value, "n": 3, "b": False, "none": None})
    )
    again = load(Tree, yaml_file(to_yaml(config)))
    assert again == config and type(again.roll.kwargs["x"]) is float


def test_yaml_holds_every_key_and_no_anchor():
    shared = [1, 2]
    text = to_yaml(Tree(roll=Roll(kwargs={"a": shared, "b": shared})))
    assert "&" not in text and all(key.rpartition(".")[2] + ":" in text for key in flatten(Tree()))


# Help and command line


def test_help_groups_keys_by_section():
    text = help_text(Tree, width=100)
    blocks = {block.splitlines()[0]: block for block in text.split("\n\n")}
    assert list(blocks) == ["top level", "train", "train.adam", "roll"]
    assert '  algorithm  (one of "grpo", "sft"; default "grpo")\n      Which.' in blocks["top level"]
    assert "  train.adam.lr  (float; default 0.001)\n      Peak learning rate." in blocks["train.adam"]
    assert "  roll.limit  (int or null; default null)" in blocks["roll"]
    assert "train.adam.lr" not in blocks["train"]


@pytest.mark.parametrize("width", [40, 60, 100])
def test_help_is_wrapped_to_the_width(width):
    assert max(map(len, help_text(Tree, width).splitlines())) <= width


def test_help_takes_the_width_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert help_text(Tree) == help_text(Tree, 40) != help_text(Tree, 100)


def test_docs_of_a_base_class_are_found():
    docs = tree_docs(Child)
    assert docs == {"lr": "Peak learning rate.", "eps": "Added to the denominator.", "beta": "Decay."}


def test_the_command_line_takes_overrides_in_any_place():
    line = parse_command_line(Tree, ["a=1", "--config", "x.yaml", "b.c=-2", "--print-config", "d=[e, f]"])
    assert line == CommandLine(["x.yaml"], ["a=1", "b.c=-2", "d=[e, f]"], True)
    assert not parse_command_line(Tree, ["--config=x.yaml"]).print_config


@pytest.mark.parametrize(
    "argv, complaint",
    [
        ([], "required: --config"),
        (["train.tp=2"], "required: --config"),
        (["x.yaml", "train.tp=2"], "'x.yaml' is not of the form key=value; write --config x.yaml"),
        (["--config"], "expected one argument"),
        (["--config", "-x"], "the value of --config begins with -; write --config=-x\n"),
        (["--config", "x", "train.tp"], "argument 'train.tp' is not of the form key=value"),
        (
            ["--config", "x", "--train.tp=2"],
            "unknown argument --train.tp=2; to set a key write train.tp=2 without dashes",
        ),
        (["--config", "x", "--fast"], "unknown argument --fast\n"),
        (["--config", "x", "--tp", "2"], "unknown argument --tp; did you mean train.tp=2 or roll.tp=2?\n"),
        (["--config", "x", "--learning-rate=1"], "did you mean train.adam.lr=1?\n"),
        (["--config", "x", "--world-size", "8"], "belongs to --dry-run; in a run the launcher (torchrun"),
        (["--conf", "x"], "unknown argument --conf; did you mean --config?\n"),
        (["--config", "x", "--dryrun"], "unknown argument --dryrun; did you mean --dry-run?\n"),
        (["nowhere", "train.tp=2"], "'nowhere' is neither a file nor key=value; name the run's YAML file in"),
    ],
)
def test_a_usage_error_exits_with_code_2(capsys, argv, complaint):
    with pytest.raises(SystemExit) as caught:
        parse_command_line(Tree, argv)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_directory_of_a_run_is_answered_with_the_way_to_name_it(capsys, tmp_path):
    saved = tmp_path / "checkpoints" / "step_000004"
    saved.mkdir(parents=True)
    for path in (tmp_path / "config.yaml", saved / "config.yaml", saved / "checkpoint.json"):
        path.write_text("")
    for argv, way in (
        ([tmp_path], f"write --config {tmp_path}/config.yaml\n"),
        (["--config", "x", tmp_path], f"write run.dir={tmp_path}\n"),
        ([saved], f"write --config {saved}/config.yaml checkpoint.resume={saved}\n"),
        (["--config", "x", saved], f"write checkpoint.resume={saved}\n"),
    ):
        with pytest.raises(SystemExit):
            parse_command_line(Tree, list(map(str, argv)))
        assert capsys.readouterr().err.endswith(way)
    assert (
        way_to_name("run.name=" + 300 * "x", has_config=False)
        == way_to_name(300 * "x", has_config=True)
        == ""
    )
    assert message(load, Tree, tmp_path) == (
        f"Config file {tmp_path} cannot be read: Is a directory; name {tmp_path}/config.yaml in it."
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["-h"],
        ["--config", "absent.yaml", "no.such=1", "--help"],
        ["--help", "--what"],
        ["--config", "--help"],
    ],
)
def test_help_prints_usage_and_keys_and_exits_with_code_0(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        parse_command_line(Tree, argv, description="Trains.", first=["train.adam.lr"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert (
        out.startswith("usage: train_rl.py --config FILE [key=value ...]")
        and "Trains." in out
        and "train.adam.lr" in out
    )


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("train.adam", {"train.adam.lr", "train.adam.eps"}),
        ("learning", {"train.adam.lr"}),
        ("parallel", {"train.tp", "roll.tp"}),
        ("all", None),
    ],
)
def test_help_selects_a_section_or_the_keys_with_a_word(capsys, word, shown):
    keys = {key for key in flatten(Tree()) if not key.startswith("train.adam")} if shown is None else shown
    with pytest.raises(SystemExit) as caught:
        parse_command_line(Tree, ["--config", "x.yaml", "--help", word])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and keys <= set(re.findall(r"^  (\S+)  \(", out, re.MULTILINE))
    assert shown is None or set(re.findall(r"^  (\S+)  \(", out, re.MULTILINE)) == shown


def test_help_refuses_a_word_that_no_key_has(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_command_line(Tree, ["--help", "xyz"])
    assert caught.value.code == 2 and "--help xyz: no section" in capsys.readouterr().err


def test_help_of_a_word_shows_other_texts_too_but_not_of_a_section(capsys):
    shown = {}
    for word in ("learning", "xyz", "train.adam"):
        with pytest.raises(SystemExit):
            parse_command_line(Tree, ["--help", word], other_help=lambda word: f"metric of {word}")
        shown[word] = capsys.readouterr().out
    assert "train.adam.lr" in shown["learning"] and "metric of learning" in shown["learning"]
    assert shown["xyz"] == "metric of xyz\n" and "metric" not in shown["train.adam"]
