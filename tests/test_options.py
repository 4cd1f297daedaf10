"""Options of training: each does what its paper or library says, and the same under every strategy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scenarios
import tiny
import torch
import yaml
from parity import FP32_TOLERANCE, assert_parity, assert_really_active
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file
from thinning import thinned
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, get_scheduler
from transformers.integrations.neftune import neftune_post_forward_hook

from finetune.config import sections
from finetune.config.command_line import parse
from finetune.config.refusals import schedule_problems
from finetune.config.sections import Train
from finetune.data.batches import IGNORED
from finetune.data.encoding import Row
from finetune.data.sampler import EMPTY
from finetune.errors import InputError
from finetune.models import adapter
from finetune.optim.optimizer import build_optimizer
from finetune.optim.schedule import learning_rate
from finetune.seeds import seed_of
from finetune.training import preferences
from finetune.training.embedding_noise import EmbeddingNoise
from finetune.training.loss import next_token_loss_sum, take_losses
from recipes import dpo, pretrain, sft

STEPS = 4
ALL: dict[str, Any] = {
    "adapter__type": "lora",
    "adapter__rank": 4,
    "adapter__rank_pattern": {"down_proj": 8},
    "adapter__alpha_pattern": {"q_proj": 64.0},
    "adapter__lora_plus_ratio": 4.0,
    "train__learning_rate": 5e-3,
    "train__steps": STEPS,
    "train__betas": [0.8, 0.9],
    "train__warmup_steps": 2,
    "train__min_learning_rate": 1e-4,
    "train__layer_decay": 0.7,
    "train__label_smoothing": 0.1,
    "train__neftune_alpha": 10.0,
}
"""Every option that a run with an adapter takes, at once."""
PLAIN: dict[str, Any] = {"weight_decay": 0.0, "weights": "fp32_master", "fused": False, "rounding_seed": 0}
"""Of an optimizer."""


class Runs:
    """Trains under a strategy, which is asserted to be active; keeps the runs on one process."""

    def __init__(self, ranks: Any, model: Path, rows: Path, folder: Path) -> None:
        self.ranks, self.model, self.rows, self.folder = ranks, model, rows, folder
        self.known: dict[str, Any] = {}

    def __call__(self, strategy: str, world_size: int, folder: Path | None = None, **settings: Any) -> tuple[Any, Any]:
        """Metrics and saved weights."""
        output = folder or self.folder / "run"
        settings |= {"train__micro_batch_size": 4 // world_size}
        config = scenarios.configuration(self.model, self.rows, output, **settings)
        for seen in self.ranks(world_size).run(scenarios.train, config, strategy=strategy):
            assert_really_active(seen, strategy, world_size)
        (file,) = (output / "final").glob("*model.safetensors")
        return scenarios.read_metrics(output), load_file(file)

    def on_one_process(self, name: str, settings: dict[str, Any]) -> tuple[Any, Any]:
        if name not in self.known:
            self.known[name] = self("single", 1, **settings)
        return self.known[name]


@pytest.fixture(scope="module")
def runs(ranks: Any, weights_folder: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ranks, weights_folder, conversations, tmp_path_factory.mktemp("options"))


def section(**values: Any) -> Train:
    return Train(output_dir="", **values)


@pytest.mark.parametrize("strategy", thinned(["fsdp2", "zero3"], ["ddp", "zero2"]))
def test_all_options_at_once_give_the_run_of_one_process(strategy: str, runs: Runs):
    expected, expected_adapter = runs.on_one_process("all", ALL)
    metrics, saved = runs(strategy, 2, **ALL)
    assert len(metrics) == STEPS
    assert_parity(metrics, expected, FP32_TOLERANCE)
    assert saved.keys() == expected_adapter.keys()
    for name, weight in expected_adapter.items():
        assert (saved[name] - weight).abs().mean() < 1e-6, name


def configured(recipe: Any, *flags: str) -> Any:
    given = ["--model.path", "m", "--data.train", "d", "--train.output_dir", "o", *flags]
    return parse(recipe.Config, given)


@pytest.mark.parametrize(("recipe", "rate"), [(sft, 2e-4), (pretrain, 2e-4), (dpo, 2e-5)])
def test_a_run_with_an_adapter_has_a_learning_rate_of_its_own_unless_one_is_set(recipe: Any, rate: float):
    found = configured(recipe, "--adapter.type", "lora")
    assert found.train.learning_rate == found.model_dump()["train"]["learning_rate"] == rate
    assert found.has_default_adapter_rate
    assert configured(recipe).train.learning_rate == 2e-5
    given = configured(recipe, "--adapter.type", "lora", "--train.learning_rate", "2e-5")
    assert given.train.learning_rate == 2e-5
    assert not given.has_default_adapter_rate


def test_the_default_learning_rate_of_an_adapter_is_said_recorded_and_not_changed_within_a_run(
    runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    config = scenarios.configuration(
        runs.model, runs.rows, tmp_path / "run", adapter__type="lora", train__steps=2, train__overwrite=False
    )
    values = config.model_dump()
    del values["train"]["learning_rate"]
    sft.main(sft.Config.model_validate(values))
    assert "train.learning_rate is not set: 0.0002, the default with an adapter" in capfd.readouterr().out
    record = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert record["config"]["train"]["learning_rate"] == 2e-4
    values["train"]["steps"], values["checkpoint"]["resume"] = 3, "auto"
    older = sft.Config.model_validate(values)
    object.__setattr__(older.train, "learning_rate", 2e-5)  # as a version with another default would have it
    with pytest.raises(InputError, match=r"train\.learning_rate was 0\.0002 in .* is 2e-05 now; set it"):
        sft.main(older)


@pytest.mark.parametrize("weights", ["fp32_master", "bf16"])  # of weights in fp32 the second rounds nothing
def test_betas_are_those_of_torchs_adamw(weights: str):
    torch.manual_seed(0)
    ours, reference = (torch.nn.Linear(8, 8) for _ in range(2))
    reference.load_state_dict(ours.state_dict())
    settings = PLAIN | {"weights": weights}
    optimizer = build_optimizer(ours, name="adamw", learning_rate=1e-2, betas=[0.5, 0.7], **settings)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.5, 0.7), weight_decay=0.0)
    inputs = torch.randn(4, 3, 8)
    for step in range(4):
        for layer, each in ((ours, optimizer), (reference, expected)):
            each.zero_grad()
            layer(inputs[step]).square().sum().backward()
            each.step()
    torch.testing.assert_close(ours.weight, reference.weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "lion_8bit"])
def test_betas_reach_the_optimizers_of_bitsandbytes(optimizer: str):
    built = build_optimizer(torch.nn.Linear(8, 8), name=optimizer, learning_rate=1e-2, betas=[0.5, 0.7], **PLAIN)
    assert all(tuple(group["betas"]) == (0.5, 0.7) for group in built.param_groups)


@pytest.fixture
def adapted(weights_folder: Path) -> Any:
    """A model of two layers, with a LoRA adapter."""
    model = AutoModelForCausalLM.from_pretrained(weights_folder)
    section = sections.Adapter(type="lora", rank=4)
    adapter.attach(model, section, base="", revision=None, dtype=torch.float32, seed=0)
    return model


def rates_of(model: Any, optimizer: torch.optim.Optimizer, key: str) -> dict[str, float]:
    known = {id(each): group[key] for group in optimizer.param_groups for each in group["params"]}
    return {name: known[id(each)] for name, each in model.named_parameters() if each.requires_grad}


def test_lora_plus_rates_are_those_of_peft(adapted: Any):
    theirs = create_loraplus_optimizer(adapted, torch.optim.AdamW, lr=1.0, loraplus_lr_ratio=16.0)
    ours = build_optimizer(adapted, lora_plus_ratio=16.0, name="adamw", learning_rate=1.0, **PLAIN)
    expected = rates_of(adapted, theirs, "lr")
    assert set(expected.values()) == {1.0, 16.0}
    assert rates_of(adapted, ours, "lr_scale") == expected


@pytest.mark.parametrize("tied", [True, False])
def test_each_layer_has_the_rate_of_the_layer_above_it_times_the_decay(tied: bool, tmp_path: Path):
    config = AutoConfig.from_pretrained(tiny.build_model_folder(tmp_path, tied=tied))
    model = AutoModelForCausalLM.from_config(config)
    found = rates_of(
        model, build_optimizer(model, layer_decay=0.5, name="adamw", learning_rate=1.0, **PLAIN), "lr_scale"
    )
    for name, scale in found.items():  # two layers, of which the upper one has the number 1
        assert scale == (0.25 if "embed" in name else 0.5 if ".layers.0." in name else 1.0), name
    assert ("lm_head.weight" in found) != tied
    for name, parameter in model.named_parameters():  # layers are counted, whichever of them train
        parameter.requires_grad_(".layers.0." in name)
    lower = build_optimizer(model, layer_decay=0.5, name="adamw", learning_rate=1.0, **PLAIN)
    assert {*rates_of(model, lower, "lr_scale").values()} == {0.5}
    model.requires_grad_(True)
    decayed = build_optimizer(model, layer_decay=0.5, name="adamw", learning_rate=1.0, **PLAIN | {"weight_decay": 0.1})
    assert {name for name, each in rates_of(model, decayed, "weight_decay").items() if each == 0} == {
        name for name in found if "norm" in name
    }


def test_smoothed_loss_is_pytorchs_and_the_held_out_one_is_not_smoothed(weights_folder: Path):
    torch.manual_seed(0)
    model, reference = (AutoModelForCausalLM.from_pretrained(weights_folder) for _ in range(2))
    take_losses(model)
    next_tokens = torch.randint(512, (3, 9)).where(torch.rand(3, 9) < 0.6, IGNORED)
    inputs = {"input_ids": torch.randint(512, (3, 9))}
    for mode, smoothing in (("train", 0.2), ("eval", 0.0)):
        for each in (model, reference):
            each.zero_grad()
            each.train(mode == "train")
        found = next_token_loss_sum(model, (next_tokens, inputs), label_smoothing=0.2)
        logits = reference(**inputs).logits
        flat = logits.flatten(0, 1), next_tokens.flatten()
        expected = F.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        found.backward()
        expected.backward()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def documents(*lengths: int) -> list[tuple[int, list[Row]]]:
    """Rows of one document each, with their numbers."""
    return [(place, [Row(np.zeros(length, np.int32), [], "")]) for place, length in enumerate(lengths)]


def test_noise_on_embeddings_is_that_of_transformers():
    table = torch.nn.Embedding(16, 8)
    noise = EmbeddingNoise(Holder(table), 5.0, seed=3)
    noise.expect(7, documents(6))
    input_ids = torch.arange(6)[None]
    ours = table(input_ids)
    plain = torch.nn.Embedding.from_pretrained(table.weight).train()
    plain.neftune_noise_alpha = 5.0
    torch.manual_seed(seed_of(3, 7, 1, 0))
    theirs = neftune_post_forward_hook(plain, input_ids, plain(input_ids))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)  # of noise up to 0.7, which is computed in fp64 here
    assert not torch.equal(ours, table.eval()(input_ids))
    assert torch.equal(table(input_ids), plain(input_ids))  # none where nothing is trained


class Holder:
    """A model, as far as the noise knows it."""

    def __init__(self, table: torch.nn.Embedding) -> None:
        self.table = table

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.table


def test_noise_of_a_row_does_not_depend_on_what_is_beside_it():
    table = torch.nn.Embedding(16, 8)
    noise = EmbeddingNoise(Holder(table), 5.0, seed=3)
    three = documents(4, 2, 5)
    noise.expect(1, three)
    flat = table(torch.zeros(1, 11, dtype=torch.int64))[0].split([4, 2, 5])
    padded = table(torch.zeros(3, 5, dtype=torch.int64))
    for place, (number, row) in enumerate(three):
        noise.expect(1, [(number, row)])
        length = len(row[0].tokens)
        alone = table(torch.zeros(1, length, dtype=torch.int64))[0]
        assert torch.equal(alone, flat[place])
        assert torch.equal(alone, padded[place, :length])
    noise.expect(2, three)
    assert not torch.equal(table(torch.zeros(1, 11, dtype=torch.int64))[0, :4], flat[0])


@pytest.mark.parametrize("flat", [True, False])
def test_noise_takes_a_pair_that_fills_up_the_last_step_for_the_two_documents_that_it_is(flat: bool):
    table = torch.nn.Embedding(16, 8)
    noise = EmbeddingNoise(Holder(table), 5.0, seed=3, fillers=2)
    pair = [Row(np.arange(1, length, dtype=np.int32), [(1, length - 1)], "") for length in (6, 4)]
    noisy = []
    for rows in ([(5, pair)], [(5, pair), (EMPTY, [])]):
        noise.expect(7, rows)
        batch = preferences.collate([documents for _, documents in rows], torch.device("cpu"), flat=flat)
        noisy.append(table(batch.inputs["input_ids"]))
    alone, filled = noisy
    assert torch.equal(filled[:, : alone.shape[1]][: alone.shape[0]], alone)


def test_warmup_in_steps_and_lowest_rate_are_those_of_transformers_scheduler():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler: LambdaLR = get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=0,
        num_training_steps=15,
        scheduler_specific_kwargs={"min_lr": 3e-5},
    )
    train = section(learning_rate=3e-4, warmup_steps=5, warmup_ratio=0.5, min_learning_rate=3e-5)
    rates = [learning_rate(step, 20, train) for step in range(1, 21)]
    assert rates[:5] == pytest.approx([3e-4 * step / 6 for step in range(1, 6)])
    for rate in rates[5:]:
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"min_learning_rate": 1e-6, "min_learning_rate_ratio": 0.1}, "say the same in two ways"),
        ({"min_learning_rate": 1e-3, "learning_rate": 1e-4}, "is above the peak"),
        ({"min_learning_rate": 1e-6, "schedule": "constant"}, "does not decay"),
        ({"betas": [0.9, 0.95], "optimizer": "sgd"}, "sgd has none"),
        ({"warmup_steps": 3, "schedule": "wsd", "warmup_ratio": 0.5, "decay_ratio": 0.8}, None),
        ({"betas": [0.9, 0.95], "optimizer": "lion_8bit"}, None),
    ],
)
def test_options_of_the_optimizer_that_contradict_one_another_are_refused(values: dict[str, Any], said: str | None):
    problems = schedule_problems(section(**values))
    assert len(problems) == (said is not None)
    assert all(str(said) in problem for problem in problems)
