"""The divergence and its gradients, in chunks, against torch's own."""

import pytest
import torch

from compressor.distill import loss
from compressor.distill.loss import Heads, divergence, divergence_gradient


def by_torch(student, teacher, ours, theirs):
    log_q = torch.log_softmax(student @ ours.T, -1)
    log_p = torch.log_softmax(teacher @ theirs.T, -1)
    return torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="sum")


@pytest.mark.parametrize("rows", [1, 5, 100])
def test_divergence_and_gradients(rows, monkeypatch):
    monkeypatch.setattr(loss, "MAX_LOGITS", rows * 40)
    torch.manual_seed(3)
    student, teacher = torch.randn(13, 8, requires_grad=True), torch.randn(13, 8)
    ours, theirs = torch.randn(40, 8, requires_grad=True), torch.randn(40, 8)
    expected = by_torch(student, teacher, ours, theirs)
    (expected / 13).backward()
    total, gradient, for_head = divergence_gradient(student.detach(), teacher, Heads(ours, theirs))
    assert total == pytest.approx(expected.item(), rel=1e-5)
    assert divergence(student.detach(), teacher, Heads(ours.detach(), theirs)) == pytest.approx(total, rel=1e-6)
    torch.testing.assert_close(gradient, student.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(for_head, ours.grad, rtol=1e-4, atol=1e-6)


def test_no_divergence_from_itself_and_no_gradient_for_a_frozen_head():
    torch.manual_seed(3)
    states, head = torch.randn(6, 8), torch.randn(40, 8)
    total, gradient, for_head = divergence_gradient(states, states, Heads(head, head))
    assert total == 0.0
    assert not gradient.any()
    assert for_head is None
