"""What GPUs send that have parts of a model: layers of their own, a part of each layer, or both.

GPUs of a layer add up hidden states within it; stages hand them on, each GPU to the one at its place in the next stage;
and those with the same part add up its gradients, or gather it and add them up where they hold shards of it. The GPUs
of a layer are neighbours; then come those with the same parts, then the next stage (``distributed.part_groups``). Of
those with the same part, the first ones may compute each row together: they gather keys and values of their own heads.

Example: of 16 GPUs, 4 for each layer and 2 stages, GPU 5 adds up hidden states with 4, 6 and 7, hands them on to 13,
and adds up gradients with 1. Both of these go through the network where there are 4 machines of 4.
"""

from collections.abc import Sequence
from dataclasses import replace

from finetune.hardware.cards import Machines
from finetune.planner.communication import (
    BUCKET_BYTES,
    Transfer,
    When,
    collectives,
    offloaded_activations,
    route,
)
from finetune.planner.pipelines import Stage, computed, sent_bytes, sent_of, stages_of, trained_elements
from finetune.trace.layers import Anatomy
from finetune.trace.setting import Setting
from finetune.trace.shallow import Step


def part_transfers(step: Step, setting: Setting, machines: Machines, anatomy: Anatomy) -> tuple[Transfer, ...]:
    """All traffic of an optimizer step, of each kind that of the stage which takes longest for it.

    Args:
        step: of the part of one GPU, as ``Tracer`` gives it.
        anatomy: of the whole model.
    """
    stages, width = stages_of(setting, anatomy), anatomy.width
    found = (
        *_handed_on(setting, machines, width),
        *_longest([_within_layers(setting, machines, anatomy, stage) for stage in stages]),
        *_longest([_of_the_same_part(step, setting, machines, stage) for stage in stages]),
        *_longest([_offloaded(step, setting, machines, stage) for stage in stages]),
    )
    return tuple(each for each in found if each.bytes)


def _longest(of_stages: Sequence[list[Transfer]]) -> list[Transfer]:
    return max(of_stages, key=lambda found: sum(each.seconds for each in found))


def _handed_on(setting: Setting, machines: Machines, width: int) -> list[Transfer]:
    """Between a stage and its neighbours, whole hidden states and their gradients.

    Args:
        width: elements of a hidden state.
    """
    if setting.stages == 1:
        return []
    times = computed(setting) * setting.parts
    # of several machines some neighbours are in another one, and all wait for them
    distance = machines.gpus_per_node if machines.nodes > 1 else setting.world_size // setting.stages
    gb_per_second, latency = route(machines, 2, distance)
    size, calls = float(sent_bytes(setting, width) * times), float(times)
    seconds = size / (gb_per_second * 1e9) + latency * times
    return [
        Transfer("hidden states to the next stage", "forward", size, calls, seconds, overlaps=False),
        Transfer("gradients to the stage before", "backward", size, calls, seconds, overlaps=False),
    ]


def _within_layers(setting: Setting, machines: Machines, anatomy: Anatomy, stage: Stage) -> list[Transfer]:
    """Between GPUs that split the layers of a stage.

    Forward, hidden states are added up after attention and after the MLP, and once for the embeddings; backward, their
    gradients before both, and once before the head (arXiv:1909.08053, section 3). Scores are put together. A layer that
    is recomputed adds up again. All wait for it.
    """
    size, times = setting.tensor, computed(setting)
    if size == 1:
        return []
    width = 4 if setting.precision == "no" else 2
    again = stage.of_first(setting.recomputed_layers or anatomy.layers) if setting.activation_checkpointing else 0
    vocabulary = dict(anatomy.sizes)["vocab_size"]
    gb_per_second, latency = route(machines, size, 1)

    def sums(what: str, when: When, elements: int, count: int, *, both_ways: int = 2) -> Transfer:
        calls = float(count * times)
        moved = both_ways * (size - 1) / size * setting.tokens * elements * width * calls
        seconds = moved / (gb_per_second * 1e9) + both_ways * latency * calls
        return Transfer(what, when, moved, calls, seconds, overlaps=False)

    both = 2 * stage.layers
    return [
        sums("all-reduce of hidden states", "forward", anatomy.width, both + stage.is_first),
        sums("all-gather of scores", "forward", vocabulary, int(stage.is_last), both_ways=1),
        sums("all-reduce of gradients of hidden states", "backward", anatomy.width, both + stage.is_last),
        sums("all-reduce of hidden states, recomputed", "backward", anatomy.width, 2 * again),
    ]


def _of_the_same_part(step: Step, setting: Setting, machines: Machines, stage: Stage) -> list[Transfer]:
    """Between GPUs that have the same part: what shards of it gather and add up in the passes, or gradients of replicas
    once in a step, beside no computation."""
    if setting.shards_parts:
        of_all = replace(setting, accumulation=computed(setting))
        return collectives(sent_of(step, setting, stage), step, of_all, machines)
    replicas = setting.data_processes
    gradients = trained_elements(step, stage) * (2 if setting.weights == "bf16" else 4)
    gb_per_second, latency = route(machines, replicas, setting.tensor)
    moved, calls = 2 * (replicas - 1) / replicas * gradients, max(1.0, gradients / BUCKET_BYTES)
    seconds = moved / (gb_per_second * 1e9) + 2 * latency * calls
    return [Transfer("all-reduce over replicas", "step", moved, calls, seconds, overlaps=False)]


def _offloaded(step: Step, setting: Setting, machines: Machines, stage: Stage) -> list[Transfer]:
    """Between a GPU and its host."""
    return offloaded_activations(step, setting, machines, share=stage.layers / step.layers)
