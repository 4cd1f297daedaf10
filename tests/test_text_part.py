"""Of a model that also reads images, the part that rows of text reach is trained alone, under every strategy."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import scenarios
import tiny
import torch
from parity import FP32_TOLERANCE, assert_parity
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from thinning import thinned
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from finetune import distributed
from finetune.cli.commands import main
from finetune.config import sections
from finetune.errors import InputError
from finetune.export.checkpoint_export import export
from finetune.models import adapter, continued_adapter, text_part
from finetune.models import loading as models
from finetune.models.recomputation import layers_of
from finetune.run import preflight
from recipes import sft

TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 512, "pad_token_id": 1, "eos_token_id": 1, "bos_token_id": None}
IMAGES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGES |= {"image_size": 32, "patch_size": 16}
BESIDE = ["model.multi_modal_projector", "model.vision_tower"]
FORMAT = {"format": "pt"}
LORA = {"adapter__type": "lora", "adapter__rank": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Gemma 3 that reads images too."""
    path = tmp_path_factory.mktemp("gemma3")
    of_all = {"image_token_index": 500, "boi_token_index": 501, "eoi_token_index": 502, "dtype": "float32"}
    config = AutoConfig.for_model("gemma3", text_config=TEXT, vision_config=IMAGES, eos_token_id=1, **of_all)
    config.architectures = ["Gemma3ForConditionalGeneration"]
    config.save_pretrained(path)
    tiny.build_tokenizer().save_pretrained(path)
    return tiny.write_weights(path)


def skeleton(folder: Path) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def test_parts_that_rows_of_text_do_not_reach_are_named_and_other_models_have_none(folder: Path, model_folder: Path):
    assert text_part.unreached(skeleton(folder)) == BESIDE
    assert text_part.unreached(skeleton(model_folder)) == []
    for family in ("gpt2", "bert", "roberta", "modernbert-decoder"):
        with torch.device("meta"):
            other = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, is_decoder=True))
        assert text_part.unreached(other) == []


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "fc1", "mlp.down_proj"]], ids=str)
def test_an_adapter_has_no_part_in_them(targets: Any, folder: Path):
    adapted = adapter.on_a_copy(skeleton(folder), sections.Adapter(type="lora", targets=targets))
    trained = {name.partition(".lora_")[0] for name, each in adapted.named_parameters() if each.requires_grad}
    assert all(name.startswith("model.language_model.layers.") for name in trained)
    assert len(trained) == 3 * (7 if targets == "all-linear" else 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"adapter__targets": ["q_proj", "fc1"]}, "adapter.targets: fc1"),
        ({"adapter__targets": ["fc1", "fc2"]}, "adapter.targets: fc1, fc2"),
        ({"adapter__rank_pattern": {"q_proj": 2, "fc1": 3}}, "adapter.rank_pattern: fc1"),
        ({"adapter__alpha_pattern": {"fc1": 3}}, "adapter.alpha_pattern: fc1"),
        ({"adapter__targets": ["q_proj"], "adapter__rank_pattern": {"q_proj": 2}}, None),
    ],
    ids=str,
)
def test_names_of_their_layers_alone_are_refused_before_weights_load(
    changes: dict[str, Any], said: str | None, folder: Path, conversations: Path, tmp_path: Path
):
    config = scenarios.configuration(folder, conversations, tmp_path / "run", **LORA | changes)
    launch = distributed.Strategy("ddp", 0, 2, 1, "no", True)
    if said is None:
        preflight.check(config, launch)
        return
    with pytest.raises(InputError) as refused:
        preflight.check(config, launch)
    (problem,) = refused.value.problems
    assert problem.startswith(f"{said} is only found in {' and '.join(BESIDE)}, which rows of text do not reach")
    assert problem.endswith(
        "linear layers of the text: down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj."
    )


def test_layers_and_flops_are_those_of_the_text(folder: Path):
    model, text = skeleton(folder), AutoConfig.from_pretrained(folder).text_config
    with torch.device("meta"):
        alone = AutoModelForCausalLM.from_config(text)
    assert len(layers_of(model)) == 3
    assert models.shape(model) == models.shape(alone)


@pytest.fixture(scope="module")
def single(folder: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("single") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ACCELERATE_MIXED_PRECISION", "no")
        sft.main(scenarios.configuration(folder, conversations, output, **LORA))
    return output


def test_the_saved_adapter_is_read_by_peft_and_can_be_trained_on(
    single: Path, folder: Path, conversations: Path, tmp_path: Path
):
    base, tokens = AutoModelForCausalLM.from_pretrained(folder), torch.arange(5, 25)[None]
    before = base(tokens).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of missing and of unknown weights
        model = PeftModel.from_pretrained(base, str(single / "final"))
    assert (model(tokens).logits - before).abs().max() > 1e-4
    with safe_open(single / "final" / "adapter_model.safetensors", "pt") as file:
        assert all(".language_model." in name for name in file.keys())  # noqa: SIM118  # it is no mapping
    changes = {"adapter__from": str(single), "model__random_weights": False, "train__steps": 1}
    sft.main(scenarios.configuration(folder, conversations, tmp_path / "run", **changes))
    named = json.loads((tmp_path / "run" / "final" / "adapter_config.json").read_text())
    assert named["r"] == 4


def saved_by_peft(base: Path, folder: Path, *, learnt: str, **settings: Any) -> Path:
    """An adapter as PEFT leaves it after training: B is no longer 0 in the layers that learnt."""
    torch.manual_seed(1)
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, **settings))
    for name, parameter in model.named_parameters():
        if ".lora_B." in name and learnt in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    with safe_open(folder / adapter.WEIGHTS, "pt") as file:
        assert any(".vision_tower." in name for name in file.keys())  # noqa: SIM118
    return folder


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "fc1", "mlp.down_proj"]], ids=str)
def test_an_adapter_of_peft_that_learnt_nothing_of_images_is_continued_without_its_part_there(
    targets: Any, use_dora: bool, folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    how = {"learnt": ".language_model.", "target_modules": targets, "use_dora": use_dora}
    how |= {"rank_pattern": {"q_proj": 2, "fc1": 3}}
    theirs = saved_by_peft(folder, tmp_path / "theirs", **how)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    changes = {"adapter__from": str(theirs), "train__steps": 1, "train__learning_rate": 1e-12}
    sft.main(scenarios.configuration(folder, conversations, tmp_path / "run", **changes))
    with safe_open(tmp_path / "run" / "final" / adapter.WEIGHTS, "pt") as file:
        layers = {name.partition(".lora_")[0] for name in file.keys()}  # noqa: SIM118
    assert all(name.startswith("base_model.model.model.language_model.") for name in layers)
    assert len(layers) == 3 * (7 if targets == "all-linear" else 2)
    named = json.loads((tmp_path / "run" / "final" / "adapter_config.json").read_text())
    assert named["rank_pattern"] == {"q_proj": 2}
    assert not any("vision" in name or "fc1" in name for name in named["target_modules"])
    section = sections.Adapter.model_validate({"from": str(tmp_path / "run")})
    assert continued_adapter.problems(skeleton(folder), section) == []
    tokens = torch.arange(5, 25)[None]
    logits = []
    for each in (theirs, tmp_path / "run" / "final"):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(each))
        logits.append(model(tokens).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)
    with torch.no_grad():
        assert (AutoModelForCausalLM.from_pretrained(folder)(tokens).logits - logits[0]).abs().max() > 1e-2


def test_an_adapter_that_learnt_of_images_is_refused_and_can_be_merged(folder: Path, tmp_path: Path):
    theirs = saved_by_peft(folder, tmp_path / "theirs", learnt="layers.1.mlp.fc1", target_modules="all-linear")
    section, model = sections.Adapter.model_validate({"from": str(theirs)}), skeleton(folder)
    (said,) = continued_adapter.problems(model, section)
    assert "has learnt something in model.vision_tower.encoder.layers.1.mlp.fc1, which rows of text do not" in said
    adapter.attach(model, section, base="", revision=None, dtype=torch.float32, seed=0)
    with pytest.raises(InputError, match=r"vision_tower.*fc1.*is unexpected"):
        continued_adapter.load_values(model, section)
    assert main(["merge", str(theirs), "--output", str(tmp_path / "merged")]) == 0


@pytest.mark.parametrize(
    ("saved", "named"),
    [
        ("multi_modal_projector", "model.multi_modal_projector"),
        ("mm_soft_emb_norm", "model.multi_modal_projector.mm_soft_emb_norm"),
        ("post_layernorm", "model.vision_tower.post_layernorm"),
        ("mlp", 9),  # three layers of three matrices
        ("norm", 19),  # PEFT compares the ends of names: of a layer six
        ("embed_tokens", 1),
        ("input_layernorm", 3),
    ],
)
def test_modules_trained_whole_are_those_of_the_text(saved: str, named: str | int, folder: Path):
    section = sections.Adapter(type="lora", targets=["q_proj"], modules_to_save=[saved])
    model = skeleton(folder)
    found = adapter.problems(model, targets=["q_proj"], modules_to_save=[saved], quantised=False)
    if isinstance(named, str):
        (said,) = found
        assert said.startswith(f"adapter.modules_to_save: {saved} matches {named}, which rows of text do not reach")
        return
    assert found == []
    adapted = adapter.on_a_copy(model, section)
    whole = [name for name, each in adapted.named_parameters() if each.requires_grad and ".lora_" not in name]
    assert len(whole) == named
    assert all(saved in name and name.startswith("model.language_model.") for name in whole)


def logits_of(base: Path, adapted: Path | None = None) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of missing and of unknown weights
        model = PeftModel.from_pretrained(model, str(adapted)) if adapted else model
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(5, 25)[None]).logits
    return found


def test_norms_of_the_text_alone_are_trained_whole_and_the_adapter_is_read_merged_and_trained_on(
    folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    asked = LORA | {"adapter__targets": ["q_proj"], "adapter__modules_to_save": ["norm"]}
    changes = {"model__random_weights": False, "train__learning_rate": 1e-2, **asked}
    sft.main(scenarios.configuration(folder, conversations, tmp_path / "run", **changes))
    result, again = tmp_path / "run" / "final", tmp_path / "again" / "final"
    saved, before = load_file(result / adapter.WEIGHTS), load_file(folder / "model.safetensors")
    norms = [name for name in saved if ".lora_" not in name]
    assert len(norms) == 19
    assert all(".language_model." in name for name in saved)
    assert sum(bool(saved[name].any()) for name in norms) == 19  # Gemma's begin with 0
    assert (logits_of(folder, result) - logits_of(folder)).abs().max() > 1e-2
    merge = ["merge", str(tmp_path / "run"), "--output", str(tmp_path / "merged"), "--dtype", "fp32"]
    assert main(merge) == 0
    torch.testing.assert_close(logits_of(tmp_path / "merged"), logits_of(folder, result), rtol=0, atol=1e-4)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    beside = [name for name in before if "vision_tower" in name or "multi_modal" in name]
    assert len(beside) > 30
    assert all(torch.equal(merged[name], before[name]) for name in beside)
    on = {"adapter__from": str(tmp_path / "run"), "model__random_weights": False, "train__steps": 1}
    sft.main(scenarios.configuration(folder, conversations, again.parent, **on, train__learning_rate=1e-12))
    torch.testing.assert_close(logits_of(folder, again), logits_of(folder, result), rtol=0, atol=1e-5)
    assert load_file(again / adapter.WEIGHTS).keys() == saved.keys()


def test_an_adapter_of_peft_with_whole_modules_of_images_is_not_continued(folder: Path, tmp_path: Path):
    how: dict[str, Any] = {"target_modules": "all-linear", "modules_to_save": ["norm"]}
    theirs = saved_by_peft(folder, tmp_path / "theirs", learnt="nothing", **how)
    section = sections.Adapter.model_validate({"from": str(theirs)})
    (said,) = continued_adapter.problems(skeleton(folder), section)
    assert "has learnt something in model.multi_modal_projector.mm_soft_emb_norm.weight and " in said
    assert "merge the adapter into its base" in said


@pytest.mark.parametrize("strategy", thinned(["zero3"], ["ddp", "fsdp2"]))
def test_losses_are_those_of_one_process(
    strategy: str, ranks: Any, single: Path, folder: Path, conversations: Path, tmp_path: Path
):
    config = scenarios.configuration(folder, conversations, tmp_path / "run", train__micro_batch_size=2, **LORA)
    for seen in ranks(2).run(scenarios.train, config, strategy=strategy):
        assert seen["world_size"] == 2
    expected = scenarios.read_metrics(single)
    assert expected[-1]["loss"] < expected[0]["loss"]
    assert_parity(scenarios.read_metrics(tmp_path / "run"), expected, FP32_TOLERANCE)


@pytest.mark.parametrize("adapter_type", ["none", "lora"])
def test_a_plan_has_what_a_run_would_start(adapter_type: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    command = ["plan", "--model", str(folder / "config.json"), "--gpus", "2x24GB", "--adapter.type", adapter_type]
    assert main([*command, "--json", "--data.max_length", "64"]) == 0
    assert {"ddp", "fsdp2"} <= {row["strategy"] for row in json.loads(capsys.readouterr().out)["rows"]}


def test_modules_beside_the_text_are_refused_before_weights_load(folder: Path, conversations: Path, tmp_path: Path):
    changes = LORA | {"adapter__modules_to_save": ["multi_modal_projector"]}
    with pytest.raises(
        InputError, match=r"modules_to_save: multi_modal_projector matches model\.multi_modal_projector"
    ):
        preflight.check(
            scenarios.configuration(folder, conversations, tmp_path / "run", **changes),
            distributed.Strategy("ddp", 0, 2, 1, "no", True),
        )


def test_without_an_adapter_the_text_part_alone_is_trained(folder: Path, model_folder: Path):
    model = skeleton(folder)
    text_part.train_alone(model, model)
    frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    assert frozen == [name for name, _ in model.named_parameters() if text_part.is_within(name, BESIDE)]
    assert len(frozen) > 30
    text = skeleton(model_folder)
    text_part.train_alone(text, text)
    assert all(each.requires_grad for each in text.parameters())


@pytest.fixture(scope="module")
def renamed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, with the names that its weights have in memory: nothing is converted when it is read."""
    path = tmp_path_factory.mktemp("renamed") / "gemma3"
    shutil.copytree(folder, path)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    save_file({name: each.detach() for name, each in model.named_parameters()}, path / "model.safetensors", FORMAT)
    return path


@pytest.fixture(scope="module")
def full(renamed: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all weights of the text on one process."""
    output = tmp_path_factory.mktemp("full") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ACCELERATE_MIXED_PRECISION", "no")
        sft.main(scenarios.configuration(renamed, conversations, output, checkpoint__every=5))
    return output


def assert_only_text_is_trained(result: Path, base: Path) -> None:
    """By the class of transformers that reads images too, and none of its weights is missing or unknown."""
    model, told = AutoModelForImageTextToText.from_pretrained(result, output_loading_info=True)
    assert not {name for kind in told.values() for name in kind}
    before, after = AutoModelForImageTextToText.from_pretrained(base).state_dict(), model.state_dict()
    assert before.keys() == after.keys()
    same = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert same == {name for name in before if text_part.is_within(name, BESIDE)}
    assert len(same) > 30


def names_of(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {*file.keys()}


def test_a_result_of_one_process_has_the_trained_text_and_the_images_of_the_base(full: Path, renamed: Path):
    assert_only_text_is_trained(full / "final", renamed)
    assert names_of(full / "final") == names_of(renamed)


@pytest.mark.parametrize("strategy", thinned(["fsdp2", "zero3"], ["ddp", "zero2"]))
def test_a_result_of_two_processes_is_that_of_one(
    strategy: str, ranks: Any, full: Path, renamed: Path, conversations: Path, tmp_path: Path
):
    changes = {"train__micro_batch_size": 2, "checkpoint__every": 5}
    config = scenarios.configuration(renamed, conversations, tmp_path / "run", **changes)
    for seen in ranks(2).run(scenarios.train, config, strategy=strategy):
        assert seen["world_size"] == 2
    assert_parity(scenarios.read_metrics(tmp_path / "run"), scenarios.read_metrics(full), FP32_TOLERANCE)
    assert_only_text_is_trained(tmp_path / "run" / "final", renamed)
    assert names_of(tmp_path / "run" / "final") == names_of(renamed)
    export(tmp_path / "run", tmp_path / "exported")
    assert_only_text_is_trained(tmp_path / "exported", renamed)


def test_zero3_gives_files_back_the_names_that_they_had(
    ranks: Any, folder: Path, renamed: Path, conversations: Path, tmp_path: Path
):
    config = scenarios.configuration(folder, conversations, tmp_path / "run", train__steps=1)
    for seen in ranks(2).run(scenarios.train, config, strategy="zero3"):
        assert seen["world_size"] == 2
    assert_only_text_is_trained(tmp_path / "run" / "final", folder)
    assert names_of(tmp_path / "run" / "final") == names_of(folder) != names_of(renamed)


def test_a_checkpoint_is_exported_with_the_images_of_its_base(full: Path, renamed: Path, tmp_path: Path):
    export(full / "checkpoints" / "step-00000015", tmp_path / "exported")
    assert_only_text_is_trained(tmp_path / "exported", renamed)


def test_a_checkpoint_is_not_exported_with_the_images_of_another_base(
    renamed: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    base = shutil.copytree(renamed, tmp_path / "base")
    sft.main(scenarios.configuration(base, conversations, tmp_path / "run", train__steps=1, checkpoint__every=1))
    weights = {name: each + 1 for name, each in load_file(base / "model.safetensors").items()}
    save_file(weights, base / "model.safetensors", FORMAT)
    with pytest.raises(InputError, match="is not the one that the run began with"):
        export(tmp_path / "run", tmp_path / "exported")
    with pytest.raises(InputError, match="what the run did not train is taken from it, such as an encoder of images"):
        export(tmp_path / "run", tmp_path / "exported", base_model=str(base))
    export(tmp_path / "run", tmp_path / "exported", base_model=str(renamed))  # the same at another place
    assert_only_text_is_trained(tmp_path / "exported", renamed)
