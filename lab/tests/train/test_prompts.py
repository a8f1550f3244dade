"""Training prompts, as people write them into files."""

from __future__ import annotations

from pathlib import Path

from shoal_lab.train.prompts import from_file


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\r\n")
    assert from_file(tmp_path / "prompts.txt") == ["a", "b"]
