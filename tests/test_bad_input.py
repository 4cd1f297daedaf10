"""Wrong input ends a run before weights load, with a sentence; a run that breaks later says where."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import scenarios
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune import distributed
from finetune.config import sections
from finetune.distributed.launch_environment import launched_as
from finetune.errors import InputError
from finetune.models import loading
from recipes import sft

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def no_weights_may_load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    if "trains" not in request.keywords:

        def load(*args, **kwargs):
            raise AssertionError("weights were loaded")

        monkeypatch.setattr(loading, "load_model", load)


def refused(config) -> str:
    with pytest.raises(InputError) as error:
        sft.main(config)
    assert not Path(config.train.output_dir).exists()
    return str(error.value)


def test_all_problems_of_a_run_are_told_together(tmp_path: Path):
    config = scenarios.configuration(
        tmp_path / "no_model",
        tmp_path / "no_data.jsonl",
        tmp_path / "out",
        train__global_batch_size=3,
        train__micro_batch_size=2,
        data__chat_template=str(tmp_path / "no_template"),
    )
    text = refused(config)
    for part in (
        "no_model; give a model folder",
        "no_data.jsonl: there is no such data file",
        "set it to 2 or 4",
        "no_template, and no template of that name; give a Jinja file, or one of chatml, ",
    ):
        assert part in text


def test_folder_without_a_configuration_is_refused(tmp_path: Path, conversations: Path):
    assert "has no config.json" in refused(scenarios.configuration(tmp_path, conversations, tmp_path / "out"))


def test_folder_with_pickled_weights_only_is_refused(tmp_path: Path, conversations: Path):
    folder = tiny.build_model_folder(tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "only has pickle files" in refused(
        scenarios.configuration(folder, conversations, tmp_path / "out", model__random_weights=False)
    )


def test_unknown_model_type_is_refused(tmp_path: Path, conversations: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    config = scenarios.configuration(tmp_path, conversations, tmp_path / "out")
    assert "transformers cannot load" in refused(config)


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path, model_folder: Path, conversations: Path):
    (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
    config = scenarios.configuration(tmp_path, conversations, tmp_path / "out")
    assert "No tokenizer could be loaded" in refused(config)


def test_tokenizer_without_a_chat_template_is_refused(tmp_path: Path, conversations: Path):
    folder = tiny.build_model_folder(tmp_path / "model")
    tiny.build_tokenizer(chat_template=None).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    config = scenarios.configuration(folder, conversations, tmp_path / "out")
    assert "has no chat template" in refused(config)


@pytest.mark.trains
def test_chat_template_from_a_file_takes_its_place(tmp_path: Path, conversations: Path):
    folder = tiny.build_model_folder(tmp_path / "model")
    tiny.build_tokenizer(chat_template=None).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    (tmp_path / "template.jinja").write_text(tiny.CHATML)
    changes = {"train__steps": 2, "data__chat_template": str(tmp_path / "template.jinja")}
    sft.main(scenarios.configuration(folder, conversations, tmp_path / "out", **changes))
    assert (tmp_path / "out" / "final" / "chat_template.jinja").read_text() == tiny.CHATML


def test_broken_line_names_file_and_line(tmp_path: Path, model_folder: Path, conversations: Path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(conversations.read_text() + "{oops\n")
    text = refused(scenarios.configuration(model_folder, broken, tmp_path / "out"))
    assert f"{broken}:81: the line is not one JSON object" in text
    assert "1 row cannot be used" in text


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [("prompts", 2, "give the questions as a list of texts, or set it to 0"), ("exact_match", True, "set it to false")],
)
def test_questions_without_an_answer_among_the_held_out_rows_are_refused(
    key: str, value: int, advice: str, tmp_path: Path, model_folder: Path, conversations: Path
):
    changes = {f"eval__{key}": value, "data__eval": 0.2, "data__train_on": "all"}
    text = refused(scenarios.configuration(model_folder, conversations, tmp_path / "out", **changes))
    assert f"eval.{key} asks for answers to held-out questions" in text
    assert advice in text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data__packing": True, "model__attention": "sdpa"}, "packed documents would attend to each other"),
        ({"data__packing": True, "model__attention": "eager"}, "packed documents would attend to each other"),
        ({"data__streaming": True, "train__steps": None}, "set train.steps"),
        ({"data__streaming": True, "data__eval": 0.1}, "name a file of held-out data"),
        ({"data__train": ["absent/*.jsonl"]}, "no data file matches"),
        ({"data__eval": 1e-9}, "choose another fraction"),
        ({"data__split_key": "chapter"}, "no key 'chapter'"),
        ({"data__format": "alpaca"}, "instruction"),
    ],
)
def test_data_settings_that_cannot_work_are_refused(
    changes: dict, sentence: str, tmp_path: Path, model_folder: Path, conversations: Path
):
    assert sentence in refused(scenarios.configuration(model_folder, conversations, tmp_path / "out", **changes))


@pytest.mark.parametrize(("key", "value"), [("prompts", 2), ("exact_match", True)])
def test_answers_to_held_out_questions_without_held_out_data_are_refused(
    key: str, value: int, tmp_path: Path, model_folder: Path, conversations: Path
):
    config = scenarios.configuration(model_folder, conversations, tmp_path / "out", **{f"eval__{key}": value})
    assert f"eval.{key} asks for held-out conversations, but data.eval names none; set data.eval." in refused(config)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "fp16 needs a GPU"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "fp8 is not supported"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "set fsdp_version: 2"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"},
            "set it to false, and train.activation_checkpointing instead",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "1"},
            "set it to false, and train.activation_checkpointing instead",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "maybe"},
            "sets fsdp_offload_params to maybe; set it to true or false",
        ),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "compiles the model by dynamo_backend inductor"),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, "set zero_stage to 1, 2 or 3"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "x"},
            "names a deepspeed_config_file",
        ),
        (
            {
                "ACCELERATE_USE_FSDP": "true",
                "FSDP_VERSION": "2",
                "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
                "WORLD_SIZE": "3",
            },
            "launch a multiple of 2, at least 4",
        ),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the sentences are those of a machine without a GPU")
def test_launch_that_cannot_work_is_refused(
    environment: dict[str, str],
    sentence: str,
    tmp_path: Path,
    model_folder: Path,
    conversations: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    config = scenarios.configuration(model_folder, conversations, tmp_path / "out", train__micro_batch_size=1)
    assert sentence in refused(config)


@pytest.mark.parametrize("use", ["bitsandbytes", "a GPU"])
def test_notebook_that_can_start_no_processes_any_more_is_told_what_to_do(use: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    strategy_file, before = ROOT / "accelerate_configs" / "ddp.yaml", dict(os.environ)
    with launched_as(strategy_file, num_processes=2):
        assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    if use == "bitsandbytes":
        monkeypatch.setitem(sys.modules, "bitsandbytes", sys)
    else:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(InputError, match=r"accelerate launch in a cell.*or restart the kernel"):
        launched_as(strategy_file, num_processes=2).__enter__()
    with launched_as(strategy_file, num_processes=1):  # which starts none
        assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert dict(os.environ) == before


def test_clipping_in_the_launch_file_that_contradicts_the_recipe_is_refused(
    ranks, tmp_path: Path, model_folder: Path, conversations: Path
):
    config = scenarios.configuration(model_folder, conversations, tmp_path / "out")
    with pytest.raises(AssertionError, match=r"clips gradients at 3\.0, the recipe at 1\.0"):
        ranks(2).run(train_with_clipping_in_the_launch_file, config, strategy="zero2")


def train_with_clipping_in_the_launch_file(config) -> None:
    import os

    os.environ["ACCELERATE_GRADIENT_CLIPPING"] = "3.0"
    sft.main(config)


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="it is installed")
def test_attention_that_is_not_installed_is_refused_before_the_data_are_read(
    tmp_path: Path, model_folder: Path, conversations: Path, monkeypatch: pytest.MonkeyPatch
):
    def read(*args, **kwargs):
        raise AssertionError("data were read")

    monkeypatch.setattr(sft, "load_rows", read)
    config = scenarios.configuration(
        model_folder, conversations, tmp_path / "out", model__attention="flash_attention_2"
    )
    assert "model.attention: flash_attention_2 cannot be used" in refused(config)


@pytest.mark.trains
def test_model_that_cannot_be_loaded_costs_neither_the_earlier_run_nor_the_folder(
    tmp_path: Path, weights_folder: Path, conversations: Path, monkeypatch: pytest.MonkeyPatch
):
    def load(*args, **kwargs):
        raise OSError("the disk is gone")

    (tmp_path / "out" / "final").mkdir(parents=True)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(InputError, match=r"could not be loaded \(the disk is gone\)"):
        sft.main(scenarios.configuration(weights_folder, conversations, tmp_path / "out", train__overwrite=True))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"final", ".lock"}


def test_tokenizer_of_another_model_is_refused(tmp_path: Path, model_folder: Path, conversations: Path):
    config = json.loads((model_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    changes = {"model__tokenizer": str(model_folder)}
    assert "the model's vocabulary has only 100 tokens" in refused(
        scenarios.configuration(tmp_path, conversations, tmp_path / "out", **changes)
    )


@pytest.mark.trains
def test_sampling_settings_of_the_base_model_do_not_keep_the_result_from_being_saved(
    tmp_path: Path, conversations: Path
):
    folder = tiny.build_model_folder(tmp_path / "model")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_p": 0.6}))
    sft.main(scenarios.configuration(folder, conversations, tmp_path / "out", train__steps=1))
    saved = json.loads((tmp_path / "out" / "final" / "generation_config.json").read_text())
    assert (saved["temperature"], saved["top_p"]) == (0.9, 0.6)


@pytest.mark.trains
def test_result_of_a_base_whose_files_name_another_end_stops_where_its_template_ends_a_turn(
    tmp_path: Path, conversations: Path
):
    """As Qwen 2.5's base models do."""
    folder = tiny.build_model_folder(tmp_path / "model")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end, other = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.eos_token = "<|im_start|>"
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": other}))
    sft.main(scenarios.configuration(folder, conversations, tmp_path / "out", train__steps=1))
    saved = json.loads((tmp_path / "out" / "final" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [other, end]


@pytest.mark.parametrize("tampering", ["wrapped twice", "a process missing"])
@pytest.mark.trains
def test_strategy_that_is_not_really_active_is_an_error(
    tampering: str, tmp_path: Path, model_folder: Path, conversations: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = distributed.Strategy("ddp", 0, 1, 1, "no", True) if tampering == "wrapped twice" else None
    asked = asked or distributed.Strategy("single", 0, 2, 1, "no", True)
    real = distributed.Strategy("single", 0, 1, 1, "no", True)
    original = distributed.prepare
    monkeypatch.setattr(distributed.Strategy, "from_environment", lambda: real)
    monkeypatch.setattr(
        distributed, "prepare", lambda accelerator, strategy, *rest, **k: original(accelerator, asked, *rest, **k)
    )
    with pytest.raises(
        RuntimeError, match=f"asked for {asked.name} with {asked.world_size} process.*nothing was trained"
    ):
        sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "out"))


def test_a_revision_is_that_of_the_model_and_not_of_a_tokenizer_in_another_repository():
    pinned = {"path": "owner/model", "revision": "v1"}
    assert sections.Model(**pinned).tokenizer_source == ("owner/model", "v1")
    assert sections.Model(**pinned, tokenizer="owner/model").tokenizer_source == ("owner/model", "v1")
    assert sections.Model(**pinned, tokenizer="other/tokenizer").tokenizer_source == ("other/tokenizer", None)
