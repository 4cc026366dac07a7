"""Files read in chunks by several threads."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from shardconv.errors import SetError
from shardconv.format.header import DATA_ALIGNMENT
from shardconv.system.crew import Crew, check_stop

# One thread copies 5 to 10 GB/s out of the page cache, so a bus of 50 GB/s wants eight; they pin 128 MiB together, no
# more than four with chunks twice as long, and pinning costs time.
CHUNK_NBYTES = 8 << 20  # bytes read and copied at once
READERS = 8  # threads; host memory is READERS times two chunks

Read = Callable[[int, int], None]  # reads from a start to an exclusive end, bytes from the start of the data part


@contextmanager
def opened(path: Path, direct: bool) -> Iterator[int]:
    fd = -1
    if direct:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the file system has no direct I/O
                raise
    if fd < 0:
        fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def share_out(nbytes: int, chunk: int, reading: Callable[[], AbstractContextManager[Read]]) -> None:
    """Have READERS threads, each inside a `reading()` of its own, read `nbytes` from the front, chunk by chunk."""
    starts = iter(range(0, nbytes, chunk))
    lock = threading.Lock()

    def read_some() -> None:
        with reading() as read:
            while True:
                check_stop()
                with lock:
                    start = next(starts, None)
                if start is None:
                    break
                read(start, min(start + chunk, nbytes))

    num = min(READERS, max(1, -(-nbytes // chunk)))
    with Crew(num, "shardconv-read") as crew:
        crew.results([crew.submit(read_some) for _ in range(num)])


def read_chunk(fd: int, path: Path, buffer: memoryview, nbytes: int, offset: int) -> None:
    """Read `nbytes` at `offset`; asks for whole pages, as direct I/O wants, and may get less at the end of the file."""
    done = 0
    asked = min(len(buffer), -(-nbytes // DATA_ALIGNMENT) * DATA_ALIGNMENT)
    while done < nbytes:
        check_stop()
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)  # before the read: another reader may meet the same refusal meanwhile
        try:
            got = os.preadv(fd, [buffer[done:asked]], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            # Some file systems take O_DIRECT and refuse the reads; and after a short read the rest is not aligned.
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        if got == 0:
            raise SetError(f"{path.name}: ends at byte {offset + done:,}, its header promised more; fetch it again")
        done += got
