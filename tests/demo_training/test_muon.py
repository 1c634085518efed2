"""Muon's update is near-orthogonal for whole stacks, wide or tall, and lowers a loss."""

import pytest
import torch

from runtime.demo_training.muon import Muon, orthogonalise


@pytest.mark.parametrize("size", [(16, 64), (64, 16), (3, 48, 128), (2, 4, 128, 48)])
def test_singular_values_come_near_one(size):
    matrices = torch.randn(size, generator=torch.Generator().manual_seed(1)) * 5
    result = orthogonalise(matrices)
    assert result.shape == matrices.shape
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_stack_is_treated_matrix_by_matrix():
    stack = torch.randn(5, 24, 40, generator=torch.Generator().manual_seed(2))
    single = torch.stack([orthogonalise(matrix) for matrix in stack])
    torch.testing.assert_close(orthogonalise(stack), single)


def test_zero_gradient_gives_no_update():
    assert orthogonalise(torch.zeros(2, 4, 8)).abs().max() == 0


def test_muon_fits_a_matrix():
    generator = torch.Generator().manual_seed(3)
    goal, inputs = torch.randn(8, 16, generator=generator), torch.randn(64, 16, generator=generator)
    weight = torch.zeros(8, 16, requires_grad=True)
    optimiser = Muon([weight], lr=0.3, weight_decay=0.0, precision=torch.float32)
    losses = []
    for _ in range(60):
        loss = ((inputs @ weight.t() - inputs @ goal.t()) ** 2).mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


def test_parameters_without_gradient_stay():
    weight = torch.ones(4, 4, requires_grad=True)
    Muon([weight]).step()
    assert torch.equal(weight.detach(), torch.ones(4, 4))
