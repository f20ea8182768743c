"""The error budget: at most twice the error of plain PyTorch in the same dtype, plus one rounding unit of the result.

Both errors are maxima over a tensor and are measured against float64. Nothing here is a constant chosen by hand: inputs that are hard
in a dtype are hard for plain PyTorch too, and easy ones leave no room. Three remarks:

- Float64 has no wider truth. Its inputs are exact in float32 (see `inputs`), so the float32 run of plain PyTorch is measured instead and its error is
  scaled by the ratio of the two rounding units.
- Where plain PyTorch overflows in a narrow dtype and the truth does not, it is run in float32 on the same inputs.
- A gradient which vanishes by cancellation, such as that of a row with one visible key, has no rounding unit of its own: it is a
  difference of equal terms, and the unit is that of these terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """One tensor against its budget. `error`, `baseline` and `unit` are absolute."""

    name: str
    error: float
    baseline: float
    unit: float

    @property
    def allowed(self) -> float:
        return 2.0 * self.baseline + self.unit

    @property
    def ratio(self) -> float:
        """Error over budget; 1 or less is within it."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.allowed if self.allowed > 0.0 else float("inf")

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed

    def __str__(self) -> str:
        return (
            f"{self.name}: error {self.error:.3g}, allowed {self.allowed:.3g} = 2 x {self.baseline:.3g} (plain PyTorch) "
            f"+ {self.unit:.3g} (one unit); ratio {self.ratio:.3g}"
        )


def baseline_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which plain PyTorch is run to judge results of `dtype`."""
    return torch.float32 if dtype == torch.float64 else dtype


def max_error(value: Tensor, truth: Tensor) -> float:
    """Largest absolute difference; infinite where one is finite and the other is not, or where infinities differ."""
    if value.shape != truth.shape:
        raise AssertionError(f"shapes differ: {list(value.shape)} against {list(truth.shape)}")
    if value.numel() == 0:
        return 0.0
    value, truth = value.detach().to(torch.float64), truth.detach().to(torch.float64)
    same = (value == truth) | (value.isnan() & truth.isnan())
    error = torch.where(same, 0.0, (value - truth).abs())
    return float(torch.where(error.isnan(), torch.inf, error).max())


def rounding_unit(truth: Tensor, dtype: torch.dtype, terms: float = 0.0) -> float:
    """One rounding unit of a result of `dtype` as large as the largest finite value of `truth`.

    Args:
        terms: magnitude of the terms of which the result is a difference. It only counts if the result vanishes beside it.
    """
    finite = truth[truth.isfinite()]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    if size <= terms * torch.finfo(torch.float32).eps:
        size = terms
    info = torch.finfo(dtype)
    return max(info.eps * size, float(info.smallest_normal) * info.eps)


def judge(name: str, value: Tensor, truth: Tensor, baseline: Tensor, *, terms: float = 0.0) -> Verdict:
    """Compare `value` with `truth` (float64), given what plain PyTorch made of it in `baseline_dtype(value.dtype)`."""
    error = max_error(baseline, truth)
    if value.dtype == torch.float64:
        error *= torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return Verdict(name, max_error(value, truth), error, rounding_unit(truth, value.dtype, terms))


def check(
    values: Mapping[str, Tensor],
    truths: Mapping[str, Tensor],
    baselines: Mapping[str, Tensor],
    *,
    terms: Mapping[str, float] | None = None,
    context: str = "",
) -> list[Verdict]:
    """Assert that every tensor of `values` is within its budget.

    Args:
        values, truths, baselines: tensors by name; the truths are float64.
        terms: per name, see `rounding_unit`.
        context: shown on failure.

    Returns:
        One verdict per tensor.

    Raises:
        AssertionError: some tensor is over its budget; the message shows all verdicts.
    """
    if values.keys() != truths.keys():
        raise AssertionError(f"{context}: results {sorted(values)} were expected to be {sorted(truths)}")
    verdicts = [
        judge(name, value, truths[name], baselines[name], terms=(terms or {}).get(name, 0.0))
        for name, value in values.items()
    ]
    if not all(verdict.ok for verdict in verdicts):
        lines = "\n".join(f"  {'ok  ' if verdict.ok else 'OVER'} {verdict}" for verdict in verdicts)
        raise AssertionError(f"{context}: over the error budget\n{lines}")
    return verdicts


def check_identical(values: Mapping[str, Tensor], others: Mapping[str, Tensor], *, context: str = "") -> None:
    """Assert that two sets of results are equal bit for bit (NaN equal to NaN)."""
    if values.keys() != others.keys():
        raise AssertionError(f"{context}: results {sorted(values)} were expected to be {sorted(others)}")
    for name, value in values.items():
        if not torch.equal(torch.nan_to_num(value, nan=12345.0), torch.nan_to_num(others[name], nan=12345.0)):
            error = max_error(value, others[name])
            raise AssertionError(f"{context}: {name} is not bit-identical; largest difference {error:.3g}")
