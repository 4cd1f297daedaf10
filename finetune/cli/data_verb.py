"""``finetune data``: the data of a configuration as the model will see them, without loading the model."""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from finetune import distributed
from finetune.cli.data_report.figures import Report, report
from finetune.cli.data_report.page import to_html, to_json
from finetune.cli.data_report.report_tables import print_report
from finetune.cli.data_report.wording import verdict
from finetune.config import sections
from finetune.config.command_line import parse
from finetune.config.recipe_classes import CorpusRun, PairedRun, class_of
from finetune.config.refusals import batch_problems
from finetune.config.token_budget import in_rows
from finetune.data import dataset
from finetune.data.rows import Rows
from finetune.data.sources import named_sources
from finetune.errors import InputError, refuse_if_any
from finetune.models import loading as models
from finetune.models import new_tokens
from finetune.models.spec import ModelSpec
from finetune.output.run_reading import read_metrics
from finetune.run.corpus import corpus_problems, stage_problems, text_problems
from finetune.run.inputs import load_tokenizer, settings_of
from finetune.run.pairs import kind_problems, pair_problems
from finetune.run.preflight import configuration_problems, model_problems, row_problems
from finetune.run.screen import Preparing
from finetune.training import evaluation
from finetune.training.task_scores import read_tasks

ROWS, ROWS_OF_PAGE, LEFT_OUT = 3, 20, 10
"""Default numbers of rows shown in a terminal and on a page, and of unused rows shown in a terminal."""


def show(
    arguments: Sequence[str], *, rows: int | None, html: Path | None, as_json: bool, tokens_per_second: float | None
) -> int:
    """Print the report, or write it as a page; the exit code is 2 if a run would refuse the data.

    Args:
        arguments: ``--config FILE`` and flags of the recipe.
        rows: rows to show as the model sees them.
        html: file to write an HTML page to instead of printing.
        as_json: print JSON, and nothing else, to the standard output.
        tokens_per_second: positions per second of all processes; None to use an earlier run.

    Raises:
        InputError: for problems with configuration, tokenizer or sources, and for data without a usable row.
    """
    refuse_if_any(_problems(rows, html is not None and as_json, tokens_per_second))
    models.quiet()
    result = _report(
        parse(class_of(arguments), arguments),
        shown_rows=rows if rows is not None else ROWS if html is None else ROWS_OF_PAGE,
        shown_left_out=LEFT_OUT if html is None and not as_json else None,
        tokens_per_second=tokens_per_second,
        shows_progress=sys.stdout.isatty() and not as_json,
    )
    if as_json:
        print(to_json(result))
    elif html is not None:
        _write(html, to_html(result))
        print(f"Wrote the report to {html}. {verdict(result)}")
    else:
        print_report(result, Console(highlight=False, emoji=False, markup=False))
    return 0 if result.refusal is None else 2


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--html {path}: cannot be written ({error.strerror}); choose another file.") from error


def _problems(rows: int | None, html_and_json: bool, tokens_per_second: float | None) -> list[str]:
    problems = []
    if rows is not None and rows < 0:
        problems.append(f"--rows {rows}: must be 0 or more; change it, or leave it out.")
    if tokens_per_second is not None and not 0 < tokens_per_second < float("inf"):
        problems.append(f"--tokens-per-second {tokens_per_second:g}: must be above 0; change it, or leave it out.")
    if html_and_json:
        problems.append("--html and --json cannot be combined; use one of them.")
    return problems


def _report(
    cfg: sections.Run,
    *,
    shown_rows: int,
    shown_left_out: int | None,
    tokens_per_second: float | None,
    shows_progress: bool,
) -> Report:
    train_sources = named_sources(cfg.data.train)
    held_out = cfg.data.eval if isinstance(cfg.data.eval, float) else named_sources(cfg.data.eval)
    held_out_sources = held_out if isinstance(held_out, list) else []
    launch = distributed.Strategy.from_environment()
    found = _problems_of_recipe(cfg, launch)
    cfg = in_rows(cfg) if isinstance(cfg, CorpusRun) and not found else cfg
    refuse_if_any(configuration_problems(cfg) + found)
    known = launch.mixed_precision in distributed.DTYPES  # another is among the problems of a run
    dtype = distributed.compute_dtype(launch, cfg.train.weights) if known else torch.float32
    packing, template = cfg.data.packing is True, cfg.data.chat_template
    spec = ModelSpec.read(cfg.model, cfg.quantization, packing=packing, dtype=dtype, chat_template=template)
    tokenizer = load_tokenizer(cfg.model, cfg.data)
    paired = isinstance(cfg, PairedRun)
    settings = settings_of(cfg.data, tokenizer, spec.end_tokens, paired=paired)
    with Preparing(shown=shows_progress) as tell:
        # bad data are exactly what a user wants to inspect
        rows, held_out_rows = dataset.load(train_sources, held_out, tokenizer, settings, skip_bad_rows=True, tell=tell)
    found = problems_of_a_run(cfg, launch, spec, tokenizer, rows, held_out_rows)
    if isinstance(cfg, PairedRun):
        found += kind_problems(cfg.dpo, rows, held_out_rows)
    if isinstance(cfg, CorpusRun):
        found += text_problems(rows, held_out_rows) + stage_problems(cfg, tokenizer, spec)
    speed = measured_speed(Path(cfg.train.output_dir)) if tokens_per_second is None else tokens_per_second
    given = f"measured in {cfg.train.output_dir}" if tokens_per_second is None else "as given"
    return report(
        rows,
        held_out_rows,
        tokenizer,
        train_sources=train_sources,
        held_out_sources=held_out_sources,
        columns=cfg.data.columns,
        max_length=cfg.data.max_length,
        packing=cfg.data.packing,
        paired=paired,
        flat=spec.flat,
        global_batch_size=cfg.train.global_batch_size,
        micro_batch_size=None if cfg.train.micro_batch_size == "auto" else cfg.train.micro_batch_size,
        epochs=cfg.train.epochs,
        steps=cfg.train.steps,
        seed=cfg.train.seed,
        skips_bad_rows=cfg.data.on_bad_row == "skip",
        problems=found,
        tokens_per_second=speed,
        speed_from=None if speed is None else given,
        shown_rows=shown_rows,
        shown_left_out=shown_left_out,
    )


def _problems_of_recipe(cfg: sections.Run, launch: distributed.Strategy) -> list[str]:
    if isinstance(cfg, PairedRun):
        return pair_problems(cfg, cfg.dpo, launch)
    return corpus_problems(cfg, launch.data_processes) if isinstance(cfg, CorpusRun) else []


def problems_of_a_run(
    cfg: sections.Run,
    launch: distributed.Strategy,
    spec: ModelSpec,
    tokenizer: PreTrainedTokenizerBase,
    rows: Rows | None,
    held_out: Rows | None,
) -> list[str]:
    """Why a run would refuse these data on this machine, by the run's own functions."""
    if launch.mixed_precision not in distributed.DTYPES:
        return [distributed.precision_problem(launch.mixed_precision)]
    found = batch_problems(cfg.train.global_batch_size, cfg.train.least_micro_batch_size, launch.data_processes)
    found += model_problems(spec, cfg.data, distributed.compute_dtype(launch, cfg.train.weights))
    found += new_tokens.problems(spec.skeleton, spec.new_tokens, cfg.adapter)
    found += row_problems(rows, held_out, cfg.data, spec)
    try:
        known = tokenizer, models.most_positions(spec.text_config)
        evaluation.questions(cfg.eval.prompts, held_out, *known, compared=cfg.eval.exact_match)
        read_tasks(cfg.eval, cfg.data, *known)
    except InputError as error:
        found += error.problems
    return found


def measured_speed(output_dir: Path) -> float | None:
    """Positions per second of an earlier run: the median of its steps without the first, which is a warm-up.

    None if it left no metrics.jsonl, or fewer than two steps that can be read.
    """
    lines = read_metrics(output_dir)[0].values()
    steps = [line for line in lines if line.get("total_tokens") and line.get("step_seconds")][1:]
    return statistics.median(s["total_tokens"] / s["step_seconds"] for s in steps) if steps else None
