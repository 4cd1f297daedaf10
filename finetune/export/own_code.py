"""Models whose code comes with them: it is run where a command is told to, whatever the run was."""

from transformers import PreTrainedConfig

from finetune.errors import InputError
from finetune.models import loading


class OwnCodeError(InputError):
    """A model needs code of its own, and that may not be run."""


def load_config(path: str, *, revision: str | None, trust_remote_code: bool) -> PreTrainedConfig:
    """As ``models.loading.load_config``.

    Raises:
        InputError: as that does.
        OwnCodeError: if the model's code would have to be run.
    """
    try:
        return loading.load_config(path, revision=revision, trust_remote_code=trust_remote_code)
    except InputError as error:
        if trust_remote_code or "trust_remote_code=True" not in str(error.__cause__):
            raise
        raise OwnCodeError(
            f"The model {path} comes with code of its own, and no code is run unless you say so; if you trust it, add "
            "--trust-remote-code."
        ) from error
