"""What CONTRIBUTING.md tells a newcomer about a row's way to its loss is what happens."""

import json
import pickle
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import finetune
from finetune.data import batches, dataset, template_process
from finetune.data.chat_template import ChatTemplate
from finetune.data.encoding import Row, Settings
from finetune.data.sources import Record, Source
from finetune.models import attention
from finetune.training.loss import next_token_loss_sum, take_losses

PACKAGE = Path(finetune.__file__).parent
MOST_FILES = 13
MARK = "zebra"
MARKED = set(tiny.build_tokenizer()(MARK)["input_ids"])


def holds_the_row(value: Any, depth: int = 4) -> bool:
    """Whether a value is the marked row, or contains it: as bytes, text, messages, tokens or a micro-batch."""
    if isinstance(value, str | bytes):
        return (MARK if isinstance(value, str) else MARK.encode()) in value
    if isinstance(value, Row | torch.Tensor):
        tokens = value.tokens if isinstance(value, Row) else value
        return set(tokens.flatten().tolist()) >= MARKED
    if depth == 0:
        return False
    if isinstance(value, Record):
        return holds_the_row(value.value)
    if isinstance(value, dict):
        return any(holds_the_row(item, depth - 1) for item in value.values())
    if isinstance(value, list | tuple):
        return any(holds_the_row(item, depth - 1) for item in value)
    return False


class Watch:
    """Notes the files of the package with a function that has held the row, in the order in which they did."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, returned: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event != "return" or not file.is_relative_to(PACKAGE):
            return
        name = file.relative_to(PACKAGE.parent).as_posix()
        if name not in self.files and holds_the_row([returned, *frame.f_locals.values()]):
            self.files.append(name)


def render_here(
    self: template_process.TemplateProcess, conversations: Sequence[template_process.Conversation]
) -> list[Any]:
    """As the child does, where it can be watched."""
    return [template_process._answer(ChatTemplate(pickle.loads(self._pickled)), each) for each in conversations]


def files_on_the_way(model_folder: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    attention.register()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), attn_implementation="packed")
    take_losses(model)
    turns = [{"role": "user", "content": f"a {MARK}?"}, {"role": "assistant", "content": f"A {MARK}."}]
    (folder / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    watch = Watch()
    monkeypatch.setattr(template_process.TemplateProcess, "render", render_here)
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        rows, _ = dataset.load([Source(str(folder / "rows.jsonl"))], [], tokenizer, Settings(max_length=64))
        work = batches.Batches(
            rows,
            packing=False,
            flat=True,
            max_length=64,
            steps=1,
            epochs=1,
            global_batch_size=1,
            micro_batch_size=1,
            seed=0,
        )
        documents = [work.documents(place) for place in work.step(1).places]
        micro_batch = batches.collate(documents, torch.device("cpu"), flat=True)
        loss = next_token_loss_sum(model, micro_batch)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert loss > 0
    return watch.files


def test_row_passes_through_the_files_that_are_named(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"^\d+\. `(finetune/\S+\.py)`", text, flags=re.MULTILINE)
    assert len(named) <= MOST_FILES
    assert sorted(files_on_the_way(model_folder, tmp_path, monkeypatch)) == sorted(named)
