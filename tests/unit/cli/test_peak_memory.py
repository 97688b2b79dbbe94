"""The peak that a summary reports is this process's own."""

import subprocess
import sys

import numpy as np
import pytest

from compressor.cli.quantize import peak_rss_bytes


def test_it_counts_what_was_touched_and_freed():
    before = peak_rss_bytes()
    held = np.ones(max(300_000_000, before) // 8)
    grown = held.nbytes
    del held
    assert peak_rss_bytes() > grown


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="other systems have no figure that leaves the parent out"
)
def test_a_child_does_not_report_its_parent():
    held = np.ones(600_000_000 // 8)
    code = "from compressor.cli.quantize import peak_rss_bytes; print(peak_rss_bytes())"
    child = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert child < held.nbytes / 2 < peak_rss_bytes()
