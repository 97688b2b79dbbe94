"""Orthogonal matrices from a seed: random ones, and Hadamard matrices with random signs, applied fast.

A Hadamard matrix of order n has entries +-1 and rows at right angles. Built from Sylvester's doubling
(orders 2^k) and Paley's two constructions over the integers mod a prime q (order q + 1 for q = 3 mod 4,
order 2(q + 1) for q = 1 mod 4; R. Paley, "On orthogonal matrices", 1933), joined by Kronecker products.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
LARGEST_FACTOR = 64  # a factor of a Hadamard matrix: small enough for cache, large enough for a matrix product


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix Q float64 [n, n] = diag(signs) (F1 kron F2 kron ...).

    Attributes:
        signs: float64 [n] of +-1, or None for all +1.
        factors: Orthogonal matrices whose orders multiply to n.
    """

    signs: Matrix | None
    factors: tuple[Matrix, ...]

    @property
    def width(self) -> int:
        """Its order n."""
        return int(np.prod([len(factor) for factor in self.factors]))

    def apply(self, x: NDArray[np.floating]) -> Matrix:
        """Rows x [rows, n] of any float dtype -> x @ Q, float64 [rows, n], fresh. Twin: ``x @ matrix()``."""
        found: Matrix = x.astype(np.float64)
        if self.signs is not None:
            found *= self.signs
        for factor in reversed(self.factors):  # each takes the last axis and moves it to the front
            rotated = found.reshape(-1, len(factor)) @ factor
            found = rotated.reshape(len(x), -1, len(factor)).swapaxes(1, 2)
        return np.ascontiguousarray(found).reshape(x.shape)

    def matrix(self) -> Matrix:
        """Q itself, by Kronecker products."""
        found: Matrix = np.ones((1, 1))
        for factor in self.factors:
            found = np.asarray(np.kron(found, factor), np.float64)
        return found if self.signs is None else self.signs[:, None] * found


def random_orthogonal(width: int, seed: tuple[int, ...]) -> Rotation:
    """A uniformly distributed orthogonal matrix: QR of a Gaussian one, R's diagonal made positive."""
    gaussian = np.random.default_rng(seed).standard_normal((width, width))
    q, r = np.linalg.qr(gaussian)
    q *= np.where(np.diag(r) < 0, -1.0, 1.0)
    return Rotation(None, (q,))


def random_hadamard(width: int, seed: tuple[int, ...]) -> Rotation:
    """A Hadamard matrix over sqrt(width) with random signs on its rows.

    Raises:
        ValueError: no Hadamard matrix of this order is known here.
    """
    orders = hadamard_orders(width)
    if orders is None:
        raise ValueError(f"no Hadamard matrix of order {width}")
    signs: Matrix = np.where(np.random.default_rng(seed).integers(0, 2, width) == 1, 1.0, -1.0)
    return Rotation(signs, tuple(_hadamard(order) / float(order) ** 0.5 for order in orders))


def hadamard_orders(width: int) -> tuple[int, ...] | None:
    """Orders of the factors of a Hadamard matrix of order ``width``; None when these constructions give none."""
    base = width & -width  # the power of two in width
    odd, order = width // base, width // base
    while order > 1 and not _paley_prime(order):
        order *= 2
        if order > width:
            return None
    rest = width // order
    factors = [order] if odd > 1 else []
    while rest > 1:
        factors.append(min(rest, LARGEST_FACTOR))
        rest //= factors[-1]
    return tuple(factors) or (1,)


def _paley_prime(order: int) -> int:
    """The prime q behind Paley's matrix of this order, 0 when there is none."""
    if order % 4:
        return 0
    if _is_prime(order - 1):  # 3 mod 4, as order is a multiple of 4
        return order - 1
    q = order // 2 - 1
    return q if q % 4 == 1 and _is_prime(q) else 0


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def _hadamard(order: int) -> Matrix:
    """A Hadamard matrix of entries +-1, order a power of two or one of Paley's."""
    if order & (order - 1):
        return _paley(order, _paley_prime(order))
    found = np.ones((1, 1))
    while len(found) < order:
        found = np.kron(found, np.array([[1.0, 1.0], [1.0, -1.0]]))
    return found


def _paley(order: int, q: int) -> Matrix:
    """Paley's matrix over the integers mod q: order q + 1, or 2(q + 1)."""
    squares = {i * i % q for i in range(1, q)}
    character = np.array([0.0] + [1.0 if i in squares else -1.0 for i in range(1, q)])
    index = np.arange(q)
    core = np.zeros((q + 1, q + 1))
    core[0, 1:] = 1.0
    core[1:, 0] = -1.0 if q % 4 == 3 else 1.0
    core[1:, 1:] = character[(index[:, None] - index[None, :]) % q]
    if order == q + 1:
        return core + np.eye(order)
    on, off = np.array([[1.0, 1.0], [1.0, -1.0]]), np.array([[1.0, -1.0], [-1.0, -1.0]])
    return np.kron(core, on) + np.kron(np.eye(q + 1), off)
