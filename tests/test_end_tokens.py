"""The tokens at which generation stops, as a model's files name them, or a sentence about the file that does not."""

import json
from pathlib import Path

import pytest
import tiny
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.errors import InputError
from finetune.models import end_tokens as files
from finetune.models import generation_settings
from finetune.models.end_tokens import end_tokens_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.build_model_folder(tmp_path / "model")


def end_tokens(folder: Path) -> tuple[int, ...]:
    return end_tokens_of(AutoConfig.from_pretrained(folder), str(folder), revision=None)


def test_tokens_of_both_files_are_taken(folder: Path):
    (folder / "generation_config.json").unlink(missing_ok=True)
    (own,) = end_tokens(folder)
    for named, expected in (("7", {7}), ("[7, 9]", {7, 9}), ("null", set())):
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {named}, "max_new_tokens": -5}}')
        assert set(end_tokens(folder)) == {own} | expected


def test_config_around_a_language_model_has_the_tokens_of_the_model_within(folder: Path):
    (folder / "generation_config.json").unlink(missing_ok=True)
    around = AutoConfig.for_model("llava", text_config={"model_type": "llama", "eos_token_id": 7})
    assert not hasattr(around, "eos_token_id")
    assert end_tokens_of(around, str(folder), revision=None) == (7,)


@pytest.mark.parametrize("content", ["{broken", "[]", '{"eos_token_id": "2"}', '{"eos_token_id": [1, null]}', "\x80"])
def test_file_that_names_no_tokens_is_refused_and_not_taken_for_absent(folder: Path, content: str):
    (folder / "generation_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"generation_config\.json or config\.json of .* cannot be used"):
        end_tokens(folder)


def test_file_that_cannot_be_read_is_refused_and_not_taken_for_absent(folder: Path):
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").mkdir()
    with pytest.raises(InputError, match=r"generation_config\.json or config\.json of .* cannot be used"):
        end_tokens(folder)


def of_the_hub(error: EntryNotFoundError, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """Of a model on a hub that answers with an error when it is asked for generation_config.json."""

    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(files, "hf_hub_download", download)
    return end_tokens_of(AutoConfig.for_model("llama", eos_token_id=7), "owner/model", revision=None)


def test_model_of_the_hub_without_the_file_has_the_tokens_of_its_configuration(monkeypatch: pytest.MonkeyPatch):
    assert of_the_hub(EntryNotFoundError("none"), monkeypatch) == (7,)


def test_hub_that_does_not_answer_is_not_taken_for_one_without_the_file(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match=r"does not say whether owner/model has a generation_config\.json"):
        of_the_hub(LocalEntryNotFoundError("no answer"), monkeypatch)
    monkeypatch.setattr(files, "is_offline_mode", lambda: True)
    assert of_the_hub(LocalEntryNotFoundError("offline"), monkeypatch) == (7,)


@pytest.mark.parametrize(
    "said",
    [
        {"pad_token_id": -1},
        {"length_penalty": 0.5, "early_stopping": True},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 0.6, "pad_token_id": -1, "early_stopping": True},
        {"temperature": 1.0, "pad_token_id": -1},
        {"top_p": 1.0, "top_k": 50, "pad_token_id": -1},
        {"num_beams": 4, "length_penalty": 0.5, "do_sample": False, "temperature": 0.6},
    ],
    ids=str,
)
def test_settings_that_transformers_reads_and_would_not_save_are_saved_without_what_is_wrong(
    said: dict[str, object], folder: Path, tmp_path: Path
):
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 3], "repetition_penalty": 1.1} | said)
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    generation_settings.take_over(model, str(folder), revision=None)
    generation_settings.stop_at(model, 5)
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [1, 3, 5]
    assert saved["repetition_penalty"] == 1.1
    for name in {"top_p", "num_beams"} & said.keys():
        assert saved.get(name, 1.0) == said[name]
    assert saved.get("pad_token_id") != -1
    samples = said.get("temperature") == 0.6 and said.get("do_sample") is not False
    assert bool(saved.get("do_sample")) == samples
    assert saved.get("temperature", 1.0) == (0.6 if samples else 1.0)


def test_settings_that_can_be_saved_stay_as_they_are(folder: Path):
    said = {"do_sample": True, "temperature": 0.6, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(said))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    generation_settings.take_over(model, str(folder), revision=None)
    assert model.generation_config.to_diff_dict().items() >= said.items()
