"""Whatever is wrong with a question to `finetune plan` is told in a sentence.

A model or an adapter that cannot be had is found out while its step is traced; the other questions get to no trace.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from plan_models import config_named
from test_plan_verb import run, write_model

from finetune.trace import serving


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_model(tmp_path, config_named("llama-3.1-8b"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--gpus 0xH100", "means no GPUs"),
        ("--gpus 8xH1000", "unknown GPU"),
        (
            "--gpus 1xH200 --row-tokens 200000 --data.streaming true",
            "the model has 131,072 positions; set data.max_length to 131072 or less",
        ),
        ("--gpus 8xH100 --global-batch-size 12", "set it to 8 or 16"),
        ("--gpus 2xH100 --train.micro_batch_size 3", "does not divide into micro-batches of 3 rows on 2 processes"),
        ("--gpus 8xH100 --strategy mine.yaml", "unknown strategy mine.yaml; use one of single, ddp"),
        ("--gpus 8xH100 --strategy zero4", "did you mean zero"),
        ("--gpus 8xH100 --strategy nowhere/ddp.yaml", "there is no file nowhere/ddp.yaml"),
        ("--gpus 8xH100 --strategy single", "single is for one GPU"),
        ("--gpus 2xH100 --strategy fsdp2_pp", "over the GPUs that have the same one; use at least 4 of them"),
        ("--gpus 6xH100 --global-batch-size 18 --strategy fsdp2 --method lora_8bit", "cannot shard the 8-bit layers"),
        ("--gpus 8xH100 --train.optimizer adafactor --strategy fsdp2", "Adafactor needs whole matrices"),
        ("--gpus 1xT4 --train.weights bf16", "computes in bf16"),
        ("--gpus 1xT4 --mixed-precision bf16", "T4 does not support bf16"),
        ("--gpus 1xT4 --mixed_precision bf16", "T4 does not support bf16"),
        ("--gpus 1xH100 --probe", "on this machine; leave out --probe, which takes real steps on one"),
        (
            "--gpus 1xH100 --method full --adapter.type lora",
            "--method full and --adapter.type lora say different things",
        ),
        ("--gpus 1xH100 --method lora --quantization.bits=4", "--quantization.bits 4 say different things; leave one"),
        ("--gpus 1xH100 --row-tokens 4096 --data.max_length 2048", "--row-tokens 4096 and --data.max_length 2048 say"),
        ("--gpus 1xH100 --trane.epochs 3", "Unknown flag --trane.epochs"),
        ("--gpus 1xH100 --tokens 0", "--tokens 0: must be above 0"),
        ("--gpus 1xH100 --document-tokens 4000", "do not fit into rows of 2048 tokens"),
        ("--gpus 1xH100 --plot picture.txt", "must end in .png, .svg or .pdf"),
        ("--gpus 1xH100 --plot no/such/folder/picture.png", "there is no folder no/such/folder"),
    ],
)
def test_wrong_input_is_told_in_a_sentence(
    arguments: str, sentence: str, arithmetic_steps: None, model: str, capsys: pytest.CaptureFixture[str]
):
    assert run("--model", model, *arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert "Traceback" not in captured.err


def test_flags_that_say_the_same_as_an_option_are_taken(arithmetic_steps: None, model: str):
    same = "--row-tokens 512 --data.max_length 512 --method qlora --quantization.bits 4 --adapter.type lora"
    assert run("--model", model, *f"--gpus 1xH100 {same}".split()) == 0


TINY = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8}
TINY_MIXTURE = TINY | {"model_type": "mixtral", "num_hidden_layers": 2, "vocab_size": 100, "num_local_experts": 4}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "perceptron"}, "model_type is 'perceptron', which is no model that transformers knows"),
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
        ({"hidden_size": 64}, "config.json: it has no model_type; give the config.json of a model"),
        ({"model_type": "t5"}, "does not make a causal language model"),
        ({"model_type": "gemma3", "text_config": 3}, "Field 'text_config' with value 3"),
        ({"model_type": "electra", "hidden_size": 64}, "electra shows each token those that follow it"),
        (TINY | {"hidden_size": 50}, "hidden size (50) is not a multiple of the number of attention heads (8)"),
        (TINY | {"hidden_size": -64}, "config.json has hidden_size: -64, but it must be 1 or more"),
        (TINY | {"num_hidden_layers": 0}, "config.json has num_hidden_layers: 0"),
        (TINY | {"num_hidden_layers": 2.5}, "Field 'num_hidden_layers' expected int"),
        (TINY | {"num_key_value_heads": 3}, "not a multiple of its num_key_value_heads: 3"),
        (TINY | {"torch_dtype": "int3"}, "torch.int3"),
        (TINY | {"quantization_config": {"quant_method": "gptq"}}, "published quantised with gptq"),
    ],
)
def test_wrong_model_is_told_in_a_sentence(
    config: dict[str, Any], sentence: str, traced_steps: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run("--model", write_model(tmp_path, config), "--gpus", "1xH100") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("--adapter.targets [nothing]", "no linear layer nothing; it has down_proj"),
        ("--adapter.targets []", "no linear layer in an empty list"),
        ("--adapter.modules_to_save [wte]", "no module wte; it has"),
        ("--adapter.targets [q_proj] --adapter.modules_to_save [q_proj]", "in both targets and modules_to_save"),
        ("--adapter.targets [q_proj] --adapter.modules_to_save [self_attn]", "PEFT cannot attach it"),
        ("--adapter.targets [lm_head] --adapter.modules_to_save [embed_tokens]", "PEFT cannot attach it"),
        ("--adapter.modules_to_save [mlp] --quantization.bits 4", "mlp will be quantised and cannot be trained"),
    ],
)
def test_adapter_that_cannot_be_had_is_told_in_a_sentence(
    asked: str, sentence: str, traced_steps: None, model_folder: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["--model", str(model_folder), "--gpus", "1xH100", "--strategy", "single", "--adapter.type", "lora"]
    assert run(*words, *asked.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert "cannot be traced" not in captured.err


@pytest.mark.slow
def test_adapter_of_experts_that_cannot_be_had_is_told_in_a_sentence(
    traced_steps: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["--model", write_model(tmp_path, TINY_MIXTURE), "--gpus", "1xH100", "--strategy", "single"]
    assert run(*words, "--adapter.type", "dora") == 2
    assert "PEFT cannot attach it" in capsys.readouterr().err


@pytest.mark.slow
def test_libraries_that_cannot_be_traced_are_told_in_a_sentence(
    traced_steps: None, model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(serving, "trace_depth", mock.Mock(side_effect=AttributeError("no such\nhook")))
    words = ["--model", str(model_folder), "--gpus", "1xH100", "--strategy", "single", "--method", "full"]
    assert run(*words, "--row-tokens", "1021") == 2
    said = capsys.readouterr()
    assert "under single cannot be traced with the versions of the libraries" in said.err
    assert "AttributeError: no such" in said.err
    assert "Traceback" not in said.err


def test_without_a_model_or_gpus_it_says_what_to_give(
    arithmetic_steps: None, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert run("--gpus", "8xH100") == 2
    assert "give a configuration (FILE.yaml), or a model" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert run("--model", model) == 2
    assert "name the GPUs, for example --gpus" in capsys.readouterr().err
    assert run("--model", model, "--gpus", "1xH100", "--probe") == 2
