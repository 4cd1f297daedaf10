"""From the command line to a question: a recipe configuration or a model, machines, and options."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.cli.links.links_file import read_links
from finetune.cli.planning.machine import free_disk, gpus_here, host_memory_here, unequal_cards
from finetune.cli.planning.strategy_file import strategy_named
from finetune.cli.planning.written import Options, all_flags, contradictions, given_flags, problems, words_of
from finetune.config import sections
from finetune.config.command_line import as_flag, parse
from finetune.config.compatibility import fp8_problems
from finetune.config.recipe_classes import CorpusRun, PairedRun, class_of, config_file, script_of
from finetune.config.refusals import (
    adapter_init_problems,
    batch_problems,
    packing_problems,
    planner_problems,
    position_problems,
)
from finetune.config.strategy_names import STRATEGIES
from finetune.config.token_budget import budget_problems, in_rows
from finetune.data import named_templates
from finetune.errors import InputError, refuse_if_any
from finetune.hardware.cards import MOST_GPUS_OF_A_MACHINE, Machines, caveat, parse_gpus, precision_problem
from finetune.models import weight_files
from finetune.models.model_config import read_config
from finetune.planner.candidates import splits
from finetune.planner.model import Model
from finetune.planner.question import METHODS, Question
from finetune.trace.setting import Method, Setting
from finetune.trace.tracer import Tracer
from finetune.units import GIB


@dataclass(frozen=True)
class Asked:
    """A question, and what else its words were about."""

    question: Question
    model: str
    revision: str | None
    notes: tuple[str, ...]
    """Sentences on what was assumed."""


@dataclass(frozen=True)
class _Read:
    """What was written, before the model is looked at."""

    cfg: sections.Run
    machines: Machines
    precision: str
    notes: tuple[str, ...]
    longest_document_tokens: int
    flat: bool = False
    """Rows that are not packed lie end to end."""
    token_rows: int = 0
    """Of special tokens that the chat template adds."""

    def setting(self, method: Method) -> Setting:
        """What all ways to train have in common."""
        return Setting.of(
            self.cfg,
            adapter=method.adapter,
            bits=method.bits,
            world_size=self.machines.world_size,
            precision=self.precision,
            row_tokens=self.documents * self.longest_document_tokens,
            flat=self.flat,
            flash=self.machines.gpu.has_flash_attention,
            token_rows=self.token_rows,
        )

    @property
    def documents(self) -> int:
        """Of a row: of a pair its two answers, each with the prompt; answers that are judged stand alone."""
        return 2 if isinstance(self.cfg, PairedRun) and self.cfg.dpo.loss != "kto" else 1

    @property
    def method(self) -> Method:
        """Of the configuration."""
        bits = self.cfg.quantization.bits
        return Method(self.cfg.adapter.type, None if bits == "none" else bits)

    @property
    def micro_batch_size(self) -> int | None:
        """None where it is left open."""
        found = _if_set(self.cfg.train, "micro_batch_size")
        return found if isinstance(found, int) else None

    @property
    def checkpointing(self) -> tuple[bool, ...]:
        """Both where it is left open."""
        found = _if_set(self.cfg.train, "activation_checkpointing")
        return (False, True) if found in (None, "auto") else (found != "none",)


def _read(arguments: Sequence[str], options: Options) -> _Read:
    refuse_if_any(problems(options) + contradictions(arguments, options))
    cfg = parse(class_of(arguments), [*arguments, *words_of(given_flags(arguments, options))])
    if isinstance(cfg, CorpusRun):
        refuse_if_any(budget_problems(cfg))
        cfg = in_rows(cfg)
    links = None if options.links is None else read_links(options.links)
    machines = _machines(options.gpus)
    precision, notes = _precision(options, machines)
    if links is not None:
        machines, notes = links.given_to(machines), (*notes, *links.notes(machines))
    notes += tuple(filter(None, [caveat(machines.gpu)]))
    return _Read(cfg, machines, precision, notes, cfg.data.max_length)


def _are_here(gpus: str | None) -> bool:
    """Whether GPUs of this machine are meant: all, or a number of them. 4090 is a card."""
    return gpus is None or (gpus.strip().isdecimal() and int(gpus) <= MOST_GPUS_OF_A_MACHINE)


def _machines(gpus: str | None) -> Machines:
    if gpus is not None and not _are_here(gpus):
        return parse_gpus(gpus)
    machine = gpus_here()
    if gpus is not None and not 1 <= int(gpus) <= machine.gpus_per_node:
        raise InputError(f"--gpus {gpus}: this machine has {machine.gpus_per_node}; give at most that, or name a card.")
    return machine if gpus is None else replace(machine, gpus_per_node=int(gpus))


def asked(
    arguments: Sequence[str], options: Options, on_progress: Callable[[int, int], None] = lambda done, of: None
) -> Asked:
    """Read a question. Its model's tracer may have a child by then, which ends with ``question.model.tracer``.

    Args:
        arguments: ``--config FILE`` and flags of the recipe.
        on_progress: see ``Tracer``.

    Raises:
        InputError: for wrong input, with a sentence per problem.
        SystemExit: after ``--print_config``.
    """
    read = _read(arguments, options)
    cfg, machines, notes = read.cfg, read.machines, list(read.notes)
    model_config, token_rows = _with_new_tokens(cfg, read_config(cfg.model.path, cfg.model.revision))
    read = replace(read, token_rows=token_rows)
    tracer = Tracer(model_config, row_tokens=read.documents * cfg.data.max_length, on_progress=on_progress)
    model = Model(model_config, tracer, is_stored=not cfg.model.random_weights)
    flags = all_flags(arguments, options)
    batch = cfg.train.global_batch_size
    batch_is_open = "global_batch_size" not in cfg.train.model_fields_set
    if batch_is_open and config_file(arguments) is None and batch % machines.world_size:
        batch = -(-batch // machines.world_size) * machines.world_size
        flags["train.global_batch_size"] = str(batch)
        notes.append(f"Assuming {batch} rows per step, which {machines.world_size} GPUs can share.")
    methods = _possible(read, model, _methods(read, options, model, is_open=config_file(arguments) is None))
    refuse_if_any(_contradictions(read, options, batch))
    read = replace(read, flat=_is_flat(read, model))
    positions = model.anatomy.positions
    refuse_if_any(position_problems(cfg.data.max_length, positions) if cfg.data.streaming else [])
    if positions is not None and not cfg.data.packing and cfg.data.max_length > positions:
        read = replace(read, longest_document_tokens=positions)
        notes.append(
            f"Assuming rows of {positions:,} tokens, the positions of the model: a run would refuse longer ones."
        )
    notes += _on_weights(cfg.model)
    notes += unequal_cards() if options.gpus is None else []
    here = _are_here(options.gpus)
    host = options.host_memory * GIB if options.host_memory else host_memory_here() if here else None
    disk = options.disk * GIB if options.disk else free_disk(Path(cfg.train.output_dir)) if here else None
    question = Question(
        model=model,
        machines=machines,
        base=read.setting(read.method),
        global_batch_size=batch,
        mean_document_tokens=min(options.document_tokens or math.inf, read.longest_document_tokens),
        methods=methods,
        strategies=(strategy_named(options.strategy),) if options.strategy else STRATEGIES,
        checkpointing=read.checkpointing,
        micro_batch_size=read.micro_batch_size,
        chosen=frozenset(cfg.train.model_fields_set & {"weights", "optimizer"}),
        epoch_tokens=options.tokens,
        host_bytes=None if host is None else int(host),
        disk_bytes=None if disk is None else int(disk),
        checkpoints=cfg.checkpoint.keep + 1,
        recipe=script_of(cfg),
        config_file=config_file(arguments),
        flags=tuple(flags.items()),
        adapter_defaults=_adapter_defaults(cfg.adapter),
    )
    return Asked(question, cfg.model.path, cfg.model.revision, tuple(notes))


def _adapter_defaults(adapter: sections.Adapter) -> tuple[tuple[str, str], ...]:
    default = sections.Adapter()
    keys = [key for key, value in adapter if key != "type" and value != getattr(default, key)]
    return tuple((f"adapter.{key.removesuffix('_')}", as_flag(getattr(default, key))) for key in keys)


def _with_new_tokens(cfg: sections.Run, model_config: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The configuration with the rows that a named chat template adds to the vocabulary, and how many are trained.

    Where no tokenizer is at hand, as beside a config.json alone, the tokens are taken to be there: two or three rows.
    """
    origin = Path(cfg.model.tokenizer or cfg.model.path)
    if not named_templates.has_specials(cfg.data.chat_template) or not (origin / "tokenizer_config.json").is_file():
        return model_config, 0
    from finetune.models import loading, new_tokens  # which import PyTorch

    config = loading.config_from(model_config)
    new = new_tokens.of_template(cfg.model, cfg.data.chat_template, config)
    refuse_if_any(new_tokens.problems(loading.without_weights(new.grown(config), False), new, cfg.adapter))
    return (new.grown(config).to_dict() if new.adds_rows else model_config), len(new.rows)


def _is_flat(read: _Read, model: Model) -> bool:
    """Whether a run would lay rows end to end: see ``packing_support.attention_for``, which knows the run's GPU."""
    section, train = read.cfg.model, read.cfg.train
    computes_in_16_bits = read.precision != "no" or train.weights == "bf16"
    is_open = section.attention in ("auto", "flash_attention_2", "flash_attention_3")
    gpu = read.machines.gpu
    return (
        is_open and computes_in_16_bits and model.anatomy.keeps_apart and not packing_problems(gpu.compute_capability)
    )


def _on_weights(model: sections.Model) -> list[str]:
    """What a run would report on the weights in a model folder. A plan needs no weights."""
    if model.random_weights or not Path(model.path).is_dir():
        return []
    try:
        weight_files.shapes(weight_files.local_files(Path(model.path)))
    except InputError as error:
        return [f"A run would be refused: {error}"]
    return []


def _if_set(section: sections.Section, key: str) -> object:
    """A key's value where a user wrote one."""
    return section.model_dump()[key] if key in section.model_fields_set else None


def _methods(read: _Read, options: Options, model: Model, *, is_open: bool) -> tuple[Method, ...]:
    """Those to compare: asked for by name, else the configuration's; all where a model alone is asked about."""
    is_said = {"type"} & read.cfg.adapter.model_fields_set or {"bits"} & read.cfg.quantization.model_fields_set
    if options.method == "all" or (options.method is None and is_open and not is_said):
        return tuple(METHODS.values())
    adapter, bits = read.method
    return (Method(adapter, bits or model.published_bits) if options.method is None else METHODS[options.method],)


def _precision(options: Options, machines: Machines) -> tuple[str, tuple[str, ...]]:
    """The launch's mixed precision, and what is to be said of it."""
    if options.mixed_precision is not None:
        problem = precision_problem(machines.gpu, options.mixed_precision)
        refuse_if_any([problem] if problem else [])
        return options.mixed_precision, ()
    if precision_problem(machines.gpu, "bf16") is None:
        return "bf16", ()
    return "fp16", (f"{machines.gpu.name} does not support bf16; fp16 is used instead.",)


def _possible(read: _Read, model: Model, methods: tuple[Method, ...]) -> tuple[Method, ...]:
    """Those for which there is the start that adapter.init asks for.

    Raises:
        InputError: if it is for none.
    """
    random_weights, is_stored = read.cfg.model.random_weights, model.published_bits is not None
    problems = [
        adapter_init_problems(
            read.cfg.adapter.model_copy(update={"type": method.adapter}),
            method.bits,
            is_stored=is_stored,
            random_weights=random_weights,
        )
        for method in methods
    ]
    if all(problems):
        refuse_if_any(problems[0])
    return tuple(method for method, found in zip(methods, problems, strict=True) if not found)


def _contradictions(read: _Read, options: Options, batch: int) -> list[str]:
    data = read.cfg.data
    found, row_tokens = planner_problems(read.cfg.model.attention), data.max_length
    found += packing_problems(read.machines.gpu.compute_capability) if data.packing else []
    found += fp8_problems(
        read.cfg.model.fp8,
        strategy=strategy_named(options.strategy) if options.strategy else "",
        bits=read.method.bits,
        precision=read.precision,
        capability=read.machines.gpu.compute_capability,
    )
    if options.document_tokens is not None and options.document_tokens > row_tokens:
        found.append(
            f"--document-tokens {options.document_tokens:g}: documents do not fit into rows of {row_tokens} "
            "tokens; give "
            f"at most {row_tokens}."
        )
    micro_batch_size = read.micro_batch_size or 1
    return found + batch_problems(batch, micro_batch_size, _data_processes(read.machines, options))


def _data_processes(machines: Machines, options: Options) -> int:
    """GPUs that compute different rows, at least: where several compute each together, as many as there may be."""
    named, world_size = strategy_named(options.strategy) if options.strategy else "", machines.world_size
    sizes = splits(named, machines, layers=world_size)
    return min(Setting(named, world_size, **each).data_processes for each in sizes)
