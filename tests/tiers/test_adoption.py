"""The host tier takes over what an earlier epoch left, or nothing of it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvd.arena.about import read_about, write_about
from kvd.arena.base import punch
from kvd.arena.header import create_header
from kvd.arena.host import MappedArena
from kvd.arena.membership import SessionLock, create_session_file
from kvd.arena.page_table import HEADER_BYTES, NO_PARENT, PageState, record_bytes
from kvd.protocol.errors import TierFailed
from kvd.protocol.keys import Identity, NamespaceInfo
from kvd.protocol.messages import Run
from kvd.protocol.units import ByteSize
from kvd.testing.places import own_place
from kvd_tiers.host import SUFFIXES, HostConfig, HostTier
from tests.arena.conftest import child, mount, shm  # noqa: F401 - fixtures
from tests.e2e.support import EXTENT_PAGES, LAYOUT

if TYPE_CHECKING:
    from kvd.tiers.base import Adopted, TierArena
    from tests.arena.conftest import Child

BLOCK_BYTES = 4 * LAYOUT.block_size
TENANT = NamespaceInfo(Identity("model", "main"), LAYOUT, "tenant")


@contextmanager
def opened(directory: Path, epoch: int, capacity: int = 1 << 20) -> Iterator[HostTier]:
    with closing(HostTier(HostConfig(ByteSize(capacity)), directory)) as tier:
        tier.open(epoch)
        yield tier


def fill(arena: TierArena, run: Run) -> None:
    """Memory for these pages, and a block in each: page n is full of n and has rows of n."""
    pages = range(run.first, run.first + run.count)
    arena.back(run)
    arena.table.free(pages)
    arena.table.reserve(pages, 7)
    for page in pages:
        arena.memory.page_view(page)[...] = page
    rows = np.repeat(np.array(pages, "<u4"), arena.layout.block_size * arena.row_bytes // 4)
    arena.table.commit(pages, NO_PARENT, 0, rows.tobytes(), namespace=1)


def blocks_on_disk(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_blocks for path in directory.iterdir()}


def in_extent(number: int, count: int = 1) -> Run:
    return Run(number * EXTENT_PAGES, count * EXTENT_PAGES)


@pytest.fixture
def left(shm: Path) -> Path:  # noqa: F811
    """An arena of which two extents have memory, left by epoch 1."""
    with opened(shm / "kvd", 1) as tier:
        arena = tier.create_arena(LAYOUT, 4)
        arena.note_namespace(1, TENANT)
        fill(arena, in_extent(0))
        fill(arena, in_extent(2))
    return arena.path


def adopt(path: Path, epoch: int = 2) -> list[Adopted]:
    with opened(path.parent, epoch) as tier:
        return tier.adopt()


# --- what is whole ---


def test_an_arena_is_adopted_as_it_was_left(left: Path) -> None:
    before = left.stat(), blocks_on_disk(left.parent)
    with opened(left.parent, 2) as tier:
        (adopted,) = tier.adopt()
        arena = adopted.arena
        assert (arena.path, arena.layout, arena.row_bytes) == (left, LAYOUT, 4)
        assert arena.num_pages * LAYOUT.page_bytes == left.stat().st_size
        assert arena.extent_pages == EXTENT_PAGES
        assert adopted.namespaces == {1: TENANT}
        assert [arena.memory.page_view(page).max() for page in (0, 2 * EXTENT_PAGES)] == [
            0,
            2 * EXTENT_PAGES,
        ]
        assert blocks_on_disk(left.parent) == before[1]
    assert left.stat().st_ino == before[0].st_ino


def test_the_records_are_those_of_pages_with_memory(left: Path) -> None:
    (adopted,) = adopt(left)
    expected = [*range(EXTENT_PAGES), *range(2 * EXTENT_PAGES, 3 * EXTENT_PAGES)]
    assert adopted.found.pages.tolist() == expected
    assert adopted.found.sealed.all()
    assert (adopted.found.records["state"] == PageState.COMMITTED).all()
    rows = adopted.found.records["rows"][:, :BLOCK_BYTES].copy().view("<u4")
    assert (rows == np.array(expected)[:, None]).all()


def test_rows_with_extras_come_back_whole(shm: Path) -> None:  # noqa: F811
    rows = np.random.default_rng(0).bytes(LAYOUT.block_size * 36)
    with opened(shm, 1) as tier:
        arena = tier.create_arena(LAYOUT, 36)
        arena.back(in_extent(1))
        arena.table.commit([EXTENT_PAGES], NO_PARENT, 0, rows, namespace=1)
    (adopted,) = adopt(arena.path)
    assert adopted.arena.row_bytes == 36
    assert adopted.found.records["rows"][0][: len(rows)].tobytes() == rows


def test_an_arena_is_adopted_by_one_epoch_after_another(left: Path) -> None:
    for epoch in (2, 3, 4):
        (adopted,) = adopt(left, epoch)
        assert np.fromfile(left.with_suffix(".pages"), "<u8", 2)[1] == epoch
    assert len(adopted.found.pages) == 2 * EXTENT_PAGES


def test_an_adopted_arena_goes_on(left: Path) -> None:
    with opened(left.parent, 2) as tier:
        (adopted,) = tier.adopt()
        other = replace(TENANT, salt="other")
        adopted.arena.note_namespace(2, other)
        adopted.arena.table.unback(range(EXTENT_PAGES))
        adopted.arena.unback(in_extent(0))
        fill(adopted.arena, in_extent(1))
        assert tier.create_arena(LAYOUT, 36).path != left
    again = {each.arena.path: each for each in adopt(left, 3)}
    assert len(again) == 2
    assert again[left].namespaces == {1: TENANT, 2: other}
    assert again[left].found.pages.tolist() == list(range(EXTENT_PAGES, 3 * EXTENT_PAGES))


def test_who_maps_an_arena_sees_the_same_memory(left: Path) -> None:
    create_session_file(session := left.parent / "session")
    (adopted,) = adopt(left)
    mapped = MappedArena(str(left), LAYOUT, adopted.arena.num_pages, SessionLock(str(session)))
    with opened(left.parent, 3) as tier:
        (adopted,) = tier.adopt()
        adopted.arena.memory.page_view(3)[...] = 99
        assert (mapped.readable.page_view(3) == 99).all()
        tier.remove_arena(adopted.arena)
    assert (mapped.readable.page_view(4) == 4).all()


def test_what_belongs_to_no_arena_is_removed(left: Path) -> None:
    alone = "0123456789abcdef-7"
    theirs = ("notes.txt", "letter.pages", "me.about", "2-2.arena")
    for name in (f"{alone}.pages", f"{alone}.about", f"{left.stem}.about.new", *theirs):
        (left.parent / name).touch()
    adopt(left)
    names = [left.name, left.stem + ".about", left.stem + ".pages", "host.lock", *theirs]
    assert sorted(path.name for path in left.parent.iterdir()) == sorted(names)


def test_directories_that_are_called_as_its_files_hinder_nothing(left: Path) -> None:
    strays = [left.parent / f"stray{suffix}" for suffix in SUFFIXES]
    for stray in strays:
        stray.mkdir()
    assert len(adopt(left)) == 1
    assert all(stray.is_dir() for stray in strays)


def test_what_clients_know_by_another_header_is_not_taken_over(shm: Path) -> None:  # noqa: F811
    def start(directory: Path, epoch: int) -> HostTier:
        directory.mkdir(exist_ok=True)
        create_header(directory / "header")
        tier = HostTier(HostConfig(ByteSize(1 << 20), str(shm / "memory")), directory)
        tier.open(epoch)
        return tier

    with closing(start(shm / "one", 1)) as tier:
        tier.create_arena(LAYOUT, 4)
    with closing(start(shm / "one", 2)) as tier:
        assert len(tier.adopt()) == 1
    with closing(start(shm / "other", 3)) as tier:
        assert tier.adopt() == []


@pytest.mark.parametrize(
    ("capacity", "is_short"), [(1 << 16, False), (1 << 20, False), (2 << 20, True)]
)
def test_an_arena_that_is_too_short_for_the_capacity_is_told_of(
    left: Path, caplog: pytest.LogCaptureFixture, capacity: int, is_short: bool
) -> None:
    with opened(left.parent, 2, capacity) as tier:
        assert len(tier.adopt()) == 1
    assert (f"reason=arena_short path={left}" in caplog.text) == is_short


# --- namespaces ---


def test_a_forgotten_namespace_is_not_written_again(left: Path) -> None:
    with opened(left.parent, 2) as tier:
        (adopted,) = tier.adopt()
        adopted.arena.forget_namespace(1)
        adopted.arena.note_namespace(2, TENANT)
        assert adopted.namespaces == {1: TENANT}
    assert adopt(left)[0].namespaces == {2: TENANT}


def test_a_note_without_room_is_a_failure_that_leaves_the_notes_of_before(
    mount: Callable[..., Path],  # noqa: F811
) -> None:
    small = mount("size=256k")
    with opened(small, 1, 128 << 10) as tier:
        arena = tier.create_arena(LAYOUT, 4)
        arena.note_namespace(1, TENANT)
        free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
        (small / "filler").write_bytes(bytes(free))
        with pytest.raises(TierFailed, match="No space left"):
            arena.note_namespace(2, TENANT)
    assert read_about(arena.path.with_suffix(".about")).namespaces == {1: TENANT}


# --- what is not ---


def cut(suffix: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        file = path.with_suffix(suffix)
        os.truncate(file, file.stat().st_size - 4096)

    return damage


def say(**fields: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        about = path.with_suffix(".about")
        write_about(about, replace(read_about(about), **fields))

    return damage


def overwrite(suffix: str, place: int, data: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with path.with_suffix(suffix).open("r+b") as file:
            file.seek(place)
            file.write(data)

    return damage


def take_memory(path: Path) -> None:
    with path.open("r+b") as file:
        punch(file.fileno(), 0, 4096)


def give_away(suffix: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        if os.getuid() != 0:
            pytest.skip("only root can give a file to another user")
        os.chown(path.with_suffix(suffix), 65534, 65534)

    return damage


def link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "the arena is shorter": (cut(".arena"), "bytes and not"),
    "the table is shorter": (cut(".pages"), "bytes and not"),
    "there is no table": (lambda path: path.with_suffix(".pages").unlink(), "No such file"),
    "nothing says what it is": (lambda path: path.with_suffix(".about").unlink(), "No such file"),
    "what it is cannot be read": (overwrite(".about", 0, b"\xff"), "is damaged"),
    "another version wrote it": (say(version=1), "has version 1 and not 2"),
    "the machine was started since": (say(boot=bytes(16)), "before the machine started"),
    "the table is of another boot": (overwrite(".pages", 40, bytes(16)), "another's"),
    "the table is of another format": (overwrite(".pages", 0, b"KVDPAGE1"), "another's"),
    "the head was half written": (overwrite(".pages", 0, bytes(8)), "another's"),
    "the layout is another": (say(layout=replace(LAYOUT, num_planes=1, head_size=16)), "another's"),
    "the extents are others": (say(extent_pages=2 * EXTENT_PAGES), "another's"),
    "the rows are wider": (say(row_bytes=36), "bytes and not"),
    "memory of a block is gone": (take_memory, "bytes are left of the"),
    "the arena is another's": (give_away(".arena"), "belongs to user"),
    "the table is another's": (give_away(".pages"), "belongs to user"),
    "who says what it is, is another": (give_away(".about"), "belongs to user"),
    "the arena is a link": (link, "Too many levels of symbolic links"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_what_does_not_agree_is_removed_and_said(
    left: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    with opened(left.parent, 2) as tier:
        other = tier.create_arena(LAYOUT, 36)
    damage(left)
    with caplog.at_level(logging.WARNING), opened(left.parent, 3) as tier:
        assert [each.arena.path for each in tier.adopt()] == [other.path]
    (message,) = caplog.messages
    assert message.startswith(f"reason=not_adopted path={left}")
    assert reason in message
    assert not [
        left.with_suffix(suffix) for suffix in SUFFIXES if left.with_suffix(suffix).exists()
    ]


def test_a_record_of_which_some_words_were_written_is_in_doubt_alone(left: Path) -> None:
    page, size = 3, record_bytes(LAYOUT, 4)
    overwrite(".pages", HEADER_BYTES + page * size + size // 2, b"12345678")(left)
    (adopted,) = adopt(left)
    assert adopted.found.pages[~adopted.found.sealed].tolist() == [page]
    assert len(adopted.found.pages) == 2 * EXTENT_PAGES


def test_an_extent_keeps_its_memory_for_one_word_of_a_record(shm: Path) -> None:  # noqa: F811
    with opened(shm, 1) as tier:
        arena = tier.create_arena(LAYOUT, 4)
        arena.back(in_extent(1))
        arena.table.records["group"][EXTENT_PAGES + 5] = 1
    (adopted,) = adopt(arena.path)
    assert adopted.found.pages.tolist() == list(range(EXTENT_PAGES, 2 * EXTENT_PAGES))
    assert adopted.found.pages[~adopted.found.sealed].tolist() == [EXTENT_PAGES + 5]


def test_memory_of_which_no_record_says_anything_goes_back(left: Path) -> None:
    with opened(left.parent, 2) as tier:
        (adopted,) = tier.adopt()
        before = blocks_on_disk(left.parent)
        adopted.arena.back(in_extent(3))  # and nobody noted it
        adopted.arena.table.unback(range(EXTENT_PAGES))  # and nobody took it
    (adopted,) = adopt(left, 3)
    assert adopted.found.pages.tolist() == list(range(2 * EXTENT_PAGES, 3 * EXTENT_PAGES))
    assert blocks_on_disk(left.parent)[left.name] == before[left.name] // 2


def test_a_table_half_of_which_is_gone_loses_that_half(shm: Path) -> None:  # noqa: F811
    with opened(shm, 1) as tier:
        arena = tier.create_arena(LAYOUT, 4)
        fill(arena, in_extent(0, 4))
    size = record_bytes(LAYOUT, 4)
    overwrite(".pages", HEADER_BYTES + 2 * EXTENT_PAGES * size, bytes(2 * EXTENT_PAGES * size))(
        arena.path
    )
    (adopted,) = adopt(arena.path)
    assert adopted.found.pages.tolist() == list(range(2 * EXTENT_PAGES))
    assert arena.path.stat().st_blocks * 512 == 2 * EXTENT_PAGES * LAYOUT.page_bytes


def test_records_without_memory_get_none_by_being_looked_at(shm: Path) -> None:  # noqa: F811
    with opened(shm, 1, 16 << 20) as tier:
        arena = tier.create_arena(LAYOUT, 4)
        last = arena.num_pages // EXTENT_PAGES - 1
        for number in (0, 40, last):
            fill(arena, in_extent(number))
    before = blocks_on_disk(shm)
    with opened(shm, 2, 16 << 20) as tier:
        (adopted,) = tier.adopt()
        assert len(adopted.found.pages) == 3 * EXTENT_PAGES
        assert blocks_on_disk(shm) == before


# --- whatever came before ---

EXTENTS = 6
Step = tuple[str, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["back", "back", "unback", "reserve", "commit", "detach", "quarantine", "free"]
        ),
        st.integers(0, EXTENTS * EXTENT_PAGES - 1),
    ),
    max_size=60,
)
cuts = st.sampled_from(["nowhere", "before it is noted", "before it is taken", "half noted"])


def do(arena: TierArena, backed: set[int], step: Step) -> None:
    """One step of a daemon's life, as far as the page allows it."""
    verb, page = step
    number, table = page // EXTENT_PAGES, arena.table
    extent = range(number * EXTENT_PAGES, (number + 1) * EXTENT_PAGES)
    if verb == "back" and number not in backed:
        arena.back(in_extent(number))
        table.free(extent)
        backed.add(number)
    elif verb == "unback" and number in backed:
        table.unback(extent)
        arena.unback(in_extent(number))
        backed.remove(number)
    elif verb == "commit" and number in backed:
        rows = page.to_bytes(4, "little") * (LAYOUT.block_size * arena.row_bytes // 4)
        table.commit([page], NO_PARENT, 0, rows, 1)
    elif verb == "reserve" and number in backed:
        table.reserve([page], 7)
    elif verb in ("detach", "quarantine", "free") and number in backed:
        getattr(table, verb)([page])


def be_killed(arena: TierArena, backed: set[int], where: str) -> None:
    """Leave a change of an extent's memory where a kill could."""
    number = next((one for one in range(EXTENTS) if one not in backed), None)
    if where == "before it is taken" and backed:
        taken = backed.pop()
        arena.table.unback(range(taken * EXTENT_PAGES, (taken + 1) * EXTENT_PAGES))
    elif where in ("before it is noted", "half noted") and number is not None:
        arena.back(in_extent(number))
        if where == "half noted":
            arena.table.free(range(number * EXTENT_PAGES, number * EXTENT_PAGES + 5))
            backed.add(number)


@given(steps, cuts, st.sampled_from([4, 36]))
@settings(max_examples=60)
def test_what_is_adopted_is_what_was_there(life: list[Step], where: str, row_bytes: int) -> None:
    backed: set[int] = set()
    with own_place() as directory:
        with opened(directory, 1) as tier:
            arena = tier.create_arena(LAYOUT, row_bytes)
            for step in life:
                do(arena, backed, step)
            be_killed(arena, backed, where)
            pages = np.array(
                [e * EXTENT_PAGES + p for e in sorted(backed) for p in range(EXTENT_PAGES)], int
            )
            records = arena.table.records[pages]
        (adopted,) = adopt(arena.path)
        assert adopted.found.pages.tolist() == pages.tolist()
        assert adopted.found.records.tobytes() == records.tobytes()
        assert adopted.found.sealed.all()
        assert arena.path.stat().st_blocks * 512 == len(pages) * LAYOUT.page_bytes


# --- whenever it was killed ---

WRITER = """
import sys
from pathlib import Path
import numpy as np
from kvd.protocol.messages import Run
from kvd_tiers.host import HostConfig, HostTier
from tests.e2e.support import EXTENT_PAGES, LAYOUT

tier = HostTier(HostConfig(1 << 20), Path(sys.argv[1]))
tier.open(1)
arena = tier.create_arena(LAYOUT, 4)
table = arena.table
rng = np.random.default_rng(int(sys.argv[2]))
blocks = {}  # of each extent that has memory
for number in range(1, 1 << 20):
    extent = int(rng.integers(6))
    first = extent * EXTENT_PAGES
    run, pages = Run(first, EXTENT_PAGES), np.arange(first, first + EXTENT_PAGES)
    if extent not in blocks:
        arena.back(run)
        table.free(pages)
        blocks[extent] = []
    elif blocks[extent]:
        table.free(blocks.pop(extent)[::-1])
        blocks[extent] = []
    elif rng.random() < 0.3:
        del blocks[extent]
        table.unback(pages)
        arena.unback(run)
    else:
        blocks[extent] = pages = rng.permutation(pages)
        table.reserve(pages, 7)
        for page in pages.tolist():
            arena.memory.page_view(page)[...] = number
        rows = np.full(EXTENT_PAGES * LAYOUT.block_size, number, "<u4")
        table.commit(pages, -1, 0, rows.tobytes(), 1)
        sums = np.full(EXTENT_PAGES, number, np.uint64)
        table.add_checksums(pages, table.generations(pages), sums)
    print(number)
"""


@pytest.mark.parametrize("seed", range(5))
def test_what_a_killed_daemon_committed_is_adopted(
    shm: Path,  # noqa: F811
    child: Callable[..., Child],  # noqa: F811
    seed: int,
) -> None:
    writer = child(WRITER, shm, seed)
    for _ in range(100 + 37 * seed):
        writer.says()
    writer.send(signal.SIGKILL)
    writer.ended()
    (path,) = shm.glob("*.arena")
    with opened(shm, 2) as tier:
        (adopted,) = tier.adopt()
        assert path.stat().st_blocks * 512 == len(adopted.found.pages) * LAYOUT.page_bytes
        assert (~adopted.found.sealed).sum() <= 1
        check_blocks(adopted)


def check_blocks(adopted: Adopted) -> None:
    """Each has the memory that its rows say, and stands behind a block that is there."""
    is_block = adopted.found.are_committed
    blocks = dict(
        zip(adopted.found.pages[is_block].tolist(), adopted.found.records[is_block], strict=True)
    )
    assert blocks
    for page, record in blocks.items():
        (number,) = set(record["rows"][:BLOCK_BYTES].copy().view("<u4").tolist())
        assert (adopted.arena.memory.page_view(page) == number).all()
        assert record["checksum"] in (0, number)
        if record["parent"] != NO_PARENT:
            parent = blocks[int(record["parent"])]
            assert parent["generation"] == record["parent_generation"]
            assert parent["block"] + 1 == record["block"]
