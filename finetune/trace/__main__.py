"""``python -m finetune.trace``: the child of ``child.trace_in_child``. JSON comes in and goes out; exit code 2 with
``problems`` for a setting that cannot be traced."""

import contextlib
import json
import logging
import os
import sys
import warnings

from finetune.errors import InputError
from finetune.trace.child import setting_of


def main() -> int:
    """Read a question, answer it."""
    question = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print
        warnings.simplefilter("ignore")
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        from finetune.trace.dry_run import dry_run

        try:
            answer = dry_run(question["model"], setting_of(question["setting"]), **question["how"]).record()
            code = 0
        except InputError as error:
            answer, code = {"problems": error.problems}, 2
    json.dump(answer, sys.stdout)
    return code


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # the libraries' destructors look for the processes of the group
