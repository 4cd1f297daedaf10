"""Configuration: YAML and flags, strict, all problems at once, each a sentence that says what to do."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from finetune.config import foreign_keys, sections
from finetune.config.command_line import _fields, as_flag, parse, to_yaml
from finetune.config.dpo_section import Dpo
from finetune.config.pretrain_section import Budget, Corpus, Tokens
from finetune.errors import InputError
from finetune.output.run_files import write_run
from finetune.output.run_reading import read_run
from recipes.dpo import Config as DpoConfig
from recipes.sft import Config

REQUIRED = ["--model.path", "m", "--data.train", "t.jsonl", "--train.output_dir", "o"]


def problems(*arguments: str) -> list[str]:
    with pytest.raises(InputError) as error:
        parse(Config, arguments)
    return error.value.problems


def test_flag_wins_over_file_and_file_over_default(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("train: {learning_rate: 1e-3, seed: 4}\nmodel: {path: from_file}")
    config = parse(Config, ["--config", str(file), *REQUIRED, "--train.seed", "5"])
    assert (config.train.learning_rate, config.train.seed, config.model.path) == (1e-3, 5, "m")
    assert config.train.global_batch_size == 16


@pytest.mark.parametrize("word", ["on", "off"])
def test_on_and_off_are_words_in_a_file_and_in_a_flag(tmp_path: Path, word: str):
    file = tmp_path / "c.yaml"
    file.write_text(f"train: {{plan_check: {word}}}")
    assert parse(Config, ["--config", str(file), *REQUIRED]).train.plan_check == word
    assert parse(Config, [*REQUIRED, "--train.plan_check", word]).train.plan_check == word


def test_a_key_that_is_true_or_false_takes_the_words_for_it(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("checkpoint: {at_end: off}\neval: {exact_match: yes}")
    config = parse(Config, ["--config", str(file), *REQUIRED, "--data.packing", "yes", "--data.streaming", "no"])
    assert (config.checkpoint.at_end, config.eval.exact_match) == (False, True)
    assert (config.data.packing, config.data.streaming) == (True, False)
    assert parse(Config, [*REQUIRED, "--data.packing", "true"]).data.packing is True


def test_every_problem_is_reported_at_once(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("train: {lerning_rate: 1, steps: many}\neval: 3\nsurprise: {a: 1}")
    found = "\n".join(problems("--config", str(file), "--model.pth", "x", "--train.max_grad_norm", "-1"))
    for part in (
        "Unknown flag --model.pth; did you mean model.path?",
        "Unknown key train.lerning_rate; did you mean train.learning_rate?",
        "train.steps: must be a valid integer",
        "train.max_grad_norm: must be greater than or equal to 0, got -1",
        "eval: 3 is not a section",
        "Unknown key surprise",
        "model.path is missing; set it in the YAML file or with --model.path.",
        "data.train is missing",
        "train.output_dir is missing",
    ):
        assert part in found


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("train: {steps: 1, steps: 2}", "duplicate key 'steps'"),
        ("train: [", "not valid YAML"),
        ("hello", "has no sections"),
    ],
)
def test_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str, reason: str):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    assert reason in problems("--config", str(file), *REQUIRED)[0]


def test_file_that_cannot_be_read_is_the_only_problem_and_shows_its_place(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("data:\n  train: [a.jsonl\ntrain:\n  steps: 3\n")
    (problem,) = problems("--config", str(file))
    assert problem.splitlines() == [
        f"--config {file}: not valid YAML at line 3, expected ',' or ']', but got ':'; fix the file:",
        "  train:",
        "       ^",
    ]
    (problem,) = problems("--config", str(tmp_path / "absent.yaml"))
    assert "absent.yaml: the file cannot be read" in problem


def test_missing_file_flag_without_value_and_stray_word_are_sentences():
    assert "nowhere.yaml: the file cannot be read" in problems("--config", "nowhere.yaml", *REQUIRED)[0]
    assert "expected one argument; see --help." in problems(*REQUIRED, "--train.seed")[0]
    assert "'stray' does not follow a flag" in problems(*REQUIRED, "stray")[0]


def test_values_that_look_like_numbers_stay_text_where_text_is_asked_for():
    config = parse(Config, [*REQUIRED, "--model.path", "2024", "--data.train", "[a.jsonl, b.jsonl]"])
    assert config.model.path == "2024"
    assert config.data.train == ["a.jsonl", "b.jsonl"]
    assert parse(Config, [*REQUIRED, "--eval.prompts", "3"]).eval.prompts == 3
    assert parse(Config, [*REQUIRED, "--eval.prompts", "['Why?']"]).eval.prompts == ["Why?"]


@pytest.mark.parametrize("value", ["fp8", "adam", "0", "1.5"])
def test_impossible_choices_and_ranges_are_refused(value: str):
    key = {"fp8": "weights", "adam": "optimizer", "0": "steps", "1.5": "warmup_ratio"}[value]
    assert f"train.{key}:" in problems(*REQUIRED, f"--train.{key}", value)[0]


def test_printed_configuration_reads_back_as_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        parse(Config, [*REQUIRED, "--train.steps", "7", "--print_config"])
    assert end.value.code == 0
    file = tmp_path / "c.yaml"
    file.write_text(capsys.readouterr().out)
    assert parse(Config, ["--config", str(file)]) == parse(Config, [*REQUIRED, "--train.steps", "7"])


def test_help_lists_every_key_with_its_docstring_and_default(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        parse(Config, ["--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    every = [
        (section, *each) for section, f in Config.model_fields.items() for each in f.annotation.model_fields.items()
    ]
    keys = {f"{section}.{field.alias or name}": field for section, name, field in every}
    assert 25 < len(keys) <= 83
    for key, field in keys.items():
        assert field.description, f"{key} has no docstring"
        assert f"--{key} " in printed
    assert " ".join(printed.split()).count("(default: ") + printed.count("(required)") == len(keys)


def test_only_the_first_process_prints_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        parse(Config, ["--help"])
    assert capsys.readouterr().out == ""


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(rate=st.floats(1e-9, 10), steps=st.one_of(st.none(), st.integers(1, 10**9)), path=text)
def test_any_valid_configuration_survives_the_way_through_yaml(rate: float, steps: int | None, path: str):
    values = {
        "model": {"path": path},
        "data": {"train": [path]},
        "train": {"output_dir": path, "learning_rate": rate, "steps": steps},
    }
    config = Config.model_validate(values)
    assert Config.model_validate(yaml.safe_load(to_yaml(config))) == config


def test_configuration_cannot_be_changed_after_it_was_read():
    config = parse(Config, REQUIRED)
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--adapter.targets", "q_proj"],
            "adapter.targets: must be all-linear or a list such ",
        ),
        (
            ["--adapter.targets", "q, v"],
            "adapter.targets: must be all-linear or a list such as [q, v], got 'q, v';",
        ),
        (
            ["--train.micro_batch_size", "many"],
            "train.micro_batch_size: must be a whole number or auto, got 'many'",
        ),
        (
            ["--train.micro_batch_size", "0"],
            "train.micro_batch_size: must be greater than or equal to 1, got 0",
        ),
        (
            ["--eval.prompts", "Why?"],
            "eval.prompts: must be a whole number or a list such as [Why?], got 'Why?'",
        ),
        (["--train.betas", "[0.9]"], "train.betas: must be a list of at least 2 items, got [0.9]"),
        (["--data.eval", "1.5"], "data.eval: must be less than 1, got 1.5; change it, or see --help."),
        (
            ["--data.train", "[{path: a, weigth: 2}]"],
            "data.train: unknown key weigth in an entry of the list; remove it",
        ),
        (["--data.train", "[{weight: 2}]"], "data.train: an entry of the list lacks the key path; add it."),
        (["--data.train", "[{path: a, weight: -2}]"], "data.train: must be greater than 0, got -2"),
    ],
)
def test_key_that_takes_several_types_has_one_complaint_and_the_nearest(flags: list[str], sentence: str):
    with pytest.raises(InputError) as error:
        parse(Config, ["--model.path", "m", "--data.train", "t", "--train.output_dir", "o", *flags])
    (problem,) = error.value.problems
    assert problem.startswith(sentence)


@pytest.mark.parametrize("word", ["true", "false"])
@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("activation_checkpointing", "must be auto or none or full or offload or a whole number, got"),
        ("micro_batch_size", "must be a whole number or auto, got"),
        ("seed", "must be a valid integer, got"),
        ("learning_rate", "must be a valid number, got"),
        ("ema_decay", "must be a valid number, got"),
    ],
)
def test_true_and_false_are_no_numbers(key: str, sentence: str, word: str, tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text(f"train: {{{key}: {word}}}")
    for arguments in (["--config", str(file)], [f"--train.{key}", word]):
        (problem,) = problems(*REQUIRED, *arguments)
        assert problem == f"train.{key}: {sentence} {word.title()}; change it, or see --help."


def number_keys() -> Iterator[tuple[str, Any]]:
    """Every key of every section, and of the objects in lists, that takes a number, alone or in a list or mapping."""
    for section in dict.fromkeys([*sections.Section.__subclasses__(), Dpo, Budget, Corpus]):
        for name, field in section.model_fields.items():
            if name in section.__annotations__ and re.search(r"\b(int|float)\b", str(field.rebuild_annotation())):
                yield f"{section.__name__}.{name}", field.rebuild_annotation()


@pytest.mark.parametrize(("key", "annotation"), list(number_keys()))
def test_no_key_makes_a_number_of_true(key: str, annotation: Any):
    for value in (True, False, [True, True], [False, False], {"a": True}, {"a": False}):
        with pytest.raises(ValidationError):
            TypeAdapter(annotation).validate_python(value)


def test_tokens_are_taken_as_people_write_them():
    taken = TypeAdapter(Tokens)
    assert [taken.validate_python(value) for value in (5, 2e9, "2e9", "7")] == [5, 2_000_000_000, 2_000_000_000, 7]
    for value in (True, 0, 1.5, "many", float("inf")):
        with pytest.raises(ValidationError):
            taken.validate_python(value)


@pytest.mark.parametrize("written", ["12", "'12'"])
def test_a_number_of_layers_is_taken_from_a_file_and_from_a_flag(written: str, tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text(f"train: {{activation_checkpointing: {written}}}")
    for arguments in (["--config", str(file)], ["--train.activation_checkpointing", written]):
        assert parse(Config, [*REQUIRED, *arguments]).train.activation_checkpointing == 12


def test_text_and_number_of_a_key_that_takes_both_are_told_apart():
    given = ["--model.path", "m", "--train.output_dir", "o", "--data.train", "2024"]
    assert parse(Config, [*given, "--data.eval", "0.1"]).data.eval == 0.1
    assert parse(Config, [*given, "--data.eval", "held_out.jsonl"]).data.eval == "held_out.jsonl"
    assert parse(Config, given).data.train == "2024"
    mixed = parse(Config, [*given, "--data.train", "[a.jsonl, {path: b/c, weight: 0.5}]"]).data.train
    assert mixed[0] == "a.jsonl"
    assert (mixed[1].path, mixed[1].weight, mixed[1].split) == ("b/c", 0.5, None)


@pytest.mark.parametrize("folder", ["runs/exp #2", "runs/a: b", "  runs/x", "runs/exp ", "2025-12-31", "2025-31-12"])
def test_text_of_a_flag_is_the_text_that_was_given(folder: str):
    config = parse(Config, [*REQUIRED, "--train.output_dir", folder])
    assert config.train.output_dir == folder
    assert parse(Config, [*REQUIRED, f"--train.output_dir='{folder}'"]).train.output_dir == folder  # as YAML quotes it


def test_a_long_list_of_a_flag_that_is_suggested_stays_on_one_line():
    assert "\n" not in as_flag([f"a file with a long name {number}.jsonl" for number in range(20)])


@pytest.mark.parametrize(("written", "seed"), [("008", 8), ("010", 10), ("012", 12), ("0x10", 16), ("1_000", 1000)])
def test_a_zero_in_front_makes_no_number_octal(written: str, seed: int, tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text(f"train: {{seed: {written}}}")
    for arguments in (["--config", str(file)], ["--train.seed", written]):
        assert parse(Config, [*REQUIRED, *arguments]).train.seed == seed


def test_a_file_may_merge_sections_and_name_a_folder_by_a_date(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("train: {<<: {seed: 3, steps: 7}, steps: 8, output_dir: 2025-12-31}")
    train = parse(Config, ["--config", str(file), *REQUIRED[:4]]).train
    assert (train.seed, train.steps, train.output_dir) == (3, 8, "2025-12-31")
    file.write_text(
        "base: &base {seed: 3, steps: 7}\nsmall: &small {<<: *base, steps: 5}\ntrain: {<<: *small, output_dir: out}"
    )
    train = parse(sections.Run, ["--config", str(file), *REQUIRED[:4]]).train
    assert (train.seed, train.steps) == (3, 5)


@pytest.mark.parametrize("written", ["9" * 5000, "[" * 5000, "!!timestamp 2025-31-12", "18446744073709551616"])
def test_a_number_that_is_none_is_a_sentence(written: str, tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text(f"train: {{seed: {written}}}")
    assert problems("--config", str(file), *REQUIRED)
    assert "train.seed" in problems(*REQUIRED, "--train.seed", written)[0]


def test_the_home_folder_is_meant_by_its_sign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    values = {"model": {"path": "~/m"}, "data": {"train": ["~/a", {"path": "~/b"}], "eval": "~/c"}}
    values |= {"train": {"output_dir": "~/runs/x"}, "checkpoint": {"resume": "~/runs/y"}}
    config = Config.model_validate(values)
    found = [config.model.path, *config.data.train[:1], config.data.train[1].path, config.data.eval]
    found += [config.train.output_dir, config.checkpoint.resume]
    assert found == [str(tmp_path / name) for name in ("m", "a", "b", "c", "runs/x", "runs/y")]


def test_a_key_of_another_toolkit_is_answered_with_its_name_here(tmp_path: Path):
    """As docs/migrating.md has it, of which each name is in the row of its key."""
    table = (Path(__file__).parent.parent / "docs" / "migrating.md").read_text().splitlines()
    lines = [line for line in table if line.startswith("| `")]
    rows: dict[str, str] = {}
    for line in lines:
        for key in re.findall(r"`([a-z_.]+)[:`]", line.partition(" | ")[0]):
            rows[key] = rows.get(key, "") + line
    known = {key for recipe in (Config, DpoConfig) for key, _ in _fields(recipe)}
    for key, names in foreign_keys.NAMES.items():
        assert key in known
        for name in names:
            assert f"`{name}`" in rows[key] or f"`{name}: " in rows[key] or name == "load_in_8bit", (key, name)
    file = tmp_path / "axolotl.yaml"
    file.write_text("base_model: m\nmicro_batch_size: 2\n")
    with pytest.raises(InputError, match=r"Unknown key base_model; here that is model.path") as error:
        parse(Config, ["--config", str(file), *REQUIRED])
    assert any(
        "Unknown key micro_batch_size; did you mean train.micro_batch_size" in one for one in error.value.problems
    )


def test_the_section_of_another_recipe_and_a_file_without_a_flag_are_named(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("dpo: {loss: ipo}")
    with pytest.raises(InputError, match=r"Unknown key dpo; it is for recipes/dpo.py: launch that, or leave it out"):
        parse(Config, ["--config", str(file), *REQUIRED])
    with pytest.raises(InputError, match=r"^Give the configuration with --config .*c.yaml\.$"):
        parse(Config, [str(file)])
    for flag in (["--eval.prompt", "q.yaml"], ["--eval.prompt=q.yaml"]):
        with pytest.raises(InputError, match=r"^Unknown flag --eval.prompt; did you mean eval.prompts"):
            parse(Config, [*REQUIRED, *flag])
    with pytest.raises(InputError, match=r"Unknown flag --dpo.losss; did you mean dpo.loss"):
        parse(DpoConfig, [*REQUIRED, "--dpo.losss", "ipo"])


@pytest.mark.parametrize(
    ("recipe", "line", "answer"),
    [
        (Config, "loss_type: ipo", r"here that is dpo.loss of recipes/dpo.py \(docs"),
        (DpoConfig, "loss_type: ipo", r"here that is dpo.loss \(docs"),
        (Config, "gradient_accumulation_steps: 8", "here that is derived: train.global_batch_size counts the rows"),
    ],
)
def test_a_key_of_another_toolkit_is_answered_with_what_this_recipe_takes(
    recipe: Any, line: str, answer: str, tmp_path: Path
):
    file = tmp_path / "c.yaml"
    file.write_text(line)
    with pytest.raises(InputError, match=answer):
        parse(recipe, ["--config", str(file), *REQUIRED])


def test_keys_that_are_no_text_are_left_to_whoever_reads_them(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("2025: {bits: 4}\ntrue: 1\n")
    assert parse(sections.Run, ["--config", str(file), *REQUIRED]).model.path == "m"


@pytest.mark.parametrize(("slip", "meant"), [("quantisation: {bits: 4}", "quantization"), ("seed: 4", "train.seed")])
def test_a_slip_is_not_passed_over_for_a_section_of_a_recipe_that_is_not_known(slip: str, meant: str, tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text(slip)
    with pytest.raises(InputError, match=f"Unknown key {slip.partition(':')[0]}; did you mean {meant}"):
        parse(sections.Run, ["--config", str(file), *REQUIRED])
    for own in ("my_own: {bits: 4}", "trainer: {bits: 4}\ntrain: {seed: 1}", "models: {n: 2}\nmodel: {}"):
        file.write_text(own)
        assert parse(sections.Run, ["--config", str(file), *REQUIRED]).model.path == "m"


@pytest.mark.parametrize("end", ["\x85", "\u2028", "\u2029"])
@pytest.mark.parametrize("around", ["a{}b", "{}", "a\n{}b\n", "a{}\nb", "{}{}a"])
def test_run_yaml_is_read_as_it_was_written_whatever_ends_a_line_in_it(tmp_path: Path, end: str, around: str):
    text = around.replace("{}", end)
    write_run(tmp_path, {"chat_template": text, text: ["不"]})
    assert read_run(tmp_path) == {"chat_template": text, text: ["不"]}
    assert "不" in (tmp_path / "run.yaml").read_text(encoding="utf-8")
