"""Exports the model or adapter of a checkpoint: the final/ folder of a run that ended there.

No model is loaded: its modules are created without memory, and the trained weights, or the averages that a run keeps of
them, are copied from the checkpoint, with the dtypes and names of a run's result. But the base is read for what a run
without an adapter did not train, such as weights for images and the bias of a router; and for an adapter that began as
pissa or olora, whose start is computed again, since the result is in terms of the base.
"""

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError

from finetune.checkpoint.reader import Checkpoint, open_checkpoint
from finetune.checkpoint.resuming import weight_problems
from finetune.config import sections
from finetune.data.named_templates import NAMED
from finetune.data.template_process import end_of_turn
from finetune.distributed import AVERAGES, DTYPES, WEIGHTS, prepare_import
from finetune.errors import InputError, refuse_if_any
from finetune.export import new_folder, own_code
from finetune.models import adapter, adapter_start, generation_settings, new_tokens, text_part, weights
from finetune.models import loading as models
from finetune.output import run_files
from finetune.output.run_reading import read_metrics


def export(
    path: Path, folder: Path, *, base_model: str | None = None, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Write the model or adapter of a checkpoint to a new folder, complete or not at all.

    Args:
        path: a checkpoint, or a run, of which the newest checkpoint is used.
        base_model: folder or hub id of the base, if it is not where the run found it.
        trust_remote_code: run the code that comes with the model.

    Returns:
        What was written, for JSON.

    Raises:
        InputError: if the checkpoint is incomplete, damaged, or not of a fine-tuning run; if its base is missing or has
            changed; or if the folder exists.
    """
    models.quiet()
    prepare_import()  # transformers imports DeepSpeed, where it is installed, when it saves
    checkpoint = open_checkpoint(path)
    refuse_if_any(new_folder.problems(folder) + checkpoint.damaged())
    config, run = _record(checkpoint)
    config = config | {"model": _base(config, run, base_model)}
    named = config["model"]
    source: dict[str, Any] = {"revision": named["revision"], "trust_remote_code": trust_remote_code}
    template = config["data"].get("chat_template")
    by_name = template if template in NAMED else None  # no file that a checkpoint names is opened: its text is kept
    section = sections.Model(path=named["path"], tokenizer=named["tokenizer"], **source)
    origin, of = section.tokenizer_source
    known: dict[str, Any] = {"chat_template": by_name, "trust_remote_code": trust_remote_code}
    tokenizer = models.load_tokenizer(origin, revision=of, adds_tokens=True, **known)
    tokenizer.chat_template = run["chat_template"]
    stored = own_code.load_config(named["path"], **source)
    new = new_tokens.of_template(section, by_name, stored, new_tokens.grown_rows_of(run))
    model = models.without_weights(new.grown(stored), trust_remote_code)
    adapter_alone = config["adapter"]["type"] != "none"
    if adapter_alone:
        _attach(model, config, models.stored_dtype(model.config), new.rows)
    else:
        text_part.train_alone(model, model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    refuse_if_any(weight_problems(checkpoint, shapes))
    dtype = models.stored_dtype(model.config)
    dtypes = {name: each.dtype for name, each in model.named_parameters()}  # fp32 where the model asks
    averaged = bool(config["train"].get("ema_decay"))  # older runs have no such key
    state = {} if adapter_alone else _untrained(model, shapes, dtypes, config, run, trust_remote_code)
    for name, value in _trained(checkpoint, shapes, averaged=averaged):
        state[name] = value if adapter_alone else value.to(dtypes[name])
    computed = config["adapter"].get("init") in ("pissa", "olora")
    beginning = _beginning(checkpoint, config, trust_remote_code) if computed else {}
    parameters = sum(value.numel() for value in state.values())  # now: transformers empties the state as it saves
    temporary = new_folder.temporary_of(folder)
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        if adapter_alone:
            adapter.save(temporary, model, state, beginning=beginning)
        else:
            model = cast(Any, model).to(dtype)  # what its config.json will tell
            generation_settings.take_over(model, named["path"], revision=named["revision"])
            generation_settings.stop_at(model, tokenizer.eos_token_id, end_of_turn(tokenizer))
            model.save_pretrained(temporary, state_dict=state)
        models.save_tokenizer(tokenizer, temporary)
        (temporary / "README.md").write_text(_card(checkpoint, run), encoding="utf-8")
        run_files.write_run(temporary, run)
        new_folder.put_in_place(folder)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"--output {folder} could not be written ({error}); free some space, or choose another one."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # it is gone, if it has taken its place
    return {
        "folder": str(folder),
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step,
        "kind": "adapter" if adapter_alone else "model",
        "averaged": averaged,
        "parameters": parameters,
    }


def describe(result: dict[str, Any]) -> str:
    """The result as text."""
    what = f"averaged {result['kind']}" if result["averaged"] else result["kind"]
    return (
        f"Exported the {what} of step {result['step']} to {result['folder']}\n"
        f"  {result['parameters']:,} parameters, from {result['checkpoint']}"
    )


def _record(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration of the run, and its record as in run.yaml."""
    run = checkpoint.contents.get("run")
    config = run.get("config") if isinstance(run, dict) else None
    told = isinstance(config, dict) and {"model", "data", "adapter", "train"} <= set(config)
    if not run or not config or not told or "progress" not in checkpoint.contents:
        raise InputError(f"{checkpoint.path} has no configuration of its run; give a checkpoint of recipes/sft.py.")
    return config, run


def _base(config: dict[str, Any], run: dict[str, Any], base_model: str | None) -> dict[str, Any]:
    """The section model of the run's configuration, with the base where that is now.

    Raises:
        InputError: if it is missing; if its config.json, which becomes that of the result, has changed.
    """
    named: dict[str, Any] = config["model"]
    if base_model is not None:
        problems = models.problems(base_model, named["tokenizer"], None)
        refuse_if_any([each.replace("model.path", "--base-model") for each in problems])
        return named | {"path": base_model, "revision": None}
    path = named["path"]
    if problems := models.problems(path, named["tokenizer"], None):
        moved = " If the base was moved, give its folder with --base-model."
        raise InputError([each + (moved if each.startswith("model.path") else "") for each in problems])
    if config["adapter"]["type"] == "none" and not _is_as_it_was(named, run["data"]["base"]):
        raise InputError(
            f"The model {path} is not the one that the run began with, by its fingerprint, and its config.json becomes "
            f"that of the exported model; restore it. If the run trained all of its weights, --base-model {path} takes "
            "it all the same."
        )
    return named


def _is_as_it_was(named: dict[str, Any], fingerprint: str) -> bool:
    """Whether a base has the fingerprint that a run recorded: without its weights, or with them."""
    path, revision = named["path"], named["revision"]
    try:
        return any(models.identity(path, revision=revision, weights=each) == fingerprint for each in (False, True))
    except InputError:  # its weights are not here
        return False


def _section(config: dict[str, Any]) -> sections.Adapter:
    # what it continued from may be gone, and is in the checkpoint
    return sections.Adapter.model_validate(config["adapter"] | {"from": None})


def _attach(
    model: models.PreTrainedModel, config: dict[str, Any], dtype: torch.dtype, token_rows: Sequence[int] = ()
) -> None:
    """Attach the run's adapter to a model; both may be without memory."""
    named, seed = config["model"], config["train"]["seed"]
    base = {"base": named["path"], "revision": named["revision"]}
    adapter.attach(model, _section(config), **base, dtype=dtype, seed=seed, token_rows=token_rows)


def _load_base(config: dict[str, Any], run: dict[str, Any], trust_remote_code: bool) -> models.PreTrainedModel:
    """The model that the run began with, on the CPU, rounded as it was."""
    named, in_bf16 = config["model"], config["train"]["weights"] == "bf16"
    source: dict[str, Any] = {"revision": named["revision"], "trust_remote_code": trust_remote_code}
    return models.load_model(
        named["path"],
        own_code.load_config(named["path"], **source),
        **source,
        attention="auto",
        dtype=torch.bfloat16 if in_bf16 else DTYPES[run["strategy"]["precision"]],
        seed=config["train"]["seed"],
        bits=None,
        device=torch.device("cpu"),
        random_weights=named.get("random_weights", False),
    )


def _trained(checkpoint: Checkpoint, names: Iterable[str], *, averaged: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each trained weight, or of its average where there is one, in the dtype of the weight."""
    known = checkpoint.manifest.tensors
    stored = {(AVERAGES if averaged and AVERAGES + name in known else WEIGHTS) + name: name for name in names}
    for place, value in checkpoint.tensors(stored):
        name = stored[place]
        yield name, value.to(getattr(torch, known[WEIGHTS + name].dtype))  # as a run computes


def _untrained(
    model: models.PreTrainedModel,
    trained: Collection[str],
    dtypes: Mapping[str, torch.dtype],
    config: dict[str, Any],
    run: dict[str, Any],
    trust_remote_code: bool,
) -> dict[str, torch.Tensor]:
    """Of the base, what belongs to the model and the run did not train: frozen weights, and buffers that are saved.

    Its other weights are freed before those of the checkpoint are read.

    Args:
        model: without memory.
        trained: names of its trained weights.
        dtypes: in which its weights are saved.

    Raises:
        InputError: if the base is another one by now.
    """
    if len(trained) == sum(1 for _ in model.parameters()) and not weights.saved_buffers(model):
        return {}
    if not _is_as_it_was(config["model"], run["data"]["base"]):
        raise InputError(
            f"{config['model']['path']} is not the model that the run began with, by its fingerprint, and what the run "
            "did not train is taken from it, such as an encoder of images; restore the original, or give its folder "
            "with --base-model."
        )
    base = _load_base(config, run, trust_remote_code)
    frozen = {name: each.detach().to(dtypes[name]) for name, each in base.named_parameters() if name not in trained}
    return frozen | weights.saved_buffers(base)


def _beginning(checkpoint: Checkpoint, config: dict[str, Any], trust_remote_code: bool) -> dict[str, torch.Tensor]:
    """What the adapter began with, as the run computed it: of the same base, rounded as it was.

    Raises:
        InputError: if the base is another one by now.
    """
    named, run = config["model"], checkpoint.contents["run"]
    path, revision, random_weights = named["path"], named["revision"], named.get("random_weights", False)
    if models.identity(path, revision=revision, weights=not random_weights) != run["data"]["base"]:
        raise InputError(
            f"The weights in {path} are not those that {checkpoint.path} was trained on, and its adapter is the "
            "difference to them; restore the original."
        )
    base = _load_base(config, run, trust_remote_code)
    _attach(base, config, base.dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return adapter_start.start(
        base, _section(config), files=[], device=device, whole=lambda _: nullcontext(), computes=True
    )


def _card(checkpoint: Checkpoint, run: dict[str, Any]) -> str:
    """The README.md of a run's result, for the step of the checkpoint."""
    progress = checkpoint.contents["progress"]
    evaluated = {**run, "eval_loss": {"before": progress["eval_loss"]}}
    metrics, folder = progress["metrics"][-1], checkpoint.path.absolute().parent.parent
    of_this_run = run_files.identity_of_run(folder).get("id", "") == run.get("id")
    if of_this_run:  # which evaluates a step after its checkpoint was written
        metrics = metrics | read_metrics(folder)[0].get(checkpoint.step, {})
    return run_files.model_card(run["config"]["model"]["path"], evaluated, metrics)
