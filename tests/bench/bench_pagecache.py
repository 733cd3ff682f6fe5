"""What the page cache costs by itself: system time of writing a file into memory that was in use, and that lay free.

    python tests/bench/bench_pagecache.py FOLDER [--gb 2] [--idle 25]

A virtual machine whose balloon reports free pages (VIRTIO_BALLOON_F_REPORTING, feature bit 5) gives memory back to its
host seconds after it was freed, and every page of it that is taken into use again has to be fetched from the host. That
time is booked as system time of whoever writes, `cp` and requant alike: read a repack's CPU-seconds per GB beside this.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

CHUNK = 4 << 20


def reporting() -> bool:
    """Whether a balloon of this machine reports free pages."""
    balloons = Path("/sys/bus/virtio/drivers/virtio_balloon")
    features = [(device / "features").read_text() for device in balloons.glob("virtio*")]
    return any(bits[5:6] == "1" for bits in features)


def write(path: Path, nbytes: int) -> float:
    """System seconds per GB of writing a preallocated file; it is synced and deleted afterwards."""
    data = os.urandom(CHUNK)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_stime
        for offset in range(0, nbytes, CHUNK):
            os.pwrite(fd, data, offset)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_stime
        os.fsync(fd)
    finally:
        os.close(fd)
        path.unlink()
    return (after - before) / nbytes * 1e9


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=2)
    parser.add_argument("--idle", type=float, default=25)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    size = int(given.gb * 1e9) // CHUNK * CHUNK
    print(f"balloon reports free pages: {'yes' if reporting() else 'no'}")
    write(given.folder / "pagecache", size)
    for _ in range(3):
        used = write(given.folder / "pagecache", size)
        time.sleep(given.idle)
        free = write(given.folder / "pagecache", size)
        print(f"memory in use a moment ago {used:.2f} s/GB, free for {given.idle:g} s {free:.2f} s/GB", flush=True)
