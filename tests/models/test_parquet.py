"""Parquet files as documents: read by bytes, and damage ends in an error."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from weft.models.data.inputs import Columns, LeftOut, find_parts, read_part
from weft.models.data.prepare import prepare
from weft.models.data.tokenizer import byte_tokenizer

from tests.models.test_kinds import disk_that_needs_no_sync, documents, parquet  # noqa: F401  a fixture


class TestParquet:
    def read(self, columns: Columns | None = None) -> int:
        """The number of texts; none is kept."""
        columns = columns or Columns()
        left_out = LeftOut(empty=0, skipped=[], bad=0, passed=[])
        parts = find_parts([Path("a.parquet")], columns, 1 << 20)
        return sum(1 for part in parts for _ in read_part(part, columns, left_out))

    @pytest.mark.exhaustive
    @pytest.mark.parametrize(
        ("texts", "options"),
        [
            pytest.param(["x" * (1 << 18)] * 2000, {}, id="one-value"),
            pytest.param(["x" * (1 << 18)] * 2000, {"use_dictionary": False, "compression": "zstd"}, id="plain"),
            pytest.param([f"{n}" + "x" * (1 << 18) for n in range(500)], {"compression": "zstd"}, id="many-values"),
        ],
    )
    def test_a_file_is_read_by_bytes_and_not_by_rows(self, texts: list[str], options: dict[str, Any]) -> None:
        """A few kB, which as rows are 512 MB."""
        pyarrow.parquet.write_table(
            pyarrow.table({"text": texts}), "a.parquet", row_group_size=10**6, write_batch_size=8, **options
        )
        count = len(texts)
        del texts
        pool = pyarrow.proxy_memory_pool(pyarrow.default_memory_pool())
        before, default = pool.bytes_allocated(), pyarrow.default_memory_pool()
        pyarrow.set_memory_pool(pool)
        tracemalloc.start()
        try:
            assert self.read() == count
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            pyarrow.set_memory_pool(default)
        assert peak + pool.max_memory() - before < 128 << 20

    def test_a_column_of_categories_is_text(self) -> None:
        column = pyarrow.array(["a", "b", "a", None]).dictionary_encode()
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), "a.parquet")
        assert self.read() == 3

    @pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()], ids=str)
    def test_texts_of_any_width_with_nulls(self, kind: Any) -> None:
        texts = [None if n % 7 == 3 else f"{n} ☃" * (n % 50) for n in range(3000)]
        pyarrow.parquet.write_table(
            pyarrow.table({"n": range(3000), "text": pyarrow.array(texts, kind)}), "a.parquet", row_group_size=1100
        )
        prepare([Path("a.parquet")], Path("out"), tokenizer=byte_tokenizer())
        assert documents() == [text for text in texts if text]

    @pytest.mark.exhaustive
    def test_damage_of_any_byte_ends_in_texts_or_in_an_error(self) -> None:
        """In a process of its own, which pyarrow may crash when it reads damaged statistics."""
        Path("a.parquet").write_bytes(parquet())
        script = """
import sys
from pathlib import Path
from weft.models.data.parquet import read_column, row_groups

content = Path("a.parquet").read_bytes()
refused = 0
for place in range(len(content)):
    changed = content[place] ^ 1 << place % 8
    Path("b.parquet").write_bytes(content[:place] + bytes([changed]) + content[place + 1 :])
    try:
        list(read_column(Path("b.parquet"), "text", list(range(len(row_groups(Path("b.parquet"), "text"))))))
    except ValueError:
        refused += 1
print(refused)
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) > 100
