"""What a report says of a model's past widens what verify accepts, and no more."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from compressor.eval.history import History, history_of, rescaled_like
from compressor.eval.tensors import relative_error


def test_a_rescaled_source_is_found_again():
    rng = np.random.default_rng(0)
    source = rng.standard_normal((40, 60)).astype(np.float32)
    rows, columns = (np.exp(rng.normal(0, 1, shape)) for shape in ((40, 1), (1, 60)))
    values = (source * rows * columns).astype(np.float32)
    assert relative_error(rescaled_like(source, values), values) < 1e-3
    assert relative_error(source, values) > 0.5


def test_another_matrix_is_no_rescaled_source():
    one, other = np.random.default_rng(1).standard_normal((2, 40, 60)).astype(np.float32)
    assert relative_error(rescaled_like(one, other), other) > 0.8


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"facts": 3}', '{"tensors": {"a": 1}}'])
def test_no_usable_report_is_no_history(tmp_path, text):
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    assert history_of(SimpleNamespace(path=tmp_path)) == History()


def test_the_history_of_a_report(tmp_path):
    report = {
        "facts": {"recipe": {"transforms": [{"rotate": {"seed": 3}}]}, "distill_scales": {}},
        "tensors": {"a.weight": {"moved": 0.25}, "b.weight": {"rescaled": {"x -> b": {}}, "moved": None}},
    }
    (tmp_path / "report.json").write_text(json.dumps(report))
    found = history_of(SimpleNamespace(path=tmp_path))
    assert [(call.name, call.options) for call in found.transforms] == [("rotate", {"seed": 3})]
    assert (dict(found.moved), found.rescaled, found.distilled) == ({"a.weight": 0.25}, {"b.weight"}, True)
