"""The command that starts a run as it was planned."""

import shlex
from collections.abc import Iterable

from finetune.hardware.cards import Machines
from finetune.planner.changes import KEYS, differing
from finetune.planner.question import Question
from finetune.trace.setting import Setting

WIDTH = 80
INDENT = "  "


def launch_command(question: Question, setting: Setting) -> list[list[str]]:
    """Words of the command, those together that belong on one line: a flag and its value."""
    given = [["--config", question.config_file]] if question.config_file else []
    wanted = recipe_flags(question, setting)
    repeated = [[f"--{key}", value] for key, value in question.flags if key not in wanted]
    return [
        ["accelerate", "launch"],
        *launcher_flags(setting, question.machines),
        [question.recipe],
        *given,
        *repeated,
        *([f"--{key}", value] for key, value in wanted.items()),
    ]


def launcher_flags(setting: Setting, machines: Machines) -> list[list[str]]:
    """What ``accelerate launch`` is told; of several machines each has a rank of its own."""
    flags = [
        ["--config_file", f"accelerate_configs/{setting.strategy}.yaml"],
        ["--num_processes", str(setting.world_size)],
    ]
    flags += [[f"--{size.key}", str(number)] for size, number in setting.sizes.items()]
    if machines.nodes > 1:
        flags += [
            ["--num_machines", str(machines.nodes)],
            ["--machine_rank", "RANK_OF_THIS_MACHINE"],
            ["--main_process_ip", "ADDRESS_OF_MACHINE_0"],
            ["--main_process_port", "29500"],
        ]
    return flags + ([["--mixed_precision", setting.precision]] if setting.precision != "bf16" else [])


def recipe_flags(question: Question, setting: Setting) -> dict[str, str]:
    """Keys of the recipe that make a run this one, whatever its configuration says."""
    always = {KEYS[field][0]: KEYS[field][1](setting) for field in ("micro_batch_size", "activation_checkpointing")}
    fields = ("weights", "optimizer", "adapter", "bits", "parts", "pipeline_schedule")
    changed = differing(setting, question.base, fields)
    if question.model.published_bits:
        changed.pop("quantization.bits", None)
    if setting.adapter == "none":
        changed |= dict(question.adapter_defaults)
    return always | changed


def in_lines(words: Iterable[Iterable[str]], width: int = WIDTH) -> str:
    """The command for a shell, in lines that end in a backslash where they go on."""
    lines = [""]
    for group in words:
        text = " ".join(shlex.quote(word) for word in group)
        if lines[-1] and len(lines[-1]) + 1 + len(text) + 2 > width:
            lines.append(INDENT + text)
        else:
            lines[-1] = f"{lines[-1]} {text}" if lines[-1] else text
    return " \\\n".join(lines)
