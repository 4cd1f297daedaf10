"""The model that a path names, loaded to answer: a run, an adapter or a model by its folder or hub id."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import yaml
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from finetune.data.columns import Columns
from finetune.data.named_templates import problems
from finetune.data.template_process import end_of_turn
from finetune.distributed.strategy import native_precision
from finetune.errors import InputError, refuse_if_any
from finetune.export import adapted_model, adapter_source, own_code
from finetune.export.results import Result, result_at
from finetune.generation.speaker import Known, Speaker
from finetune.hub_access import is_hub_id
from finetune.models import frequencies, new_tokens, quantization, weights
from finetune.models import loading as models
from finetune.models.end_tokens import end_tokens_of
from finetune.output.run_files import read_run


@dataclass(frozen=True)
class Request:
    """Who is to answer, and how it is loaded."""

    path: str
    """Output folder of a run, or folder of an adapter or of a model, or a model's id on the hub."""
    base_model: str | None = None
    """Folder of an adapter's base, if it was moved."""
    bits: int | None = None
    """4 or 8, to quantise a model; of an adapter's base, if there is no run.yaml."""
    chat_template: str | None = None
    """Jinja file or name, instead of the tokenizer's own template."""
    compares: bool = False
    """The model that it was trained from answers too."""
    trust_remote_code: bool = False
    """The code that comes with the model is run."""


@dataclass(frozen=True)
class Unloaded:
    """The model that a path names, or two: all that can be refused has been, but no weights are loaded."""

    known: list[Known]
    load: Callable[[], list[Speaker]]
    notes: list[str] = field(default_factory=list)
    """What to know of the answers, in sentences."""


def read_speakers(request: Request) -> Unloaded:
    """The model that a path names; before it the one that it was trained from, where they are compared.

    A base answers through the same tokenizer and template, so that both are asked the same.

    Raises:
        InputError: if there is no such model, or it cannot be loaded; loading raises it for what the files do not show.
    """
    models.quiet()
    with _of_options():
        found = _read(request)
    return replace(found, load=_of_options()(found.load))


@contextmanager
def _of_options() -> Iterator[None]:
    """Problems without the keys of a configuration, which these verbs do not have."""
    try:
        yield
    except InputError as error:
        said = [problem.removeprefix("model.path: ") for problem in error.problems]
        raise InputError([each.replace("data.chat_template:", "--chat-template:") for each in said]) from error


def columns_of(path: str) -> Columns:
    """The columns that the rows of a run were read by; none for what no run left.

    Raises:
        InputError: if there is no result in the folder.
    """
    run = result_at(Path(path)).run if Path(path).is_dir() else None
    data = {} if run is None else read_run(run.parent).get("config", {}).get("data", {})
    return tuple(data.get("columns", {}).items())


def _read(request: Request) -> Unloaded:
    refuse_if_any(problems(request.chat_template))
    path = request.path
    result = None if is_hub_id(path) else result_at(Path(path))
    if result is not None and result.is_adapter:
        return _adapted(request, result.run)
    if request.base_model is not None:
        raise InputError(f"--base-model: {path} is a model and not an adapter; leave it out.")
    folder = path if result is None else str(result.folder)
    run = None if result is None else result.run
    before = _trained_from(path, result) if request.compares else None
    tokenizer = _tokenizer(request, folder, None)
    own = _whole(request, folder, None, tokenizer, run)
    if before is None:
        return own
    first = _whole(request, *before, tokenizer, run)
    return Unloaded([*first.known, *own.known], lambda: [*first.load(), *own.load()])


def _adapted(request: Request, run: Path | None) -> Unloaded:
    source = adapter_source.read(
        Path(request.path),
        base_model=request.base_model,
        bits=request.bits,
        trust_remote_code=request.trust_remote_code,
    )
    has_own = (source.folder / "tokenizer_config.json").is_file()
    tokenizer = _tokenizer(request, *((str(source.folder), None) if has_own else (source.base, source.revision)))
    if tokenizer.pad_token_id >= source.config.get_text_config().vocab_size:  # PEFT's users add one that no row is for
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    ends = end_tokens_of(source.config, source.base, revision=source.revision)
    own = _known(request.path, source.config, tokenizer, ends)
    base = replace(own, name=source.base)

    def load() -> list[Speaker]:
        model = adapted_model.load_to_answer(source, _dtype(source.dtype)).eval()
        _turn_as_trained(model, source.config, run)
        speaker = Speaker(**vars(own), model=model)
        return [Speaker(**vars(base), model=model, without_adapter=True), speaker] if request.compares else [speaker]

    return Unloaded([base, own] if request.compares else [own], load, source.notes)


def _whole(
    request: Request, path: str, revision: str | None, tokenizer: PreTrainedTokenizerBase, run: Path | None
) -> Unloaded:
    bits, trusts = request.bits, request.trust_remote_code
    config = own_code.load_config(path, revision=revision, trust_remote_code=trusts)
    refuse_if_any(quantization.problems(config, bits))
    refuse_if_any(weights.problems(models.without_weights(config, trusts), weights.files(path, revision)))
    known = _known(path, config, tokenizer, end_tokens_of(config, path, revision=revision))

    def load() -> list[Speaker]:
        device = torch.device("cuda" if bits and torch.cuda.is_available() else "cpu")
        model = models.load_model(
            path,
            config,
            revision=revision,
            trust_remote_code=trusts,
            attention="auto",
            dtype=_dtype(models.stored_dtype(config)),
            seed=0,
            bits=bits,
            device=device,
        )
        _turn_as_trained(model, config, run)
        # of a base that is asked by another's tokenizer
        new_tokens.give_rows(model, new_tokens.of_tokenizer(tokenizer, config))
        return [Speaker(**vars(known), model=adapted_model.on_device(model).eval())]

    return Unloaded([known], load)


def _turn_as_trained(model: torch.nn.Module, config: PreTrainedConfig, run: Path | None) -> None:
    """Give a model the rotary frequencies that a run used, where they are those for long rows.

    Those for short rows transformers chooses for itself, and others for prompts that are longer than what was trained.
    """
    longest = read_run(run.parent).get("config", {}).get("data", {}).get("max_length", 0) if run else 0
    if frequencies.differ(config, longest, 1):
        frequencies.fix(model, longest)


def _known(name: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...]) -> Known:
    own = [token for token in (tokenizer.eos_token_id, end_of_turn(tokenizer)) if token is not None]
    return Known(name, tokenizer, tuple(sorted({*ends, *own})), models.most_positions(config.get_text_config()))


def _tokenizer(request: Request, path: str, revision: str | None) -> PreTrainedTokenizerBase:
    code, template = request.trust_remote_code, request.chat_template
    try:
        tokenizer = models.load_tokenizer(path, revision=revision, trust_remote_code=code, chat_template=template)
    except InputError as error:
        what, key, _ = str(error).partition("; set model.tokenizer")
        raise InputError(f"{what}; copy the files of a fast tokenizer to that folder." if key else what) from error
    if tokenizer.pad_token_id is None:  # masked wherever it stands
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _dtype(stored: torch.dtype) -> torch.dtype:
    """Of computation: that of the weights, or fp32 on a CPU for which 16 bits are slow."""
    is_slow = not torch.cuda.is_available() and (native_precision() == "no" or stored == torch.float16)
    return torch.float32 if is_slow else stored


def _trained_from(path: str, result: Result | None) -> tuple[str, str | None]:
    """The model that a run trained all weights of, and its revision.

    Raises:
        InputError: if nothing says what it was.
    """
    if result is None or result.run is None:
        raise InputError(
            f"--compare: nothing says what {path} was trained from; give an adapter, or the output folder of a run."
        )
    try:
        model = yaml.safe_load(result.run.read_text(encoding="utf-8"))["config"]["model"]
        return str(model["path"]), model["revision"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise InputError(
            f"--compare: {result.run} is not the record of a run ({type(error).__name__}: {error}); leave it out."
        ) from error
