"""`weft evaluate` of a run takes the options of the loss from the run's config.toml, and prints the options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from weft.models.cli.evaluate import run

from tests.models.chat_folder import save_chat_folder
from tests.models.test_evaluate import JUDGED, PAIRS, write

CONFIG = """\
task = "{task}"
from = "{base}"
{options}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference, and the final model of a run whose config.toml a test writes."""
    made = tmp_path_factory.mktemp("folders")
    save_chat_folder(made / "reference", seed=4)
    save_chat_folder(made / "run/checkpoint")
    (made / "run/metrics.jsonl").write_text("")
    write(made / "pairs.jsonl", PAIRS)
    write(made / "judged.jsonl", JUDGED)
    return made


def of_run(folders: Path, task: str, options: str) -> Path:
    (folders / "run/config.toml").write_text(CONFIG.format(task=task, base=folders / "reference", options=options))
    return folders / "run"


def evaluated(capsys: pytest.CaptureFixture[str], folder: Path, data: str, *options: str) -> dict[str, Any]:
    reference = folder.parent / "reference" if folder.name == "run" else folder.parent.parent / "reference"
    data_path = reference.parent / data
    assert run([str(folder), "--data", str(data_path), "--reference", str(reference), "--json", *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


CASES = {
    "dpo": ("pairs.jsonl", "[dpo]\nbeta = 0.3\nlength_normalized = true", "--dpo.beta 0.3 --dpo.length-normalized"),
    "kto": (
        "judged.jsonl",
        "[kto]\nbeta = 0.2\nundesirable_weight = 0.5",
        "--kto.beta 0.2 --kto.undesirable-weight .5",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("within", ["", "checkpoint"], ids=["run", "final-model"])
@pytest.mark.parametrize("task", CASES)
def test_the_options_of_the_run_are_taken(
    task: str, within: str, capsys: pytest.CaptureFixture[str], folders: Path
) -> None:
    data, options, given = CASES[task]
    found = evaluated(capsys, of_run(folders, task, options) / within, data)
    (folders / "run/config.toml").unlink()
    explicit = evaluated(capsys, folders / "run", data, *given.split())
    default = evaluated(capsys, folders / "run", data)
    taken = found.pop("options_of_run")
    assert found == explicit != default
    assert "options_of_run" not in default
    assert (
        taken
        == {
            "dpo": ["dpo.beta 0.3", "dpo.loss sigmoid", "dpo.label_smoothing 0.0", "dpo.length_normalized true"],
            "kto": ["kto.beta 0.2", "kto.desirable_weight 1.0", "kto.undesirable_weight 0.5"],
        }[task]
    )


def test_given_options_come_before_the_runs(capsys: pytest.CaptureFixture[str], folders: Path) -> None:
    folder = of_run(folders, "dpo", "[dpo]\nbeta = 0.3\nlength_normalized = true")
    found = evaluated(capsys, folder, "pairs.jsonl", "--no-dpo.length-normalized", "--dpo.label-smoothing", "0.1")
    assert found.pop("options_of_run") == ["dpo.beta 0.3", "dpo.loss sigmoid"]
    (folders / "run/config.toml").unlink()
    assert found == evaluated(capsys, folder, "pairs.jsonl", "--dpo.beta", "0.3", "--dpo.label-smoothing", "0.1")


def test_the_options_are_printed(capsys: pytest.CaptureFixture[str], folders: Path) -> None:
    folder = of_run(folders, "dpo", "[dpo]\nbeta = 0.3")
    data = ["--data", str(folders / "pairs.jsonl")]
    assert run([str(folder), *data, "--reference", str(folders / "reference")]) == 0
    _, line, *_ = capsys.readouterr().out.splitlines()
    assert line == (
        f"options of {folder / 'config.toml'}: dpo.beta 0.3, dpo.loss sigmoid, dpo.label_smoothing 0.0, "
        f"dpo.length_normalized false"
    )
    assert run([str(folder), *data]) == 0
    _, line, *_ = capsys.readouterr().out.splitlines()
    assert line == (
        f"the run's reference was {folders / 'reference'}: give --reference for rewards and the loss of dpo"
    )


def test_a_run_of_another_task_gives_nothing(capsys: pytest.CaptureFixture[str], folders: Path) -> None:
    folder = of_run(folders, "dpo", "[dpo]\nbeta = 0.3\n[kto]\nbeta = 0.3")
    assert "options_of_run" not in evaluated(capsys, folder, "judged.jsonl")


@pytest.mark.parametrize(
    ("options", "given", "error"),
    [
        pytest.param(
            "[dpo]\nlabel_smoothing = 0.1", "--dpo.loss ipo", "dpo.label_smoothing is 0.1", id="contradiction"
        ),
        pytest.param("[dpo]\nbeta = -1", "", "dpo.beta is -1.0; it must be above 0", id="value"),
        pytest.param("[dpo", "", "is not TOML", id="no-toml"),
    ],
)
def test_bad_options_are_one_line(
    capsys: pytest.CaptureFixture[str], folders: Path, options: str, given: str, error: str
) -> None:
    folder = of_run(folders, "dpo", options)
    reference = ["--reference", str(folders / "reference")]
    with pytest.raises(SystemExit) as ended:
        run([str(folder), "--data", str(folders / "pairs.jsonl"), *reference, *given.split()])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"weft evaluate: config {folder / 'config.toml'}") and error in err
