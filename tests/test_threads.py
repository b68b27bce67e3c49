"""How many threads are used: cores that are really ours, as others leave them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdrseg import threads


@pytest.mark.parametrize(
    ("ours", "there", "used", "expected"),
    [
        (2, 2, 0.0, 2),
        (2, 2, 0.3, 2),
        (2, 2, 0.67, 1),  # one other thread beside our two
        (2, 2, 2.0, 1),
        (16, 16, 8.0, 8),
        (2, 64, 8.0, 2),  # a container that is granted two of many cores
        (0.5, 4, 0.0, 1),
        (2.5, 64, 0.0, 3),
    ],
)
def test_threads_are_the_cores_that_others_leave(ours, there, used, expected):
    assert threads.free_cores(ours, there, used) == expected


def test_a_container_counts_with_what_it_is_granted(tmp_path: Path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/pod/app\n3:cpu,cpuacct:/old\n1:memory:/other\n")
    for path, files in {
        "pod": {"cpu.max": "300000 100000\n"},
        "pod/app": {"cpu.max": "max 100000\n"},
        "cpu/old": {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"},
        "cpu": {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"},
    }.items():
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / path / name).write_text(text)
    assert sorted(threads._quotas(tmp_path, membership)) == [1.5, 3.0]
    assert threads._quotas(tmp_path / "absent", tmp_path / "absent") == []


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc")
def test_the_load_of_others_is_not_our_own():
    """A child that is not ours to subtract keeps a core busy; what this process does itself does not count."""
    load = threads.Load()
    sum(range(3_000_000))
    quiet = threads.Load()
    busy = subprocess.Popen([sys.executable, "-c", "import time; t = time.process_time\nwhile t() < 0.4: pass"])
    busy.wait(60)
    assert load.of_others() >= 0
    seconds = quiet._used
    assert threads._seconds_of_others() - seconds > 0.3


@pytest.mark.parametrize(
    ("given", "spin", "ours"),
    [({}, threads.SPIN, True), ({"OMP_NUM_THREADS": "2"}, None, False), ({"GOMP_SPINCOUNT": "7"}, "7", False)],
)
def test_what_the_user_set_is_left(given, spin, ours):
    code = "import os; from sdrseg import threads; threads.prepare(); print(os.environ.get('GOMP_SPINCOUNT'), "
    code += "threads._load is not None)"
    environment = {name: value for name, value in os.environ.items() if name not in threads.CHOICES} | given
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(spin), str(ours)]


def test_a_process_that_has_torch_is_left_alone(monkeypatch):
    """It is the user's own program, which decides itself."""
    for name in threads.CHOICES:
        monkeypatch.delenv(name, raising=False)
    threads.prepare()
    assert threads._load is None and "GOMP_SPINCOUNT" not in os.environ
