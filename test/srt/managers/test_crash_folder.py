"""Which record in a folder belongs to which process."""

from __future__ import annotations

from sglang.srt.managers.crash_folder import new_record_path, record_of


def test_a_process_has_its_newest_record(tmp_path):
    assert record_of(tmp_path, 12) is None and record_of(tmp_path / "absent", 12) is None
    for name in ("crash-20260102-000000-12.rec", "crash-20260101-000000-12.rec", "crash-20260103-000000-112.rec"):
        (tmp_path / name).touch()
    assert record_of(tmp_path, 12) == tmp_path / "crash-20260102-000000-12.rec"
    new = new_record_path(tmp_path, 34)
    new.touch()
    assert record_of(tmp_path, 34) == new
