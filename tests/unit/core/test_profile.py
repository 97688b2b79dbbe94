"""Stages add up, and what none of them covers is named."""

import time

import pytest

from compressor.core.profile import Profile


def test_stages_add_up_and_the_rest_is_other():
    profile = Profile()
    for _ in range(2):
        with profile.stage("sleeping"):
            time.sleep(0.05)
    with pytest.raises(KeyError), profile.stage("failing"):
        raise KeyError
    rows = profile.shares(wall=1.0, cpu=0.5)
    assert [row["stage"] for row in rows] == ["sleeping", "failing", "other"]
    assert 0.1 <= rows[0]["wall_s"] < 0.5
    assert rows[0]["cpu_s"] < 0.05
    assert rows[0]["share"] == pytest.approx(rows[0]["wall_s"], abs=0.01)
    assert sum(row["wall_s"] for row in rows) == pytest.approx(1.0, abs=0.02)
