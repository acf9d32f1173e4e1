"""Values that an option cannot take: the error is one line, with the option as typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from weft.models.cli import main


@pytest.mark.parametrize(
    ("command", "said"),
    [
        pytest.param("train --steps twenty", "--steps is 'twenty'; it must be a whole number", id="whole"),
        pytest.param("train --steps 1e3", "--steps is '1e3'; it must be a whole number", id="exponent"),
        pytest.param("train --steps 3.5 --seed x", "--steps is '3.5'; it must be a whole number", id="two"),
        pytest.param("train --optimizer.lr big", "--optimizer.lr is 'big'; it must be a number", id="number"),
        pytest.param("train --mesh.dp x", "--mesh.dp is 'x'; it must be a whole number", id="or-none"),
        pytest.param(
            "train --mesh.dp=2,tp=2",
            "--mesh.dp is '2,tp=2'; it must be a whole number: write --mesh.dp 2 --mesh.tp 2",
            id="several",
        ),
        pytest.param(
            "train --mesh.dp 2,tp=x", "--mesh.dp is '2,tp=x'; it must be a whole number", id="several-unclear"
        ),
        pytest.param("train --steps -5", "--steps is -5; it must be 1 or more", id="steps"),
        pytest.param("train --mesh.dp 0", "--mesh.dp is 0; it must be 1 or more", id="mesh"),
        pytest.param("train --data.batch-size 0", "--data.batch-size is 0; it must be 1 or more", id="underscore"),
        pytest.param("train --model.num-layers 0", "--model.num-layers is 0; it must be an int >= 1", id="model"),
        pytest.param(
            "train --model.num-heads 6",
            "LlamaConfig: num_heads 6 is not a multiple of num_kv_heads 4; use one of [1, 2, 3, 6]",
            id="two-fields",
        ),
        pytest.param("train --step x", "--step is 'x'; it must be a whole number", id="replay"),
        pytest.param("generate run --prompt x --top-k 1.5", "--top-k is '1.5'; it must be a whole number", id="top-k"),
        pytest.param("evaluate run --data x --batch-size q", "--batch-size is 'q'; it must be a whole number", id="q"),
        pytest.param(
            "train --config run.toml", "config run.toml: data.batch_size is 'x'; it must be a whole number", id="file"
        ),
        pytest.param("train --config low.toml", "config low.toml: steps is 0; it must be 1 or more", id="file-bound"),
    ],
)
def test_an_unusable_value_is_named_with_its_option(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('data.batch_size = "x"\n')
    Path("low.toml").write_text("steps = 0\n")
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", f"weft {command.split()[0]}: {said}\n")
