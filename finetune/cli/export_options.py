"""Options of the verb ``export``, which takes a result elsewhere. Imports nothing that is slow."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from finetune.errors import InputError


def add_export(verbs: Any) -> None:
    """The verb that writes a result for another program, or uploads it."""
    export = verbs.add_parser(
        "export",
        help="write a model as a GGUF file for llama.cpp and Ollama, or upload a model or adapter to the hub",
        description="Write a model as one GGUF file, or upload a model or an adapter with its card to the hub. An "
        "adapter becomes a model with finetune merge.",
    )
    export.add_argument(
        "model", metavar="RUN_OR_MODEL", type=Path, help="output folder of a run, or folder of an adapter or of a model"
    )
    export.add_argument("--gguf", metavar="FILE", type=Path, help="GGUF file to create")
    export.add_argument(
        "--dtype",
        choices=["bf16", "f16", "f32", "q8_0"],
        help="with --gguf: of the matrices; q8_0 is 8 bits in blocks of 32; default: bf16",
    )
    export.add_argument("--push", metavar="OWNER/NAME", help="repository on the hub to upload to; it is made if needed")
    export.add_argument(
        "--public", action="store_true", help="with --push: everybody may read a repository that is made"
    )
    export.add_argument("--json", action="store_true", help="print the result as JSON")
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> int:
    if options.gguf is None and options.push is None:
        raise InputError("Say where to: --gguf FILE for llama.cpp, or --push OWNER/NAME for the hub.")
    if options.dtype is not None and options.gguf is None:
        raise InputError("--dtype is for --gguf; leave it out: what is uploaded keeps its dtype.")
    if options.public and options.push is None:
        raise InputError("--public is for --push; leave it out.")
    results = {}
    if options.push is not None:
        from finetune.export.hub_upload import to_upload, upload

        to_upload(options.model, options.push)  # refused before minutes of writing
    if options.gguf is not None:
        from finetune.export.gguf_file import describe, write_gguf

        results["gguf"] = write_gguf(options.model, options.gguf, dtype=options.dtype or "bf16")
        if not options.json:
            print(describe(results["gguf"]))
    if options.push is not None:
        results["push"] = upload(
            options.model, options.push, public=options.public, say=lambda line: print(line, file=sys.stderr)
        )
        if not options.json:
            print(f"Uploaded: {results['push']['repository']}")
    if options.json:
        print(json.dumps(results, indent=2))
    return 0
