"""Every model of the zoo is a usable oracle: repeatable, exact in float64, and every parameter matters."""

from fnmatch import fnmatchcase

import pytest
import torch
from zoo import ZOO, reference


@pytest.fixture(params=ZOO, scope="module")
def case(request):
    return ZOO[request.param]


@pytest.fixture(scope="module")
def expected(case):
    return reference(case)


def test_the_loss_is_a_finite_float64_scalar(expected):
    loss, _ = expected
    assert loss.dtype == torch.float64
    assert loss.shape == ()
    assert 0.1 < loss.item() < 20


def test_every_trainable_parameter_has_a_gradient_and_only_those_listed_a_zero_one(case, expected):
    _, grads = expected
    model = case.build()
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert grads.keys() == trainable
    for name, grad in grads.items():
        assert grad.dtype == torch.float64
        assert grad.isfinite().all()
        largest = grad.abs().max()
        if case.zero_grad and fnmatchcase(name, case.zero_grad):
            assert largest < 1e-14, name
        else:
            assert largest > 1e-7, f"{name} has a zero gradient"


def test_a_case_gives_the_same_numbers_each_time(case, expected):
    loss, grads = reference(case)
    assert torch.equal(loss, expected[0])
    assert all(torch.equal(grads[name], grad) for name, grad in expected[1].items())


def test_gradients_are_exact_to_central_differences(case, expected):
    """Along one random direction; float32 anywhere inside would cost five digits."""
    _, grads = expected
    model, batch = case.build(), case.batch()
    generator = torch.Generator().manual_seed(2)
    directions = {
        name: torch.randn(grad.shape, generator=generator, dtype=torch.float64) for name, grad in grads.items()
    }
    step = 1e-6

    def moved(scale):
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, direction in directions.items():
                parameters[name].add_(direction, alpha=scale)
            return case.loss(model, batch)

    difference = moved(step) - moved(-2 * step)
    slope = sum((grads[name] * direction).sum() for name, direction in directions.items())
    torch.testing.assert_close(difference / (2 * step), slope, rtol=1e-6, atol=1e-8)
