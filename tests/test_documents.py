"""The README and the manual: every figure is the measured one, every command parses, every link and path is there.

``tests/test_demo.py`` checks what `make demo` prints. Nothing of a command is run here but its parser.
"""

import importlib
import importlib.util
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser
from parity import ACCUMULATIONS, BF16_TOLERANCE, FP32_TOLERANCE, LAUNCHES, MAX_GRAD_NORMS, OPTIMIZERS
from rich.cells import cell_len
from test_attention import MODELS
from test_layout import ROOMS

from benchmarks import (
    checkpoint_speed,
    data_preparation,
    dpo_reference,
    kills,
    lm_eval_reference,
    parity_table,
    pictures,
    plan_cases,
    preference_run,
    resume_table,
    trl_reference,
)
from benchmarks.tables import PARTS, recorded, with_part
from finetune.cli import (
    commands,
    evaluate_options,
    export_options,
    links_options,
    report_verb,
    setup_options,
    talk_options,
    train_options,
)
from finetune.config import adapter_file, sections
from finetune.config.command_line import parse
from finetune.config.compatibility import cells
from finetune.config.recipe_classes import class_of
from finetune.config.refusals import batch_problems
from finetune.data import formats
from finetune.distributed import Strategy
from finetune.distributed.launch_environment import launch_environment
from finetune.models import tensor_plan
from finetune.models.loading import config_from, without_weights
from finetune.optim.optimizer_state import Trained, state_tensors
from recipes import pretrain
from recipes.sft import Config

ROOT = Path(__file__).parent.parent
INDEX = "docs/README.md"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
DOCUMENTS = ["README.md", "README.ja.md", "CONTRIBUTING.md", *PAGES]
PROJECT_README = "finetune/cli/project_readme.md"
"""Unpacked by `finetune init`, whose folder its links are for; only its commands are checked."""
LONGEST_README = 190
SAMPLE = "recipes/configs/sample.yaml"
STRATEGY_FILES = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


README = text_of("README.md")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands name the repository's files relative to its root."""
    monkeypatch.chdir(ROOT)


def fences(document: str) -> list[tuple[str, str]]:
    """Language and text of each fenced block, without the indentation of a list."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^ *```$", text_of(document), flags=re.DOTALL | re.MULTILINE)
    return [(language, re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)) for indent, language, body in found]


def prose(document: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", text_of(document), flags=re.DOTALL | re.MULTILINE)


def spans(document: str) -> list[str]:
    """What stands between backticks in a line of prose or of a table."""
    return re.findall(r"`([^`\n]+)`", prose(document))


def headings(document: str) -> list[tuple[int, str]]:
    return [(len(marks), title) for marks, title in re.findall(r"^(#+) (.*)$", prose(document), flags=re.MULTILINE)]


def anchor(title: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


# Pages, links, paths


@pytest.fixture(autouse=True)
def named_adapters_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of adapter.from, which a configuration is completed with as it is read."""
    monkeypatch.setattr(adapter_file, "continued", lambda path, given: {"type": "lora"})


def test_there_are_documents_to_check():
    assert len(PAGES) == 21
    assert sum(len(spans(document)) for document in DOCUMENTS) > 300


def test_readme_is_short_enough_for_a_door():
    assert len(README.splitlines()) <= LONGEST_README


def layout_names(body: str) -> list[str]:
    """Folders in the left column of the layout."""
    return [re.match(r" *(?:\w+/ ?)+", line)[0].strip() for line in body.splitlines()]  # type: ignore[index]


def test_readme_in_japanese_has_the_commands_and_the_output_of_the_english_one():
    english, japanese = fences("README.md"), fences("README.ja.md")
    assert japanese[:-1] == english[:-1]
    assert layout_names(japanese[-1][1]) == layout_names(english[-1][1])
    commands_of = [
        re.findall(r"^\| (`.*?`) \| ", text_of(name).split(f"## {title}")[1], flags=re.MULTILINE)
        for name, title in (("README.md", "Commands"), ("README.ja.md", "コマンド"))
    ]
    assert commands_of[0] == commands_of[1]
    assert len(commands_of[0]) > 10


def test_readme_in_japanese_says_the_same_of_what_is_verified():
    """As many sections, and in that of what is verified as many points, with the same links and figures."""
    documents = ("README.md", "README.ja.md")
    levels = [[level for level, _ in headings(document)] for document in documents]
    assert levels[0] == levels[1]
    verified = [
        text_of(name).split(f"## {title}")[1].split("\n## ")[0].split("\n- ")[1:]
        for name, title in (("README.md", "What is verified"), ("README.ja.md", "確かめてあること"))
    ]
    targets = [[re.findall(r"\]\(([^)]+)\)", point) for point in points] for points in verified]
    assert targets[0] == targets[1]
    figures = [[sorted(re.findall(r"\d[\d.,]*\d", point)) for point in points] for points in verified]
    assert figures[0] == figures[1]
    assert sum(map(len, figures[0])) >= 5
    pages = [[link for link in links(document) if link in PAGES] for document in documents]
    assert {*pages[0]} == {*pages[1]}


def links(document: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(document))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_anchors_resolve(document: str):
    for link in links(document):
        assert not link.startswith(("http:", "https:", "/")), link
        file, _, fragment = link.partition("#")
        target = (ROOT / document).parent / file if file else ROOT / document
        assert target.is_file(), link
        if fragment:
            assert fragment in [anchor(title) for _, title in headings(str(target.resolve().relative_to(ROOT)))], link


def test_every_page_is_linked_from_the_readme_and_the_index():
    for page in PAGES:
        assert page in links("README.md")
        assert page == INDEX or page.removeprefix("docs/") in links(INDEX)


def test_table_of_contents_has_every_section_in_its_order():
    contents = text_of(INDEX).split("## Contents")[1]
    expected = []
    for page in re.findall(r"^- \[.*\]\((\w+\.md)\)$", contents, flags=re.MULTILINE):
        parts = [(level, title) for level, title in headings(f"docs/{page}") if level <= 2]
        expected += [
            f"- [{title}]({page})" if level == 1 else f"  - [{title}]({page}#{anchor(title)})" for level, title in parts
        ]
    assert len(expected) > 40
    assert [line for line in contents.splitlines() if line.lstrip().startswith("- [")] == expected


@pytest.mark.parametrize("page", [page for page in PAGES if page != INDEX])
def test_page_opens_with_the_question_that_the_index_gives(page: str):
    title, blank, question, *_ = text_of(page).splitlines()
    assert title.startswith("# ")
    assert blank == ""
    assert re.fullmatch(r"\*.*\?\*", question)
    name = page.removeprefix("docs/")
    assert f"| [{title.removeprefix('# ')}]({name}) | {question.strip('*')} |" in text_of(INDEX)


def named_paths(document: str) -> Iterator[str]:
    """Words between backticks whose first part is a folder of the repository, and its Markdown files."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    for span in spans(document):
        for word in span.split():
            if word.split("/")[0] in folders - {"runs"} and "/" in word:
                yield word


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_paths_exist(document: str):
    assert [path for path in named_paths(document) if not (ROOT / path).exists()] == []


def test_paths_are_found_to_check():
    assert sum(len(list(named_paths(document))) for document in DOCUMENTS) > 30


def test_layout_names_every_room():
    layout = README.split("## Layout")[1]
    assert re.findall(r"(\w+)/", layout.split("from those above it in this list")[1].split("benchmarks/")[0]) == list(
        ROOMS
    )


# Commands and keys


def shell_lines(language: str, body: str) -> list[str]:
    """The commands of a fenced block: all lines of one in bash, those behind a prompt in console."""
    joined = re.sub(r"\\\n\s*", "", body)
    if language == "bash":
        lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    else:
        lines = [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ ")]
    return [command for line in lines for command in line.split(" && ")]


COMMANDS = [
    (document, command)
    for document in [*DOCUMENTS, PROJECT_README]
    for language, body in fences(document)
    if language in ("bash", "console")
    for command in shell_lines(language, body)
]
ELSEWHERE = {"git clone ...", "cd ..."}


def check_recipe(script: str, arguments: list[str]) -> Any:
    assert (ROOT / script).is_file()
    config_class = importlib.import_module(script.removesuffix(".py").replace("/", ".")).Config
    if {"--help", "--print_config"} & {*arguments}:
        with pytest.raises(SystemExit) as ending:
            parse(config_class, arguments)
        assert ending.value.code == 0
        return None
    return parse(config_class, arguments)


def check_accelerate(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert arguments[0] == "launch"
    launch = launch_command_parser().parse_args(arguments[1:])
    assert Path(launch.config_file).parent == Path("accelerate_configs")
    assert Path(launch.config_file).is_file()
    assert (launch.num_processes is None) == (Path(launch.config_file).stem == "single")
    cfg = check_recipe(launch.training_script, launch.training_script_args)
    if launch.num_processes is not None:
        before_script = arguments[1 : arguments.index(launch.training_script)]
        check_processes(launch.config_file, launch.num_processes, before_script, cfg, monkeypatch)


SHAPES = {"SmolLM2-135M-Instruct": "SmolLM2-135M", "Llama-3.1-8B-Instruct": "Llama-3.1-8B"}
"""Of models in commands, by names in ``plan_cases.MODELS``."""


def check_processes(file: str, processes: int, flags: list[str], cfg: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That so many processes can share its rows, and the layers of its model."""
    for name, value in launch_environment(file, processes, others=flags).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    launch = Strategy.from_environment()
    assert batch_problems(cfg.train.global_batch_size, cfg.train.least_micro_batch_size, launch.data_processes) == []
    shape = SHAPES.get(cfg.model.path.rpartition("/")[2])
    if launch.tensor > 1:
        assert shape, cfg.model.path
        fields = plan_cases.MODELS[shape] | {"num_hidden_layers": 1}
        skeleton = without_weights(config_from(fields), trust_remote_code=False)
        assert [*tensor_plan.why_not(skeleton, launch.tensor, bits=None)] == []


def check_finetune(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command's own parser, with what it would do taken away; by the recipe's sections what it passes on."""
    taken: list[Any] = []
    verbs = {
        commands: ["_merge", "_data", "_plan", "_list_checkpoints", "_verify_checkpoints", "_export_checkpoint"],
        setup_options: ["_init", "_doctor"],
        talk_options: ["_generate", "_chat"],
        train_options: ["_train"],
        export_options: ["_export"],
        links_options: ["_links"],
        evaluate_options: ["_evaluate"],
        report_verb: ["_report"],
    }
    for module, name in [(module, name) for module, names in verbs.items() for name in names]:
        monkeypatch.setattr(module, name, lambda options: taken.append(options) or 0)
    assert commands.main(arguments) == 0
    [options] = taken
    if options.verb in ("data", "plan") and options.others:
        parse(class_of(options.others), options.others)
    if options.verb == "train" and options.config != "FILE":
        assert options.strategy is None or options.strategy in STRATEGY_FILES
        written = ["--config", options.config, *options.others]
        parse(class_of(written), written)


def check_module(arguments: list[str]) -> None:
    assert importlib.util.find_spec(arguments[0]), arguments


def check_make(targets: list[str]) -> None:
    known = re.findall(r"^(\w+):", text_of("Makefile"), flags=re.MULTILINE)
    assert {*targets} <= {*known}


def check(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises or fails where a command names a flag, file or value that does not exist."""
    program, *arguments = shlex.split(command)
    checks: dict[str, Callable[[], None]] = {
        "accelerate": lambda: check_accelerate(arguments, monkeypatch),
        "finetune": lambda: check_finetune(arguments, monkeypatch),
        "make": lambda: check_make(arguments),
        "python": lambda: (
            check_module(arguments[1:]) if arguments[0] == "-m" else check_recipe(arguments[0], arguments[1:])
        ),
    }
    checks[program]()


def test_there_are_commands_to_check():
    programs = [shlex.split(command)[0] for _, command in COMMANDS]
    assert {program: programs.count(program) >= 2 for program in ("accelerate", "finetune", "python")} == {
        "accelerate": True,
        "finetune": True,
        "python": True,
    }
    assert len(COMMANDS) >= 20


@pytest.mark.parametrize(("document", "command"), COMMANDS)
def test_command_is_one_that_its_parser_accepts(document: str, command: str, monkeypatch: pytest.MonkeyPatch):
    if command not in ELSEWHERE:
        check(command, monkeypatch)


LAUNCH = "accelerate launch --config_file accelerate_configs"


@pytest.mark.parametrize(
    "wrong",
    [
        "finetune data --config recipes/configs/sample.yaml --data.trian mine.jsonl",
        "finetune plan --model m --gpu 1x24GB",
        f"{LAUNCH}/fsdp2.yaml --num_processes 16 recipes/sft.py --config {SAMPLE}",  # rows for fewer
        f"{LAUNCH}/tp.yaml --num_processes 2 recipes/sft.py --config {SAMPLE}",  # 9 heads for two
        "finetune checkpoint list runs/sample",
        f"finetune train {SAMPLE} --train.epoch 1",
        "finetune train recipes/configs/none.yaml",
        f"finetune train {SAMPLE} --strategy zero9",
        f"accelerate launch --config_file accelerate_configs/zero9.yaml recipes/sft.py --config {SAMPLE}",
        f"accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/sft.py --config {SAMPLE}",
        f"accelerate launch --config_file accelerate_configs/single.yaml recipes/sft.py --config {SAMPLE} --log.evry 1",
        f"python recipes/none.py --config {SAMPLE}",
        "python -m benchmarks.none",
        "make everything",
    ],
)
def test_wrong_command_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises((Exception, SystemExit)):  # an assertion, the parser's own error, or its exit
        check(wrong, monkeypatch)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_the_text_are_ones_that_their_parsers_accept(document: str, monkeypatch: pytest.MonkeyPatch):
    for span in spans(document):
        if re.fullmatch(r"finetune \w+", span):  # a verb as a name
            with pytest.raises(SystemExit) as ended:
                commands.main([*span.split()[1:], "--help"])
            assert ended.value.code == 0
        elif span.startswith(("finetune ", "python -m ", "make ")) and not re.fullmatch("finetune data .*FILE", span):
            check(span, monkeypatch)


KEY = re.compile(rf"(?<![\w.])(?:--)?((?:{'|'.join(Config.model_fields)})\.\w+)(?:[ :]+(.+))?$")


def keys(document: str) -> list[tuple[str, str | None]]:
    """Keys of a recipe between backticks, and the values given with them."""
    return [(found[1], found[2]) for span in spans(document) if (found := KEY.match(span))]


def problems_of_key(key: str, value: str | None) -> str:
    section, name = key.split(".")
    every: tuple[Any, ...] = (Config, pretrain.Config)
    knowing = [
        known
        for known in every
        if name in {each.alias or own for own, each in known.model_fields[section].annotation.model_fields.items()}
    ]
    if not knowing:
        return f"{key} is no key"
    try:
        parse(knowing[0], ["--config", SAMPLE, *([f"--{key}", value] if value else [])])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("document", DOCUMENTS)
def test_keys_exist_and_take_the_values_that_are_given(document: str):
    assert [problem for key in keys(document) if (problem := problems_of_key(*key))] == []


def test_wrong_keys_are_noticed():
    assert sum(len(keys(document)) for document in DOCUMENTS) >= 30
    assert problems_of_key("train.micro_batch", None) == "train.micro_batch is no key"
    assert "checkpoint.every" in problems_of_key("checkpoint.every", "often")


def test_yaml_and_json_in_the_documents_are_read_as_configuration_and_rows(tmp_path: Path):
    read = {"yaml": 0, "json": 0}
    for language, body in [fence for document in DOCUMENTS for fence in fences(document)]:
        if language == "yaml":
            (tmp_path / "config.yaml").write_text(body)
            flags = ["--config", str(tmp_path / "config.yaml"), "--model.path", "m", "--train.output_dir", "o"]
            parse(class_of(flags), flags)
        elif language == "json":
            row = json.loads(body)
            judged = "chosen" in row or "label" in row
            assert formats.convert_compared(row) if judged else formats.convert(row, "auto")
        else:
            assert language in ("bash", "console", "python", "text"), language
            continue
        read[language] += 1
    assert read == {"yaml": 5, "json": 5}


# Tables and figures


@pytest.fixture(scope="module")
def comparisons() -> list[dict[str, Any]]:
    measured: list[dict[str, Any]] = recorded(parity_table.RESULTS)["comparisons"]
    return measured


@pytest.mark.parametrize("name", PARTS)
def test_generated_part_is_what_its_script_writes(name: str):
    page = text_of(PARTS[name].page)
    assert with_part(page, name, PARTS[name].text()) == page, "run `make tables`"


def test_every_generated_part_has_a_script():
    found = [(d, name) for d in DOCUMENTS for name in re.findall(r"^<!-- (.*): written by", text_of(d), re.MULTILINE)]
    assert sorted(found) == sorted((part.page, name) for name, part in PARTS.items())


def test_part_without_its_place_is_refused():
    with pytest.raises(ValueError, match=r"'parity table' stands 0 times in its page"):
        with_part("no comments\n", "parity table", "| |")


def test_recorded_run_covers_every_launch_and_setting_within_the_tolerances(comparisons: list[dict[str, Any]]):
    exact = [row for row in comparisons if row["precision"] == "fp32"]
    launches = [("single", 1), *LAUNCHES]
    assert len(exact) == (len(launches) * len(OPTIMIZERS) - 1) * len(MAX_GRAD_NORMS) * len(ACCUMULATIONS)
    assert {(row["strategy"], row["processes"]) for row in exact} == set(launches)
    rounded = [row for row in comparisons if row["precision"] == "bf16"]
    assert [(row["strategy"], row["processes"]) for row in rounded] == LAUNCHES
    for rows, tolerance in ((exact, FP32_TOLERANCE), (rounded, BF16_TOLERANCE)):
        assert all(row[key] <= tolerance[key] for row in rows for key in tolerance)


def test_comparison_with_trl_keeps_its_bounds():
    assert trl_reference.broken_bounds(recorded(trl_reference.RESULTS)) == []
    assert {pair for pair, bound in trl_reference.BOUNDS.items() if bound == 0.005} == {
        ("trl", "recipe"),
        ("trl_4_bits", "recipe_4_bits"),
    }


def test_comparison_with_lm_eval_keeps_its_bounds():
    results = recorded(lm_eval_reference.RESULTS)
    assert list(lm_eval_reference.broken_bounds(results)) == []
    assert set(results["scores"]) == {score for task in lm_eval_reference.TASKS.values() for score in task.scores}
    assert all(0 < found["ours"] <= 1 and found["rows"] >= 36 for found in results["scores"].values())


HANDED_OVER = {
    "lm_eval": {"--model", "--model_args", "--tasks", "--apply_chat_template", "--batch_size"},
    "vllm": {"--enable-lora", "--lora-modules"},
}
"""Flags of other programs that the manual hands results over to, by their own help: lm-eval 0.4.13, vLLM 0.11."""


def test_commands_of_other_programs_have_flags_that_these_know():
    lines = [
        line for language, body in fences("docs/evaluation.md") if language == "text" for line in body.splitlines()
    ]
    found = [shlex.split(line) for line in lines if line.startswith(tuple(HANDED_OVER))]
    assert {program for program, *_ in found} == set(HANDED_OVER)
    for program, *arguments in found:
        assert {each for each in arguments if each.startswith("--")} <= HANDED_OVER[program]


def test_comparison_of_preferences_with_trl_keeps_its_bound_under_the_stated_conditions():
    measured, page = recorded(dpo_reference.RESULTS), text_of("docs/comparisons.md")
    assert measured["losses"].keys() == dpo_reference.LOSSES.keys()
    for found in measured["losses"].values():
        assert len(found["recipe"]) == len(found["trl"]) == measured["setup"]["steps"]
        assert dpo_reference.furthest(found) <= dpo_reference.BOUND
    setup = measured["setup"]
    stated = f"{setup['steps']} steps of {setup['global_batch_size']} of the demo's pairs, LoRA of rank {setup['rank']}"
    assert f"{setup['model']}, {stated}" in page


def test_real_preferences_are_learnt_by_more_than_luck_under_the_stated_conditions():
    measured, page = recorded(preference_run.RESULTS), text_of("docs/preferences.md")
    assert preference_run.chance_of(5, 5) == 1 / 32
    assert preference_run.chance_of(0, 5) == 1
    assert measured["chance"] == preference_run.chance_of(measured["eval_right"], measured["eval_pairs"])
    assert measured["chance"] <= preference_run.SIGNIFICANT
    assert (measured["flags"], measured["further_flags"]) == (preference_run.FLAGS, [])
    assert f"{measured['model']} with LoRA of rank {measured['flags']['adapter.rank']}, in fp32" in page
    assert f"room for both answers in {measured['flags']['data.max_length']} tokens" in page


def test_conditions_of_the_comparison_with_trl_are_the_recorded_ones():
    measured, page = recorded(trl_reference.RESULTS), text_of("docs/comparisons.md")
    setup, runs = measured["setup"], measured["runs"]
    stated = f"{setup['steps']} steps of {setup['global_batch_size']} rows, LoRA of rank {setup['rank']}"
    assert f"{setup['model']} on GSM8K: {stated}" in page
    assert f"{setup['held_out']['rows']} held-out rows" in page
    cost = runs["recipe_4_bits"]["held_out_loss_before"] / runs["recipe"]["held_out_loss_before"] - 1
    assert f"the held-out loss is {100 * cost:.0f} % higher before any" in page


def test_memory_of_data_preparation_keeps_its_bound():
    measured = recorded(data_preparation.RESULTS)
    assert data_preparation.too_large(measured["memory"]) == []
    assert measured["speed"]["setup"]["rows"] == 100_000
    assert measured["speed"]["setup"]["max_length"] == 2048


def test_every_pair_of_launches_was_resumed_within_the_tolerance():
    measured = recorded(resume_table.RESULTS)
    pairs = {(row["method"], row["before"], row["after"]) for row in measured["comparisons"]}
    assert len(pairs) == len(measured["comparisons"]) == 18 * 18 + 11 * 11 + 7 * 7
    assert all(row["loss"] == row["grad_norm"] == 0 for row in measured["comparisons"] if row["before"] == row["after"])
    assert all(row[key] <= 1e-5 for row in measured["comparisons"] for key in ("loss", "grad_norm"))


def test_kills_are_as_many_as_stated():
    measured = recorded(kills.RESULTS)
    assert f"[{len(measured['runs'])} kills]" in README
    assert len(measured["runs"]) > 100
    assert len(measured["launches"]) == 6


def test_size_of_the_checkpoints_is_the_recorded_one():
    measured = recorded(checkpoint_speed.RESULTS)
    weights = measured["setup"]["weights"]
    stated = f"A model of {weights / 1e9:.1f}B parameters with AdamW's state ({3 * 4 * weights / 2**30:.1f} GiB)"
    assert stated in text_of("docs/comparisons.md")


def test_stated_tolerances_are_those_of_the_tests():
    page = text_of("docs/strategies.md")
    assert "1e-5 in fp32" in page
    assert FP32_TOLERANCE == {"loss": 1e-5, "grad_norm": 1e-5}
    assert "3e-3 (loss) and 1e-2 (gradient norm) in bf16" in page
    assert BF16_TOLERANCE == {"loss": 3e-3, "grad_norm": 1e-2}


def test_stated_numbers_are_those_of_the_code():
    assert f"all {len(cells())} combinations" in text_of("docs/compatibility.md")
    published = recorded(ROOT / "tests" / "model_configs.json")
    assert f"parameters of {len(published)} published models" in text_of("docs/planner.md")
    assert "nine families of models" in text_of("docs/data.md")
    assert len(MODELS) == 9
    assert f"`checkpoint.every` steps ({sections.Checkpoint().every} by default)" in text_of("docs/checkpoints.md")


@pytest.mark.parametrize(
    ("optimizer", "weights", "stated"),
    [("adamw", "fp32_master", 16), ("adamw", "bf16", 8), ("adamw_8bit", "fp32_master", 10), ("adamw_8bit", "bf16", 6)],
)
def test_stated_bytes_per_weight_are_those_of_the_planner(optimizer: str, weights: str, stated: int):
    width, elements = 4 if weights == "fp32_master" else 2, 4096 * 4096
    state = sum(state_tensors(optimizer, weights, Trained(elements, rows=4096, width=width)))
    assert round(2 * width + state / elements, 1) == stated
    row = {16: "full fine-tuning", 8: "the same in bf16", 10: "8-bit optimizer state", 6: "8-bit optimizer state"}[
        stated
    ]
    [bytes_per_weight] = re.findall(rf"^\| {row} \|.*?\|(.*?)\|", text_of("docs/memory.md"), flags=re.MULTILINE)
    assert re.search(rf"\b{stated}\b", bytes_per_weight)


def test_figures_of_the_demo_are_of_its_data_and_in_the_words_of_its_output():
    rows = {part: len(text_of(f"recipes/data/demo_{part}.jsonl").splitlines()) for part in ("train", "heldout")}
    assert f"on {rows['train']} conversations" in README
    assert f"how many of {rows['heldout']} held-out requests" in README
    before, after = map(float, re.findall(r"^held-out loss: (\S+) before, (\S+) after training$", README, re.M)[0])
    assert after < 0.7 * before  # as tests/test_demo.py asks of the demo
    [matches] = re.findall(rf"^exact match on {rows['heldout']} held-out rows: 0 before, (\d+) after", README, re.M)
    assert rows["heldout"] / 2 < int(matches) <= rows["heldout"]


def test_every_strategy_file_is_in_the_table_of_its_page():
    assert len(STRATEGY_FILES) == 20
    table = text_of("docs/strategies.md").split("## Which strategy file?")[1].split("## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == STRATEGY_FILES


# Pictures


def shown_lines(svg: str) -> dict[float, int]:
    """The width in columns of each line of a picture, by its height."""
    widths: dict[float, int] = {}
    for y, text in re.findall(r'<text class="terminal-r\d+" x="[\d.]+" y="([\d.]+)"[^>]*>(.*?)</text>', svg):
        plain = re.sub(r"&#?\w+;", " ", text)
        widths[float(y)] = widths.get(float(y), 0) + cell_len(plain)
    return widths


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_picture_is_shown_and_no_line_of_it_is_cut(name: str):
    svg = text_of(f"docs/images/{name}.svg")
    assert any(f"images/{name}.svg" in link for document in DOCUMENTS for link in links(document))
    assert len(shown_lines(svg)) > 15
    assert max(shown_lines(svg).values()) <= pictures.COLUMNS
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "").replace("https://www.textualize.io", "")


def test_picture_of_the_data_is_up_to_date():
    assert text_of("docs/images/data.svg") == pictures.data_picture(), "run `python -m benchmarks.pictures data`"


def test_command_of_the_picture_of_a_run_is_one_that_its_parser_accepts(monkeypatch: pytest.MonkeyPatch):
    check(shlex.join(pictures.RUN), monkeypatch)
    for line in pictures.folded(pictures.RUN):
        assert len(line) <= pictures.COLUMNS
    assert "step</text>" in text_of("docs/images/run.svg").replace("&#160;", "")


def test_a_picture_shows_what_is_left_on_the_terminal():
    assert pictures.screen("1/2\r\x1b[2Ksaved\n2/2") == ["saved", "2/2"]
    assert pictures.screen("one\r\ntwo\r\x1b[1A\x1b[2Kthree\n\n\n") == ["three", "two"]
    assert pictures.screen("\x1b[?25l\x1b[1mbold\x1b[0m\x1b[?25h") == ["\x1b[1mbold\x1b[0m"]


def test_a_command_that_fails_is_not_drawn():
    with pytest.raises(RuntimeError, match=r"ended with exit code 2:"):
        pictures.drawn(["finetune", "data", "--config", "missing.yaml"], title="")
