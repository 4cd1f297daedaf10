"""The launch, from the environment that ``accelerate launch`` sets, and whether it can work here."""

import math
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil
import torch
from accelerate.utils import str_to_bool

from finetune.compat.torch_private import cpu_computes_bf16
from finetune.config.compatibility import Cell, bf16_weights_problems, refusal
from finetune.config.strategy_names import (
    IN_PARTS,
    SHARDED_PARTS,
    SIZES,
    TOGETHER,
    Size,
)
from finetune.distributed import deepspeed_ops
from finetune.errors import InputError
from finetune.start_up import was_launched

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Strategy:
    """The strategy, the processes and the precision of a launch."""

    name: str
    """Name of the strategy file that asks for it, without ``.yaml``."""
    rank: int
    world_size: int
    replicas: int
    """Copies of the sharded model: 2 for hsdp, 1 for the other sharded strategies."""
    mixed_precision: str
    """``no``, ``bf16`` or ``fp16``: the precision of computation."""
    rehearsal: bool
    """No GPU found: the same classes run on the CPU."""
    context: int = 1
    """Processes that compute each row together: the number in the launch file for cp, ulysses and cp_tp."""
    stages: int = 1
    """Into which the layers are divided, each on processes of its own: the number in the launch file for pp, and
    wherever there are pipelines."""
    tensor: int = 1
    """Processes that split the weights of each layer, and compute the same rows: the number in the launch file for
    tp, and wherever layers are split."""
    experts: int = 1
    """Processes that share the experts of each layer: the number in the launch file for ep."""
    parent: int = field(default_factory=os.getppid, compare=False)
    """The process that started this one, when the launch was read."""

    @classmethod
    def from_environment(cls) -> "Strategy":
        """The strategy of this launch, from the environment that ``accelerate launch`` sets.

        Raises:
            InputError: if the launch is not supported.
        """
        environ, replicas = os.environ, 1
        if (compiler := environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()) != "no":
            raise InputError(
                f"The launch compiles the model by dynamo_backend {compiler}, which no strategy here has been proven "
                "with; set it to no, or remove it."
            )
        together, sizes = _together()
        if environ.get("ACCELERATE_USE_FSDP") == "true":
            if environ.get("FSDP_VERSION") != "2":
                raise InputError("The launch file asks for FSDP version 1; set fsdp_version: 2 in its fsdp_config.")
            replicas = int(environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
            if environ.get("PARALLELISM_CONFIG_TP_SIZE", "1") != "1":
                raise InputError(
                    "The launch file sets parallelism_config_tp_size, by which layers are not split here; set it to "
                    f"1, or use the strategy file {'cp_tp' if together == 'cp' else 'fsdp2_tp'}."
                )
            if _is_on("fsdp_activation_checkpointing"):
                raise InputError(
                    "The launch file sets fsdp_activation_checkpointing to true, which gives the weights of wrapped "
                    "layers names that no library reads; set it to false, and train.activation_checkpointing instead."
                )
            offload = _is_on("fsdp_offload_params")
            name = together or ("hsdp" if replicas > 1 else "fsdp2")
            name += "_offload" if offload else ""
        elif environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            name = _zero_name()
        elif environ.get("ACCELERATE_USE_MEGATRON_LM") == "true":
            name, sizes = _megatron()
        else:
            name = "ddp" if "LOCAL_RANK" in environ else "single"
        rehearsal = not torch.cuda.is_available()
        return cls(
            name=name,
            rank=int(environ.get("RANK", "0")),
            world_size=int(environ.get("WORLD_SIZE", "1")),
            replicas=replicas,
            mixed_precision=environ.get("ACCELERATE_MIXED_PRECISION") or native_precision(),
            rehearsal=rehearsal,
            **sizes,
        )

    @property
    def data_processes(self) -> int:
        """Processes, or groups of them, that compute different rows."""
        return max(1, self.world_size // self.context // self.stages // self.tensor)

    @property
    def data_share(self) -> dict[str, int]:
        """Which rows this process computes, as for ``data.sampler.micro_batches``."""
        return {"rank": self.shares[self.rank], "world_size": self.data_processes}

    @property
    def shares(self) -> list[int]:
        """Which share of the rows each process computes: those of a row have the same."""
        return [rank // (self.context * self.tensor) % self.data_processes for rank in range(self.world_size)]

    @property
    def noise(self) -> int:
        """By which the random numbers of a step differ: processes that compute the same draw the same."""
        return self.rank // self.tensor

    @property
    def stage(self) -> int:
        """Which part of the layers this process has."""
        return self.rank * self.stages // self.world_size

    @property
    def shards(self) -> int:
        """Processes over which the optimizer's state is split; of a part of the model, where each has one."""
        return 1 if self.keeps_parameters else self.world_size // self.replicas // self.stages // self.tensor

    @property
    def shard(self) -> int:
        """Which of the shards this process holds; processes with the same one hold the same weights, or parts of the
        same."""
        return self.rank // self.tensor % self.shards

    @property
    def takes_parts(self) -> bool:
        """Each process leaves a part of the model that it has loaded."""
        return self.name in IN_PARTS or self.shards_parts

    @property
    def keeps_parameters(self) -> bool:
        """What the optimizer steps are the model's own parameters, which no framework shards."""
        return self.name in ("single", "ddp", *IN_PARTS)

    @property
    def shards_parts(self) -> bool:
        """Each process has a shard of a part of the model, which ``part_shards`` takes."""
        return self.name in SHARDED_PARTS

    @property
    def is_fsdp(self) -> bool:
        """Accelerate shards the whole model with FSDP2."""
        return self.name.startswith(("fsdp2", "hsdp", *TOGETHER)) and not self.shards_parts

    @property
    def is_deepspeed(self) -> bool:
        return self.name.startswith("zero")

    @property
    def offloads(self) -> bool:
        """Sharded weights, or the optimizer's state and masters, are not on the GPU but for a moment."""
        return self.name.endswith(("_offload", "_nvme"))

    @property
    def gathers_in_order(self) -> bool:
        """Each layer's weights are gathered ahead, in the order of an earlier pass: ZeRO-3."""
        return self.name.startswith("zero3")


def _is_on(key: str) -> bool:
    """Whether the launch file turns on a key, in any of the words that Accelerate reads as true.

    Raises:
        InputError: if it is neither.
    """
    value = os.environ.get(key.upper(), "false")
    try:
        return bool(str_to_bool(value))
    except ValueError as error:
        raise InputError(f"The launch file sets {key} to {value}; set it to true or false.") from error


def _together() -> tuple[str, dict[str, int]]:
    """The strategy under which whole models compute rows together, and how many by the name of their field; an empty
    name where none does.

    Raises:
        InputError: if it is asked for with what it does not work with.
    """
    environ = os.environ
    names = {size: name for name in TOGETHER if name not in SHARDED_PARTS for size in SIZES[name]}
    asked = _asked(names)
    if not asked:
        return "", {}
    (size, number), *others = asked.items()
    name, key = names[size], size.key
    for other, processes in others:
        raise InputError(
            f"The launch file sets {key} to {number} and {other.key} to {processes}, but processes spread rows in one "
            "of these ways; set the other to 1."
        )
    if environ.get("ACCELERATE_USE_FSDP") != "true":
        files = f"{name} or cp_tp" if environ.get("ACCELERATE_USE_MEGATRON_LM") == "true" else name
        raise InputError(
            f"The launch file sets {key} to {number}, but not distributed_type to FSDP, without which this key "
            f"does nothing here; use the strategy file {files}, or set {key} to 1."
        )
    if environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1") != "1":
        raise InputError(
            f"The launch file asks for replicas and sets {key} to {number}, but {name} shards weights over all "
            f"processes; set parallelism_config_dp_replicate_size to 1, or {key} to 1."
        )
    if _is_on("fsdp_offload_params"):
        raise InputError(
            f"The launch file sets fsdp_offload_params to true and {key} to {number}, but {name} keeps weights on "
            "the GPUs; set fsdp_offload_params to false, or use the strategy file fsdp2_offload."
        )
    return name, {size.field: number}


def _megatron() -> tuple[str, dict[str, int]]:
    """The strategy that is asked for by the keys of Megatron-LM, and its sizes by the names of their fields.

    Raises:
        InputError: if it is asked for with what it does not work with.
    """
    known = *IN_PARTS, *SHARDED_PARTS
    asked = _asked(dict.fromkeys(size for name in known for size in SIZES[name]))
    found = " and ".join(f"{size.key} to {number}" for size, number in asked.items())
    if not asked:
        keys = {SIZES[name][0].key: name for name in IN_PARTS if len(SIZES[name]) == 1}
        named = " or ".join(f"{key} (strategy file {name})" for key, name in keys.items())
        raise InputError(f"The launch file asks for a pipeline of one stage; set {named} to 2 or more.")
    shards = _is_on("megatron_lm_use_distributed_optimizer")
    alike = [name for name in known if set(SIZES[name]) == set(asked)]
    if not alike:
        raise InputError(
            f"The launch file sets {found}, for which there is no strategy; use the strategy file "
            f"{' or '.join(_nearest(asked, shards=shards))}."
        )
    names = [name for name in alike if (name in SHARDED_PARTS) == shards]
    if not names and shards:
        raise InputError(
            f"The launch file sets megatron_lm_use_distributed_optimizer to true, but {alike[0]} does not shard what "
            "processes hold; set it to false, or use the strategy file fsdp2."
        )
    if not names:
        raise InputError(
            f"The launch file sets {found}, but not megatron_lm_use_distributed_optimizer to true, without which there "
            f"is no {alike[0]}; set it to true."
        )
    return names[0], {size.field: number for size, number in asked.items()}


def _nearest(asked: Iterable[Size], *, shards: bool) -> list[str]:
    """Strategies that do most of what is asked for by the keys of Megatron-LM, and nothing else."""
    doing = [each for each in (*IN_PARTS, *SHARDED_PARTS) if set(SIZES[each]) < {*asked}]
    alike = [each for each in doing if (each in SHARDED_PARTS) == shards] or doing
    most = max((len(SIZES[each]) for each in alike), default=0)
    return [each for each in alike if len(SIZES[each]) == most] or ["cp"]


def _asked(sizes: Iterable[Size]) -> dict[Size, int]:
    """Those of some sizes that are asked for: with more than one process."""
    numbers = {size: int(os.environ.get(size.key.upper(), "1")) for size in sizes}
    return {size: number for size, number in numbers.items() if number > 1}


def _zero_name() -> str:
    if "ACCELERATE_DEEPSPEED_CONFIG_FILE" in os.environ:
        raise InputError(
            "The launch file names a deepspeed_config_file, which could hide settings that change the result; "
            "write its ZeRO keys into the deepspeed_config section, as accelerate_configs/zero3.yaml does."
        )
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if stage not in ("1", "2", "3"):
        raise InputError(f"The launch file asks for ZeRO stage {stage}; set zero_stage to 1, 2 or 3, or use ddp.yaml.")
    targets = {os.environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_DEVICE", "none") for what in ("OPTIMIZER", "PARAM")}
    return f"zero{stage}" + ("_nvme" if "nvme" in targets else "_offload" if "cpu" in targets else "")


def native_precision() -> str:
    """The native 16-bit precision of this hardware: bf16, else fp16 on a GPU, else none (``no``)."""
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if cpu_computes_bf16() else "no"


def launcher_of(strategy: Strategy) -> str:
    """Identifies the launcher of this process: the same after it restarts its processes, different for other
    launches."""
    try:
        began = psutil.Process(strategy.parent).create_time()
    except psutil.NoSuchProcess:
        began = 0.0
    return f"{platform.node()} {strategy.parent} {began}"


def was_restarted() -> bool:
    """Whether the launcher started this process to replace one that died (``--max_restarts``)."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def describe(strategy: Strategy) -> str:
    """One line for the run's output."""
    processes = f"{strategy.world_size} process{'es' if strategy.world_size > 1 else ''}"
    processes += f", {strategy.context} for each row" if strategy.context > 1 else ""
    processes += f", {strategy.stages} stages" if strategy.stages > 1 else ""
    processes += f", {strategy.experts} for the experts" if strategy.experts > 1 else ""
    processes += f", {strategy.tensor} for each layer" if strategy.tensor > 1 else ""
    processes += f", {strategy.shards} shards of each part" if strategy.shards_parts else ""
    precision = "fp32" if strategy.mixed_precision == "no" else strategy.mixed_precision
    where = "rehearsal on CPU, no GPU found" if strategy.rehearsal else torch.cuda.get_device_name()
    if strategy.rehearsal and strategy.mixed_precision == "bf16" and native_precision() == "no":
        where += "; this CPU has no units for bf16, so --mixed_precision no is several times faster"
    return f"{strategy.name} on {processes}, computing in {precision}: {where}"


def problems(strategy: Strategy, *, bits: int | None, adapter: str, optimizer: str, weights: str) -> list[str]:
    """What makes this launch impossible, here or anywhere, as sentences. Reads no weights."""
    cell = Cell(strategy.name, bits, adapter, optimizer)
    refused = refusal(cell)
    found = [refused] if refused else []
    several_asked = "MASTER_ADDR" in os.environ and was_launched()
    if strategy.name == "single" and several_asked and "RANK" not in os.environ:
        found.append(
            "accelerate launch was asked for several processes but started one; use a strategy file for several "
            "processes (ddp, fsdp2, ...), or unset MASTER_ADDR if your shell exports it."
        )
    replicas, processes = strategy.replicas, strategy.world_size
    gpus = 0 if strategy.rehearsal else torch.cuda.device_count()
    if strategy.name != "single" and processes == 1 and was_launched() and gpus > 1:
        found.append(
            f"{strategy.name} was launched with one process, and this machine has {gpus} GPUs; launch with "
            f"--num_processes {gpus}, or set CUDA_VISIBLE_DEVICES to the GPU that is meant."
        )
    sizes = SIZES.get(strategy.name, ())
    together = math.prod(getattr(strategy, size.field) for size in sizes)
    if processes % together:
        launched = " and ".join(f"{getattr(strategy, size.field)} {size.what}" for size in sizes)
        found.append(
            f"{strategy.name} was launched with {launched}, but with {processes} process{'es' if processes > 1 else ''}"
            f"; launch a multiple of {together}, or set {' or '.join(f'--{size.key}' for size in sizes)}."
        )
    if replicas > 1 and (processes % replicas or processes < 2 * replicas):
        found.append(
            f"hsdp keeps {replicas} replicas, each sharded over at least 2 processes, but {processes} processes were "
            f"launched; launch a multiple of {replicas}, at least {2 * replicas}, or use fsdp2."
        )
    if strategy.shards_parts and processes == together and strategy.shards == 1:
        found.append(
            f"{strategy.name} shards each part of the model over the processes that have the same, but each of the "
            f"{processes} processes has another one; launch {2 * processes} or more, or use the strategy file "
            f"{SHARDED_PARTS[strategy.name]}."
        )
    if strategy.mixed_precision not in DTYPES:
        found.append(precision_problem(strategy.mixed_precision))
    elif strategy.mixed_precision == "fp16" and strategy.rehearsal:
        found.append("fp16 needs a GPU; launch with --mixed_precision bf16 or --mixed_precision no.")
    elif strategy.mixed_precision == "bf16" and not strategy.rehearsal and native_precision() != "bf16":
        name = torch.cuda.get_device_name()
        found.append(f"{name} does not support bf16; launch with --mixed_precision fp16 (or no).")
    found += bf16_weights_problems(cell, weights=weights, precision=strategy.mixed_precision)
    if strategy.is_deepspeed:
        found += deepspeed_ops.problems(nvme=strategy.name.endswith("_nvme"))
    return found


def precision_problem(mixed_precision: str) -> str:
    """Why a launch cannot compute in a precision that is none of ``DTYPES``."""
    return f"mixed_precision {mixed_precision} is not supported; launch with bf16, fp16 or no."


def compute_dtype(strategy: Strategy, weights: str) -> torch.dtype:
    """The dtype in which weights are loaded, so that every strategy starts from the same rounded values."""
    return torch.bfloat16 if weights == "bf16" else DTYPES[strategy.mixed_precision]
