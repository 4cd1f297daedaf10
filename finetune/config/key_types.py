"""The types of keys that take numbers or paths."""

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticKnownError


def _no_boolean(error: Literal["int_type", "float_type"]) -> BeforeValidator:
    """Refuse true and false, of which pydantic would make 1 and 0."""

    def refuse(value: Any) -> Any:
        if isinstance(value, bool):
            raise PydanticKnownError(error)
        return value

    return BeforeValidator(refuse)


WHOLE, NUMBER = _no_boolean("int_type"), _no_boolean("float_type")
"""Of every key that takes an integer, and of every key that takes a float."""
PositiveInt = Annotated[int, Field(ge=1), WHOLE]
NonNegativeInt = Annotated[int, Field(ge=0), WHOLE]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER]
LessThanOne = Annotated[float, Field(ge=0, lt=1), NUMBER]
UpToOne = Annotated[float, Field(gt=0, le=1), NUMBER]
PathText = Annotated[str, AfterValidator(os.path.expanduser)]
"""The shell expands ~ neither in a file nor behind an equals sign, and a folder of this name is easily removed with all
that is in the home folder."""
