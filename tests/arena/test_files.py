"""Files that outlive the daemon: made anew, or found as an earlier one left them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.arena.files import boot_id, data_ranges, find_file, make_file, replace_file
from kvd.protocol.errors import TierFailed

PAGE = 4096


def test_a_boot_has_one_id() -> None:
    assert boot_id() == boot_id() != bytes(16)
    assert len(boot_id()) == 16


def test_a_new_file_has_its_length_and_the_memory_of_its_head(shm: Path) -> None:
    os.close(make_file(shm / "file", 8 * PAGE, 0o660, PAGE))
    found = (shm / "file").stat()
    assert (found.st_size, found.st_blocks * 512) == (8 * PAGE, PAGE)
    assert found.st_mode & 0o777 == 0o660


def test_a_file_that_is_there_is_not_made_again(shm: Path) -> None:
    (shm / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        make_file(shm / "file", PAGE, 0o600)
    assert (shm / "file").read_text() == "mine"


def test_what_an_earlier_try_left_does_not_hinder_that_a_file_is_replaced(shm: Path) -> None:
    (shm / "file").write_bytes(b"before")
    (shm / "file.new").write_bytes(b"half of it")
    replace_file(shm / "file", b"now", lasting=True)
    assert (shm / "file").read_bytes() == b"now"
    assert [path.name for path in shm.iterdir()] == ["file"]


def test_a_file_that_cannot_be_replaced_says_what_it_said_before(shm: Path) -> None:
    replace_file(shm / "file", b"before")
    (shm / "file.new").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(shm / "file", b"now")
    assert (shm / "file").read_bytes() == b"before"


def test_on_a_full_volume_it_is_told_which_file_was_not_written(
    mount: Callable[..., Path],
) -> None:
    path = mount("size=4k") / "file"
    with pytest.raises(OSError, match="No space left") as caught:
        replace_file(path, bytes(2 * PAGE))
    assert caught.value.filename == str(path)


def test_a_file_is_found_by_its_size(shm: Path) -> None:
    (shm / "file").write_bytes(b"four")
    fd = find_file(shm / "file", 4)
    assert os.pread(fd, 4, 0) == b"four"
    os.close(fd)
    with pytest.raises(TierFailed, match="has 4 bytes and not 5"):
        find_file(shm / "file", 5)


def test_a_pipe_is_no_file_of_ours(shm: Path) -> None:
    os.mkfifo(shm / "pipe")
    with pytest.raises(TierFailed, match="is not a file"):
        find_file(shm / "pipe", 0)


def test_a_file_has_data_where_it_was_written(shm: Path) -> None:
    fd = make_file(shm / "file", 16 * PAGE, 0o600)
    assert list(data_ranges(fd, 0)) == []
    for page in (2, 3, 9):
        os.pwrite(fd, b"x", page * PAGE + 5)
    assert list(data_ranges(fd, 0)) == [(2 * PAGE, 4 * PAGE), (9 * PAGE, 10 * PAGE)]
    assert list(data_ranges(fd, 3 * PAGE)) == [(3 * PAGE, 4 * PAGE), (9 * PAGE, 10 * PAGE)]
    os.close(fd)
