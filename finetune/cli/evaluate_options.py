"""Options of the verb ``evaluate``. Imports nothing that is slow."""

import argparse
from typing import Any

from finetune.cli.hub_first import ask_for_data, ask_for_held_out, ask_for_result
from finetune.cli.talk_options import trusts_code


def add_evaluate(verbs: Any) -> None:
    """The verb that scores a model on rows."""
    evaluate = verbs.add_parser(
        "evaluate",
        help="score a run, an adapter or a model on rows; compare two of them on the same rows",
        description="Score a model on rows: the share of right answers, the loss of the expected ones, the choice "
        "among given ones. With two models, also the difference and whether it is more than chance. Intervals are of "
        "95 %. Scores: exact_match, contains, regex:PATTERN, regex_last:PATTERN, json, json_fields (or "
        "json_fields:a,b), choice, choice_norm, loss.",
    )
    evaluate.add_argument(
        "model",
        metavar="RUN_OR_MODEL",
        help="output folder of a run, folder of an adapter or of a model, or a model's id on the hub",
    )
    evaluate.add_argument("other", metavar="OTHER", nargs="?", help="a second one, to compare with the first")
    evaluate.add_argument(
        "--compare", action="store_true", help="compare with the model that it was trained from, instead of OTHER"
    )
    evaluate.add_argument(
        "--data",
        metavar="FILE",
        help="rows in any format that training reads, or with prompt and answer, or with prompt, choices and answer; "
        "default: the run's own held-out data",
    )
    evaluate.add_argument(
        "--score",
        metavar="SCORE",
        action="append",
        help="may be repeated; default: exact_match and loss, or choice and choice_norm for rows with choices",
    )
    evaluate.add_argument("--limit", metavar="N", type=int, help="only the first N rows")
    evaluate.add_argument(
        "--max-new-tokens", metavar="N", type=int, default=256, help="tokens of an answer, at most; default: 256"
    )
    evaluate.add_argument("--batch-size", metavar="N", type=int, default=8, help="rows answered together; default: 8")
    evaluate.add_argument("--plain", action="store_true", help="ask texts as they stand, without a chat template")
    evaluate.add_argument("--output", metavar="FILE", help="JSONL file to create: each row, the answers, their scores")
    evaluate.add_argument("--json", action="store_true", help="print the scores as JSON")
    evaluate.add_argument("--bits", type=int, choices=[4, 8], help="quantise the models")
    evaluate.add_argument("--base-model", metavar="PATH", help="folder of an adapter's base model, if it was moved")
    evaluate.add_argument("--chat-template", metavar="FILE", help="Jinja file, instead of the models' own template")
    trusts_code(evaluate)
    evaluate.set_defaults(run=_evaluate, late_words="other")


def _evaluate(options: argparse.Namespace) -> int:
    for path in filter(None, (options.model, options.other)):
        ask_for_result(path, options.base_model)
    if options.data is None:
        ask_for_held_out(options.model)
    else:
        ask_for_data(options.data)
    from finetune.cli.evaluate_verb import evaluate

    return evaluate(options)
