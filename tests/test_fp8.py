"""Products in fp8 are those of the rounded factors, near those in bf16, and train as these do."""

from pathlib import Path
from typing import Any

import pytest
import scenarios
import torch
import torch.nn.functional as F
import yaml
from parity import assert_really_active
from test_fused import model_of
from test_lora_forward import adapted
from thinning import thinned
from transformers import PreTrainedModel

from finetune.config.compatibility import fp8_problems
from finetune.models import fp8
from finetune.models.lora_forward import write_once
from recipes import sft


def values(scales: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    return rounded.float() * scales


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """With rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** torch.linspace(-4, 3, shape[0])[:, None]
    return (torch.randn(*shape, generator=generator) * sizes).bfloat16()


def test_rows_are_rounded_to_four_significant_bits_each_by_its_own_scale():
    x = numbers(7, 48)
    rounded, scales = fp8.rounded_rows(x, None)
    assert rounded.dtype == torch.float8_e4m3fn
    largest = x.float().abs().amax(1, keepdim=True)
    torch.testing.assert_close(values(scales, rounded).abs().amax(1, keepdim=True), largest)
    # half of the last of 4 bits, or of the smallest number
    error = (values(scales, rounded) - x.float()).abs()
    assert bool((error <= torch.maximum(x.float().abs() / 16, largest / 448 * 2**-10) * 1.001).all())


def test_columns_are_multiplied_before_they_are_rounded():
    x, factors = numbers(5, 32), torch.rand(32)
    found = fp8.rounded_rows(x, factors)
    expected = fp8.rounded_rows((x.float() * factors), None)
    assert torch.equal(found[0].float(), expected[0].float())
    assert torch.equal(found[1], expected[1])


def test_transposed_weights_are_the_same_rounded_ones():
    weight = numbers(48, 32)
    rounded, scales = fp8.rounded_rows(weight, None)
    assert torch.equal(fp8.rounded_transposed(weight, scales).t().float(), rounded.float())


def test_a_row_of_zeros_stays_zero_and_what_is_not_finite_stays_so():
    x = torch.zeros(3, 16, dtype=torch.bfloat16)
    x[1, 2], x[2, 3] = float("inf"), float("nan")
    rounded, scales = fp8.rounded_rows(x, None)
    found = values(scales, rounded)
    assert torch.equal(found[0], torch.zeros(16))
    assert not found[1].isfinite().all()
    assert not found[2].isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
def test_output_and_gradients_are_those_of_the_rounded_factors(bias: bool):
    layer: Any = torch.nn.Linear(48, 32, bias=bias, dtype=torch.bfloat16)
    reference = torch.nn.Linear(48, 32, bias=bias)
    reference.load_state_dict(layer.state_dict())
    x = numbers(2 * 5, 48).view(2, 5, 48)
    of_out = numbers(2 * 5, 32, seed=1).view(2, 5, 32)
    weight = values(*fp8.rounded_rows(layer.weight.data, None)[::-1])
    given = values(*fp8.rounded_rows(x.flatten(0, 1), None)[::-1])

    mine = x.clone().requires_grad_()
    out = fp8._Linear.apply(mine, layer.weight, layer.bias)
    out.backward(of_out)

    def near(found: Any, expected: torch.Tensor) -> None:
        expected = expected.detach()
        torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()))

    near(out.detach().flatten(0, 1), F.linear(given, weight, layer.bias.float() if bias else None))
    scales = fp8.rounded_rows(layer.weight.data, None)[1].flatten()
    rounded, of_rows = fp8.rounded_rows(of_out.flatten(0, 1), scales)
    near(mine.grad.flatten(0, 1), values(of_rows, rounded) @ (weight / scales[:, None]))
    near(layer.weight.grad, of_out.flatten(0, 1).float().t() @ x.flatten(0, 1).float())
    if bias:
        near(layer.bias.grad, of_out.flatten(0, 1).float().sum(0))


def step(model: PreTrainedModel) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    tokens = torch.randint(97, (2, 17))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item(), {name: each.grad.float() for name, each in model.named_parameters() if each.grad is not None}


def angle(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Cosine between all gradients."""
    one, other = (torch.cat([each.flatten() for each in all_.values()]) for all_ in (found, expected))
    return float(F.cosine_similarity(one, other, 0))


@pytest.mark.parametrize("method", ["full", "lora", "lora as PEFT computes it", "dropout"])
def test_a_model_in_fp8_has_nearly_the_loss_and_the_gradients_of_one_in_bf16(method: str):
    def made() -> PreTrainedModel:
        if method == "full":
            return model_of("llama", torch.bfloat16)
        return adapted(None, torch.bfloat16, dropout=1e-9 if method == "dropout" else 0.0)

    model, plain = made(), made()
    if method in ("lora", "dropout"):
        write_once(model)
    assert fp8.multiply_in_fp8(model) == 14
    (loss, gradients), (expected, of_plain) = map(step, (model, plain))
    assert loss != expected
    assert loss == pytest.approx(expected, rel=0.02)
    assert gradients.keys() == of_plain.keys()
    assert angle(gradients, of_plain) > 0.98

    model.eval(), plain.eval()
    tokens = torch.arange(17)[None]
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=0, atol=2**-6 * 5)


def test_adapters_the_head_and_what_does_not_divide_stay_in_bf16():
    model = adapted(None, torch.bfloat16)
    names = {name for name, each in model.named_modules() if any(each is layer for layer in fp8.layers_of(model))}
    assert len(names) == 14
    assert all(name.endswith("base_layer") for name in names)


@pytest.fixture(scope="module")
def runs(weights_folder: Path, conversations: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs by their settings, and the metrics of each."""
    known: dict[Any, Any] = {}

    def run(**settings: Any) -> Any:
        key = tuple(settings.items())
        if key not in known:
            output = tmp_path_factory.mktemp("run")
            config = scenarios.configuration(
                *(weights_folder, conversations, output), train__steps=6, data__eval=str(held_out), **settings
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
                sft.main(config)
            known[key] = output, scenarios.read_metrics(output)
        return known[key]

    return run


@pytest.mark.parametrize("adapter", thinned(["lora"], ["none"]))
def test_a_run_in_fp8_learns_what_one_in_bf16_learns_and_says_so(adapter: str, runs: Any):
    output, found = runs(adapter__type=adapter, model__fp8=True)
    _, expected = runs(adapter__type=adapter)
    for one, other in zip(found, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=5e-3)
        assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=5e-3) if "eval_loss" in other else True
    assert [one["loss"] for one in found] != [other["loss"] for other in expected]
    # evaluation is in bf16: before training nothing differs
    results = [yaml.safe_load((each / "run.yaml").read_text()) for each in (output, runs(adapter__type=adapter)[0])]
    assert results[0]["kernels"]["linear layers in fp8"] == 14
    assert "linear layers in fp8" not in results[1]["kernels"]


@pytest.mark.parametrize(
    ("strategy", "adapter"),
    thinned(
        [("ddp", "none"), ("fsdp2", "lora"), ("pp", "none")],
        [("ddp", "lora"), ("fsdp2", "none"), ("pp", "lora"), ("zero2", "none"), ("zero2", "lora")],
    ),
)
def test_processes_compute_in_fp8_what_one_computes(
    strategy: str, adapter: str, runs: Any, ranks: Any, weights_folder: Path, conversations: Path, tmp_path: Path
):
    _, expected = runs(adapter__type=adapter, model__fp8=True)
    changes = {"adapter__type": adapter, "model__fp8": True, "train__steps": 6}
    config = scenarios.configuration(weights_folder, conversations, tmp_path / "run", **changes)
    everyone = ranks(2).run(scenarios.train, config, strategy=strategy, mixed_precision="bf16")
    for seen in everyone:
        assert_really_active(seen, strategy, 2)
    for one, other in zip(scenarios.read_metrics(tmp_path / "run"), expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 4}, "quantised to 4 bits; set model.fp8 to false, or quantization.bits to none"),
        ({"precision": "no"}, "the launch computes in no; launch with --mixed_precision bf16"),
        ({"strategy": "zero3_offload"}, "zero3_offload gathers the weights of one module at a time"),
        ({"strategy": "tp"}, "tp gives each process a part of the numbers that share a scale"),
        ({"capability": (8, 6)}, "this GPU does not multiply in fp8"),
    ],
)
def test_what_cannot_be_is_refused_and_not_without_fp8(changes: dict[str, Any], words: str):
    how = {"strategy": "single", "bits": None, "precision": "bf16", "capability": (8, 9)} | changes
    (sentence,) = fp8_problems(True, **how)  # type: ignore[arg-type]
    assert words in sentence
    assert fp8_problems(False, **how) == []  # type: ignore[arg-type]
    assert fp8_problems(True, strategy="fsdp2", bits=None, precision="bf16", capability=None) == []


def test_a_model_of_which_nothing_would_be_in_fp8_is_refused():
    model = model_of("llama")
    for name, each in list(model.named_modules()):
        if type(each) is torch.nn.Linear and name != "lm_head":
            model.set_submodule(name, torch.nn.Linear(each.in_features, each.out_features + 1))
    (sentence,) = fp8.problems(model)
    assert "multiples of 16; set it to false" in sentence


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_round_as_pytorch_does():
    for shape in ((7, 48), (300, 14336), (64, 4096)):
        x = numbers(*shape)
        for factors in (None, torch.rand(shape[1])):
            found = fp8.rounded_rows(x.cuda(), None if factors is None else factors.cuda())
            expected = fp8.rounded_rows(x, factors)
            torch.testing.assert_close(found[1].cpu(), expected[1])
            # a number in the middle of two others may be rounded either way
            alike = (found[0].cpu().float() == expected[0].float()).float().mean()
            assert float(alike) > 0.999
        rounded, scales = fp8.rounded_rows(x.cuda(), None)
        assert torch.equal(fp8.rounded_transposed(x.cuda(), scales).t().float(), rounded.float())
