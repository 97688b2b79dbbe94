"""Scores of hand-made logits against closed forms and an obvious float64 twin."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.eval.divergence import TokenScores, join, score_logits, summarize


def probabilities(*rows):
    return torch.tensor(rows, dtype=torch.float64).log().float()


def twin(logits, reference, targets):
    """The definition, token by token, in float64."""
    found = []
    for x, y, target in zip(logits.double().numpy(), reference.double().numpy(), targets.tolist(), strict=True):
        q, p = (np.exp(v - v.max()) / np.exp(v - v.max()).sum() for v in (x, y))
        kld = sum(pi * math.log(pi / qi) for pi, qi in zip(p, q, strict=True) if pi > 0)
        found.append((-math.log(q[target]), -math.log(p[target]), kld, float(x.argmax() == y.argmax())))
    return np.array(found)


def test_uniform_logits_have_the_perplexity_of_the_vocabulary():
    scores = score_logits(torch.full((5, 32), 3.25), None, torch.arange(5))
    found = summarize(scores)
    assert scores.nll == pytest.approx(np.full(5, math.log(32)), rel=1e-12)
    assert found == {"perplexity": pytest.approx(32.0, rel=1e-12), "perplexity_error": pytest.approx(0.0, abs=1e-9)}


def test_two_outcomes_by_hand():
    """P = (3/4, 1/4) and Q = (1/2, 1/2): KL(P||Q) = 3/4 ln 3/2 + 1/4 ln 1/2, not the other way round."""
    target, reference = probabilities([0.5, 0.5], [0.5, 0.5]), probabilities([0.75, 0.25], [0.25, 0.75])
    scores = score_logits(target, reference, torch.tensor([1, 1]))
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert scores.kld == pytest.approx([expected, expected], rel=1e-6)
    assert scores.nll == pytest.approx([math.log(2)] * 2, rel=1e-7)
    assert scores.reference_nll == pytest.approx([math.log(4), math.log(4 / 3)], rel=1e-6)
    assert scores.same_top.tolist() == [1.0, 0.0]  # a tie goes to the first token


def test_a_model_against_itself_diverges_by_exactly_nothing():
    torch.manual_seed(0)
    logits = 8 * torch.randn(64, 100)
    scores = score_logits(logits.clone(), logits.clone(), torch.arange(64))
    assert (scores.kld == 0).all()
    assert (scores.same_top == 1).all()
    assert np.array_equal(scores.nll, scores.reference_nll)


def test_shifted_logits_are_the_same_distribution():
    torch.manual_seed(1)
    logits = (4 * torch.randn(16, 50)).round(decimals=2)
    shifted = score_logits(logits + 64.0, logits.clone(), torch.arange(16))
    assert shifted.kld == pytest.approx(np.zeros(16), abs=1e-5)
    assert shifted.nll == pytest.approx(shifted.reference_nll, abs=1e-5)


def test_huge_and_absent_probabilities_stay_finite():
    """A reference that is certain (p = 0 elsewhere in float32) against a target certain of another token."""
    reference = torch.tensor([[1000.0, 0.0, 0.0]])
    target = torch.tensor([[0.0, 1000.0, 0.0]])
    scores = score_logits(target, reference, torch.tensor([0]))
    assert scores.kld.tolist() == [1000.0]
    assert scores.nll.tolist() == [1000.0]
    assert scores.reference_nll.tolist() == [0.0]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(2, 300), st.floats(0.1, 20), st.floats(0, 2), st.integers(0, 2**31))
def test_equals_the_definition(tokens, vocab, spread, noise, seed):
    generator = torch.Generator().manual_seed(seed)
    reference = spread * torch.randn(tokens, vocab, generator=generator)
    logits = reference + noise * torch.randn(tokens, vocab, generator=generator)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    expected = twin(logits, reference, targets)
    scores = score_logits(logits.clone(), reference.clone(), targets)
    found = np.stack([scores.nll, scores.reference_nll, scores.kld, scores.same_top], 1)
    assert found == pytest.approx(expected, rel=1e-5, abs=2e-5)


def test_figures_and_errors_by_hand():
    """Four tokens, every figure worked out on paper (numpy only interpolates the quantiles)."""
    nll, base = np.array([1.0, 2.0, 3.0, 2.0]), np.array([1.0, 1.0, 3.0, 1.0])
    kld, same = np.array([0.0, 0.1, 0.2, 0.5]), np.array([1.0, 1.0, 0.0, 1.0])
    found = summarize(TokenScores(nll, base, kld, same))
    error = math.sqrt((18 / 4 - 2.0**2) / 3)  # llama-perplexity: sqrt((E[v^2] - E[v]^2) / (n - 1))
    assert found["perplexity"] == pytest.approx(math.exp(2.0))
    assert found["perplexity_error"] == pytest.approx(math.exp(2.0) * error)
    assert found["reference_perplexity"] == pytest.approx(math.exp(1.5))
    assert found["ln_ppl_ratio"] == pytest.approx(0.5)
    assert found["ln_ppl_ratio_error"] == pytest.approx(math.sqrt(0.25 / 3))  # differences 0, 1, 0, 1
    assert found["top1"] == 0.75
    assert found["top1_error"] == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    assert found["kld"] == {
        "mean": pytest.approx(0.2),
        "mean_error": pytest.approx(math.sqrt((0.3 / 4 - 0.04) / 3)),
        "median": pytest.approx(0.15),
        "p99": pytest.approx(0.2 + 0.3 * 0.97),
        "p999": pytest.approx(0.2 + 0.3 * 0.997),
        "max": 0.5,
    }


def test_one_token_has_figures_and_valid_json():
    found = summarize(TokenScores(*(np.array([0.5]),) * 4))
    assert found["perplexity_error"] == 0.0
    json.dumps(found, allow_nan=False)


def test_join_keeps_order_and_absent_parts():
    one, two = np.array([1.0]), np.array([2.0, 3.0])
    assert join([TokenScores(one), TokenScores(two)]).nll.tolist() == [1.0, 2.0, 3.0]
    assert join([TokenScores(one), TokenScores(two)]).kld is None
    both = join([TokenScores(one, one, one, one), TokenScores(two, two, two, two)])
    assert both.reference_nll.tolist() == both.kld.tolist() == both.same_top.tolist() == [1.0, 2.0, 3.0]
