"""Private names of Python's own library. Read in 3.10 to 3.13."""

import sys
from types import FrameType


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a thread, by its identifier. Documented, but for the underscore."""
    return sys._current_frames().get(thread)
