"""Pretraining: batches and sources that change, its budget in tokens, and what it tells of held-out texts."""

import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

import corpora
import numpy as np
import pytest
import scenarios
import tiny
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from test_reference import RecordingTrainer
from thinning import thinned
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from benchmarks import pretrain_tiny
from finetune.cli import commands
from finetune.config.command_line import parse
from finetune.config.token_budget import Stage, in_rows, stages_of
from finetune.data import dataset
from finetune.data.encoding import Settings
from finetune.data.sampler import EMPTY, global_batch
from finetune.data.sources import named_sources
from finetune.data.stages import Staged
from finetune.errors import InputError
from finetune.models.initialisation import scale_by_depth
from finetune.models.spec import ModelSpec
from finetune.optim.schedule import learning_rate
from finetune.run.corpus import corpus_of, corpus_problems
from finetune.training.pretraining import Measured, MeasuredRow, Pretraining, _loss_sum, names_of
from recipes.pretrain import Config, main

ROOT = Path(__file__).parent.parent
TINY_MODEL = ROOT / "recipes" / "models" / "pretrain_tiny"
SHAKESPEARE = ROOT.parent / "shared" / "data" / "shakespeare_400k.txt"
COMPARED = ("loss", "grad_norm", "tokens", "total_tokens")
GROWING = {
    "train__steps": None,
    "train__tokens": 3000,
    "train__global_batch_tokens": 384,
    "train__batch_warmup": [{"until_tokens": 1000, "global_batch_tokens": 192}],
}
"""6 steps of 4 rows, then 5 of 8: at 1,152 and at 3,072 tokens, the first that are enough."""
HELD_OUT = ("loss", "bits_per_byte", "loss/a.jsonl", "loss/b.jsonl", "bits_per_byte/a.jsonl", "bits_per_byte/b.jsonl")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpora.write_texts(tmp_path_factory.mktemp("texts") / "train.jsonl", rows=60)


@pytest.fixture(scope="module")
def held_out_texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("held_out")
    return [str(corpora.write_texts(folder / f"{name}.jsonl", rows=5, seed=seed)) for seed, name in enumerate("ab", 1)]


@pytest.fixture(scope="module")
def run(
    ranks: Any, model_folder: Path, texts: Path, held_out_texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    folder = tmp_path_factory.mktemp("pretrain")

    def train(strategy: str, world_size: int, name: str = "run", **changes: Any) -> list[dict[str, Any]]:
        settings = {"data__eval": held_out_texts, "pretrain__z_loss": 1e-3, "train__decay_embeddings": False}
        settings |= {"train__schedule": "wsd", "train__decay_ratio": 0.4} | changes
        values = corpora.values_of(model_folder, texts, folder / name, **settings)
        assert ranks(world_size).run(corpora.pretrain, values, strategy=strategy) == [world_size] * world_size
        return scenarios.read_metrics(folder / name)

    train.folder = folder
    return train


@pytest.fixture(scope="module")
def alone(run: Any) -> list[dict[str, Any]]:
    metrics: list[dict[str, Any]] = run("single", 1, train__micro_batch_size=8, pretrain__depth_scaled=True)
    return metrics


def tokens_of(texts: Path) -> list[int]:
    """Of all texts of a file, end to end."""
    tokenizer = tiny.build_tokenizer()
    read = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    return [token for text in read for token in [*tokenizer.encode(text), tokenizer.eos_token_id]]


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert [one[name] for name in COMPARED] == pytest.approx([other[name] for name in COMPARED], rel=1e-5)
    ends = [[line[-1][f"eval_{name}"] for name in HELD_OUT] for line in (found, expected)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)


def test_documents_that_are_kept_apart_do_not_see_one_another(run: Any, alone: Any):
    apart = run("fsdp2", 2, data__packing=True, pretrain__depth_scaled=True)
    assert apart[0]["loss"] != alone[0]["loss"]
    assert_alike(apart, run("single", 1, data__packing=True, pretrain__depth_scaled=True))


def test_full_rows_need_no_attention_to_documents(run: Any, alone: Any):
    """With packing kept apart this attention is refused."""
    found = run("ddp", 2, model__attention="eager", pretrain__depth_scaled=True)
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in alone], rel=1e-5)
    assert found[-1]["total_tokens"] >= alone[-1]["total_tokens"]  # the last row of the corpus is shorter, and padded


@pytest.fixture(scope="module")
def changing(run: Any, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run whose batches grow, and whose sources change."""
    other = corpora.write_texts(tmp_path_factory.mktemp("other") / "other.jsonl", rows=9, seed=7)
    return GROWING | {"data__stages": [{"from_tokens": 2000, "train": str(other)}]}


@pytest.fixture(scope="module")
def changing_alone(run: Any, changing: Any) -> list[dict[str, Any]]:
    metrics: list[dict[str, Any]] = run("single", 1, **changing)
    rows = [-(-line["total_tokens"] // 48) for line in metrics]  # of which the last one of a mix is shorter
    assert rows == [4] * 6 + [8] * 5
    return metrics


@pytest.mark.parametrize("strategy", thinned(["fsdp2", "zero1"], ["ddp", "zero3_offload"]))
def test_a_run_whose_batches_and_sources_change_is_that_of_one_process(
    strategy: str, run: Any, changing: Any, changing_alone: Any
):
    assert_alike(run(strategy, 2, f"changing-{strategy}", **changing), changing_alone)


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_a_run_whose_batches_and_sources_change_is_that_of_a_plain_loop(
    micro_batch_size: int, run: Any, changing: dict[str, Any], model_folder: Path, texts: Path
):
    """Which knows of no accumulation: each step is one backward pass over its rows, whose gradients are all used."""
    plain = {"pretrain__z_loss": 0.0, "train__schedule": "wsd", "train__decay_ratio": 0.4}
    plain |= {"train__weight_decay": 0.0, "train__micro_batch_size": micro_batch_size} | changing
    ours = run("single", 1, "plain", **plain)
    cfg = in_rows(Config.model_validate(corpora.values_of(model_folder, texts, run.folder / "plain", **plain)))
    spec = ModelSpec.read(cfg.model, cfg.quantization, packing=False, dtype=torch.float32)
    batches, _ = corpus_of(cfg, tiny.build_tokenizer(), spec)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses, norms = [], []
    for step in range(1, batches.steps + 1):
        rows = [row for place in batches.step(step).places for row in batches.documents(place)]
        tokens = [torch.from_numpy(row.tokens.astype(np.int64))[None] for row in rows]
        sums = [model(row, labels=row).loss * (row.shape[1] - 1) for row in tokens]
        loss = torch.stack(sums).sum() / sum(row.shape[1] - 1 for row in tokens)
        loss.backward()
        optimizer.param_groups[0]["lr"] = learning_rate(step, batches.steps, cfg.train)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert [line["loss"] for line in ours] == pytest.approx(losses, rel=1e-5)
    assert [line["grad_norm"] for line in ours] == pytest.approx(norms, rel=1e-4)


def test_a_run_resumes_in_any_of_its_stages_under_another_strategy(run: Any, changing: Any, changing_alone: Any):
    every = changing | {"checkpoint__every": 1, "checkpoint__keep": 20}
    run("fsdp2", 2, "stages", **every)
    for step, strategy in ((5, "zero3"), (6, "ddp"), (9, "zero2")):
        folder = run.folder / "stages" / "checkpoints" / f"step-{step:08d}"
        assert_alike(run(strategy, 2, f"from-{step}", **every, checkpoint__resume=str(folder)), changing_alone[step:])


def test_another_warm_up_of_the_batch_is_another_run(run: Any, changing: Any):
    run("single", 1, "first", **changing, checkpoint__every=3)
    later = changing | {"train__batch_warmup": [{"until_tokens": 1500, "global_batch_tokens": 192}]}
    with pytest.raises(AssertionError, match=r"train.batch_warmup was .* its steps have other rows"):
        run("single", 1, "first", **later, checkpoint__resume="auto", train__overwrite=False)


def test_stages_are_those_that_the_docstring_says():
    warmup = [{"until_tokens": 21_000, "global_batch_tokens": 4_000}]
    staged: dict[str, Any] = {"train__tokens": 100_000, "train__global_batch_tokens": 10_000, "train__steps": None}
    staged |= {"train__batch_warmup": warmup, "data__stages": [{"from_tokens": 50_000, "train": "b"}]}
    values = corpora.values_of(Path("m"), Path("t"), Path("o"), **staged, data__max_length=1000)
    cfg = Config.model_validate(values)
    assert stages_of(cfg) == [Stage(6, 4, 0), Stage(3, 10, 0), Stage(5, 10, 1)]
    assert in_rows(cfg).train.steps == 14


@given(data=st.data())
def test_a_growing_batch_trains_the_rows_of_a_constant_one_in_their_order(data: st.DataObject):
    """Unit by unit: within one they are dealt by length."""
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    stages = [Stage(data.draw(st.integers(1, 5)), rows, 0) for rows in sizes]
    lengths = data.draw(st.lists(st.integers(2, 9), min_size=1, max_size=30))
    staged = Staged(stages, lambda mix, steps, rows: corpora.batches_of_lengths(lengths, steps, rows))
    assert staged.steps == sum(stage.steps for stage in stages)
    trained = [place for step in range(1, staged.steps + 1) for place in staged.step(step).places]
    total = sum(stage.steps * stage.rows for stage in stages)
    constant = corpora.batches_of_lengths(lengths, total, 1)
    expected = [place for step in range(1, total + 1) for place in constant.step(step).places]
    for first in range(0, total, staged.unit):
        unit = slice(first, first + staged.unit)
        assert sorted(trained[unit]) == sorted(expected[unit])


def test_mixes_are_streams_that_go_on_and_rows_know_theirs():
    stages = [Stage(2, 2, 0), Stage(1, 4, 1), Stage(1, 4, 0)]
    lengths = [[3, 4, 5, 6, 7], [9, 9, 9]]
    staged = Staged(stages, lambda mix, steps, rows: corpora.batches_of_lengths(lengths[mix], steps, rows))
    placed = [staged.step(step).places for step in range(1, 5)]
    assert [len(places) for places in placed] == [2, 2, 4, 4]
    assert {place for places in placed[:2] + placed[3:] for place in places} == {0, 1, 2, 3, 4}
    assert set(placed[2]) == {5, 6, 7}
    assert [len(staged.documents(place)[0].tokens) for place in range(8)] == lengths[0] + lengths[1]
    assert staged.documents(EMPTY) == []
    assert [len(document.tokens) for row in staged.heaviest() for document in row] == [9]
    assert [staged.rows[place].tokens.size for place in range(8)] == lengths[0] + lengths[1]
    with pytest.raises(IndexError, match="there are 8 rows"):
        staged.rows[8]


@pytest.mark.slow
def test_without_its_own_keys_it_is_the_run_of_transformers_trainer(
    run: Any, texts: Path, model_folder: Path, tmp_path: Path
):
    """The same tiny model, tokens and hyperparameters, 20 steps."""
    length, batch, steps = 48, 8, 20
    as_theirs = {"pretrain__z_loss": 0.0, "train__decay_embeddings": True, "train__warmup_ratio": 0.0}
    ours = run("single", 1, **as_theirs, train__schedule="cosine", train__decay_ratio=0.2, train__steps=steps)

    tokens = np.array(tokens_of(texts))
    blocks = [tokens[i : i + length].tolist() for i in range(0, len(tokens) - len(tokens) % length, length)]
    rows = -(-len(tokens) // length)
    order = [
        index
        for step in range(1, steps + 1)
        for index in global_batch(step, rows=rows, rows_in_run=10**9, global_batch_size=batch, seed=0)
    ]
    assert set(order) >= {rows - 1}  # the last row is shorter
    blocks.append(tokens[(rows - 1) * length :].tolist())
    features = [{"input_ids": blocks[i]} for i in order]

    def collate(some: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(each["input_ids"]) for each in some)
        padded = [each["input_ids"] + [-100] * (longest - len(each["input_ids"])) for each in some]
        labels = torch.tensor(padded)
        return {"input_ids": labels.clamp(min=0), "labels": labels, "attention_mask": (labels >= 0).long()}

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), attn_implementation="sdpa")
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "theirs"),
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0,
        weight_decay=0.1,
        max_grad_norm=1.0,
        optim="adamw_torch",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    trainer = RecordingTrainer(model=model, train_dataset=features, data_collator=collate, args=arguments)
    trainer.losses = []
    trainer.train()
    assert len(ours) == len(trainer.losses) == steps
    assert [m["loss"] for m in ours] == pytest.approx(trainer.losses, abs=1e-4)


@pytest.mark.slow
def test_it_learns_what_counts_of_single_tokens_and_of_pairs_cannot(tmp_path: Path):
    """In a text whose letters are, but for one of ten, those that stand two before them."""
    draw = random.Random(0)
    letters = [0, 1]
    while len(letters) < 40_000:
        letters.append(letters[-2] if draw.random() < 0.9 else draw.randrange(7))
    (tmp_path / "text.txt").write_text("".join(map("abcdefg".__getitem__, letters)))
    flags = ["--config", str(pretrain_tiny.CONFIG), "--data.train", str(tmp_path / "text.txt")]
    flags += ["--train.output_dir", str(tmp_path / "run"), "--data.max_length", "64", "--train.tokens", "6e4"]
    cfg = parse(Config, [*flags, "--train.global_batch_tokens", "1024", "--model.path", str(TINY_MODEL)])
    main(cfg)
    learnt = scenarios.read_metrics(tmp_path / "run")[-1]["eval_loss"]
    train, held_out = pretrain_tiny.rows_of(cfg)
    counted = [pretrain_tiny.counted_loss(train, held_out, vocabulary=257, before=before) for before in (0, 1)]
    assert counted == pytest.approx([math.log(7), math.log(7)], abs=0.06)
    # what one of ten letters is, nobody knows: it may also be the one that follows
    follows = 0.9 + 0.1 / 7
    possible = -follows * math.log(follows) - 6 * 0.1 / 7 * math.log(0.1 / 7)
    assert possible <= learnt < 0.5 * min(counted)


def test_recorded_run_is_of_the_configuration_as_it_is_and_beats_counts_by_the_margins_of_the_manual():
    found = json.loads(pretrain_tiny.RESULTS.read_text())
    assert found["configuration"] == hashlib.sha256(pretrain_tiny.CONFIG.read_bytes()).hexdigest()
    assert found["loss"] < found["bigram"] - 0.3
    assert found["bigram"] < found["unigram"] - 0.3
    readme = (ROOT / "README.md").read_text()
    assert f"{found['text']['bytes']:,} bytes of Shakespeare" in readme
    assert f"{found['loss']:.3f} nats a byte on held-out rows" in readme
    assert f"come to {found['bigram']:.3f}." in readme
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2), rel=0.01)  # a token is a byte


@pytest.mark.skipif(not SHAKESPEARE.is_file(), reason=f"{SHAKESPEARE} is not here")
def test_recorded_counts_are_those_of_the_text(tmp_path: Path):
    found = json.loads(pretrain_tiny.RESULTS.read_text())
    assert found["text"]["sha256"] == hashlib.sha256(SHAKESPEARE.read_bytes()).hexdigest()
    flags = ["--data.train", str(SHAKESPEARE), "--train.output_dir", str(tmp_path), "--model.path", str(TINY_MODEL)]
    train, held_out = pretrain_tiny.rows_of(parse(Config, ["--config", str(pretrain_tiny.CONFIG), *flags]))
    for name, before in (("unigram", 0), ("bigram", 1)):
        counted = pretrain_tiny.counted_loss(train, held_out, vocabulary=257, before=before)
        assert counted == pytest.approx(found[name], rel=1e-9)


def test_z_loss_is_the_squared_logarithm_of_the_denominator_of_trained_tokens():
    torch.manual_seed(0)
    logits, targets = torch.randn(1, 3, 5), torch.tensor([[1, -100, 4]])
    log_z = [math.log(sum(math.exp(score) for score in logits[0, i].tolist())) for i in (0, 2)]
    plain = sum(z - logits[0, i, t].item() for z, i, t in zip(log_z, (0, 2), (1, 4)))
    found = _loss_sum(logits, targets, z_loss=0.1)
    assert found.item() == pytest.approx(plain + 0.1 * sum(z * z for z in log_z), rel=1e-5)


def test_bits_a_byte_are_of_the_texts_that_the_tokens_stand_for(model_folder: Path, held_out_texts: list[str]):
    tokenizer = tiny.build_tokenizer()
    rows = Measured(tiny.read_rows(Path(held_out_texts[0]), tokenizer), tokenizer)
    assert sum(row.trained_bytes for row in rows) < sum(len(tokenizer.decode(row.tokens.tolist())) for row in rows)
    row = max(rows, key=lambda each: len(each.tokens))
    assert row.trained_bytes == len(tokenizer.decode(row.tokens[1:].tolist(), skip_special_tokens=True))
    learnt = Pretraining(0.5, rows)
    batch = learnt.collate([[row], []], torch.device("cpu"), flat=True)
    assert batch.bytes_S.tolist() == [row.trained_bytes]

    class Model(torch.nn.Module):
        def forward(self, loss_of_scores: Any, **inputs: Any) -> torch.Tensor:
            scores = torch.zeros(1, len(loss_of_scores.targets_N), 512)  # each of 512 tokens is as likely: 9 bits
            return loss_of_scores.of_all(loss_of_scores.losses_of(scores, loss_of_scores.targets_N[None]))

    assert learnt.loss_sum(Model().eval(), batch).item() == pytest.approx(row.trained_tokens * math.log(512))
    total, count = learnt.take_figures()["bits_per_byte"]
    assert (total / count).item() == pytest.approx(9 * row.trained_tokens / row.trained_bytes)


def test_depth_scaled_weights_are_smaller_where_they_write_into_the_residual_stream(model_folder: Path):
    config = AutoConfig.from_pretrained(model_folder)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(0)
    scaled = AutoModelForCausalLM.from_config(config)
    assert scale_by_depth(scaled) == 4  # of each of two layers the outputs of attention and MLP
    for (name, one), other in zip(plain.named_parameters(), scaled.parameters()):
        factor = 0.5 if name.split(".")[-2] in ("o_proj", "down_proj") else 1.0
        assert torch.equal(one * factor, other), name
    linear: Any = torch.nn.Linear(2, 2)
    linear.config = config
    with pytest.raises(
        InputError, match=r"pretrain\.depth_scaled: Linear has 0 matrices named o_proj.* two for each of its 2 layers"
    ):
        scale_by_depth(linear)


def configured(**changes: Any) -> Config:
    return Config.model_validate(corpora.values_of(Path("m"), Path("t"), Path("o"), train__steps=None, **changes))


def test_budget_in_tokens_is_steps_of_rows():
    cfg = in_rows(configured(data__max_length=2048, train__tokens=10**9, train__global_batch_tokens=524_288))
    assert (cfg.train.steps, cfg.train.global_batch_size) == (1908, 256)
    assert in_rows(configured()).train.steps is None


@pytest.mark.parametrize("text", ["2e9", "2.0e+9", "2_000_000_000", "2000000000"])
def test_tokens_are_written_as_people_write_them(text: str):
    flags = ["--model.path", "m", "--data.train", "t", "--train.output_dir", "o", "--train.tokens", text]
    assert parse(Config, flags).train.tokens == 2_000_000_000


@pytest.mark.parametrize("text", ["many", "1.5", "0", "-1e9", "1e400", "nan"])
def test_tokens_that_are_no_number_are_refused(text: str):
    flags = ["--model.path", "m", "--data.train", "t", "--train.output_dir", "o", "--train.tokens", text]
    with pytest.raises(InputError, match=r"train\.tokens"):
        parse(Config, flags)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"train__global_batch_tokens": 100},
            "train.global_batch_tokens 100 is no multiple of data.max_length 48; set it to 96",
        ),
        ({"train__tokens": 100, "train__steps": 5}, "train.tokens and train.steps both say how long the run is"),
        ({"train__tokens": 100, "data__packing": False}, "count tokens of full rows"),
        (
            {"pretrain__depth_scaled": True, "model__random_weights": False},
            "pretrain.depth_scaled is about random weights",
        ),
        ({"data__streaming": True, "train__tokens": 100}, None),
        ({"data__format": "messages"}, "data.format messages: pretraining takes plain text only"),
        ({"eval__exact_match": True}, "eval.exact_match: a text has no answer"),
        ({"train__tokens": 100, "train__global_batch_tokens": 96}, None),
        (GROWING, None),
        (GROWING | {"train__tokens": None}, "train.batch_warmup: until_tokens are tokens of the run; say how long"),
        (GROWING | {"train__tokens": 900}, "until_tokens 1,000 is not reached in train.tokens 900; leave it out"),
        (GROWING | {"train__global_batch_tokens": None}, "ends at a batch in tokens; set train.global_batch_tokens"),
        (GROWING | {"train__micro_batch_size": "auto"}, "with train.batch_warmup set a number"),
        (
            GROWING | {"train__micro_batch_size": 4},
            "192 tokens do not divide into micro-batches of 4 rows",
        ),
        (
            GROWING | {"train__batch_warmup": [{"until_tokens": 500, "global_batch_tokens": 100}]},
            "train.batch_warmup: global_batch_tokens 100 is no multiple of data.max_length 48; set it to 96",
        ),
        (GROWING | {"data__stages": [{"from_tokens": 960, "train": "b"}]}, None),
        (
            GROWING | {"data__stages": [{"from_tokens": 960, "train": "b"}, {"from_tokens": 900, "train": "c"}]},
            "data.stages: from_tokens 960, 900: each must be above the one before",
        ),
        (
            GROWING | {"data__stages": [{"from_tokens": 960, "train": "b"}], "data__eval": 0.1},
            "data.eval 0.1 is taken out of data.train, and data.stages may train what it took",
        ),
    ],
)
def test_keys_that_contradict_a_corpus_are_refused(changes: dict[str, Any], said: str | None):
    values = corpora.values_of(Path("m"), Path("t"), Path("o"), **{"train__steps": None} | changes)
    problems = corpus_problems(Config.model_validate(values), 2)
    assert len(problems) == (said is not None)
    assert all(str(said) in problem for problem in problems)


def test_conversations_are_refused_with_the_recipe_for_them(model_folder: Path, conversations: Path, tmp_path: Path):
    with pytest.raises(InputError, match=r"rows of the format messages were found.*recipes/sft\.py"):
        corpora.pretrain(corpora.values_of(model_folder, conversations, tmp_path / "run"))


def test_sources_have_the_shortest_names_that_tell_them_apart():
    assert names_of(["data/a/wiki.jsonl", "data/b/wiki.jsonl", "c.txt"]) == ["a/wiki.jsonl", "b/wiki.jsonl", "c.txt"]
    assert names_of(["owner/name"]) == ["name"]
    assert names_of(["a", "a"]) == ["a (1)", "a (2)"]  # two splits of a dataset


def test_source_of_which_nothing_is_held_out_has_no_figures(texts: Path, held_out_texts: list[str]):
    tokenizer = tiny.build_tokenizer()
    rows = dataset.read_rows(named_sources([str(texts), *held_out_texts]), tokenizer, Settings(64))
    some = rows.choose(np.flatnonzero(rows.column("origin") != 1))
    measured = Measured(some, tokenizer)
    assert measured.sources == ["train.jsonl", "b.jsonl"]
    origins = [row.origin for row in measured if isinstance(row, MeasuredRow)]
    assert [measured.sources[origin] for origin in origins] == [row.source.split("/")[-1].split(":")[0] for row in some]


def test_finetune_data_shows_the_rows_that_a_run_would_have(
    model_folder: Path, texts: Path, held_out_texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    changes: dict[str, Any] = {"data__eval": held_out_texts, "train__steps": None, "train__tokens": 10**4}
    values = corpora.values_of(model_folder, texts, tmp_path / "run", **changes, train__global_batch_tokens=480)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert commands.main(["data", "--config", str(tmp_path / "config.yaml"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    rows = math.ceil(len(tokens_of(texts)) / 48)
    assert (shown["packing"], shown["packed"]["rows_per_epoch"]) == ("concatenate", rows)
    assert (shown["global_batch_size"], shown["packed"]["steps"]) == (10, 21)
    assert commands.main(["data", "--config", str(tmp_path / "config.yaml")]) == 0
    assert "concatenated (chosen)" in capsys.readouterr().out
    assert commands.main(["data", "--config", str(tmp_path / "config.yaml"), "--train.steps", "3"]) == 2
    assert "train.tokens and train.steps both say how long the run is" in capsys.readouterr().err


def test_finetune_data_reads_the_sources_of_every_stage(
    model_folder: Path, texts: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    stages = [{"from_tokens": 1000, "train": str(texts)}, {"from_tokens": 2000, "train": str(conversations)}]
    values = corpora.values_of(model_folder, texts, tmp_path / "run", **GROWING, data__stages=stages)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert commands.main(["data", "--config", str(tmp_path / "config.yaml"), "--json"]) == 2
    problem = json.loads(capsys.readouterr().out)["refusal"]
    assert problem.startswith(f"data.stages 2: {conversations}: rows of the format messages were found")
