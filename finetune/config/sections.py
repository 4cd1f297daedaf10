"""The keys of a recipe: every section typed, every key with its docstring and its only default.

``finetune.config.command_line`` turns a YAML file and flags into these classes. A section may travel to the code that
it configures; the whole configuration stays with the recipe and the session (``finetune.run``).
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A group of keys: unknown keys are errors, and a value never changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Model(Section):
    path: str
    """Folder of a model, or its id on the hub."""
    random_weights: bool = False
    """Start from random weights drawn from train.seed, and read no others: for training from scratch, benchmarks and
    tests. Of the model, only its config.json and its tokenizer are then needed."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer, where it is not the model's own."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off: a downloaded model is data, not a program."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention implementation; auto leaves the choice to transformers: sdpa (PyTorch's scaled_dot_product_attention)
    for most models; with data.packing it is PyTorch's own attention for documents of varying length."""


class Quantization(Section):
    bits: Literal["none", 8, 4] = "none"
    """Store the frozen weights of the linear layers in fewer bits, through bitsandbytes: 4 (NF4 with double
    quantisation, 0.52 bytes a weight) or 8 (LLM.int8, 1 byte). Needs an adapter. A model that is published quantised
    is recognised, and loaded as it is."""


class Adapter(Section):
    type: Literal["none", "lora", "dora"] = "none"
    """none: every weight is trained. lora: the model is frozen, and a product of two thin matrices is trained beside
    each linear layer (arXiv:2106.09685). dora: a magnitude per output as well (arXiv:2402.09353)."""
    rank: PositiveInt = 16
    """Rank of the two matrices."""
    alpha: PositiveFloat = 32.0
    """The product is scaled by alpha / rank."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank) instead, for large ranks (rsLoRA, arXiv:2312.03732)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapter's input. Above 0 it takes more memory: each layer keeps its own copy of its input."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Linear layers that get an adapter: all but the output head, or a list of names, [q_proj, v_proj] say."""
    modules_to_save: list[str] = []
    """Modules trained whole and saved with the adapter, [embed_tokens, lm_head] where new tokens must be learned."""


class DataSource(Section):
    path: str
    """File, glob, folder, or id of a dataset on the hub."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """How often each of its rows is trained in an epoch: 2 is twice, 0.5 is about half of them, chosen by a hash."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    split: str = "train"
    """Split of a hub dataset."""


class Data(Section):
    train: str | Annotated[list[str | DataSource], Field(min_length=1)]
    """What to train on: a file (.jsonl, .json, .parquet, .csv, .tsv or .txt, also with .gz or .zst behind it), a glob,
    a folder, or the id of a dataset on the hub (owner/name); or a list of these, each a text or an object with path,
    weight, subset and split."""
    eval: str | list[str | DataSource] | Annotated[float, Field(gt=0, lt=1)] | None = None
    """What is held out: never trained, used for eval_loss and for the answers of eval.prompts. Sources as for train, or
    a fraction of the training rows, 0.05 say, chosen by a hash of each row, so that a row never changes sides."""
    split_key: str | None = None
    """Field of a row whose hash decides, in place of the whole row's, on which side of a fraction it falls: rows that
    agree in it, turns of one document say, stay together."""
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt-completion", "text"] = "auto"
    """What a row looks like; auto tells it by the keys of each row, and names what was found."""
    chat_template: str | None = None
    """File with a Jinja chat template, in place of the tokenizer's."""
    max_length: PositiveInt = 2048
    """Tokens of a row, at most. Longer conversations are cut at the end and counted; one that keeps no trained token is
    dropped and counted. Longer plain texts are cut into several rows, and lose nothing."""
    packing: bool = False
    """Put several documents into one row of max_length, each blind to the others, so that no position is spent on
    padding. global_batch_size and micro_batch_size then count packed rows."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens are trained: every answer of the assistant with the end of its turn, the last answer alone, or all.
    Of prompt and completion, the completion; of a text, all."""
    on_bad_row: Literal["error", "skip"] = "error"
    """error: a row that cannot be used stops the run before it begins. skip: the others are trained, and each left out
    is written to rejected.jsonl in the output folder, with its reason."""
    streaming: bool = False
    """Read, tokenise and pack while training, and keep nothing on disk, for corpora that are not worth a cache: rows
    come in the order of the files, shuffled a thousand at a time. Needs train.steps; every process reads everything."""


class Train(Section):
    output_dir: str
    """Folder for everything that the run leaves."""
    overwrite: bool = False
    """Replace the run that output_dir holds already (its run.yaml, metrics.jsonl and final/)."""
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Passes over the training rows."""
    steps: PositiveInt | None = None
    """Optimizer steps; takes the place of epochs."""
    global_batch_size: PositiveInt = 16
    """Rows of one optimizer step, over all processes and micro-batches: the mathematics of the run."""
    micro_batch_size: PositiveInt | Literal["auto"] = 1
    """Rows that one process computes at a time: memory and speed, never the result. auto: what the planner predicts to
    be fastest of what fits the GPU."""
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2e-5
    """The highest learning rate of the schedule."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Share of the steps over which the learning rate rises."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of the weight matrices (L2 for SGD); norms, biases and DoRA's magnitudes have none."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients with a larger global norm are scaled down to it; 0 switches clipping off. Metrics report the norm
    before clipping either way."""
    max_bad_steps: PositiveInt = 5
    """Steps in a row whose loss or gradients are not finite, until the run stops. Such a step never changes the
    weights: it is left out on all processes, counted, and its rows are named."""
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "lion_8bit", "adafactor", "sgd"] = "adamw"
    """AdamW (betas 0.9 and 0.999; fused on a GPU), 8 bytes of state a trained weight. adamw_8bit: 2 bytes;
    paged_adamw_8bit: the same, moved to host memory when the GPU is full; lion_8bit: 1 byte (betas 0.9 and 0.99; take
    a third to a tenth of AdamW's learning rate). adafactor: a row and a column of state a matrix. sgd: no
    state, no momentum."""
    weights: Literal["fp32_master", "bf16"] = "fp32_master"
    """fp32_master: trained weights and optimizer state in fp32, computation in the launch file's mixed_precision.
    bf16: weights, gradients and optimizer state in bf16, half of the memory; AdamW then rounds each update of a
    weight stochastically, because rounding to nearest would lose most small updates."""
    activation_checkpointing: Literal["auto", "none", "full"] = "auto"
    """full: recompute each layer in the backward pass, for less memory and about a third more computation. auto: none
    where the planner predicts that it fits with a tenth of the GPU's memory to spare, else full; none on a CPU."""
    plan_check: Literal["on", "off"] = "on"
    """on: a run whose predicted peak is more than a GPU has is refused before anything is loaded, with the nearest
    that fits. off: it is tried."""
    seed: NonNegativeInt = 0
    """Seed of the row order, of dropout and of random weights."""

    @property
    def least_micro_batch_size(self) -> int:
        """Rows of a micro-batch, as far as they are given: 1 while the planner has not chosen."""
        return 1 if self.micro_batch_size == "auto" else self.micro_batch_size

    @property
    def recomputes(self) -> bool:
        """Whether activations are computed again in the backward pass; not while the planner has not chosen."""
        return self.activation_checkpointing == "full"


class Checkpoint(Section):
    every: NonNegativeInt = 500
    """Optimizer steps between checkpoints; 0: none. A signal (SIGTERM, SIGINT, SIGUSR1) that ends the run leaves one in
    any case. Writing goes on beside training."""
    at_end: bool = True
    """The last step leaves a checkpoint too, so that the run can go on with more steps: with a larger train.steps or
    train.epochs, and checkpoint.resume auto."""
    keep: PositiveInt = 2
    """Newest checkpoints that are kept; an older one is deleted when a newer one is complete."""
    resume: str = "none"
    """none: begin. auto: go on from the newest complete checkpoint of output_dir, or begin where there is none. Or the
    folder of a checkpoint, or of a run. Strategy and number of processes may be others than before."""
    resume_weights_only: bool = False
    """Take the weights and the position in the data from the checkpoint, and start the optimizer anew: for another
    optimizer, or one whose state cannot be carried over."""


class Eval(Section):
    every: NonNegativeInt = 0
    """Optimizer steps between evaluations; 0: only before the first and after the last step."""
    prompts: NonNegativeInt | list[str] = 0
    """Questions answered before and after training: a number (the first so many held-out conversations; with
    exact_match, so many that are typical of all) or a list of texts."""
    exact_match: bool = False
    """Answer every held-out conversation before and after training, greedily, and count the answers that are the row's
    own, word for word: for tasks with one right answer."""
    max_new_tokens: PositiveInt = 64
    """Length of an answer, in tokens, at most; answers that exact_match compares may be as long as the row's own."""


class Log(Section):
    every: PositiveInt = 1
    """Optimizer steps between printed lines where the output is not a terminal. metrics.jsonl has every step."""


class Run(BaseModel):
    """The sections that every recipe has. Read as such, what else a file holds is passed over."""

    model_config = ConfigDict(frozen=True)

    model: Model
    quantization: Quantization = Quantization()
    adapter: Adapter = Adapter()
    data: Data
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    log: Log = Log()


class Recipe(Run):
    """The configuration of a recipe, which adds sections of its own to it. Other sections and keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
