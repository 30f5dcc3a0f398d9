"""Sampling against plain NumPy, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deeploop_model import ModelConfigError
from deeploop_model.sampling import Sampling, draw, probabilities, sample

VOCAB = 23


def logits(rows: int = 5, seed: int = 0) -> torch.Tensor:
    """Rows with two pairs of equal logits each."""
    x = 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    x[:, 4], x[:, 9] = x[:, 7], x[:, 2]
    return x


def plain_distribution(row: Any, sampling: Sampling) -> Any:
    """The rules of the module's docstring by sorting a list of ids."""
    if sampling.temperature == 0:
        best = max(range(VOCAB), key=lambda i: (row[i], -i))
        return np.array([1.0 if i == best else 0.0 for i in range(VOCAB)])
    weights = {i: np.exp((row[i] - max(row)) / sampling.temperature) for i in range(VOCAB)}
    if sampling.top_k is not None:
        least = sorted(weights.values(), reverse=True)[min(sampling.top_k, VOCAB) - 1]
        weights = {i: w for i, w in weights.items() if w >= least}
    kept: dict[int, float] = {}
    for i in sorted(weights, key=lambda i: (-weights[i], i)):
        if sum(kept.values()) / sum(weights.values()) >= sampling.top_p:
            break
        kept[i] = weights[i]
    return np.array([kept.get(i, 0.0) / sum(kept.values()) for i in range(VOCAB)])


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 1, 5, 100])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.8, 1.0])
def test_distribution_is_that_of_the_plain_rules(temperature: float, top_k: int | None, top_p: float) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    expected = [plain_distribution(row, sampling) for row in logits().double().numpy()]
    np.testing.assert_allclose(probabilities(logits(), sampling).numpy(), expected, rtol=1e-12, atol=0)


def test_a_tiny_temperature_takes_the_most_likely_token() -> None:
    x = logits()
    x[:, 0] = x.max(dim=-1).values + 1
    for temperature in (1e-308, 5e-324):
        assert probabilities(x, Sampling(temperature))[:, 0].tolist() == [1.0] * len(x)


def test_draw_inverts_the_distribution_function() -> None:
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    almost_one = 1 - 2**-53
    for u, token in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (almost_one, 4)):
        assert draw(p.unsqueeze(0), torch.tensor([u], dtype=torch.float64)).tolist() == [token]
    thirds = torch.full((1, 3), 1 / 3, dtype=torch.float64) * (1 + 1e-15)
    assert draw(thirds, torch.tensor([almost_one], dtype=torch.float64)).tolist() == [2]


def test_frequencies_follow_the_distribution() -> None:
    sampling = Sampling(temperature=1.5, top_k=6, top_p=0.95)
    row, draws = logits(1), 4000
    p = probabilities(row, sampling)[0]
    uniform = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    counts = torch.bincount(draw(p.expand(draws, -1), uniform), minlength=VOCAB)
    spread = (draws * p * (1 - p)).sqrt()
    assert ((counts - draws * p).abs() <= 5 * spread).all()
    assert (counts[p == 0] == 0).all()


def test_a_row_draws_alike_alone_and_in_a_batch_and_by_seed() -> None:
    def tokens(rows: list[int], seed: int) -> list[list[int]]:
        generators = [torch.Generator().manual_seed(seed + row) for row in rows]
        return [sample(logits()[rows], Sampling(), generators).tolist() for _ in range(20)]

    together = tokens([0, 1, 2], seed=5)
    assert [drawn[1:2] for drawn in together] == tokens([1], seed=5)
    assert together == tokens([0, 1, 2], seed=5)
    assert together != tokens([0, 1, 2], seed=6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature: -0.1 must be 0 or more"),
        ({"temperature": float("nan")}, "temperature: nan must be 0 or more"),
        ({"top_k": 0}, "top_k: 0 must be 1 or more"),
        ({"top_p": 0.0}, "top_p: 0.0 must be more than 0 and at most 1"),
        ({"top_p": 1.1}, "top_p: 1.1 must be more than 0"),
    ],
)
def test_values_without_meaning(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        Sampling(**fields)
