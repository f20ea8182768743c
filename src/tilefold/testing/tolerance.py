"""The error budget: at most twice the error of plain PyTorch in the same dtype, plus one rounding unit of the
result.

Both errors are maxima over a tensor and are measured against float64. Nothing here is a constant chosen by
hand: inputs that are hard in a dtype are hard for plain PyTorch too, and easy ones leave no room. Plain
PyTorch may be measured in several ways (`evaluate` takes two); the largest of their errors counts. Three
remarks:

- Float64 has no wider truth. Its inputs are exact in float32 (see `inputs`), so the float32 run of plain
  PyTorch is measured instead and its error is scaled by the ratio of the two rounding units. The truth, which
  is itself plain PyTorch in float64, may be off by as much.
- Where plain PyTorch overflows in a narrow dtype and the truth does not, it is run in float32 on the same
  inputs.
- A maximum over few numbers says little: the one sum in the gradient of a sink may be rounded luckily in
  plain PyTorch. So verdicts of several draws of one case can be pooled: the largest error is compared with
  the largest baseline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """One tensor against its budget.

    Attributes:
        name: of the tensor.
        error: of the result, the largest absolute difference from the truth.
        baseline: that of plain PyTorch.
        unit: one rounding unit of the result.
        doubt: by how much the truth may be off.
    """

    name: str
    error: float
    baseline: float
    unit: float
    doubt: float = 0.0

    @property
    def allowed(self) -> float:
        return 2.0 * self.baseline + self.unit + self.doubt

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
        state = "ok  " if self.ok else "OVER"
        terms = f"2 x {self.baseline:.3g} (plain PyTorch) + {self.unit:.3g} (one unit)"
        if self.doubt:
            terms += f" + {self.doubt:.3g} (the truth)"
        allowed = f"allowed {self.allowed:.3g} = {terms}"
        return f"{state} {self.name}: error {self.error:.3g}, {allowed}; ratio {self.ratio:.3g}"


def baseline_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which plain PyTorch is run to judge results of `dtype`."""
    return torch.float32 if dtype == torch.float64 else dtype


def max_error(value: Tensor, truth: Tensor) -> float:
    """Largest absolute difference; infinite where one is finite and the other is not, or where infinities
    differ.
    """
    if value.shape != truth.shape:
        raise AssertionError(f"shapes differ: {list(value.shape)} against {list(truth.shape)}")
    if value.numel() == 0:
        return 0.0
    value, truth = value.detach().to(torch.float64), truth.detach().to(torch.float64)
    same = (value == truth) | (value.isnan() & truth.isnan())
    error = torch.where(same, 0.0, (value - truth).abs())
    return float(torch.where(error.isnan(), torch.inf, error).max())


def rounding_unit(truth: Tensor, dtype: torch.dtype) -> float:
    """One rounding unit of a result of `dtype` as large as the largest finite value of `truth`."""
    finite = truth.detach()[truth.isfinite()]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    info = torch.finfo(dtype)
    return max(info.eps * size, float(info.smallest_normal) * info.eps)


def judge(name: str, value: Tensor, truth: Tensor, baselines: Sequence[Tensor]) -> Verdict:
    """Compare `value` with `truth` (float64), given what plain PyTorch made of it in
    `baseline_dtype(value.dtype)`.
    """
    plain, doubt = max(max_error(baseline, truth) for baseline in baselines), 0.0
    if value.dtype == torch.float64:
        plain *= torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        doubt = plain
    return Verdict(name, max_error(value, truth), plain, rounding_unit(truth, value.dtype), doubt)


def judge_all(
    values: Mapping[str, Tensor],
    truths: Mapping[str, Tensor],
    baselines: Sequence[Mapping[str, Tensor]],
    *,
    context: str = "",
) -> list[Verdict]:
    """One verdict per tensor of `values`; each has a truth of the same name, and the other way round.

    Args:
        values, truths: tensors by name; the truths are float64.
        baselines: the same by plain PyTorch, one mapping per way of computing it.
        context: put before the names.
    """
    if values.keys() != truths.keys():
        raise AssertionError(f"{context}: results {sorted(values)} were expected to be {sorted(truths)}")
    prefix = f"{context}: " if context else ""
    return [
        judge(prefix + name, value, truths[name], [baseline[name] for baseline in baselines])
        for name, value in values.items()
    ]


def pool(draws: Iterable[Iterable[Verdict]]) -> list[Verdict]:
    """The verdicts of several draws of one case as those of one larger draw: maxima by name."""
    pooled: dict[str, Verdict] = {}
    for verdict in (verdict for draw in draws for verdict in draw):
        known = pooled.get(verdict.name, verdict)
        pooled[verdict.name] = Verdict(
            verdict.name,
            max(known.error, verdict.error),
            max(known.baseline, verdict.baseline),
            max(known.unit, verdict.unit),
            max(known.doubt, verdict.doubt),
        )
    return list(pooled.values())


def assert_within(verdicts: Iterable[Verdict], context: str = "") -> None:
    """Assert that all are within their budgets; the message shows every one.

    Raises:
        AssertionError: some tensor is over its budget.
    """
    verdicts = list(verdicts)
    if not all(verdict.ok for verdict in verdicts):
        raise AssertionError("\n  ".join([f"{context}: over the error budget", *map(str, verdicts)]))


def check(
    values: Mapping[str, Tensor],
    truths: Mapping[str, Tensor],
    baseline: Mapping[str, Tensor],
    *,
    context: str = "",
) -> None:
    """`judge_all` with one baseline, then `assert_within`."""
    assert_within(judge_all(values, truths, [baseline], context=context), context)


def check_identical(values: Mapping[str, Tensor], others: Mapping[str, Tensor], *, context: str = "") -> None:
    """Assert that two sets of results are equal bit for bit (NaN equal to NaN)."""
    if values.keys() != others.keys():
        raise AssertionError(f"{context}: results {sorted(values)} were expected to be {sorted(others)}")
    for name, value in values.items():
        if not torch.equal(torch.nan_to_num(value, nan=12345.0), torch.nan_to_num(others[name], nan=12345.0)):
            error = max_error(value, others[name])
            raise AssertionError(f"{context}: {name} is not bit-identical; largest difference {error:.3g}")
