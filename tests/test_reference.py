"""The recipe against a loop that we did not write: the Trainer of transformers."""

from pathlib import Path
from typing import Any

import pytest
import scenarios
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from finetune.data.sampler import global_batch
from recipes.sft import main

BATCH, MICRO_BATCH = 8, 2


class RecordingTrainer(Trainer):
    """Keeps every micro-batch's loss, which the Trainer logs rounded, and takes the rows in the order given."""

    losses: list[float]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.losses.append(loss.item())
        return loss

    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def collate(features: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(f["input_ids"]) for f in features)
    padding = {"input_ids": 1, "labels": -100, "attention_mask": 0}
    return {
        key: torch.tensor([f[key] + [fill] * (longest - len(f[key])) for f in features])
        for key, fill in padding.items()
    }


@pytest.mark.parametrize(("optimizer", "max_grad_norm"), [("adamw", 1.0), ("sgd", 0.5)])
def test_losses_and_norms_are_those_of_transformers_trainer(
    optimizer: str,
    max_grad_norm: float,
    model_folder: Path,
    conversations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    learning_rate = {"adamw": 1e-3, "sgd": 0.3}[optimizer]
    main(
        scenarios.configuration(
            model_folder,
            conversations,
            tmp_path / "ours",
            train__micro_batch_size=MICRO_BATCH,
            train__optimizer=optimizer,
            train__learning_rate=learning_rate,
            train__max_grad_norm=max_grad_norm,
            train__weight_decay=0.1,
            train__warmup_ratio=0.0,
        )
    )
    ours = scenarios.read_metrics(tmp_path / "ours")

    rows = tiny.read_rows(conversations, tiny.build_tokenizer())
    order = [
        index
        for step in range(1, scenarios.STEPS + 1)
        for index in global_batch(step, rows=len(rows), rows_in_run=10**9, global_batch_size=BATCH, seed=0)
    ]
    features = [
        {
            "input_ids": rows[i].tokens.tolist(),
            "labels": [t if is_trained else -100 for t, is_trained in zip(rows[i].tokens.tolist(), rows[i].trained)],
            "attention_mask": [1] * len(rows[i].tokens),
        }
        for i in order
    ]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), attn_implementation="sdpa")
    trainer = RecordingTrainer(
        model=model,
        train_dataset=features,
        data_collator=collate,
        args=TrainingArguments(
            output_dir=str(tmp_path / "theirs"),
            max_steps=scenarios.STEPS,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=BATCH // MICRO_BATCH,
            learning_rate=learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=0,
            weight_decay=0.1,
            max_grad_norm=max_grad_norm,
            optim={"adamw": "adamw_torch", "sgd": "sgd"}[optimizer],
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            remove_unused_columns=False,
            disable_tqdm=True,
        ),
    )
    trainer.losses = []
    trainer.train()
    micro_batches = BATCH // MICRO_BATCH
    theirs = [sum(trainer.losses[i : i + micro_batches]) for i in range(0, len(trainer.losses), micro_batches)]
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(theirs) == len(logged) == len(ours) == 20
    assert [m["learning_rate"] for m in ours] == pytest.approx([e["learning_rate"] for e in logged])
    assert [m["loss"] for m in ours] == pytest.approx(theirs, abs=1e-4)
    assert [m["grad_norm"] for m in ours] == pytest.approx([e["grad_norm"] for e in logged], abs=1e-4)
