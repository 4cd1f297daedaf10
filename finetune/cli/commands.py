"""The ``finetune`` command. Each verb imports lazily, so that ``--help`` is instant."""

import argparse
import difflib
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from finetune import __version__
from finetune.cli.evaluate_options import add_evaluate
from finetune.cli.export_options import add_export
from finetune.cli.hub_first import ask_for_result, ask_for_run, ask_for_trained
from finetune.cli.links_options import add_links
from finetune.cli.report_verb import add_report
from finetune.cli.setup_options import add_doctor, add_init
from finetune.cli.talk_options import add_chat, add_generate, trusts_code
from finetune.cli.train_options import add_train
from finetune.errors import InputError, RunStopped, refuse_if_any


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Suggest the choice that was probably meant."""
        if refused := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            close = difflib.get_close_matches(refused[1], re.findall(r"[\w-]+", refused[2]), n=1)
            message += f"; did you mean {close[0]}?" if close else ""
        super().error(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 2 for wrong input, or 1 for work that had to stop.

    It is also 1 if the reader of the output exits early, as `head` does. Rich's console does the same. Ctrl-C makes it
    130, as in a shell.
    """
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # here, and not at the interpreter's end, where nobody can catch it
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # for what is still in the buffer
        os.close(nowhere)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(arguments: Sequence[str] | None) -> int:
    parser = _Parser(prog="finetune", description="Fine-tune language models with Accelerate.")
    parser.add_argument("--version", action="version", version=f"finetune {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    add_init(verbs)
    add_doctor(verbs)
    add_train(verbs)
    _add_merge(verbs)
    add_export(verbs)
    add_generate(verbs)
    add_chat(verbs)
    add_evaluate(verbs)
    add_report(verbs)
    _add_data(verbs)
    _add_plan(verbs)
    add_links(verbs)
    _add_checkpoint(verbs)
    options, words = parser.parse_known_args(arguments)
    others = _left_over(words, options)
    takes_keys = options.verb in ("data", "plan", "train")
    if others and not takes_keys:
        parser.error(f"unrecognized arguments: {' '.join(others)}{_meant(others[0], verbs.choices[options.verb])}")
    options.others = others
    try:
        if takes_keys and getattr(options, "recipe", None) is None:
            refuse_if_any(_unknown_flags(others, options.verb, verbs.choices[options.verb]))
        exit_code: int = options.run(options)
    except (InputError, RunStopped) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return exit_code


def _left_over(words: list[str], options: argparse.Namespace) -> list[str]:
    """Words that no argument takes. An argument that may be left out takes those that follow an option.

    argparse takes it to be left out there: in ``generate RUN --json Hello`` the prompt is none, and Hello is a word.
    A verb names that argument as ``late_words``.
    ``data`` and ``plan`` take a configuration as ``train`` does, and ``plan`` a model.
    """
    if options.verb in ("data", "plan") and words and not words[0].startswith("-"):
        if options.verb == "data" or words[0].endswith((".yaml", ".yml")):
            is_named = any(word.partition("=")[0] == "--config" for word in words)
            return words if is_named else ["--config", *words]
        if options.model is None:
            options.model = words[0]
            return words[1:]
    name = getattr(options, "late_words", None)
    if name is None or any(word.startswith("-") and word != "-" for word in words):
        return words
    taken = getattr(options, name)
    if isinstance(taken, list):
        taken += map(Path, words)
        return []
    if taken is None and len(words) == 1:
        setattr(options, name, words[0])
        return []
    return words


def _unknown_flags(words: Sequence[str], verb: str, parser: argparse.ArgumentParser) -> list[str]:
    """Flags that neither the verb knows nor a recipe: those of recipes are ``--section.key``."""
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    unknown = [flag for flag in flags if "." not in flag and flag not in ("--config", "--print_config", "--help")]
    see = f"see finetune {verb} --help for all flags."
    return [
        f"Unknown flag {flag}{meant} Otherwise {see}"
        if (meant := _meant(flag, parser))
        else f"Unknown flag {flag}; {see}"
        for flag in unknown
    ]


def _meant(word: str, parser: argparse.ArgumentParser) -> str:
    """The flag that was probably meant, as the end of a sentence."""
    known = re.findall(r"^  (--[\w-]+)", parser.format_help(), re.MULTILINE)
    close = difflib.get_close_matches(word.partition("=")[0], [*known, "--config"], n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _add_merge(verbs: "argparse._SubParsersAction[_Parser]") -> None:
    merge = verbs.add_parser("merge", help="merge an adapter into its base model, which then needs no PEFT")
    merge.add_argument(
        "source", metavar="RUN_OR_ADAPTER", type=Path, help="output folder of a run, or folder of an adapter"
    )
    merge.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder to create for the model")
    merge.add_argument("--base-model", metavar="PATH", help="folder of the base model, if it was moved")
    merge.add_argument(
        "--base",
        choices=["dequantized", "original"],
        help="weights to merge onto, if the base was quantised for training: those that the adapter was trained "
        "on (dequantized, the default), or those before quantisation (original)",
    )
    merge.add_argument(
        "--bits", type=int, choices=[4, 8], help="bits of the quantised base, for an adapter without a run.yaml"
    )
    merge.add_argument(
        "--dtype", choices=["bf16", "fp32"], default="bf16", help="dtype of the merged model; default: bf16"
    )
    merge.add_argument(
        "--text", metavar="FILE", type=Path, help="text to compare the models on; default: the run's own data"
    )
    trusts_code(merge)
    merge.add_argument("--json", action="store_true", help="print the result as JSON")
    merge.set_defaults(run=_merge)


def _add_data(verbs: "argparse._SubParsersAction[_Parser]") -> None:
    data = verbs.add_parser(
        "data",
        help="show the data as the model will see them: rows, masks, lengths, packing, steps",
        usage="finetune data CONFIG [--section.key VALUE ...] [options]",
        description="Show the data as the model will see them. Takes a configuration of a recipe, or "
        "--config FILE, and the recipe's flags. Loads the tokenizer, but not the model. The exit code is 2 if a run "
        "would refuse the data.",
        allow_abbrev=False,
    )
    data.add_argument("--rows", metavar="N", type=int, help="rows to show; default: 3, or 20 with --html")
    data.add_argument("--html", metavar="FILE", type=Path, help="write an HTML page instead of printing")
    data.add_argument("--json", action="store_true", help="print every figure as JSON")
    data.add_argument(
        "--tokens-per-second",
        metavar="N",
        type=float,
        help="positions per second of all processes, to estimate the time of an epoch; default: measured by an "
        "earlier run with the same train.output_dir",
    )
    data.add_argument("--cache", action="store_true", help="list the cache of prepared rows instead")
    data.add_argument(
        "--remove-older-than",
        metavar="DAYS",
        type=float,
        help="with --cache: remove the prepared rows that were not used for so many days; 0 removes all",
    )
    data.set_defaults(run=_data)


def _add_plan(verbs: "argparse._SubParsersAction[_Parser]") -> None:
    plan = verbs.add_parser(
        "plan",
        help="predict what fits on which GPUs, under which strategy, and how fast, before anything is loaded",
        usage="finetune plan CONFIG_OR_MODEL [--section.key VALUE ...] [options]",
        description="Predict what fits on which GPUs, under which strategy, and how fast. Takes a configuration of "
        "a recipe, or --config FILE, and the recipe's flags; or only a model. Reads nothing but the model's "
        "config.json. The exit code is 0 if something fits, 1 if nothing fits, 2 for wrong input.",
        allow_abbrev=False,
    )
    plan.add_argument("--model", metavar="MODEL", help="folder of a model, a config.json file, or an id on the hub")
    plan.add_argument(
        "--gpus",
        metavar="GPUS",
        help="for example 1x4090, H100x8, 8x80GB, 2x8xH100 for two machines, or 2 for two GPUs of this machine; "
        "default: all GPUs of this machine",
    )
    plan.add_argument("--row-tokens", metavar="N", type=int, help="tokens per row, like data.max_length")
    plan.add_argument("--global-batch-size", metavar="N", type=int, help="rows per step, like train.global_batch_size")
    plan.add_argument(
        "--document-tokens", metavar="N", type=float, help="length of the documents in packed rows, taken to be equal"
    )
    plan.add_argument("--tokens", metavar="N", type=float, help="tokens per epoch, to estimate its time")
    plan.add_argument(
        "--method",
        choices=["full", "lora", "qlora", "lora_8bit", "all"],
        help="training method; default: that of the configuration, or all for --model",
    )
    plan.add_argument("--strategy", metavar="NAME_OR_FILE", help="a single strategy file; default: compare all")
    plan.add_argument(
        "--mixed-precision",
        "--mixed_precision",  # as accelerate launch has it
        choices=["bf16", "fp16", "no"],
        help="default: bf16, or fp16 on cards without bf16",
    )
    plan.add_argument("--host-memory", metavar="GIB", type=float, help="memory of one machine; default: not checked")
    plan.add_argument("--disk", metavar="GIB", type=float, help="disk space for checkpoints; default: not checked")
    plan.add_argument(
        "--links",
        metavar="FILE",
        type=Path,
        help="links as finetune links measured them; default: as on data sheets",
    )
    plan.add_argument("--all", action="store_true", help="also show what does not fit")
    plan.add_argument("--json", action="store_true", help="print every figure as JSON")
    plan.add_argument("--plot", metavar="FILE", type=Path, help="plot the memory over one step to FILE.png or FILE.svg")
    plan.add_argument("--probe", action="store_true", help="also measure the first option by real steps on this GPU")
    plan.set_defaults(run=_plan)


def _add_checkpoint(verbs: "argparse._SubParsersAction[_Parser]") -> None:
    checkpoint = verbs.add_parser("checkpoint", help="list, check or export the checkpoints of a run")
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="list the checkpoints of a run, including incomplete ones")
    ls.add_argument("path", metavar="RUN", type=Path, help="output folder of a run")
    verify = actions.add_parser(
        "verify",
        help="verify the checksum of every file",
        description="Read every file and compare it with the checksum from when it was written. The exit code is 1 if "
        "a file is damaged or missing.",
    )
    export = actions.add_parser(
        "export",
        help="export the model or adapter of a checkpoint, in the form of final/",
        description="Write what final/ would contain if the run had ended at this checkpoint: a model for "
        "transformers, or an adapter for PEFT.",
    )
    for action in (verify, export):
        action.add_argument(
            "path", metavar="RUN_OR_CHECKPOINT", type=Path, help="folder of a checkpoint, or output folder of a run"
        )
    export.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder to create")
    export.add_argument("--base-model", metavar="PATH", help="folder of the base model, if it was moved")
    trusts_code(export)
    for action, run in ((ls, _list_checkpoints), (verify, _verify_checkpoints), (export, _export_checkpoint)):
        action.add_argument("--json", action="store_true", help="print the result as JSON")
        action.set_defaults(run=run)


def _merge(options: argparse.Namespace) -> int:
    ask_for_result(str(options.source), options.base_model)
    from finetune.export.merge import describe, merge

    result = merge(
        options.source,
        options.output,
        base_model=options.base_model,
        bits=options.bits,
        base=options.base,
        dtype=options.dtype,
        text_file=options.text,
        trust_remote_code=options.trust_remote_code,
        say=lambda line: print(line, file=sys.stderr),
    )
    print(json.dumps(result, indent=2) if options.json else describe(result))
    return 1 if result["verdict"] == "different" else 0


def _data(options: argparse.Namespace) -> int:
    if options.cache:
        from finetune.cli.data_cache import show_cache

        return show_cache(remove_older_than=options.remove_older_than, as_json=options.json)
    if options.remove_older_than is not None:
        raise InputError("--remove-older-than is for the cache; add --cache.")
    ask_for_run(options.others)
    from finetune.cli.data_verb import show

    return show(
        options.others,
        rows=options.rows,
        html=options.html,
        as_json=options.json,
        tokens_per_second=options.tokens_per_second,
    )


def _plan(options: argparse.Namespace) -> int:
    from finetune.cli.plan_verb import Shown, show
    from finetune.cli.planning.written import Options

    return show(
        options.others,
        Options(
            gpus=options.gpus,
            model=options.model,
            row_tokens=options.row_tokens,
            global_batch_size=options.global_batch_size,
            document_tokens=options.document_tokens,
            method=options.method,
            strategy=options.strategy,
            mixed_precision=options.mixed_precision,
            tokens=options.tokens,
            host_memory=options.host_memory,
            disk=options.disk,
            links=options.links,
        ),
        Shown(
            as_json=options.json,
            all_rows=options.all,
            plot=options.plot,
            probes=options.probe,
        ),
    )


def _list_checkpoints(options: argparse.Namespace) -> int:
    from finetune.cli.checkpoint_verb import ls

    return ls(options.path, as_json=options.json)


def _verify_checkpoints(options: argparse.Namespace) -> int:
    from finetune.cli.checkpoint_verb import verify

    return verify(options.path, as_json=options.json)


def _export_checkpoint(options: argparse.Namespace) -> int:
    ask_for_trained(options.path, options.base_model)
    from finetune.export.checkpoint_export import describe, export

    more = {"base_model": options.base_model, "trust_remote_code": options.trust_remote_code}
    result = export(options.path, options.output, **more)
    print(json.dumps(result, indent=2) if options.json else describe(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
