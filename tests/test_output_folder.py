"""A run takes no folder for its own that was not meant, and harms nothing that lies beside it."""

from pathlib import Path

import pytest
import scenarios

from finetune.errors import InputError
from finetune.models import loading
from finetune.output import output_folder
from recipes import sft


def problems(folder: Path, *, overwrite: bool = False, resumes: bool = False, inputs: list[str] | None = None) -> str:
    return " ".join(output_folder.problems(folder, overwrite=overwrite, resumes=resumes, inputs=inputs or []))


MANNERS = [{}, {"overwrite": True}, {"resumes": True}]


@pytest.mark.parametrize("manner", MANNERS, ids=str)
@pytest.mark.parametrize("entry", ["others.jsonl", "model.safetensors", "photos/", "report.pdf"])
def test_folder_of_other_things_is_refused_by_what_lies_there_with_a_folder_to_name(
    entry: str, manner: dict[str, bool], tmp_path: Path
):
    (tmp_path / entry).mkdir() if entry.endswith("/") else (tmp_path / entry).touch()
    told = problems(tmp_path, **manner)
    assert f"{tmp_path} contains other files but no run ({entry})" in told
    assert f"choose a new one, for example {tmp_path / 'run'}." in told


def test_many_other_things_are_not_all_listed(tmp_path: Path):
    for number in range(7):
        (tmp_path / f"{number}.jsonl").touch()
    assert "(0.jsonl, 1.jsonl, 2.jsonl, 3.jsonl and 3 more)" in problems(tmp_path)


@pytest.mark.parametrize("manner", MANNERS, ids=str)
def test_what_people_and_schedulers_keep_beside_a_run_is_accepted_and_said(manner: dict[str, bool], tmp_path: Path):
    for name in ("train.log", "slurm-17.out", "config.yaml", "notes.md", "start.sh", ".lock", ".cache"):
        (tmp_path / name).touch()
    assert problems(tmp_path, **manner) == ""
    (line,) = output_folder.prepare_folder(tmp_path)
    assert line == (
        f"{tmp_path} also contains config.yaml, notes.md, slurm-17.out, start.sh and 1 more, which the run does not "
        "touch"
    )


def test_files_that_the_run_reads_may_lie_in_its_folder(tmp_path: Path):
    for name in ("train.jsonl", "a.parquet", "b.parquet", "template.jinja"):
        (tmp_path / name).touch()
    inputs = [str(tmp_path / name) for name in ("train.jsonl", "*.parquet", "template.jinja")]
    assert problems(tmp_path, inputs=inputs) == ""
    assert "(train.jsonl)" in problems(tmp_path, inputs=inputs[1:])


@pytest.mark.parametrize("manner", MANNERS, ids=str)
def test_empty_folder_hidden_files_and_what_an_unlucky_run_leaves_are_accepted(manner: dict[str, bool], tmp_path: Path):
    assert problems(tmp_path, **manner) == ""
    for name in (".lock", "run.yaml.tmp", "metrics.jsonl.tmp", "final.old.left-behind-1"):
        (tmp_path / name).touch()
    for name in (".git", "final.tmp", "final.old", "nvme_offload"):
        (tmp_path / name).mkdir()
    assert problems(tmp_path, **manner) == ""
    assert output_folder.prepare_folder(tmp_path) == []


@pytest.mark.parametrize("manner", MANNERS[1:], ids=str)
def test_folder_of_a_run_may_hold_anything_else(manner: dict[str, bool], tmp_path: Path):
    (tmp_path / "run.yaml").touch()
    (tmp_path / "merged").mkdir()
    (tmp_path / "plot.png").touch()
    assert problems(tmp_path, **manner) == ""


@pytest.mark.parametrize(
    ("source", "folder"),
    [("data", "data"), ("data", "data/runs/a"), ("data/*.jsonl", "data"), ("data/**/*.jsonl", "data/runs/a")],
)
def test_run_whose_own_files_would_be_read_as_rows_is_refused(
    source: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    told = problems(Path(folder), inputs=["owner/name", source])
    assert f"{folder} is inside the data source {source}, so the run's own files would be read as rows" in told


@pytest.mark.parametrize(
    ("source", "folder"),
    [("data", "runs/a"), ("data", "data-runs"), ("data", "data/.runs/a"), ("data/*.jsonl", "data/runs/a")],
)
def test_folder_that_a_source_does_not_read_is_accepted(
    source: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert problems(Path(folder), inputs=[source]) == ""


def test_recipe_refuses_a_folder_with_other_things_before_weights_load_and_leaves_it_as_it_is(
    model_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "mine.jsonl").write_bytes(conversations.read_bytes())
    (tmp_path / "others.jsonl").touch()
    monkeypatch.setattr(loading, "load_model", None)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"contains other files but no run \(others\.jsonl\)"):
        sft.main(scenarios.configuration(model_folder, tmp_path / "mine.jsonl", tmp_path))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["final", "final.tmp", "final.old"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_link_or_file_in_the_place_of_a_result_is_left_aside_and_what_it_names_is_not_touched(
    name: str, kind: str, tmp_path: Path
):
    mine, run = tmp_path / "mine", tmp_path / "run"
    run.mkdir()
    if kind == "link":
        mine.mkdir()
    (run / name).touch() if kind == "file" else (run / name).symlink_to(mine)
    (run / f"{name}.left-behind-1").symlink_to("nowhere")
    (line,) = output_folder.leave_links_aside(run)
    assert line == (f"{run / name} is a {kind.split()[-1]}, not a result; it was renamed to {name}.left-behind-2")
    assert not (run / name).is_symlink()
    assert (run / f"{name}.left-behind-2").is_symlink() == (kind != "file")
    assert mine.is_dir() == (kind == "link")


def test_folder_in_the_place_of_a_result_stays(tmp_path: Path):
    for name in ("final", "final.tmp", "final.old"):
        (tmp_path / name).mkdir()
    assert output_folder.leave_links_aside(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3
