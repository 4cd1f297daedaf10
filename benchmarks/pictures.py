"""Draws docs/images: a run, and `finetune data`, as they look in a terminal of 80 columns; and the report of the run.

  python -m benchmarks.pictures        # or one of them: python -m benchmarks.pictures data

Each command runs in a pseudo-terminal, in a folder that holds the recipes, the strategy files and ``tiny-llama``, a
model of 0.9 million random weights. What it writes goes through a small emulator, which keeps what a person sees at
the end, and rich draws that as SVG. No font is loaded from elsewhere. Needs Linux or macOS, and no GPU; takes a minute.

Limits: the emulator knows what rich writes, and no more: colours, line feeds, moves upwards, lines that are erased
whole. The seconds of the run differ from one drawing to the next; the picture of the data does not.
"""

import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Sequence
from fcntl import ioctl
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))  # the tests' tiny model

import tiny  # noqa: E402

IMAGES = ROOT / "docs" / "images"
COLUMNS = 80
DATA = ["finetune", "data", "--config", "recipes/configs/demo.yaml", "--model.path", "tiny-llama", "--rows", "2"]
RUN = ["accelerate", "launch", "--config_file", "accelerate_configs/single.yaml", "recipes/sft.py"]
RUN += ["--config", "recipes/configs/demo.yaml", "--model.path", "tiny-llama", "--model.random_weights", "true"]
RUN += ["--adapter.type", "none", "--train.epochs", "10", "--eval.every", "80", "--eval.prompts", "0"]
RUN += ["--eval.exact_match", "false"]  # 0.8 million weights learn the form of the answers, and no names


def data_picture() -> str:
    """What `finetune data` shows of the demo's rows, as SVG: the same characters each time."""
    return drawn(DATA, title="finetune data")


def run_picture() -> str:
    """What the recipe shows of a run of 240 steps, as SVG; its own picture of its figures is kept beside it."""
    return drawn(RUN, title="accelerate launch recipes/sft.py", kept=["runs/demo/report.png"])


def drawn(command: Sequence[str], *, title: str, kept: Sequence[str] = ()) -> str:
    """Run a command of the repository, and draw the terminal at its end.

    Args:
        kept: files that the command writes, which are copied to ``IMAGES``.

    Raises:
        RuntimeError: if the command fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("recipes", "accelerate_configs"):
            (Path(folder) / name).symlink_to(ROOT / name)
        tiny.build_model_folder(Path(folder) / "tiny-llama", hidden_size=192, intermediate_size=384)
        written = output(command, Path(folder))
        for name in kept:
            shutil.copy(Path(folder) / name, IMAGES)
    lines = [f"\x1b[1m{line}\x1b[0m" for line in folded(command)] + ["", *screen(written)]
    return svg([Text.from_ansi(line) for line in lines], title=title)


def folded(command: Sequence[str]) -> list[str]:
    """The command over as many lines as it takes, broken between words, as a person types it."""
    lines = [f"$ {command[0]}"]
    for word in command[1:]:
        if len(f"{lines[-1]} {word} \\") > COLUMNS:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return lines


def output(command: Sequence[str], folder: Path) -> str:
    """Everything that a command writes to a terminal of 80 columns."""
    module = {"finetune": "finetune.cli", "accelerate": "accelerate.commands.accelerate_cli"}[command[0]]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {name: value for name, value in os.environ.items() if "COLOR" not in name} | {
        "PYTHONPATH": paths,
        "TERM": "xterm-256color",
        "COLUMNS": str(COLUMNS),
        "FINETUNE_DATA_CACHE": str(folder / "cache"),
    }
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", module, *command[1:]], cwd=folder, env=environment, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    parts = []
    while part := read(ours):
        parts.append(part)
    os.close(ours)
    text = b"".join(parts).decode()
    if code := process.wait():
        raise RuntimeError(f"{' '.join(command)} ended with exit code {code}:\n{text}")
    return text


def read(terminal: int) -> bytes:
    """The next bytes; none when the last process has closed the terminal, which Linux calls an I/O error."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def screen(written: str) -> list[str]:
    """The lines that are left on the terminal, with their colours; blank ones at the end are left out.

    A bar is drawn, erased (`ESC[2K`) and drawn again one line further down. With `ESC[1A` the cursor goes up:
    "1/2\\r\\x1b[2Ksaved\\n2/2" leaves the lines "saved" and "2/2".
    """
    lines, at = [""], 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", written):
        if piece == "\n":
            at += 1
            lines += [""] * (at + 1 - len(lines))
        elif piece.endswith("A") and piece.startswith("\x1b["):
            at = max(at - int(piece[2:-1] or 1), 0)
        elif piece == "\x1b[2K":
            lines[at] = ""
        elif not piece.startswith("\x1b") or piece.endswith("m"):
            lines[at] += "" if piece == "\r" else piece
    while lines and not lines[-1]:
        lines.pop()
    return lines


def svg(lines: Sequence[Text], *, title: str) -> str:
    """A terminal of 80 columns that shows these lines; a longer one goes on in the next, as in a terminal."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(line, overflow="fold", highlight=False)
    return re.sub(r"@font-face \{.*?\}\n?", "", console.export_svg(title=title, unique_id="terminal"), flags=re.DOTALL)


PICTURES = {"data": data_picture, "run": run_picture}


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        (IMAGES / f"{name}.svg").write_text(PICTURES[name](), encoding="utf-8")


if __name__ == "__main__":
    main()
