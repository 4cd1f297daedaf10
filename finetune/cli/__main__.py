"""``python -m finetune.cli``: the command ``finetune``."""

import sys

from finetune.cli.commands import main

sys.exit(main())
