"""Which GPU a name stands for, what a user may write, and that the data file is whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune.errors import InputError
from finetune.hardware.cards import (
    MOST_GPUS_OF_A_MACHINE,
    Machines,
    caveat,
    known_gpus,
    links,
    lookup,
    parse_gpus,
    peak_flops,
    precision_problem,
    stand_in,
)

GIB = 2**30
CARDS = (
    st.sampled_from(known_gpus()).map(lambda gpu: gpu.name)
    | st.integers(1, 4096).map(lambda size: f"{size}GB")
    | st.integers(1, 40960).map(lambda tenths: f"{tenths / 10:g}GiB")
)
"""What a user may write for a card."""


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("Tesla T4", 65),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4070", 58.3),
        ("NVIDIA GeForce RTX 4070 SUPER", 71),
        ("NVIDIA GeForce RTX 4070 Ti", 80.2),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GH200 144G HBM3e", 989),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        ("Tesla P100-PCIE-16GB", 9.3),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA T400", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A40-12Q", None),
    ],
)
def test_peak_is_that_of_the_gpu_and_of_no_other_with_a_similar_name(name: str, tflops: float | None):
    assert peak_flops(name) == (None if tflops is None else tflops * 1e12)


def test_every_card_is_whole_and_stands_for_itself():
    assert len({gpu.name for gpu in known_gpus()}) == len(known_gpus()) >= 45
    for gpu in known_gpus():
        figures = (gpu.tflops, gpu.fp32_tflops, gpu.memory_gb_per_second)
        assert all(figure is not None and figure > 0 for figure in figures), gpu.name
        assert 0.9 * gpu.gb < gpu.memory_gib < gpu.gb, gpu.name
        assert parse_gpus(f"8x{gpu.name}") == Machines(gpu, 8)
        assert stand_in(gpu) is gpu
    assert all(link.gb_per_second > 0 and link.microseconds > 0 for link in links().values())


def test_cards_before_ampere_and_only_they_have_no_bf16_and_only_nvidias_a_compute_capability():
    capabilities = {gpu.name: gpu.compute_capability for gpu in known_gpus()}
    assert {name for name, capability in capabilities.items() if capability is None} == {"MI300X"}
    assert {capabilities[name] for name in ("B200", "RTX 4090", "A100-80GB")} == {(10, 0), (8, 9), (8, 0)}
    old = {"T4", "RTX 2080 Ti", "V100", "V100 PCIe", "P100", "P100 PCIe"}
    assert {gpu.name.split("-")[0] for gpu in known_gpus() if not gpu.bf16} == old
    assert parse_gpus("80GB").gpu.bf16


def test_a_newer_geforce_card_multiplies_in_16_bits_at_twice_its_rate_in_fp32():
    """With fp32 accumulation; the figures of product pages are with fp16 accumulation, and most with sparsity."""
    found = [gpu for gpu in known_gpus() if gpu.name[:5] in ("RTX 3", "RTX 4", "RTX 5")]
    assert len(found) >= 16
    for gpu in found:
        assert gpu.tflops == pytest.approx(2 * (gpu.fp32_tflops or 0), rel=0.01), gpu.name


def test_a_card_of_another_vendor_is_planned_with_a_caveat_and_no_other_is():
    assert [gpu.name for gpu in known_gpus() if caveat(gpu)] == ["MI300X"]
    assert "never run on it" in str(caveat(parse_gpus("8xMI300X").gpu))
    assert caveat(parse_gpus("192GB").gpu) is None


@given(
    card=CARDS,
    gpus=st.integers(1, MOST_GPUS_OF_A_MACHINE),
    nodes=st.integers(1, 1000),
    respell=st.sampled_from(
        [str, str.lower, str.upper, lambda text: text.replace("x", " x ").replace("RT x ", "RTX ")]
    ),
)
def test_what_is_written_and_what_is_shown_are_the_same_machines(card, gpus, nodes, respell):
    machines = parse_gpus(respell(f"{nodes}x{gpus}x{card}"))
    assert (machines.nodes, machines.gpus_per_node, machines.gpu.name) == (nodes, gpus, card)
    assert parse_gpus(machines.text) == machines
    assert machines.world_size == nodes * gpus


@given(
    card=CARDS | st.sampled_from(known_gpus()).map(lambda gpu: gpu.name.removeprefix("RTX ")),
    gpus=st.integers(1, MOST_GPUS_OF_A_MACHINE),
    times=st.sampled_from(["x", "X", " x ", " x", "x "]),
    respell=st.sampled_from([str, str.lower, str.upper, lambda text: f"  {text}"]),
)
def test_a_card_counted_first_or_last_means_the_same_machines(card, gpus, times, respell):
    assert parse_gpus(respell(f"{card}{times}{gpus}")) == parse_gpus(respell(f"{gpus}{times}{card}"))


@given(st.text() | st.from_regex(r"\A(\d+x)*[A-Z0-9]*(GB|GiB)?(x\d+)*\Z"))
def test_any_text_is_machines_or_a_sentence(text: str):
    try:
        machines = parse_gpus(text)
    except InputError:
        return
    assert machines.world_size >= 1
    assert machines.gpu.memory_gib > 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0xH100", "0xH100 means no GPUs; give at least one"),
        ("0x8xH100", "0x8xH100 means no GPUs"),
        (
            "32xH100",
            "machines have at most 16; give the number of machines and the GPUs of each, for example 4x8xH100",
        ),
        (
            "8xMI250",
            "unknown GPU 8xMI250. Or give its memory instead, for example 1x8GB. Known GPUs: B200, H200, H100,",
        ),
        ("H100x0", "H100x0 means no GPUs; give at least one"),
        ("H100 x 32", "H100 x 32 is one machine with 32 GPUs"),
        ("0GBx8", "0GBx8 has no memory"),
        ("2xH100x8", "unknown GPU 2xH100x8. Did you mean H100?"),
        ("H900x8", "unknown GPU H900x8. Did you mean H200?"),
        ("4099 x 2", "unknown GPU 4099 x 2. Did you mean RTX 4090?"),
        ("RTX 4099", "unknown GPU RTX 4099. Did you mean RTX 4090?"),
        ("MI300x8", "unknown GPU MI300x8. Did you mean MI300X?"),
        ("", "unknown GPU (empty)"),
        ("8x0GB", "8x0GB has no memory"),
        ("-1xH100", "unknown GPU"),
        ("8x\nH100x", "unknown GPU"),
        (5000 * "9" + "xH100", "unknown GPU"),
    ],
)
def test_what_is_no_machine_is_refused_with_a_sentence(text: str, sentence: str):
    with pytest.raises(InputError, match="--gpus: ") as refused:
        parse_gpus(text)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "spellings"),
    {
        "RTX 4090": ["4090", "1x4090", "2x4090-24gb", "rtx4090", "1x rtx_4090", "1xNVIDIA GeForce RTX 4090", "4090x2"],
        "RTX A6000": ["A6000", "8x NVIDIA RTX A6000"],
        "RTX 6000 Ada": ["6000ada", "NVIDIA RTX 6000 Ada Generation"],
        "H100": ["h100", "8xH100 SXM", "H100-SXM5-80GB", "NVIDIA H100 80GB HBM3"],
        "H100 PCIe": ["h100-pcie", "NVIDIA H100 PCIe"],
        "A100-80GB": ["a100", "A100-SXM4-80GB", "8xA100 SXM 80GB"],
        "A100-40GB": ["NVIDIA A100-SXM4-40GB"],
        "A100 PCIe-80GB": ["A100 PCIe", "NVIDIA A100 80GB PCIe", "A100-PCIE-80GB x 8"],
        "A100 PCIe-40GB": ["A100-PCIE-40GB"],
        "RTX PRO 6000 Blackwell": ["RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"],
        "RTX 4060 Ti-16GB": ["4060 Ti", "rtx-4060-ti-16gb", "RTX 4060Ti16GBx2"],
        "GH200-144GB": ["NVIDIA GH200 144G HBM3e"],
        "MI300X": ["AMD Instinct MI300X", "MI300Xx8"],
        "V100-16GB": ["Tesla V100-SXM2-16GB"],
        "T4": ["Tesla T4"],
    }.items(),
)
def test_a_card_is_known_in_any_spelling_and_without_its_vendor(name: str, spellings: list[str]):
    assert {text: parse_gpus(text).gpu.name for text in spellings} == dict.fromkeys(spellings, name)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("1x4099", "RTX 4090"), ("RTX 4090 Ti", "RTX 4090"), ("8xH900", "H200"), ("V100S-PCIE-32GB", "V100-32GB")],
)
def test_an_unknown_card_is_never_taken_for_another_but_the_nearest_is_named(text: str, meant: str):
    with pytest.raises(InputError, match=rf"Did you mean {meant}\? Or give its memory .* 1x8GB\. Known GPUs: B200"):
        parse_gpus(text)


def test_a_memory_alone_promises_no_more_than_any_card_of_that_size_and_no_speed():
    sizes = {gpu.gb for gpu in known_gpus()}
    for size in sizes:
        gpu = parse_gpus(f"8x{size}GB").gpu
        assert gpu.memory_gib == pytest.approx(min(known.memory_gib for known in known_gpus() if known.gb == size))
        assert gpu.tflops is None
        assert stand_in(gpu).gb == size
    assert parse_gpus("79.25GiB").gpu.memory_gib == 79.25


def test_a_driver_tells_the_memory_and_which_of_two_cards_it_is():
    small = lookup("Tesla V100-SXM2-16GB", int(15.75 * GIB))
    assert (small.name, small.memory_gib) == ("V100-16GB", 15.75)
    assert lookup("Tesla V100-SXM3-32GB", int(31.74 * GIB)).name == "V100-32GB"
    assert lookup("NVIDIA A100 80GB PCIe", int(79.2 * GIB)).name == "A100 PCIe-80GB"
    assert lookup("NVIDIA GH200 480GB", int(94.5 * GIB)).name == "GH200-96GB"
    assert lookup("NVIDIA GeForce RTX 4060 Ti", int(7.6 * GIB)).name == "RTX 4060 Ti-8GB"
    unknown = lookup("NVIDIA L20", 44 * GIB)
    assert (unknown.name, unknown.memory_gib, unknown.tflops) == ("NVIDIA L20", 44.0, None)


def test_bf16_is_refused_where_it_is_not_multiplied():
    assert "--mixed_precision fp16" in str(precision_problem(parse_gpus("T4").gpu, "bf16"))
    assert precision_problem(parse_gpus("T4").gpu, "fp16") is None
    assert precision_problem(parse_gpus("H100").gpu, "bf16") is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_the_data_file_is_what_the_driver_reports():
    properties = torch.cuda.get_device_properties(0)
    found = lookup(properties.name, properties.total_memory)
    known = next(gpu for gpu in known_gpus() if gpu.name == found.name)
    assert known.memory_gib == pytest.approx(found.memory_gib, rel=0.01)
