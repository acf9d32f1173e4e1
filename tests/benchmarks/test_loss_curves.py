"""What the benchmark of loss curves trains on."""

from __future__ import annotations

from pathlib import Path

from benchmarks.test_loss_curves import sources


def test_what_python_keeps_of_the_sources_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"\xcb\r\r\n")
    (tmp_path / "a.py").write_text("x = 1\n")
    corpus = sources(tmp_path)
    assert (corpus.files, corpus.num_bytes) == ((tmp_path / "a.py",), 6)
