"""What the hub does not give is said within seconds, with the remedy that fits; the rest is left to the libraries."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tiny

from finetune import hub_access
from finetune.cli import hub_first
from finetune.data.sources import Source, identity, read
from finetune.data.sources.names import is_hub_dataset
from finetune.data.sources.names import problems as data_problems
from finetune.errors import InputError
from finetune.export.hub_upload import local_base_of
from finetune.export.results import Result
from finetune.models import loading as models
from finetune.models.model_config import read_config

SAMPLE = Path(__file__).parent.parent / "recipes" / "configs" / "sample.yaml"
COMMIT = "0" * 40
ANSWERS: dict[str, tuple[int, dict[str, str]]] = {
    "good": (200, {"X-Repo-Commit": COMMIT, "ETag": '"1"', "Content-Length": "2"}),
    "gated": (401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}),
    "absent": (404, {"X-Error-Code": "RepoNotFound"}),
    "private": (401, {}),
    "no_revision": (404, {"X-Error-Code": "RevisionNotFound"}),
    "no_file": (404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}),
    "forbidden": (403, {"X-Error-Message": "The token may not read this."}),
    "busy": (503, {}),
    "not_here": (404, {}),
}


SILENTLY_ASKED: list[str] = []
"""What was asked for and not answered."""


class Hub(BaseHTTPRequestHandler):
    """Answers for ``owner/NAME`` as the real one does; not at all for ``owner/silent``. Every file is ``{}``."""

    def do_GET(self) -> None:  # the names that http.server asks for
        self.do_HEAD()
        self.wfile.write(b"{}")

    def do_HEAD(self) -> None:
        name = self.path.removeprefix("/datasets").split("/")[2]
        if name == "silent":
            SILENTLY_ASKED.append(self.path)
            time.sleep(30)
            return
        code, headers = ANSWERS.get(name, (404, {}))
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def said(endpoint: str, cache: Path, code: str, **environment: str) -> list[str]:
    """What a program prints, line by line, that may ``ask`` for names; with its standard error."""
    program = (
        "import time\n"
        "from finetune.errors import InputError\n"
        "from finetune.hub_access import refuse_without_access\n"
        "def ask(name, file='config.json', **how):\n"
        "    began = time.monotonic()\n"
        "    try: refuse_without_access(name, file, **how); print('given')\n"
        "    except InputError as error: print(error)\n"
        "    assert time.monotonic() - began < 6\n"
    )
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", program + code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | own | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def test_each_refusal_of_the_hub_has_its_own_remedy_and_other_answers_have_none(endpoint: str, tmp_path: Path):
    names = [f"owner/{name}" for name in ANSWERS]
    lines = dict(zip(ANSWERS, said(endpoint, tmp_path, f"for name in {names}: ask(name, revision='v2')"), strict=True))
    given = [name for name, line in lines.items() if line == "given"]
    assert given == ["good", "no_file", "busy", "not_here"]
    assert lines["gated"] == (
        f"No access to owner/gated: accept its terms at {endpoint}/owner/gated, log in with `hf auth login`, or give "
        "the folder of a model."
    )
    assert lines["absent"].startswith(
        "The hub has no model owner/absent, or it is private: check the name, log in with"
    )
    assert lines["no_revision"].startswith("owner/no_revision has no branch, tag or commit v2: check the revision")
    for name in ("private", "forbidden"):
        assert lines[name].startswith(f"No access to owner/{name} (")
        assert lines[name].endswith("): log in with `hf auth login`, or give the folder of a model.")


def test_dataset_is_asked_for_where_datasets_lie(endpoint: str, tmp_path: Path):
    code = "ask('owner/good', 'README.md', kind='dataset'); ask('owner/gated', 'README.md', kind='dataset')"
    good, gated = said(endpoint, tmp_path, code)
    assert good == "given"
    assert f"{endpoint}/datasets/owner/gated" in gated
    assert gated.endswith("or give the folder of a dataset.")


def test_hub_that_does_not_answer_is_waited_for_no_longer_than_the_time_given(endpoint: str, tmp_path: Path):
    (line,) = said(endpoint, tmp_path, "ask('owner/silent', seconds=0.3)")
    assert line.startswith("The hub cannot be reached (")
    assert line.endswith(
        "), and owner/silent is not in the cache: check the network, log in with `hf auth login` if the model is "
        "gated, or give the folder of a model."
    )


def put_into_cache(home: Path, name: str) -> None:
    """An empty config.json of ``owner/NAME``."""
    repository = home / "hub" / f"models--owner--{name}"
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    (repository / "snapshots" / COMMIT / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)


def test_without_a_network_what_the_cache_knows_is_given_and_folders_need_no_hub(tmp_path: Path):
    put_into_cache(tmp_path, "known")
    code = f"ask('owner/known'); ask('owner/unknown'); ask({str(tmp_path)!r}); ask('a b/c')"
    for environment, reason in (({}, "The hub cannot be reached ("), ({"HF_HUB_OFFLINE": "1"}, "owner/unknown is not")):
        known, unknown, folder, wrong = said("http://127.0.0.1:9", tmp_path, code, **environment)
        assert (known, folder) == ("given", "given")
        assert unknown.startswith(reason)
        assert wrong == "a b/c is neither a local folder nor a hub id (owner/name); check the name."


@pytest.mark.parametrize(
    "load",
    [
        lambda: models.load_config("owner/name", revision=None, trust_remote_code=False),
        lambda: models.load_tokenizer("owner/name", revision=None, trust_remote_code=False, chat_template=None),
        lambda: identity([Source("owner/name")]),
        lambda: next(read(Source("owner/name"), streaming=True)),
        lambda: read_config("owner/name"),
    ],
    ids=["model", "tokenizer", "dataset", "streamed dataset", "plan"],
)
def test_whatever_loads_from_the_hub_asks_for_access_first(
    load: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub_access, "_failure", lambda url, seconds: OSError(f"no way to {url.split('/')[-1]}"))
    with pytest.raises(
        InputError, match=r"^The hub cannot be reached \(no way to \w+.(json|md)\), and owner/name is not"
    ):
        load()


PLAN = (
    "import huggingface_hub\n"
    "from finetune.cli import commands, plan_verb\n"
    "def plan(name):\n"
    "    began = time.monotonic()\n"
    "    print(commands.main(['plan', '--model', name, '--gpus', '1xH100']))\n"
    "    print(time.monotonic() - began < 5)\n"
)
"""A program that prints what ``finetune plan`` says, its exit code, and whether it took less than five seconds."""
REMEDY = "log in with `hf auth login`"
WAY_OUT = ", or give a config.json file (--model path/to/config.json)."


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated", "absent", "private", "forbidden", "not_here", "no_file", "busy", "silent"])
def test_plan_without_access_ends_within_seconds_in_one_sentence_with_the_login_and_a_way_out(
    name: str, endpoint: str, tmp_path: Path
):
    line, code, in_time = said(endpoint, tmp_path, f"{PLAN}plan('owner/{name}')")
    assert line.startswith("error: ")
    assert f"owner/{name}" in line
    assert REMEDY in line
    assert line.endswith(WAY_OUT)
    assert ". " not in line
    assert (code, in_time) == ("2", "True")


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, {"HF_HUB_OFFLINE": "1"}], ids=["no hub", "offline"])
def test_plan_without_a_network_ends_so_too(environment: dict[str, str], tmp_path: Path):
    line, code, in_time = said("http://127.0.0.1:9", tmp_path, f"{PLAN}plan('owner/unknown')", **environment)
    assert REMEDY in line
    assert line.endswith(WAY_OUT)
    assert ("HF_HUB_OFFLINE prevents" in line) == bool(environment)
    assert (code, in_time) == ("2", "True")


@pytest.mark.slow
def test_plan_takes_a_config_from_the_hub_and_what_the_cache_knows_from_a_hub_that_gives_no_answer(
    endpoint: str, tmp_path: Path
):
    for name in ("silent", "busy"):
        put_into_cache(tmp_path, name)
    read = "    print(read_config(f'owner/{name}'), time.monotonic() - began < 5)\n"
    code = "from finetune.models.model_config import read_config\n"
    code += f"for name in ('good', 'busy', 'silent'):\n    began = time.monotonic()\n{read}"
    assert said(endpoint, tmp_path, code) == ["{} True"] * 3


VERBS = (
    "import sys\n"
    "from finetune.cli import commands\n"
    "def run(words):\n"
    "    print(commands.main(words.split()), sorted({'torch', 'transformers'} & set(sys.modules)))\n"
)
"""A program that prints what a command says, its exit code, and what it has imported of that which takes seconds."""
REFUSED = "2 []"
ASKING = {
    "plan --model owner/name --gpus 1xH100": REMEDY,
    "train {sample} --model.path owner/name": REMEDY,
    "train {sample} --model.path {model} --data.train owner/rows": REMEDY,
    "evaluate owner/name --data {rows} --json": REMEDY,
    "evaluate {model} --data owner/rows": REMEDY,
    "evaluate {run}": REMEDY,
    "generate owner/name hello": REMEDY,
    "generate {run} hello": "give its folder with --base-model.",
    "generate {model} --prompts owner/rows": REMEDY,
    "chat owner/name": REMEDY,
    "chat {run} --base-model owner/name": "give its folder with --base-model.",
    "data --config {sample} --model.path owner/name": REMEDY,
    "data --config {sample} --model.path {model} --data.eval owner/rows": REMEDY,
    "merge {run} --output {new}": "give its folder with --base-model.",
    "checkpoint export {run} --output {new}": REMEDY,
    "checkpoint export {run}/checkpoints/step-1 --output {new}": REMEDY,
    "export {model} --push owner/name --json": "--push owner/name: the hub cannot be reached (",
}
"""Commands that ask the hub, with a part of what they say where it cannot be reached."""


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Path]:
    """What the commands name: of the run the base is on the hub, and so are the rows that it held out."""
    final = tmp_path / "run" / "final"
    final.mkdir(parents=True)
    (final / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/name"}))
    config = {"model": {"path": "owner/name"}, "data": {"eval": ["owner/rows"]}}
    (tmp_path / "run" / "run.yaml").write_text(json.dumps({"config": config}))
    (tmp_path / "run" / "checkpoints" / "step-1").mkdir(parents=True)
    model = tiny.write_weights(tiny.build_model_folder(tmp_path / "model"))
    rows = tiny.write_conversations(tmp_path / "rows.jsonl", rows=2)
    return {"model": model, "rows": rows, "sample": SAMPLE, "run": tmp_path / "run", "new": tmp_path / "new"}


@pytest.mark.slow
def test_every_verb_that_asks_the_hub_ends_in_one_sentence_without_a_network_before_it_imports_what_takes_seconds(
    names: dict[str, Path], tmp_path: Path
):
    program = VERBS + "".join(f"run({words.format(**names)!r})\n" for words in ASKING)
    lines = said("http://127.0.0.1:9", tmp_path / "cache", program, HF_TOKEN="hf_x")
    refusals = [line for line in lines if not line.startswith(("Uploading", "  "))]
    for (words, remedy), sentence, ended in zip(ASKING.items(), refusals[::2], refusals[1::2], strict=True):
        assert sentence.startswith("error: "), words
        assert remedy in sentence, words
        assert ended == REFUSED, words


SILENT = (
    "plan --model owner/silent --gpus 1xH100",
    "train {sample} --model.path owner/silent",
    "data --config {sample} --model.path {model} --data.train owner/silent",
    "merge {run} --output {new} --base-model owner/silent",
)
"""A command for each kind of thing that is asked for: a model alone, that of a configuration, a dataset, a base."""


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("owner/some-model_1.5", True),
        ("runs/model", False),  # is a folder here
        ("runs/file.txt", False),  # is a file here
        ("runs/other", False),  # is missing in a folder that is here
        ("owner/name/more", False),
        ("owner/a model", False),
        ("./model", False),
        ("../model", False),
        ("~/model", False),
        ("/model", False),
    ],
)
def test_a_name_with_an_owner_is_an_id_of_the_hub_to_all_where_nothing_here_has_it(
    name: str, is_id: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "model").mkdir(parents=True)
    (tmp_path / "runs" / "file.txt").write_text("")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name}))
    asked = list[str]()
    monkeypatch.setattr(hub_first, "refuse_without_access", lambda path, *_, **__: asked.append(path))
    hub_first.ask_for_model(name)
    assert asked == [name] * is_id
    is_refused = any("there is no folder" in problem for problem in models.problems(name, None, None))
    assert is_refused == (not is_id and not Path(name).is_dir())
    base = local_base_of(Result(tmp_path / "adapter", None))
    assert base == (None if is_id else name)
    assert is_hub_dataset(name) == is_id


def test_a_model_that_is_missing_in_a_folder_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    said = "here is no folder runs/other, though there is a folder runs; check the name, or, if the hub's is meant, "
    (problem,) = models.problems("runs/other", None, None)
    assert problem == f"model.path: t{said}start in a folder that has no runs."
    assert models.problems(str(tmp_path), "runs/other", None)[0].startswith(f"model.tokenizer: t{said}")
    (problem,) = data_problems([Source("runs/other")])
    assert problem.startswith(f"runs/other: t{said}")
    (problem,) = data_problems([Source("runs/other.jsonl")])
    assert problem.startswith("runs/other.jsonl: there is no such data file or folder")
    monkeypatch.setattr(hub_access, "_failure", lambda url, seconds: pytest.fail(f"{url} was asked for"))
    for ask in (models.load_config, models.load_tokenizer, read_config):
        how = {"trust_remote_code": False} | ({"chat_template": None} if ask is models.load_tokenizer else {})
        with pytest.raises(InputError, match=f"^T{said}"):
            ask("runs/other", revision=None, **({} if ask is read_config else how))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"train": "a/b", "eval": "c/d"}, [("c/d", None)]),
        (
            {"train": "a/b", "eval": [{"path": "c/d", "revision": "v1", "weight": 2.0}, "e/f"]},
            [("c/d", "v1"), ("e/f", None)],
        ),
        ({"train": [{"path": "a/b", "revision": "v2"}], "eval": 0.1}, [("a/b", "v2")]),
        ({"train": "a/b", "eval": None}, []),
        ({"train": "a/b", "eval": [3, {"weight": 1.0}]}, []),
    ],
    ids=str,
)
def test_the_datasets_that_a_run_held_out_are_asked_for_at_their_revisions(
    data: Any, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "run.yaml").write_text(json.dumps({"config": {"data": data}}))
    asked: list[Any] = []
    monkeypatch.setattr(
        hub_first, "refuse_without_access", lambda name, *_, revision=None, **__: asked.append((name, revision))
    )
    hub_first.ask_for_held_out(str(tmp_path))
    assert asked == expected


def test_the_oldest_models_have_no_owner():
    assert hub_access.is_hub_id("gpt2", needs_owner=False)
    assert not hub_access.is_hub_id("gpt2")
    assert models.problems("gpt2", None, None) == []


@pytest.mark.slow
def test_a_hub_that_never_answers_is_waited_for_once_before_anything_else_takes_time(
    endpoint: str, names: dict[str, Path], tmp_path: Path
):
    """Three seconds, and nothing is imported that would take the other two: five are not reached."""
    assert hub_access.SECONDS <= 3
    programs = [f"{VERBS}run({words.format(**names)!r})\n" for words in SILENT]
    asked_before = len(SILENTLY_ASKED)
    with ThreadPoolExecutor(len(programs)) as threads:
        for sentence, ended in threads.map(lambda code: said(endpoint, tmp_path / "cache", code), programs):
            assert sentence.startswith(
                "error: The hub cannot be reached (no answer within 3 seconds; HF_HUB_ETAG_TIMEOUT=30 waits longer)"
            )
            assert ended == REFUSED
    assert len(SILENTLY_ASKED) - asked_before == len(SILENT)


@pytest.mark.parametrize(("waits", "seconds"), [("0", "3.0"), ("00", "3.0"), ("30", "30.0"), ("", "3.0")])
def test_the_hub_is_waited_for_where_the_variable_says_zero(waits: str, seconds: str):
    """As huggingface_hub does, for which 0 is as if it were not set: otherwise no hub could answer in time."""
    code = "from finetune.hub_access import SECONDS; print(SECONDS)"
    environment = os.environ | {"HF_HUB_ETAG_TIMEOUT": waits}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout == seconds + "\n"
