"""``python -m finetune.trace``: the child of a ``Tracer``. Each line that comes in is a question, as JSON."""

import json
import os
import sys
import warnings


def main() -> None:
    """Answer questions until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    warnings.simplefilter("ignore")
    from finetune.trace.serving import answers_to, import_the_rest, workers

    import_the_rest()
    with workers() as forks:
        for line in sys.stdin:
            for answer in answers_to(json.loads(line), forks):
                print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
