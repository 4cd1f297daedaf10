"""The configuration keys: typed sections, each key with its docstring and its only default.

``finetune.config.command_line`` turns a YAML file and flags into these classes. A section may travel to the code that
it configures; the whole configuration stays with the recipe and the session (``finetune.run``).
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from finetune.config import adapter_file
from finetune.config.key_types import (
    NUMBER,
    LessThanOne,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    UpToOne,
)

Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]


class Section(BaseModel):
    """A group of keys. Unknown keys are errors, and values never change after they are read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Model(Section):
    path: PathText
    """Model folder, or model id on the hub."""
    random_weights: bool = False
    """Draw the weights, by train.seed, instead of reading them. The model then needs config.json and tokenizer."""
    tokenizer: PathText | None = None
    """Folder or hub id of the tokenizer, if it is not the model's own."""
    revision: str | None = None
    """Branch, tag or commit on the hub; not of a model.tokenizer in another repository."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. When off, a downloaded model is only data, never a program."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention implementation. With auto the rows of a micro-batch lie end to end, blind to each other and without
    padding, in PyTorch's variable-length attention; where a model or GPU cannot do that, they are padded, and
    transformers chooses. eager and sdpa (PyTorch's scaled_dot_product_attention) pad."""
    kernels: Literal["auto", "plain"] = "auto"
    """auto: norms and the gated products of MLPs are one operation each, which keeps less for the backward pass. On a
    GPU Liger's kernels compute them, where liger-kernel is installed, and one in Triton steps AdamW over bf16 weights.
    plain: as transformers, PEFT and PyTorch compose them."""
    fp8: bool = False
    """Multiply in 8-bit floating point in the linear layers while training, forward and for the gradients of their
    inputs: faster on GPUs from Ada and Hopper on. Weights stay in 16 or 32 bits, and evaluation is in bf16."""

    @property
    def tokenizer_source(self) -> tuple[str, str | None]:
        """Folder or hub id of the tokenizer, and its revision."""
        return (self.tokenizer, None) if self.tokenizer not in (None, self.path) else (self.path, self.revision)


class Quantization(Section):
    bits: Literal["none", 8, 4] = "none"
    """Quantise the frozen weights of the linear layers with bitsandbytes: 4 bits (NF4 with double quantisation, 0.52
    bytes per weight) or 8 bits (LLM.int8, 1 byte per weight). Needs an adapter. A model that was published quantised is
    detected and loaded as it is."""


class Adapter(Section):
    model_config = ConfigDict(serialize_by_alias=True)

    from_: PathText | None = Field(default=None, alias="from")
    """Continue training a saved adapter: its folder, or the output folder of the run that trained it. Type, rank,
    alpha, targets and modules_to_save are then the adapter's own. Null: begin with a new adapter."""
    type: Literal["none", "lora", "dora"] = "none"
    """none: train every weight. lora: freeze the model and train the product of two low-rank matrices for each linear
    layer (arXiv:2106.09685). dora: also train a magnitude per output (arXiv:2402.09353)."""
    rank: PositiveInt = 16
    """Rank of the two adapter matrices."""
    alpha: PositiveFloat = 32.0
    """The product of the two matrices is scaled by alpha / rank."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank) instead, for large ranks (rsLoRA, arXiv:2312.03732)."""
    lora_plus_ratio: PositiveFloat = 1.0
    """Learning rate of the matrices B over that of the matrices A, which is train.learning_rate (LoRA+,
    arXiv:2402.12354, which finds 16 to be good, with a lower learning rate)."""
    init: Literal["default", "pissa", "olora", "loftq"] = "default"
    """What the two matrices start with. default: B is 0, so the adapter adds nothing. pissa: the largest directions of
    each weight, which are taken off the frozen one (arXiv:2404.02948). olora: likewise the first columns of its QR
    decomposition (arXiv:2406.01775). loftq: the largest directions of what each weight loses in 4 bits
    (arXiv:2310.08659). pissa and olora are saved as an ordinary adapter of twice the rank."""
    dropout: LessThanOne = 0.0
    """Dropout on the adapter's input. Values above 0 need more memory: each layer keeps its own copy of its input."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Linear layers that get an adapter: all except the output head and, in Mamba blocks, all but in_proj; or a list of
    names, for example [q_proj, v_proj]."""
    rank_pattern: dict[str, PositiveInt] = {}
    """Other ranks for some of the targets, by their names, for example {down_proj: 32}."""
    alpha_pattern: dict[str, PositiveFloat] = {}
    """Other values of alpha for some of the targets, as rank_pattern."""
    modules_to_save: list[str] = []
    """Modules that are trained in full and saved with the adapter, for example [embed_tokens, lm_head] to learn new
    tokens."""

    @property
    def is_nothing_at_first(self) -> bool:
        """Whether the model that training begins with is the one that the adapter, when it is off, leaves."""
        return self.type != "none" and self.from_ is None and self.init == "default"

    @model_validator(mode="before")
    @classmethod
    def _take_over_what_is_continued(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("from"), str):
            return values
        return values | adapter_file.continued(values["from"], values)


class DataSource(Section):
    path: PathText
    """File, glob, folder, or hub id of a dataset."""
    weight: PositiveFloat = 1.0
    """How often each of its rows is used per epoch: 2 means twice, 0.5 means about half of the rows, chosen by hash."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    split: str | None = None
    """Split of a hub dataset; without it, train."""
    revision: str | None = None
    """Commit, tag or branch of a hub dataset; without it, the newest commit of its main branch."""


class Data(Section):
    train: PathText | Annotated[list[PathText | DataSource], Field(min_length=1)]
    """Training data: a file (.jsonl, .ndjson, .json, .csv, .tsv or .txt, also compressed as .gz or .zst, or .parquet),
    a glob, a folder, or the hub id of a dataset (owner/name). Or a list of these, each a string or an object with the
    keys path, weight, subset, split and revision."""
    eval: PathText | list[PathText | DataSource] | Annotated[float, Field(gt=0, lt=1), NUMBER] | None = None
    """Held-out data: never trained on, used for eval_loss and for the answers to eval.prompts. Sources as for train, or
    a fraction of the training rows, for example 0.05. The fraction is chosen by a hash of each row, so a row is always
    on the same side."""
    split_key: str | None = None
    """Field to hash instead of the whole row when data.eval is a fraction. Rows with the same value, for example parts
    of one document, stay on the same side."""
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt-completion", "text"] = "auto"
    """Format of a row; auto detects it from the keys of each row and reports what it found."""
    columns: dict[str, str] = {}
    """Columns of your rows that have other names than the fields of their format: each field with its column, for
    example {prompt: question, completion: answer}."""
    chat_template: PathText | None = None
    """Chat template to use instead of the tokenizer's: a Jinja file, or a name for base models that have none (chatml,
    gemma, llama3, mistral, phi3, zephyr). Special tokens of a named one that the tokenizer lacks are added to it, and
    their rows of embedding and output head are trained, also beside an adapter."""
    max_length: PositiveInt = 2048
    """Maximum tokens per row. What becomes of longer conversations is for too_long to say. Longer plain texts are split
    into several rows and lose nothing."""
    too_long: Literal["cut", "keep_end", "drop", "error"] = "cut"
    """Conversations and answers of more than max_length tokens. cut: their end is cut off, and they are counted; those
    left without a trained token are dropped and counted. keep_end: their beginning is cut off, system message
    included. drop: they are left out and counted. error: each is an unusable row."""
    packing: bool = False
    """Pack several documents into one row of max_length tokens, so that all rows are nearly as long. A document does
    not attend to the others. global_batch_size and micro_batch_size then count packed rows."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens are trained: every assistant answer including its end-of-turn token, only the last answer, or all
    tokens. For prompt and completion, it is the completion; for a plain text, all tokens."""
    train_think: Literal["auto", "never"] = "auto"
    """auto: whatever follows the generation prompt is trained, blocks of reasoning included, and the empty ones that
    some templates write too. never: the model reads such blocks, and is not trained to write them."""
    on_dropped: Literal["error", "warn"] = "error"
    """error: a conversation of which the chat template leaves something out (the system's words, definitions of tools,
    reasoning ...) is an unusable row, and so is a plain text that begins or ends with the name of a special token.
    warn: train on what is left of it, and count it; of such a text train the characters."""
    on_bad_row: Literal["error", "skip"] = "error"
    """error: an unusable row stops the run before training. skip: train on the other rows, and write each skipped row
    to rejected.jsonl in the output folder, with the reason."""
    streaming: bool = False
    """Read, tokenise and pack during training and cache nothing on disk, for corpora not worth caching. Rows come in
    file order, shuffled in windows of a thousand. Needs train.steps; every process reads all data."""


class Train(Section):
    output_dir: PathText
    """Folder for everything the run writes."""
    overwrite: bool = False
    """Replace the run that is already in output_dir (its run.yaml, metrics.jsonl, final/ and checkpoints)."""
    epochs: PositiveFloat = 1.0
    """Passes over the training rows."""
    steps: PositiveInt | None = None
    """Optimizer steps; overrides epochs."""
    global_batch_size: PositiveInt = 16
    """Rows per optimizer step, over all processes and micro-batches. It changes the result of the run."""
    micro_batch_size: PositiveInt | Literal["auto"] = 1
    """Rows that one process computes at a time. It changes memory and speed, never the result. auto: the size that the
    planner predicts to be the fastest of those that fit the GPU."""
    learning_rate: PositiveFloat = 2e-5
    """Peak learning rate of the schedule. A run with an adapter that sets none has 2e-4 (2e-5 in recipes/dpo.py)."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """How the learning rate decays after the warm-up. wsd: it stays at its peak, and decays at the end, over
    decay_ratio of the steps (arXiv:2405.18392)."""
    warmup_ratio: LessThanOne = 0.03
    """Fraction of the steps used for the learning-rate warm-up."""
    warmup_steps: NonNegativeInt | None = None
    """Optimizer steps of the warm-up; overrides warmup_ratio."""
    decay_ratio: UpToOne = 0.2
    """Fraction of the steps in which wsd decays the learning rate."""
    min_learning_rate_ratio: LessThanOne = 0.0
    """The learning rate to which schedules decay, as a fraction of its peak."""
    min_learning_rate: PositiveFloat | None = None
    """The same as a learning rate, in place of min_learning_rate_ratio."""
    betas: Annotated[list[LessThanOne], Field(min_length=2, max_length=2)] | None = None
    """How slowly the optimizer's two moving averages forget, of the gradient and of its square (Lion: of the gradient,
    in the update and in the average): null for [0.9, 0.999], in Lion [0.9, 0.99]. Pretraining often has [0.9, 0.95]."""
    layer_decay: UpToOne = 1.0
    """Learning rate of a layer over that of the layer above it (arXiv:1801.06146, arXiv:2003.10555); embeddings are
    below the first. The top layer, the last norm and the output head have train.learning_rate."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of the weight matrices (L2 for SGD); none for norms, biases and DoRA's magnitudes."""
    decay_embeddings: bool = True
    """Whether the weight decay is that of embeddings too, and of an output head that shares their weights."""
    neftune_alpha: NonNegativeFloat = 0.0
    """Noise on the embeddings of training rows (NEFTune, arXiv:2310.05914, which uses 5 to 15); 0 for none."""
    label_smoothing: LessThanOne = 0.0
    """Share of each target that all tokens of the vocabulary have in equal parts (arXiv:1512.00567). loss is then the
    smoothed one; eval_loss is not smoothed."""
    router_aux_loss_coef: NonNegativeFloat | None = None
    """Coefficient of the load-balancing loss of a mixture of experts, which is computed for each document, added to the
    loss of training and reported as router_aux_loss; 0 for none. null: as transformers, the coefficient of the model's
    config.json if that sets output_router_logits, else none."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip gradients to this global norm; 0 disables clipping. Metrics report the norm before clipping either way."""
    max_bad_steps: PositiveInt = 5
    """Stop the run after this many consecutive steps with a non-finite loss or gradient. Such a step never changes the
    weights: all processes skip it, it is counted, and its rows are named."""
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "lion_8bit", "adafactor", "sgd"] = "adamw"
    """adamw: fused on a GPU, 8 bytes of state per trained weight. adamw_8bit: 2 bytes. paged_adamw_8bit: the same,
    moved to host memory when the GPU is full. lion_8bit: 1 byte; use a third to a tenth of AdamW's learning rate.
    adafactor: one row and one column of state per matrix. sgd: no state, no momentum."""
    ema_decay: LessThanOne = 0.0
    """Average the trained weights over the steps (Polyak averaging, arXiv:1803.05407), and evaluate and save the
    averages: each step keeps this share of them, for example 0.999, and the first steps of a run less. 4 bytes of state
    more per trained weight; the training itself does not change. 0: no averages."""
    weights: Literal["fp32_master", "bf16"] = "fp32_master"
    """fp32_master: trained weights and optimizer state in fp32, computation in the launch file's mixed_precision. bf16:
    weights, gradients and optimizer state in bf16, for half the memory. AdamW then rounds its updates stochastically,
    because rounding to nearest would lose most small updates."""
    activation_checkpointing: Literal["auto", "none", "full", "offload"] | PositiveInt = "auto"
    """full: recompute each layer in the backward pass, which saves memory and adds about a third more computation. A
    number: as many layers, the first ones. offload: full, but for attention, with what is kept in host memory: for very
    long rows. auto: as few as leave a tenth of the GPU's memory free, offload where full does not; none on a CPU."""
    pipeline_parts: PositiveInt = 1
    """Parts of the layers that each stage of pp has (interleaved 1F1B, arXiv:2104.04473): with 2, stages wait half as
    long for one another, send hidden states twice as often, and keep more activations. It never changes the result."""
    pipeline_schedule: Literal["1f1b", "zero_bubble"] = "1f1b"
    """Order in which stages of pp compute. zero_bubble (ZB-H1, arXiv:2401.10241): they defer the gradients of linear
    layers' weights until they would else wait, which leaves a third of it, and keep more activations. Adapters have
    nothing to defer. It never changes the result."""
    plan_check: Literal["on", "off"] = "on"
    """on: refuse a run whose predicted peak exceeds the GPU's memory before anything is loaded, and name the nearest
    configuration that fits. off: try it anyway."""
    seed: Annotated[NonNegativeInt, Field(lt=2**63)] = 0
    """Seed of the row order, dropout and random weights."""

    @property
    def least_micro_batch_size(self) -> int:
        """Rows of a micro-batch, as far as they are given: 1 while the planner has not chosen."""
        return 1 if self.micro_batch_size == "auto" else self.micro_batch_size

    @property
    def recomputes(self) -> bool:
        """Whether activations are computed again in the backward pass; not while the planner has not chosen."""
        return self.activation_checkpointing not in ("auto", "none")

    @property
    def recomputed_layers(self) -> int | None:
        """How many layers are computed again in the backward pass, the first ones; None for all."""
        if isinstance(self.activation_checkpointing, int):
            return self.activation_checkpointing
        return None if self.recomputes else 0

    @property
    def offloads_activations(self) -> bool:
        """Whether what recomputed layers keep is in host memory."""
        return self.activation_checkpointing == "offload"

    @property
    def averages(self) -> bool:
        """Whether averages of the weights are kept, and are the result."""
        return self.ema_decay > 0


class Checkpoint(Section):
    every: NonNegativeInt = 500
    """Optimizer steps between checkpoints, which are written while training continues; 0 for none. A signal that stops
    the run (SIGTERM, SIGINT, SIGUSR1, SIGHUP) always saves one."""
    at_end: bool = True
    """Also save a checkpoint after the last step, so that the run can be extended: with a larger train.steps or
    train.epochs, and checkpoint.resume auto."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep; an older one is deleted when a newer one is complete."""
    resume: PathText = "none"
    """none: start a new run. auto: resume from the newest complete checkpoint in output_dir, or start a new run if
    there is none. Or the folder of a checkpoint or of a run. The strategy and the number of processes may change."""
    resume_weights_only: bool = False
    """Take the weights and the position in the data from the checkpoint, but reset the optimizer: for a different
    optimizer, or one whose state cannot be carried over."""


class Task(Section):
    name: str
    """Name of the score in metrics.jsonl, as eval_NAME: letters, digits, - and _."""
    data: PathText
    """File, glob, folder or hub id, in any format of data.train, or with the keys prompt and answer; for scores of
    choices also with the key choices."""
    score: str = "exact_match"
    """What is right: exact_match, contains, regex:PATTERN, regex_last:PATTERN, json, json_fields, choice or
    choice_norm."""
    limit: PositiveInt | None = None
    """Ask the first rows only, this many."""
    max_new_tokens: PositiveInt | None = None
    """Maximum tokens of an answer, which may be as long as the row's own; default: eval.max_new_tokens."""


class Eval(Section):
    every: NonNegativeInt = 0
    """Optimizer steps between evaluations; 0 evaluates only before the first and after the last step."""
    prompts: NonNegativeInt | list[str] = 0
    """Questions to answer before and after training: a list of texts, or a number N (the first N held-out
    conversations; with exact_match, N that are typical of all)."""
    exact_match: bool = False
    """Answer every held-out conversation greedily before and after training, and count the answers that equal the row's
    answer word for word: for tasks with one right answer."""
    metric: str = "eval_loss"
    """Figure of an evaluation by which keep_best and early_stopping compare, as metrics.jsonl names it: eval_loss, or
    eval_... of the recipe. Of losses and bits per byte less is better, of all others more."""
    keep_best: bool = False
    """Keep the checkpoint of the best evaluation beside those of checkpoint.keep, and write its weights to final/."""
    early_stopping: NonNegativeInt = 0
    """End training after this many evaluations in a row that did not improve on the best one; 0: never."""
    max_new_tokens: PositiveInt = 64
    """Maximum tokens of an answer; answers that exact_match compares may be as long as the row's own."""
    tasks: list[Task] = []
    """Questions that are answered and scored whenever the held-out loss is computed: a list of objects with the keys
    name, data, score (exact_match, contains, regex:PATTERN, json_fields, choice ...), limit and max_new_tokens."""


class Log(Section):
    every: PositiveInt = 1
    """Optimizer steps between printed lines when the output is not a terminal. metrics.jsonl has every step."""
    profile: NonNegativeInt = 0
    """Optimizer steps of which the first process writes a trace, profile.json.gz in the output folder, from the third
    that it makes on; 0 for none. Perfetto opens it. Of a few steps: each takes megabytes."""
    to: Tracker | list[Tracker] = []
    """Trackers that get each line of metrics.jsonl too: one, or a list of them; none by default. TensorBoard's files
    are written to tensorboard/ in the output folder. The others send the figures and the configuration to where their
    own settings say (WANDB_MODE, MLFLOW_TRACKING_URI ...)."""
    project: str = "finetune"
    """Project of wandb and trackio, or experiment of mlflow, that the run belongs to."""
    report: bool = True
    """Write report.html, and report.png where matplotlib is installed, at the end of the run."""

    @property
    def trackers(self) -> list[Tracker]:
        """Each once."""
        return list(dict.fromkeys([self.to] if isinstance(self.to, str) else self.to))


class Run(BaseModel):
    """The sections that every recipe has. Read as such, what else a file holds is passed over."""

    model_config = ConfigDict(frozen=True)
    adapter_learning_rate: ClassVar[float] = 2e-4
    """Of a run with an adapter that sets none: ten times that of full fine-tuning (Thinking Machines, "LoRA Without
    Regret", 2025)."""

    model: Model
    quantization: Quantization = Quantization()
    adapter: Adapter = Adapter()
    data: Data
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    log: Log = Log()

    @model_validator(mode="after")
    def _set_learning_rate_of_adapter(self) -> "Run":
        """The default learning rate is that of what is trained; ``model_fields_set`` goes on telling that it is one."""
        if self.has_default_adapter_rate:
            values = dict(self.train) | {"learning_rate": self.adapter_learning_rate}
            train = type(self.train).model_construct(set(self.train.model_fields_set), **values)
            object.__setattr__(self, "train", train)  # the section is frozen for everyone else
        return self

    @property
    def has_default_adapter_rate(self) -> bool:
        """Whether an adapter is trained, and the configuration leaves its learning rate to the default."""
        return self.adapter.type != "none" and "learning_rate" not in self.train.model_fields_set


class Recipe(Run):
    """The configuration of a recipe, which adds sections of its own to it. Other sections and keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
