"""What a file of prompts asks: rows in any format that training reads, up to their last answer."""

from finetune.data import sources
from finetune.data.columns import Columns, renamed
from finetune.data.formats import convert_prompt
from finetune.data.prompt_texts import Prompt
from finetune.data.sources import Record, Source
from finetune.errors import BadRow, InputError, refuse_if_any
from finetune.scoring.task_rows import shortened


def prompt_of(text: str, *, system: str | None, plain: bool) -> Prompt:
    """A text that somebody typed.

    Raises:
        InputError: if it is blank.
    """
    if not text.strip():
        raise InputError("The prompt is empty; give a text, or a file of prompts with --prompts.")
    return Prompt.of_user("the prompt", text, is_plain=plain, system=system or None)


def read_prompts(path: str, columns: Columns = ()) -> list[Prompt]:
    """The prompts of a file, in its order.

    Args:
        columns: that rows of the training were read by; rows without them are read by the names that they have.

    Raises:
        InputError: with file and line of the first rows that ask nothing; there is no such file, or nothing in it.
    """
    source = Source(path)
    refuse_if_any([f"--prompts {problem}" for problem in sources.problems([source])])
    found: list[Prompt] = []
    wrong: list[str] = []
    for each in sources.read(source):
        try:
            if not isinstance(each, Record):
                raise BadRow(each.reason)
            found.append(Prompt(each.source, convert_prompt(renamed(each.value, columns)), each.value))
        except BadRow as reason:
            wrong.append(f"{each.source}: {reason}; correct the row, or leave it out.")
    refuse_if_any(shortened(wrong, "asked"))
    if not found:
        raise InputError(f"--prompts {path}: there are no rows in it; give a file with a prompt in each.")
    return found
