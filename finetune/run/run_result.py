"""What a run left, in a notebook's hands: metrics as a table, losses as a picture, answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config import sections
from finetune.errors import InputError
from finetune.output import run_files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

ANSWERED_TOGETHER = 8


@dataclass(frozen=True)
class RunResult:
    """A run by its output folder, from which everything is read when it is asked for.

    A recipe's ``main`` returns it, on every process. ``RunResult(Path("runs/sample"))`` is that of an earlier run.
    """

    folder: Path
    """The output folder: run.yaml, metrics.jsonl, checkpoints/ and final/."""

    @classmethod
    def of(cls, cfg: sections.Run) -> "RunResult":
        """Of the run that a configuration asks for."""
        return cls(Path(cfg.train.output_dir))

    @property
    def final(self) -> Path:
        """The folder of the trained model, or of the adapter."""
        return self.folder / "final"

    @property
    def record(self) -> dict[str, Any]:
        """What run.yaml says: configuration, strategy, versions, predictions and measurements."""
        return run_files.read_run(self.folder)

    @property
    def metrics(self) -> "DataFrame":
        """metrics.jsonl as a table with a row for each optimizer step, which is its index; empty before the first."""
        import pandas as pd

        lines = run_files.read_metrics(self.folder)[0]
        rows = [lines[step] for step in sorted(lines)]
        return pd.DataFrame(rows, columns=None if rows else ["step", "loss"]).set_index("step")

    def plot(self, axes: "Axes | None" = None, *, label: str = "training") -> "Axes":
        """Draw the loss over the optimizer steps, and the held-out loss where there is one; returns the axes.

        Args:
            axes: to draw into, as those of another run; None makes new ones.
            label: of the line.

        Raises:
            InputError: if matplotlib is missing.
        """
        try:
            import matplotlib.pyplot as plt
            from matplotlib.ticker import MaxNLocator
        except ImportError as error:
            raise InputError(
                "plot() needs matplotlib, which is not installed; install it with: pip install matplotlib."
            ) from error
        metrics = self.metrics
        if axes is None:
            axes = plt.figure(figsize=(6, 3)).add_subplot(xlabel="optimizer step", ylabel="loss")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.plot(metrics.index, metrics["loss"], label=label)
        if "eval_loss" in metrics:
            before = self.record.get("eval_loss", {}).get("before")
            held_out = ({} if before is None else {0: before}) | metrics["eval_loss"].dropna().to_dict()
            axes.plot(list(held_out), list(held_out.values()), marker="o", label=f"{label}, held out")
        axes.legend()
        return axes

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        system: str | None = None,
        plain: bool | None = None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Any:
        """Answers of the trained model, as ``finetune generate`` gives them: a text to a text, a list to a list.

        The model is loaded for the first answer, and stays in memory as long as this object.

        Args:
            system: what the system says before each prompt.
            plain: continue the prompts as texts; None does so where the model has no chat template.
            max_new_tokens: after which an answer is cut.
            temperature: of sampling; 0 takes the most likely token each time.
            top_p: of sampling: the most likely tokens that have this probability together.
            seed: of sampling.

        Raises:
            InputError: if the run has no result yet, or a prompt or a setting cannot be used.
        """
        from finetune.generation.manner import Manner
        from finetune.generation.prompts import prompt_of

        manner = Manner(max_new_tokens, temperature, top_p, seed)
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        is_plain = self._speaker.tokenizer.chat_template is None if plain is None else plain
        tokens = self._speaker.prompt_tokens([prompt_of(text, system=system, plain=is_plain) for text in texts])
        answers = [
            answer.text
            for begin in range(0, len(tokens), ANSWERED_TOGETHER)
            for answer in self._speaker.answers(tokens[begin : begin + ANSWERED_TOGETHER], manner, number=begin)
        ]
        return answers[0] if isinstance(prompts, str) else answers

    @cached_property
    def _speaker(self) -> Any:
        from finetune.generation.speaker_loading import Request, read_speakers

        (speaker,) = read_speakers(Request(str(self.folder))).load()
        return speaker
