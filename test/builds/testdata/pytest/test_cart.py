import os
import subprocess
import sys
import tempfile
from multiprocessing import Pool, Queue

import pytest

from cart import total


@pytest.mark.parametrize("prices, want", [([], 0), ([1, 2], 3)])
def test_total(prices, want):
    assert total(prices) == want


def test_files(tmp_path):
    (tmp_path / "a").write_text("1")
    os.link(tmp_path / "a", tmp_path / "b")
    os.symlink("a", tmp_path / "c")
    assert (tmp_path / "c").read_text() == "1"
    with tempfile.TemporaryFile() as f:
        f.write(b"1")


def test_processes():
    assert subprocess.check_output([sys.executable, "-c", "print(1)"]) == b"1\n"
    with Pool(2) as pool:  # semaphores in /dev/shm
        assert pool.map(total, [[1], [2]]) == [1, 2]
    Queue().close()
