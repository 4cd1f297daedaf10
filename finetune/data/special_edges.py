"""Special tokens that somebody wrote into a plain text: rendered conversations, and EOS added by hand.

In a plain text their characters are text, and the tokens in front of it and behind it are added to it. What is meant as
a token must not be trained as ``<``, ``/s``, ``>`` without a word.
"""

from collections.abc import Collection

from finetune.data.formats import Example
from finetune.errors import BadRow


def refuse_special_edges(example: Example, specials: Collection[str]) -> None:
    """Refuse a plain text that begins or ends with the name of a special token.

    Raises:
        BadRow: naming it.
    """
    if example.messages is not None:
        return
    text, names = (example.prompt + example.completion).strip(), tuple(specials)
    if example.begins and text.startswith(names):
        edge, token = "begins", max(filter(text.startswith, names), key=len)
    elif example.ends and text.endswith(names):
        edge, token = "ends", max(filter(text.endswith, names), key=len)
    else:
        return
    raise BadRow(
        f"the text {edge} with {token}, which is a special token in conversations only: here its characters would be "
        "trained. Give a conversation as messages; leave out tokens in front and at the end, which are added; or set "
        "data.on_dropped to warn to train the characters"
    )
