"""A mask is a value: who may look at whom. Its algebra, its spelling, its definition.

Every mask says one thing, `visible(b, h, i, j, q_length, k_length)`, elementwise on index tensors; that is its definition, and
`materialize` only calls it. The other methods (`band`, `row_spans`, `col_spans`, `tiles`) answer the same question for whole lines or
tiles, so that lowering never visits single elements where it need not; what they cannot say they leave to `visible`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ArgumentTypeError, MaskError
from . import intervals
from .context import Boxes, Length, Lines, grid, indices
from .intervals import Spans

if TYPE_CHECKING:
    from .band import Band


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """Who may look at whom. Combine masks with `&`, `|` and `~`; build them with the functions of `tilefold.masks`."""

    # -- what a mask says ----------------------------------------------------------------------------------------------------------

    def visible(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, q_length: Length, k_length: Length) -> Tensor:
        """The definition: bool, whether query `i` of batch element `b` and query head `h` sees key `j`.

        All arguments are int64 tensors that broadcast together (lengths may be ints); the result broadcasts with them.
        """
        raise NotImplementedError

    def band(self, Lq: int, Lk: int) -> Band | None:
        """The mask as a band around the diagonal of a call of these lengths, or None."""
        return None

    def row_spans(self, lines: Lines) -> Spans | None:
        """Visible key intervals of each query row, or None where the mask is not a few intervals per row."""
        return None

    def col_spans(self, lines: Lines) -> Spans | None:
        """Visible query intervals of each key, or None where the mask is not a few intervals per key."""
        return None

    def tiles(self, boxes: Boxes) -> Tensor:
        """int8 `[B or 1, H or 1, nq, nk]`: 0 surely empty, 2 surely full, 1 not known."""
        return torch.ones((1, 1, 1, 1), dtype=torch.int8, device=boxes.q0.device)

    def states(self, B: int, H: int, Lq: int, Lk: int, size: int, device: torch.device) -> Tensor:
        """`tiles` for the grid of one call; masks that know a faster way for whole calls take it."""
        return self.tiles(grid(B, H, Lq, Lk, size, device))

    # -- checks --------------------------------------------------------------------------------------------------------------------

    def check(self, B: int, Hq: int, Lq: int | None, Lk: int | None, device: torch.device | str) -> None:
        """Does the mask fit a call of these sizes? Reads metadata only. A length of None is not known (inside `documents`).

        Raises:
            MaskError: a tensor of another shape or device, or a mask built for other lengths.
        """
        for tensor in self._own_tensors():
            check_device(f"mask {self._name()}", tensor, device)
        for part in self._parts():
            part.check(B, Hq, Lq, Lk, device)

    def check_values(self, Lq: int | None, Lk: int | None) -> None:
        """Do the values in the mask's tensors fit these lengths? Reads the tensors.

        Raises:
            MaskError: offsets that decrease, lengths or indices out of range.
        """
        for part in self._parts():
            part.check_values(Lq, Lk)

    @property
    def needs_build(self) -> bool:
        """True if some part has no spelling (a `predicate`), so that `build` has to come before `spec`."""
        return any(part.needs_build for part in self._parts())

    # -- algebra -------------------------------------------------------------------------------------------------------------------

    def __and__(self, other: Mask) -> Mask:
        return And(self, _operand(other, "&"))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, _operand(other, "|"))

    def __rand__(self, other: Any) -> Mask:
        return And(_operand(other, "&"), self)

    def __ror__(self, other: Any) -> Mask:
        return Or(_operand(other, "|"), self)

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise ArgumentTypeError("mask: expected & | ~ between masks, got and / or / not (a mask has no truth value)")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        return self is other or (type(self) is type(other) and self._identity() == other._identity())

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[object, ...]:
        """What makes two masks equal: the spelling, and of everything that has no spelling the object itself."""
        held: list[Any] = []
        return (self._write("", held), *(id(value) for value in held))

    # -- spelling ------------------------------------------------------------------------------------------------------------------

    def spec(self) -> tuple[str, tuple[Tensor, ...]]:
        """The mask as a short string and its tensors, which the string calls t0, t1, ... in order; `parse` is the inverse.

        Raises:
            MaskError: a `predicate` has no spelling; `build` it first.
        """
        if torch.compiler.is_compiling():
            return self._spell()
        found = self.__dict__.get("_spec")
        if found is None:
            found = self._spell()
            object.__setattr__(self, "_spec", found)
        return found

    def _spell(self) -> tuple[str, tuple[Tensor, ...]]:
        if self.needs_build:
            raise MaskError(
                "mask: expected a mask that was built before (mask.build(B, Hq, Lq, Lk)), got a predicate, which has no spelling"
            )
        held: list[Any] = []
        text = self._write("", held)
        return text, tuple(held)

    def __repr__(self) -> str:
        return self._write("masks.", None)

    def _name(self) -> str:
        """The constructor's name."""
        return type(self).__name__.lower()

    def _arguments(self) -> tuple[tuple[str, Any], ...]:
        """(keyword or "", value) of each argument of the constructor that is not at its default."""
        return ()

    def _write(self, prefix: str, held: list[Any] | None) -> str:
        """The spelling. `held` collects what cannot be written; None writes a readable stand-in for it."""
        written = []
        for keyword, value in self._arguments():
            text = write_value(value, prefix, held)
            written.append(f"{keyword}={text}" if keyword else text)
        return f"{prefix}{self._name()}({', '.join(written)})"

    # -- parts ---------------------------------------------------------------------------------------------------------------------

    def _parts(self) -> tuple[Mask, ...]:
        """The masks of which this one is made."""
        return ()

    def _own_tensors(self) -> tuple[Tensor, ...]:
        """The tensors of this mask itself, without those of its parts."""
        return tuple(value for _, value in self._arguments() if isinstance(value, Tensor))

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._own_tensors()
        for part in self._parts():
            yield from part._tensors()

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Mask:
        """The same mask with every tensor changed."""
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changes[field.name] = change(value)
            elif isinstance(value, Mask):
                changes[field.name] = value._mapped(change)
        return dataclasses.replace(self, **changes) if changes else self

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tensors on `device`."""
        return self._mapped(lambda tensor: tensor.to(device))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __deepcopy__(self, memo: dict[int, Any]) -> Mask:
        return self._mapped(lambda tensor: copy.deepcopy(tensor, memo))

    # -- the two ways to use one ---------------------------------------------------------------------------------------------------

    def materialize(self, B: int, H: int, Lq: int, Lk: int, device: torch.device | str | None = None) -> Tensor:
        """The dense mask that defines this one: bool `[B, H, Lq, Lk]`, a view that repeats what batch and heads share.

        Raises:
            MaskError: the mask does not fit these sizes.
        """
        device = self._device(device)
        self.check(B, H, Lq, Lk, device)
        if device.type == "cpu":
            self.check_values(Lq, Lk)
        b, h = indices(B, H, 4, device)
        i = torch.arange(Lq, device=device).view(1, 1, Lq, 1)
        j = torch.arange(Lk, device=device).view(1, 1, 1, Lk)
        return self.visible(b, h, i, j, Lq, Lk).expand(B, H, Lq, Lk)

    def build(self, B: int, H: int, Lq: int, Lk: int, device: torch.device | str | None = None) -> Mask:
        """The mask fixed for one size of call: a mask that holds the lowered tables.

        It is usable inside compiled regions and graph capture, where a `predicate`, or a mask whose lowering reads the device, is not.
        A mask that lowers to a band is returned as it is.

        Raises:
            MaskError: the mask does not fit these sizes.
        """
        from .lower import built

        return built(self, B, H, Lq, Lk, self._device(device))

    def _device(self, device: torch.device | str | None) -> torch.device:
        if device is not None:
            return torch.device(device)
        return next((tensor.device for tensor in self._tensors()), torch.device("cpu"))


def _operand(value: Any, operator: str) -> Mask:
    if not isinstance(value, Mask):
        hint = " (masks.dense(t) takes a boolean tensor)" if isinstance(value, Tensor) else ""
        raise ArgumentTypeError(f"mask: expected masks on both sides of {operator}, got {type(value).__name__}{hint}")
    return value


def write_value(value: Any, prefix: str, held: list[Any] | None) -> str:
    """One argument as source text."""
    if isinstance(value, Mask):
        return value._write(prefix, held)
    if value is None or isinstance(value, (bool, int, float, str, tuple, torch.SymInt)):
        return f"{value!r}"
    if held is None:
        return f"<{value.dtype} {list(value.shape)}>" if isinstance(value, Tensor) else f"<{getattr(value, '__qualname__', value)}>"
    held.append(value)
    return f"t{len(held) - 1}"


def check_device(argument: str, tensor: Tensor, device: torch.device | str) -> None:
    """Raise `MaskError` unless `tensor` lies on `device` (a device without an index means any of its kind)."""
    wanted = torch.device(device) if isinstance(device, str) else device
    same_index = wanted.index is None or tensor.device.index is None or wanted.index == tensor.device.index
    if tensor.device.type != wanted.type or not same_index:
        raise MaskError(f"{argument}: expected a tensor on {wanted}, got one on {tensor.device} (mask.to(device) moves it)")


def _join(left: Mask, right: Mask, operator: str, loose: tuple[type[Mask], ...], prefix: str, held: list[Any] | None) -> str:
    """`left operator right`. The operators group to the left, so an equal one on the right side needs brackets too."""
    first, second = left._write(prefix, held), right._write(prefix, held)
    if isinstance(left, loose) and not (operator == "&" and isinstance(left, And)) and not (operator == "|" and isinstance(left, Or)):
        first = f"({first})"
    if isinstance(right, loose):
        second = f"({second})"
    return f"{first} {operator} {second}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class And(Mask):
    """What both masks show."""

    left: Mask
    right: Mask

    def _parts(self) -> tuple[Mask, ...]:
        return self.left, self.right

    def _write(self, prefix: str, held: list[Any] | None) -> str:
        return _join(self.left, self.right, "&", (And, Or), prefix, held)

    def visible(self, b, h, i, j, q_length, k_length):
        return self.left.visible(b, h, i, j, q_length, k_length) & self.right.visible(b, h, i, j, q_length, k_length)

    def band(self, Lq, Lk):
        left, right = self.left.band(Lq, Lk), self.right.band(Lq, Lk)
        for band in (left, right):
            if band is not None and band.is_empty:
                return band
        return None if left is None or right is None else left.intersection(right)

    def row_spans(self, lines):
        return intervals.intersection(self.left.row_spans(lines), self.right.row_spans(lines), lines.k_length)

    def col_spans(self, lines):
        return intervals.intersection(self.left.col_spans(lines), self.right.col_spans(lines), lines.q_length)

    def tiles(self, boxes):
        return torch.minimum(self.left.tiles(boxes), self.right.tiles(boxes))

    def states(self, *call):
        return torch.minimum(self.left.states(*call), self.right.states(*call))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Or(Mask):
    """What either mask shows."""

    left: Mask
    right: Mask

    def _parts(self) -> tuple[Mask, ...]:
        return self.left, self.right

    def _write(self, prefix: str, held: list[Any] | None) -> str:
        return _join(self.left, self.right, "|", (Or,), prefix, held)

    def visible(self, b, h, i, j, q_length, k_length):
        return self.left.visible(b, h, i, j, q_length, k_length) | self.right.visible(b, h, i, j, q_length, k_length)

    def band(self, Lq, Lk):
        left, right = self.left.band(Lq, Lk), self.right.band(Lq, Lk)
        for band in (left, right):
            if band is not None and band.is_full:
                return band
        return None if left is None or right is None else left.union(right)

    def row_spans(self, lines):
        return intervals.union(self.left.row_spans(lines), self.right.row_spans(lines), lines.k_length)

    def col_spans(self, lines):
        return intervals.union(self.left.col_spans(lines), self.right.col_spans(lines), lines.q_length)

    def tiles(self, boxes):
        return torch.maximum(self.left.tiles(boxes), self.right.tiles(boxes))

    def states(self, *call):
        return torch.maximum(self.left.states(*call), self.right.states(*call))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    """What the mask hides."""

    mask: Mask

    def _parts(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def _write(self, prefix: str, held: list[Any] | None) -> str:
        text = self.mask._write(prefix, held)
        return f"~({text})" if isinstance(self.mask, (And, Or)) else f"~{text}"

    def visible(self, b, h, i, j, q_length, k_length):
        return ~self.mask.visible(b, h, i, j, q_length, k_length)

    def band(self, Lq, Lk):
        inner = self.mask.band(Lq, Lk)
        return None if inner is None else inner.complement()

    def row_spans(self, lines):
        return intervals.complement(self.mask.row_spans(lines), lines.k_length)

    def col_spans(self, lines):
        return intervals.complement(self.mask.col_spans(lines), lines.q_length)

    def tiles(self, boxes):
        return 2 - self.mask.tiles(boxes)

    def states(self, *call):
        return 2 - self.mask.states(*call)
