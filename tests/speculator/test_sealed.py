"""A sealed folder is known by its checksums, which one process takes once for as long as the files are as they were."""

from speculator import sealed


def test_a_file_that_did_not_change_is_read_once(tmp_path, monkeypatch):
    read, digest = [], sealed.digest
    monkeypatch.setattr(sealed, "_SETTLED", -1)
    monkeypatch.setattr(sealed, "digest", lambda file: [read.append(file.name), digest(file)][1])
    (tmp_path / "weights").write_bytes(b"12")
    sealed.seal(tmp_path)
    read.clear()
    assert sealed.damage(tmp_path) is None
    assert sealed.damage(tmp_path) is None
    assert read == ["weights"]
    (tmp_path / "weights").write_bytes(b"1234")
    assert "does not match" in sealed.damage(tmp_path)


def test_a_file_just_written_is_read_each_time(tmp_path):
    """A change within the clock's grain leaves the time stamp as it was."""
    (tmp_path / "weights").write_bytes(b"12")
    sealed.seal(tmp_path)
    assert sealed.damage(tmp_path) is None
    (tmp_path / "weights").write_bytes(b"21")
    assert "does not match" in sealed.damage(tmp_path)
