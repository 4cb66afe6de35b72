"""tools/opened_files.py: lines of strace become counts of files and bytes."""

from tools.opened_files import read_trace, table

LINES = """\
openat(AT_FDCWD</work>, "/x/a.py", O_RDONLY) = 3</x/a.py>
read(3</x/a.py>, ""..., 4096) = 100
openat(AT_FDCWD</work>, "/x/none.py", O_RDONLY) = -1 ENOENT (No such file or directory)
openat(AT_FDCWD</work>, "/x/a.py", O_RDONLY) = 4</x/a.py>
mmap(NULL, 5000, PROT_READ, MAP_PRIVATE, 3</x/a.py>, 0) = 0x7f0000000000
read(5<socket:[17]>, ""..., 4096) = 9
openat(AT_FDCWD</work>, "/proc/stat", O_RDONLY) = 5</proc/stat>
"""


def test_opens_and_bytes_are_counted_by_mount():
    (found,) = read_trace(LINES.splitlines())
    assert found.mount.startswith("/ (") and found.files == {"/x/a.py"}
    assert (found.opens, found.read, found.mapped) == (2, 100, 5000)
    assert table([found]).splitlines()[1].split()[:4] == ["2", "1", "0.0", "0.0"]
