"""What `make prove` has recorded is of the present sources, and is recorded only where every point passed."""

import ast
import json
import re
from pathlib import Path

import pytest
from recording import matrix_of

from benchmarks import proofs

MAKEFILE = (proofs.ROOT / "Makefile").read_text()
pytest_plugins = ["pytester"]


@pytest.mark.slow  # not by itself: a commit need not wait for `make prove`
@pytest.mark.parametrize("matrix", proofs.MATRICES)
def test_proof_is_of_the_present_sources(matrix: str):
    if matrix not in proofs.read():
        pytest.skip(f"{matrix} was not proven yet; run `make prove`")
    assert proofs.problem(matrix) is None


def _files_of(options: str) -> set[str]:
    """The test files that the Makefile's one pytest command with these options names."""
    (command,) = re.findall(rf"PYTEST\) .*{options} ((?:.*\\\n)*.*)", MAKEFILE)
    return {Path(name).stem for name in re.findall(r"tests/\S+", command)}


def test_make_prove_runs_every_matrix_and_records_it():
    assert _files_of(r"--record-proofs") == set(proofs.MATRICES)


def test_make_prove_runs_every_test_file_with_points_that_are_left_to_it():
    leaving = {
        path.stem
        for path in proofs.TESTS.glob("test_*.py")
        if path != Path(__file__)
        and re.search(r"^from thinning import thinned\b|mark\.prove\b", path.read_text(), re.MULTILINE)
    }
    without_record = _files_of(r"-m prove")
    assert leaving - set(proofs.MATRICES) == without_record


@pytest.mark.parametrize("matrix", proofs.MATRICES)
def test_sources_of_a_matrix_are_the_step_its_strategies_and_its_helpers(matrix: str):
    names = {path.relative_to(proofs.ROOT).as_posix() for path in proofs.sources_of(matrix)}
    assert {"recipes/sft.py", f"tests/{matrix}.py", "tests/ranks.py", "accelerate_configs/zero3.yaml"} <= names
    assert {"finetune/training/loss.py", "finetune/distributed/__init__.py", "finetune/data/rows.py"} <= names
    assert not [name for name in names if name.startswith(proofs.NOT_TRAINING + proofs.FROM_RECORDS_TO_ROWS)]


@pytest.mark.parametrize("left_out", proofs.NOT_TRAINING + proofs.FROM_RECORDS_TO_ROWS)
def test_what_no_proof_depends_on_is_there(left_out: str):
    assert (proofs.ROOT / left_out).exists()


def test_a_module_without_a_matrix_is_not_found():
    with pytest.raises(KeyError):
        proofs.sources_of("test_chat")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two modules and a strategy file, as if they were all there is."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "a.py").write_text('"""A."""\n\ndef f(x):\n    """Doc."""\n    import b\n\n    return f"{x}"  # x\n')
    (tmp_path / "b.py").write_text("y = 1\n")
    (tmp_path / "c.yaml").write_text("k: 1  # one\n")
    (tmp_path / "d.py").write_text("if y:\n    raise InputError('One.')\n")
    monkeypatch.setattr(proofs, "ROOT", tmp_path)
    monkeypatch.setattr(proofs, "TESTS", tmp_path / "tests")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.py", 'def f(x):\n    import b\n    return f"{x}"\n'),
        ("a.py", "'''Another.'''\ndef f(\n    x,\n):\n    'Other.'\n    import b\n    return f'{x}'\n"),
        ("b.py", "# why\ny=1\n"),
        ("c.yaml", "# why\nk:  1\n"),
        ("d.py", "if y:\n    raise InputError(f'Another {y}.') from error\n"),
    ],
)
def test_comments_docstrings_words_of_errors_and_layout_leave_the_hash_as_it_is(file: str, text: str, repository: Path):
    before = proofs.sources_hash(repository.glob("*.*"))
    (repository / file).write_text(text)
    assert proofs.sources_hash(repository.glob("*.*")) == before


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.py", 'def f(x, y=None):\n    import b\n    return f"{x}"\n'),
        ("a.py", 'def f(x):\n    import b\n    return f"{x!r}"\n'),
        ("b.py", "y = 2\n"),
        ("b.py", "y = 1.0\n"),
        ("b.py", "y = '1'\n"),
        ("d.py", "if z:\n    raise InputError('One.')\n"),
        ("d.py", "if y:\n    print('One.')\n"),
        ("d.py", "if y:\n    raise RunStopped('One.')\n"),
        ("c.yaml", "k: 2\n"),
    ],
)
def test_any_change_of_code_or_strategy_changes_the_hash(file: str, text: str, repository: Path):
    before = proofs.sources_hash(repository.glob("*.*"))
    (repository / file).write_text(text)
    assert proofs.sources_hash(repository.glob("*.*")) != before


def test_a_files_name_is_part_of_the_hash(repository: Path):
    before = proofs.sources_hash([repository / "b.py"])
    (repository / "b.py").rename(repository / "e.py")
    assert proofs.sources_hash([repository / "e.py"]) != before


def test_imports_are_followed_into_functions_packages_and_tests(repository: Path):
    package = repository / "p"
    package.mkdir()
    (package / "__init__.py").write_text("from . import q\nfrom .r import z\n")
    for name in ("q", "r", "unused"):
        (package / f"{name}.py").write_text("z = 1\n")
    (repository / "tests" / "helper.py").write_text("import json\nimport p.q\n")
    (repository / "a.py").write_text("def f():\n    from helper import g\n    import b\n")
    names = {path.relative_to(repository).as_posix() for path in proofs.imported_by([repository / "a.py"])}
    assert names == {"a.py", "b.py", "tests/helper.py", "p/__init__.py", "p/q.py", "p/r.py"}
    left = {path.name for path in proofs.imported_by([repository / "a.py"], ("tests",))}
    assert left == {"a.py", "b.py"}


def test_outdated_proof_is_told_with_its_matrix_and_what_renews_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proofs, "RESULTS", tmp_path / "proofs.json")
    missing = "benchmarks/results/proofs.json has no proof of tests/test_parity.py; run `make prove`."
    assert proofs.problem("test_parity") == missing
    proofs.write("test_parity", 7)
    proofs.write("test_resume", 3)
    assert proofs.problem("test_parity") is None
    written = json.loads((tmp_path / "proofs.json").read_text())
    assert (written["test_parity"]["points"], written["test_resume"]["points"]) == (7, 3)
    assert set(written["test_parity"]["packages"]) == set(proofs.PACKAGES)
    written["test_parity"] |= {"sources": "0" * 64, "date": "2026-01-02"}
    (tmp_path / "proofs.json").write_text(json.dumps(written))
    sentence = proofs.problem("test_parity")
    assert sentence is not None
    assert re.fullmatch(
        r"The proof of tests/test_parity\.py \(.+\) is of 2026-01-02, and its sources have changed since; "
        r"run `make prove`, which renews it\.",
        sentence,
    )
    assert proofs.problem("test_resume") is None


POINTS = """
import pytest

@pytest.mark.parametrize("point", [1, pytest.param(2, marks=pytest.mark.prove), 3])
def test_point(point):
    {body}

@pytest.fixture
def left():
    yield
    {teardown}

def test_alone(left):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "body", "teardown", "recorded"),
    [
        ([], "pass", "pass", True),
        (["-m", "not prove"], "pass", "pass", False),
        (["-k", "point"], "pass", "pass", False),
        (["test_walked.py::test_point"], "pass", "pass", False),
        ([], "assert point != 2", "pass", False),
        ([], "assert point == 1", "pass", False),
        ([], "point == 3 and pytest.skip('not here')", "pass", False),
        ([], "point == 3 and pytest.xfail('known')", "pass", False),
        ([], "pass", "raise OSError", False),
    ],
)
def test_matrix_is_recorded_only_if_every_point_of_it_ran_and_passed(
    arguments: list[str],
    body: str,
    teardown: str,
    recorded: bool,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
):
    written: dict[str, int] = {}
    monkeypatch.setattr(proofs, "write", written.__setitem__)
    monkeypatch.setitem(proofs.MATRICES, "test_walked", "points")  # no module that this process may have imported
    pytester.makeini("[pytest]\nmarkers =\n    prove: a point\n")
    pytester.makeconftest(
        "from recording import Recorder\ndef pytest_configure(config):\n    config.pluginmanager.register(Recorder())\n"
    )
    pytester.makepyfile(test_walked=POINTS.format(body=body, teardown=teardown), test_other="def test_a():\n    pass\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
    assert written == ({"test_walked": 4} if recorded else {})
    told = r"test_walked: all 4 points passed; recorded\." if recorded else r"of \d points passed; not recorded\."
    named = any("::" in argument for argument in arguments)
    assert bool(re.search(told, result.stdout.str())) is not named


def test_module_of_a_test_is_read_off_its_id():
    assert matrix_of("tests/test_resume.py::test_a[tests/b.py::c]") == "test_resume"
    assert matrix_of("test_resume.py::test_a") == "test_resume"


def test_tree_that_is_hashed_holds_no_position():
    one, other = ast.parse("x = [1,\n 2]"), ast.parse("\n\nx = [1, 2]")
    assert proofs._code(one) == proofs._code(other)
    assert proofs._code(one) != proofs._code(ast.parse("x = [2, 1]"))
