"""The state that travels: pieces tile every tensor, go back to the bit, and go on under any other launch.

Shapes are odd on purpose: rows that do not divide by the processes, padded partitions, processes that hold nothing.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import scenarios
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig

from finetune import distributed, planner
from finetune.config import sections
from finetune.models import adapter as adapters
from finetune.models import loading as models
from finetune.optim.optimizer import build_optimizer
from finetune.planner.memory import reference_bytes
from finetune.trace.shallow import Depth, Step
from finetune.training.loss import token_loss_sum

LAUNCHES = [
    ("single", 1),
    ("ddp", 2),
    ("fsdp2", 2),
    ("fsdp2", 4),
    ("hsdp", 4),
    ("zero1", 2),
    ("zero2", 2),
    ("zero3", 2),
    ("zero3", 4),
    ("fsdp2_offload", 2),
    ("zero3_offload", 2),
    ("zero3_nvme", 2),
]
ROWS, MICRO_BATCH = 8, 2
Trained = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """What is trained, besides the launch."""

    folder: str
    optimizer: str = "adamw"
    weights: str = "fp32_master"
    adapter_rank: int = 0
    bits: int | None = None
    steps: int = 3


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """97 rows and 66 columns; enough elements that NVMe offload puts them on disk."""
    folder = tmp_path_factory.mktemp("odd")
    LlamaConfig(
        hidden_size=66,
        head_dim=8,
        intermediate_size=97,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        vocab_size=8192,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def even_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Each half of a matrix is a multiple of 256 elements."""
    return str(tiny.build_model_folder(tmp_path_factory.mktemp("even")))


class Run:
    """A model under training, as the recipe sets it up."""

    def __init__(self, setting: Setting, output: Path) -> None:
        self.strategy = distributed.Strategy.from_environment()
        self.offload_folder = output / "nvme_offload"
        config = models.load_config(setting.folder, revision=None, trust_remote_code=False)
        self.accelerator = distributed.start(
            self.strategy,
            accumulation=ROWS // (MICRO_BATCH * self.strategy.world_size),
            micro_batch_size=MICRO_BATCH,
            max_grad_norm=1.0,
            optimizer=setting.optimizer,
            weights=setting.weights,
            largest_parameter=lambda: max(p.numel() for p in models.without_weights(config, False).parameters()),
            offload_folder=self.offload_folder,
        )
        dtype = distributed.compute_dtype(self.strategy, setting.weights)
        with distributed.loading(self.accelerator, self.strategy, whole=True, by_every_process=False):
            model: Any = models.load_model(
                setting.folder,
                config,
                revision=None,
                trust_remote_code=False,
                attention="auto",
                dtype=dtype,
                seed=0,
                bits=setting.bits,
                device=self.accelerator.device,
                random_weights=True,
            )
        if setting.adapter_rank:
            adapters.attach(
                model,
                sections.Adapter(type="lora", rank=setting.adapter_rank, alpha=4.0),
                base=setting.folder,
                revision=None,
                dtype=dtype,
                seed=0,
            )
        optimizer = build_optimizer(
            model,
            name=setting.optimizer,
            learning_rate=1e-3,
            weight_decay=0.1,
            weights=setting.weights,
            fused=False,
            rounding_seed=self.strategy.shard,
        )
        self.model, self.optimizer = distributed.prepare(
            self.accelerator, self.strategy, model, optimizer, weights=setting.weights
        )
        self.vocabulary = config.vocab_size

    def step(self, number: int) -> float:
        """One optimizer step on rows that ``number`` decides; returns the loss per token of all processes."""
        rows = torch.randint(self.vocabulary, (ROWS, 17), generator=torch.Generator().manual_seed(number))
        tokens, accelerator, loss_sum = ROWS * 16, self.accelerator, torch.zeros(())
        own = rows.chunk(self.strategy.world_size)[self.strategy.rank].split(MICRO_BATCH)
        for part in own:
            with accelerator.accumulate(self.model):
                loss = token_loss_sum(self.model(input_ids=part[:, :-1], use_cache=False).logits, part[:, 1:])
                accelerator.backward(loss * accelerator.num_processes * len(own) / tokens)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            loss_sum += loss.detach()
        return accelerator.reduce(loss_sum, "sum").item() / tokens

    def evaluate(self) -> None:
        """A forward pass without a backward pass, after which FSDP leaves parameters gathered."""
        self.model.eval()
        with torch.no_grad():
            self.model(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=False)
        self.model.train()

    def scores(self, fails: bool = False) -> torch.Tensor:
        """Of some tokens. One that fails ends in a KeyError, in the last layer."""

        def fail(*_: Any) -> None:
            raise KeyError

        bare = self.accelerator.unwrap_model(self.model)
        hook = bare.get_decoder().layers[-1].register_forward_pre_hook(fail) if fails else None
        self.model.eval()
        try:
            with torch.no_grad():
                found: Any = self.model(input_ids=torch.arange(40)[None], use_cache=False)
        finally:
            self.model.train()
            if hook:
                hook.remove()
        return found.logits.clone()  # type: ignore[no-any-return]

    def pieces(self) -> Iterator[distributed.Piece]:
        return distributed.pieces(self.strategy, self.model, self.optimizer)

    def steps(self) -> dict[str, int]:
        return distributed.optimizer_steps(self.strategy, self.model, self.optimizer)

    def whole(self) -> dict[str, torch.Tensor]:
        return {n: v.clone().cpu() for n, v in distributed.full_parameters(self.accelerator, self.model)}

    def working(self) -> dict[str, torch.Tensor]:
        return {n: v.clone().cpu() for n, v in distributed.working_parameters(self.accelerator, self.model)}

    def settle(self) -> None:
        distributed.sync_compute_weights(self.model)


@contextmanager
def running(setting: Setting, output: Path) -> Iterator[Run]:
    run = Run(setting, output)
    yield run
    distributed.finish(run.accelerator, run.strategy, run.offload_folder)


def save(run: Run, output: Path, name: str) -> None:
    """The parts that this process writes, as ``name.RANK``; process 0 also writes the whole weights, gathered."""
    written, shapes = {}, {}
    for piece in run.pieces():
        first, end = piece.written
        written[f"{piece.begin + first}|{piece.name}"] = piece.values[first:end].clone().cpu()
        shapes[piece.name] = list(piece.shape)
    save_file(written, output / f"{name}.{run.strategy.rank}", {"shapes": json.dumps(shapes)})
    whole = run.whole()
    if run.strategy.rank == 0:
        save_file(whole, output / f"{name}.gathered")


def assemble(output: Path, name: str) -> dict[str, torch.Tensor]:
    """Whole tensors from the parts of all processes, each element of which must have been written exactly once."""
    found: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    for path in sorted(output.glob(f"{name}.[0-9]")):
        with safe_open(path, "pt") as file:
            shapes = json.loads(file.metadata()["shapes"])
            for key in file.keys():  # noqa: SIM118
                begin, _, tensor_name = key.partition("|")
                part, shape = file.get_tensor(key), torch.Size(shapes[tensor_name])
                place = slice(int(begin), int(begin) + len(part))
                found.setdefault(tensor_name, torch.zeros(shape.numel(), dtype=part.dtype))[place] = part
                times.setdefault(tensor_name, torch.zeros(shape.numel(), dtype=torch.int))[place] += 1
                assert len(found[tensor_name]) == shape.numel()
    assert {n for n, counted in times.items() if not (counted == 1).all()} == set()
    return found


def overwrite(run: Run, whole: dict[str, torch.Tensor], steps: dict[str, int], settle: bool = True) -> None:
    distributed.make_optimizer_state(run.model, run.optimizer)
    for piece in run.pieces():
        assert whole[piece.name].dtype == piece.values.dtype
        piece.values.copy_(whole[piece.name][piece.begin : piece.begin + len(piece.values)])
    distributed.set_optimizer_steps(run.strategy, run.model, run.optimizer, steps)
    if settle:
        run.settle()


def train_and_save(setting: Setting, output: Path) -> dict[str, Any]:
    """Train, save, train on, go back to what was saved, and train on again."""
    with running(setting, output) as run:
        for number in range(setting.steps):
            run.step(number)
        run.evaluate()
        save(run, output, "saved")
        kept = {piece.name: (piece.begin, piece.values.clone()) for piece in run.pieces()}
        steps = run.steps()
        losses = [run.step(setting.steps), run.step(setting.steps + 1)]
        weights = run.whole()
        for piece in run.pieces():
            begin, values = kept.pop(piece.name)
            assert (begin, len(values)) == (piece.begin, len(piece.values))
            piece.values.copy_(values)
        assert not kept
        distributed.set_optimizer_steps(run.strategy, run.model, run.optimizer, steps)
        run.settle()
        again = [run.step(setting.steps), run.step(setting.steps + 1)]
        differing = [name for name, value in run.whole().items() if not torch.equal(value, weights[name])]
        return {
            "name": distributed.active_name(run.model),
            "processes": run.accelerator.num_processes,
            "steps": steps,
            "losses": losses,
            "again": again,
            "differing": differing,
        }


def go_on(setting: Setting, output: Path, whole_file: Path, steps: dict[str, int], settle: bool = True) -> list[float]:
    """The losses of the next steps of a new run that was given the assembled state."""
    whole = {}
    with safe_open(whole_file, "pt") as file:
        whole = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    with running(setting, output) as run:
        overwrite(run, whole, steps, settle)
        return [run.step(setting.steps), run.step(setting.steps + 1)]


@pytest.fixture(scope="module")
def trained(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """``trained(setting, strategy, world_size)``: one run, what its processes agree on, and its assembled state.

    A run is trained once; tests that save and tests that go on share it.
    """
    known: dict[Any, dict[str, Any]] = {}

    def run(setting: Setting, strategy: str, world_size: int, **launch: Any) -> dict[str, Any]:
        key = (setting, strategy, world_size, *launch.values())
        if key not in known:
            folder = tmp_path_factory.mktemp("trained")
            everyone = ranks(world_size).run(train_and_save, setting, folder, strategy=strategy, **launch)
            assert [(seen["name"], seen["processes"]) for seen in everyone] == [(strategy, world_size)] * world_size
            assert len({tuple(seen["losses"]) for seen in everyone}) == 1
            steps = {name: count for seen in everyone for name, count in seen["steps"].items()}
            whole = assemble(folder, "saved")
            save_file(whole, folder / "whole")
            known[key] = {**everyone[0], "folder": folder, "steps": steps, "whole": whole}
        return known[key]

    return run


def assert_goes_back_to_the_bit(found: dict[str, Any]) -> None:
    assert found["differing"] == []
    assert found["again"] == found["losses"]


def assert_weights_are_those_gathered(found: dict[str, Any]) -> None:
    with safe_open(found["folder"] / "saved.gathered", "pt") as file:
        names = set(file.keys())
        assert {n.removeprefix("weights/") for n in found["whole"] if n.startswith("weights/")} == names
        for name in names:
            assert torch.equal(found["whole"][f"weights/{name}"], file.get_tensor(name).flatten())


@pytest.fixture(scope="module")
def of_one_process(trained: Trained, odd_folder: str) -> dict[str, Any]:
    return trained(Setting(odd_folder), "single", 1)


@pytest.mark.parametrize(("strategy", "world_size"), LAUNCHES, ids=str)
def test_pieces_are_the_state_of_one_process_and_go_back_to_the_bit(
    strategy: str, world_size: int, trained: Trained, odd_folder: str, of_one_process: dict[str, Any]
):
    found = trained(Setting(odd_folder), strategy, world_size)
    assert_weights_are_those_gathered(found)
    assert_goes_back_to_the_bit(found)
    assert found["steps"] == of_one_process["steps"]
    assert found["whole"].keys() == of_one_process["whole"].keys()
    for name, value in of_one_process["whole"].items():
        assert (found["whole"][name] - value).abs().max() < 1e-6, name


REMEMBERED = [(launch, 0, "no") for launch in LAUNCHES if launch[0] != "zero3_nvme"]
REMEMBERED += [(("zero2", 2), 0, "bf16"), (("zero3", 2), 4, "bf16")]  # masters beside what is computed with


def remember(setting: Setting, output: Path) -> dict[str, Any]:
    """Train, computing with the weights of the beginning in between, once to the middle of a pass alone."""
    with running(setting, output) as run:
        beginning = distributed.RememberedWeights()
        beginning.remember(run.model)
        copied = sum(copy.nbytes for copy in beginning.copies)
        scores = [run.scores()]
        for number in range(setting.steps):
            run.step(number)
        scores.append(run.scores())
        with beginning.in_place(run.model):
            scores.append(run.scores())
        with pytest.raises(KeyError), beginning.in_place(run.model):
            run.scores(fails=True)
        scores.append(run.scores())
        shapes = [tuple(getattr(p, "ds_shape", p.shape)) for p in run.model.parameters() if p.requires_grad]
        return {
            "processes": run.accelerator.num_processes,
            "copied": copied,
            "shapes": shapes,
            "alike": [[torch.equal(one, other) for other in scores] for one in scores],
            "losses": [run.step(setting.steps), run.step(setting.steps + 1)],
        }


@pytest.mark.parametrize(
    ("launch", "rank", "precision"),
    REMEMBERED,
    ids=str,
)
def test_remembered_weights_compute_as_they_did_and_those_of_now_come_back(
    launch: tuple[str, int],
    rank: int,
    precision: str,
    ranks: Any,
    odd_folder: str,
    of_one_process: dict[str, Any],
    tmp_path: Path,
):
    """Before the first forward pass too, after which FSDP2 has laid out shards that are not full anew."""
    (strategy, world_size), setting = launch, Setting(odd_folder, adapter_rank=rank)
    everyone = ranks(world_size).run(remember, setting, tmp_path, strategy=strategy, mixed_precision=precision)
    assert [found["processes"] for found in everyone] == [world_size] * world_size
    for found in everyone:
        first, trained = [True, False, True, False], [False, True, False, True]
        assert found["alike"] == [first, trained, first, trained]
        if (rank, precision) == (0, "no"):
            assert max(abs(one - other) for one, other in zip(found["losses"], of_one_process["losses"])) < 1e-6
    shapes = Counter(everyone[0]["shapes"])
    step = Step(2, *[Depth(2, dict(shapes), (), {}, (), (), 0)] * 2)
    planned = planner.Setting(strategy, world_size, precision=precision, reference="model")
    assert everyone[0]["copied"] == reference_bytes(step, planned) == max(found["copied"] for found in everyone)


def onward(ranks: Any, setting: Setting, found: dict[str, Any], output: Path, strategy: str, world_size: int) -> float:
    """Largest difference of the next steps' losses, under another launch, from those of the run that was saved."""
    group = ranks(world_size)
    everyone = group.run(go_on, setting, output, found["folder"] / "whole", found["steps"], strategy=strategy)
    assert len(everyone) == world_size
    return max(abs(one - other) for losses in everyone for one, other in zip(losses, found["losses"]))


@pytest.mark.parametrize(
    ("saved_by", "read_by"),
    [
        (("single", 1), ("zero3", 2)),
        (("zero3", 4), ("fsdp2", 2)),
        (("fsdp2", 4), ("zero2", 2)),
        (("ddp", 2), ("zero1", 2)),
        (("hsdp", 4), ("single", 1)),
        (("zero3_nvme", 2), ("fsdp2_offload", 2)),
        (("zero2", 2), ("zero3_nvme", 2)),
        (("fsdp2", 2), ("zero3_offload", 2)),
    ],
    ids=str,
)
def test_run_goes_on_under_another_launch(
    saved_by: tuple[str, int], read_by: tuple[str, int], trained: Trained, ranks: Any, odd_folder: str, tmp_path: Path
):
    setting = Setting(odd_folder)
    found = trained(setting, *saved_by)
    assert onward(ranks, setting, found, tmp_path, *read_by) < 1e-5


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize(("saved_by", "read_by"), [(("fsdp2", 4), ("zero3", 2)), (("zero3", 4), ("fsdp2", 2))], ids=str)
def test_adapter_of_three_rows_on_four_processes_goes_on_under_another_launch(
    saved_by: tuple[str, int],
    read_by: tuple[str, int],
    bits: int | None,
    trained: Trained,
    ranks: Any,
    odd_folder: str,
    even_folder: str,
    tmp_path: Path,
):
    setting = Setting(even_folder if bits else odd_folder, adapter_rank=3, bits=bits)
    found = trained(setting, *saved_by)
    assert_weights_are_those_gathered(found)
    assert_goes_back_to_the_bit(found)
    assert {name.partition("lora_")[2][:1] for name in found["whole"]} == {"A", "B"}
    assert onward(ranks, setting, found, tmp_path, *read_by) < 1e-5


def test_run_goes_back_to_the_bit_after_many_steps_of_the_optimizer_of_the_host(trained: Trained, even_folder: str):
    """It multiplies the powers of its betas up from step to step, whose last bits differ from those of a power."""
    found = trained(Setting(even_folder, adapter_rank=3, steps=50), "zero3_offload", 2)
    assert set(found["steps"].values()) == {50}
    assert_goes_back_to_the_bit(found)


def state_on_disk(setting: Setting, output: Path) -> list[tuple[int, int]]:
    """Elements of each flat partition in memory, before its pieces are read and meanwhile."""
    with running(setting, output) as run:
        run.step(0)
        flat = run.model.optimizer.fp32_partitioned_groups_flat
        before = [partition.numel() for partition in flat]
        most = [0] * len(flat)
        for _ in run.pieces():
            most = [max(pair) for pair in zip(most, (partition.numel() for partition in flat))]
        assert [partition.numel() for partition in flat] == before
        return list(zip(before, most))


def test_state_on_disk_is_read_for_its_pieces_and_leaves_memory_again(ranks: Any, odd_folder: str, tmp_path: Path):
    for found in ranks(2).run(state_on_disk, Setting(odd_folder), tmp_path, strategy="zero3_nvme"):
        (before, most), *others = found
        assert before == 0
        assert most > 2**18  # 1 MiB, the least that is swapped
        assert all(before == most for before, most in others)  # norms, too small to be swapped


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "lion_8bit"])
@pytest.mark.parametrize("read_by", [("fsdp2", 2), ("zero2", 2), ("zero3", 2)], ids=str)
def test_8_bit_state_goes_on_where_its_blocks_are_those_of_the_whole(
    optimizer: str, read_by: tuple[str, int], trained: Trained, ranks: Any, even_folder: str, tmp_path: Path
):
    setting = Setting(even_folder, optimizer)
    found = trained(setting, "single", 1)
    assert_goes_back_to_the_bit(found)
    dtypes = {value.dtype for name, value in found["whole"].items() if name.startswith("optimizer/state1/")}
    assert dtypes == {torch.uint8, torch.float32}  # matrices and norms
    assert onward(ranks, setting, found, tmp_path, *read_by) < 1e-5


@pytest.mark.parametrize(("strategy", "world_size"), [("fsdp2", 2), ("hsdp", 4), ("zero2", 2), ("zero3", 2)], ids=str)
def test_8_bit_state_that_cannot_be_cut_anew_is_named_after_its_launch_and_goes_back_to_the_bit(
    strategy: str, world_size: int, trained: Trained, odd_folder: str
):
    found = trained(Setting(odd_folder, "adamw_8bit"), strategy, world_size)
    assert_goes_back_to_the_bit(found)
    layer = "model.layers.0.mlp.gate_proj.weight"  # 97 rows of 66
    own = {name.partition("@")[2] for name in found["whole"] if name.startswith(f"optimizer/absmax1/{layer}")}
    launches = [f"{strategy}, {world_size} processes, shard {shard}" for shard in range(2)]
    assert own
    assert own <= set(launches)
    assert f"optimizer/state2/{layer}" not in found["whole"]
    assert "optimizer/state2/model.norm.weight" in found["whole"]


IN_BF16 = [
    (launch, optimizer, weights)
    for launch in [("single", 1), ("ddp", 2), ("fsdp2", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2)]
    for optimizer, weights in [("adamw", "fp32_master"), ("adamw", "bf16"), ("adamw_8bit", "bf16")]
]


@pytest.mark.parametrize("point", IN_BF16, ids=scenarios.point_id)
def test_run_in_bf16_goes_back_to_the_bit(point: tuple[tuple[str, int], str, str], trained: Trained, odd_folder: str):
    launch, optimizer, weights = point
    found = trained(Setting(odd_folder, optimizer, weights), *launch, mixed_precision="bf16")
    assert_weights_are_those_gathered(found)
    assert_goes_back_to_the_bit(found)
    dtypes = {value.dtype for name, value in found["whole"].items() if name.startswith("weights/")}
    assert dtypes == {torch.float32 if weights == "fp32_master" else torch.bfloat16}


@pytest.mark.parametrize("optimizer", ["adafactor", "sgd"])
@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("ddp", 2)])
def test_state_of_other_shapes_and_no_state_go_back_to_the_bit_and_on_to_the_other(
    optimizer: str, strategy: str, world_size: int, trained: Trained, ranks: Any, odd_folder: str, tmp_path: Path
):
    setting = Setting(odd_folder, optimizer)
    found = trained(setting, strategy, world_size)
    assert_goes_back_to_the_bit(found)
    kinds = {name.split("/")[1] for name in found["whole"] if name.startswith("optimizer/")}
    assert kinds == ({"exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col"} if optimizer == "adafactor" else set())
    other = ("ddp", 2) if strategy == "single" else ("single", 1)
    assert onward(ranks, setting, found, tmp_path, *other) < 1e-5


def go_on_without_settling(setting: Setting, output: Path, whole_file: Path, steps: dict[str, int]) -> list[float]:
    return go_on(setting, output, whole_file, steps, settle=False)


@pytest.mark.parametrize(("strategy", "world_size"), [("zero1", 2), ("zero3", 2), ("zero3_nvme", 2)])
def test_comparison_sees_working_weights_that_were_forgotten(
    strategy: str, world_size: int, ranks: Any, odd_folder: str, of_one_process: dict[str, Any], tmp_path: Path
):
    save_file(of_one_process["whole"], tmp_path / "whole")
    given = (Setting(odd_folder), tmp_path, tmp_path / "whole", of_one_process["steps"])
    losses = ranks(world_size).run(go_on_without_settling, *given, strategy=strategy)[0]
    assert abs(losses[0] - of_one_process["losses"][0]) > 1e-3


def test_comparison_sees_moments_that_were_exchanged(
    ranks: Any, odd_folder: str, of_one_process: dict[str, Any], tmp_path: Path
):
    exchanged = dict(of_one_process["whole"])
    for name in [name for name in exchanged if "/exp_avg/" in name]:
        other = name.replace("exp_avg", "exp_avg_sq", 1)
        exchanged[name], exchanged[other] = exchanged[other], exchanged[name].abs()
    save_file(exchanged, tmp_path / "whole")
    assert onward(ranks, Setting(odd_folder), of_one_process | {"folder": tmp_path}, tmp_path, "fsdp2", 2) > 1e-4


def make_state_first(setting: Setting, output: Path) -> dict[str, Any]:
    """Train from no state and from state that was made before; each from fresh weights."""
    found: dict[str, Any] = {}
    for made in (False, True):
        with running(setting, output) as run:
            before = run.whole()
            if made:
                distributed.make_optimizer_state(run.model, run.optimizer)
                distributed.make_optimizer_state(run.model, run.optimizer)  # there is none to make any more
                found["steps"] = set(run.steps().values())
                found["changed"] = [n for n, value in run.whole().items() if not torch.equal(value, before[n])]
                found["gradients"] = [n for n, p in run.model.named_parameters() if p.grad is not None]
                found["rates"] = [group["lr"] for group in run.optimizer.param_groups]
            found[made] = ([run.step(number) for number in range(2)], run.whole())
    return found


@pytest.mark.parametrize(
    ("strategy", "world_size", "optimizer", "weights"),
    [
        ("single", 1, "adamw", "fp32_master"),
        ("single", 1, "adamw", "bf16"),
        ("single", 1, "adamw_8bit", "bf16"),
        ("single", 1, "lion_8bit", "fp32_master"),
        ("single", 1, "adafactor", "fp32_master"),
        ("single", 1, "sgd", "fp32_master"),
        ("fsdp2", 2, "adamw", "fp32_master"),
        ("fsdp2", 2, "adamw_8bit", "fp32_master"),
        ("zero1", 2, "adamw", "fp32_master"),
        ("zero2", 2, "adamw_8bit", "fp32_master"),
        ("zero3", 2, "adamw_8bit", "fp32_master"),
        ("zero3_offload", 2, "adamw", "fp32_master"),
        ("zero3_nvme", 2, "adamw", "fp32_master"),
    ],
)
def test_making_state_changes_nothing_that_training_sees(
    strategy: str, world_size: int, optimizer: str, weights: str, ranks: Any, odd_folder: str, tmp_path: Path
):
    setting = Setting(odd_folder, optimizer, weights)
    precision = "bf16" if weights == "bf16" else "no"
    everyone = ranks(world_size).run(make_state_first, setting, tmp_path, strategy=strategy, mixed_precision=precision)
    assert len(everyone) == world_size
    for found in everyone:
        assert found["changed"] == []
        assert found["gradients"] == []
        assert set(found["rates"]) == {1e-3}
        assert found["steps"] == (set() if optimizer == "sgd" else {0})
        (losses, weights_of), (expected_losses, expected_weights) = found[True], found[False]
        assert losses == expected_losses
        assert [n for n, value in weights_of.items() if not torch.equal(value, expected_weights[n])] == []


def set_unequal_steps(setting: Setting, output: Path) -> str:
    with running(setting, output) as run:
        distributed.make_optimizer_state(run.model, run.optimizer)
        steps = run.steps()
        assert len(steps) > 1
        steps[next(iter(steps))] += 1
        try:
            distributed.set_optimizer_steps(run.strategy, run.model, run.optimizer, steps)
        except ValueError as error:
            return str(error)
        return "" if run.steps() == steps else "forgotten"


def test_unequal_numbers_of_steps_are_kept_where_parameters_have_their_own_and_refused_where_not(
    ranks: Any, odd_folder: str, tmp_path: Path
):
    assert ranks(2).run(set_unequal_steps, Setting(odd_folder), tmp_path, strategy="fsdp2") == ["", ""]
    refused = ranks(2).run(set_unequal_steps, Setting(odd_folder), tmp_path, strategy="zero2")
    assert all("zero2 keeps one count for all" in sentence for sentence in refused)


def scale_in_fp16(setting: Setting, output: Path, power: int, given: dict[str, float] | None) -> dict[str, Any]:
    """Train until the scale has come down, note it, and go back to it; or begin with a given one."""
    from test_fp16 import fp16_on_cpu

    with fp16_on_cpu(power), running(setting, output) as run:
        if given is not None:
            distributed.restore_loss_scale(run.accelerator, run.model, given)
            return {"restored": distributed.loss_scale(run.accelerator, run.model)}
        for number in range(14):
            run.step(number)
        noted = distributed.loss_scale(run.accelerator, run.model)
        run.step(14)
        after = distributed.loss_scale(run.accelerator, run.model)
        distributed.restore_loss_scale(run.accelerator, run.model, noted)
        restored = distributed.loss_scale(run.accelerator, run.model)
        return {"noted": noted, "after": after, "restored": restored}


@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("fsdp2", 2), ("zero2", 2), ("zero3", 2)])
def test_loss_scale_is_restored_here_and_under_the_other_kind_of_scaler(
    strategy: str, world_size: int, ranks: Any, even_folder: str, tmp_path: Path
):
    def run(name: str, size: int, given: dict[str, float] | None) -> list[dict[str, Any]]:
        arguments = (scale_in_fp16, Setting(even_folder), tmp_path, 24, given)
        return ranks(size).run(*arguments, strategy=name, mixed_precision="fp16")

    everyone = run(strategy, world_size, None)
    assert len(everyone) == world_size
    assert all(found == everyone[0] for found in everyone)
    noted = everyone[0]["noted"]
    assert 1 < noted["scale"] < 2**24
    assert 0 < noted["good_steps"] < 14
    assert json.loads(json.dumps(noted)) == noted == everyone[0]["restored"] != everyone[0]["after"]
    (other, size) = ("single", 1) if strategy.startswith("zero") else ("zero2", 2)
    for found in run(other, size, noted):
        assert {key: found["restored"][key] for key in ("scale", "good_steps")} == {
            key: noted[key] for key in ("scale", "good_steps")
        }


def nothing_to_scale(setting: Setting, output: Path) -> Any:
    with running(setting, output) as run:
        distributed.restore_loss_scale(run.accelerator, run.model, None)
        return distributed.loss_scale(run.accelerator, run.model)


@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("zero2", 2)])
def test_without_fp16_there_is_no_loss_scale(
    strategy: str, world_size: int, ranks: Any, even_folder: str, tmp_path: Path
):
    found = ranks(world_size).run(nothing_to_scale, Setting(even_folder), tmp_path, strategy=strategy)
    assert found == [None] * world_size
