"""A mask is a value: who may look at whom. Its algebra, its spelling, its definition.

Every mask says one thing, `visible`, elementwise on index tensors; that is its definition, and `materialize`
only calls it. The other methods (`band`, `row_spans`, `col_spans`, `tiles`) answer the same question for
whole lines or tiles, so that lowering never visits single elements where it need not; what they cannot say
they leave to `visible`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilefold.errors import ArgumentTypeError, MaskError

from . import intervals
from .context import Boxes, Lines, Points, grid, indices, stripes
from .intervals import Spans
from .spelling import check_device, write_value

if TYPE_CHECKING:
    from .band import Band

# (keyword or "", value) of each argument of a constructor.
Arguments = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """Who may look at whom. Combine masks with `&`, `|` and `~`; build them with the functions of
    `tilefold.masks`.
    """

    # The spelling, kept from the start: compiled code takes it as it is, since there the ints of a mask made
    # outside would be symbols, which have no spelling. Without annotation, so that it is not a field.
    _spec = None

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling() and not self.needs_build:
            object.__setattr__(self, "_spec", self._spell())

    # -- what a mask says ------------------------------------------------------------------------------

    def visible(self, p: Points) -> Tensor:
        """The definition: bool, whether query `i` of batch element `b` and query head `h` sees key `j`.

        The result broadcasts with the indices.
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

    def hidden_spans(self, lines: Lines) -> Spans | None:
        """Hidden query intervals of each key; some masks know a tighter bound than the complement has."""
        return intervals.complement(self.col_spans(lines), lines.q_length)

    def tiles(self, boxes: Boxes) -> Tensor:
        """int8 `[B or 1, H or 1, nq, nk]`: 0 surely empty, 2 surely full, 1 not known."""
        return torch.ones((1, 1, 1, 1), dtype=torch.int8, device=boxes.q0.device)

    def states(self, B: int, H: int, Lq: int, Lk: int, size: int, device: torch.device) -> Tensor:
        """`tiles` for the grid of one call; masks that know a faster way for whole calls take it."""
        # In stripes, so that the int64 numbers on the way need less memory than the states themselves.
        parts = stripes(grid(B, H, Lq, Lk, size, device))
        return torch.cat([self.tiles(part).expand(-1, -1, part.q0.shape[2], -1) for part in parts], dim=2)

    # -- checks ----------------------------------------------------------------------------------------

    def check(self, B: int, Hq: int, Lq: int | None, Lk: int | None, device: torch.device | str) -> None:
        """Does the mask fit a call of these sizes? Reads metadata only. A length of None is not known (inside
        `documents`).

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

    # -- algebra ---------------------------------------------------------------------------------------

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

    def complement(self) -> Mask:
        """`~mask`, for compiled functions: Dynamo traces a method of an object, but not the operator `~` on
        one.
        """
        return Not(self)

    def __bool__(self) -> bool:
        raise ArgumentTypeError(
            "mask: expected & | ~ between masks, got and / or / not (a mask has no truth value)"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        return self is other or (type(self) is type(other) and self._identity() == other._identity())

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[object, ...]:
        """What makes two masks equal: the spelling, and the very objects that have no spelling."""
        held: list[Any] = []
        return (self._write("", held), *(id(value) for value in held))

    # -- spelling --------------------------------------------------------------------------------------

    def spec(self) -> tuple[str, tuple[Tensor, ...]]:
        """The mask as a short string and its tensors, which the string calls t0, t1, ... in order; `parse` is
        the inverse.

        Raises:
            MaskError: a `predicate` has no spelling; `build` it first.
        """
        return self._spell() if self._spec is None else self._spec

    def _spell(self) -> tuple[str, tuple[Tensor, ...]]:
        if self.needs_build:
            raise MaskError(
                "mask: expected a mask that was built before (mask.build(B, Hq, Lq, Lk)), "
                "got a predicate, which has no spelling"
            )
        held: list[Any] = []
        text = self._write("", held)
        return text, tuple(held)

    def __repr__(self) -> str:
        return self._write("masks.", None)

    def _name(self) -> str:
        """The constructor's name."""
        return type(self).__name__.lower()

    def _arguments(self) -> Arguments:
        """(keyword or "", value) of each argument of the constructor that is not at its default."""
        return ()

    def _write(self, prefix: str, held: list[Any] | None) -> str:
        """The spelling. `held` collects what cannot be written; None writes a readable stand-in for it."""
        # Plain concatenation: Dynamo cannot join strings that it has formatted.
        text, comma = prefix + self._name() + "(", ""
        for keyword, value in self._arguments():
            text += comma + (keyword + "=" if keyword else "")
            text += value._write(prefix, held) if isinstance(value, Mask) else write_value(value, held)
            comma = ", "
        return text + ")"

    # -- parts -----------------------------------------------------------------------------------------

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Mask:
        return self._mapped(lambda tensor: copy.deepcopy(tensor, memo))

    # -- the two ways to use one -----------------------------------------------------------------------

    def materialize(
        self, B: int, H: int, Lq: int, Lk: int, device: torch.device | str | None = None
    ) -> Tensor:
        """The dense mask that defines this one: bool `[B, H, Lq, Lk]`, a view that repeats what batch and
        heads share.

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
        return self.visible(Points(b, h, i, j, Lq, Lk)).expand(B, H, Lq, Lk)

    def build(self, B: int, H: int, Lq: int, Lk: int, device: torch.device | str | None = None) -> Mask:
        """The mask fixed for one size of call: a mask that holds the lowered tables.

        It is usable inside compiled regions and graph capture, where a `predicate`, or a mask whose lowering
        reads the device, is not. A mask that lowers to a band is returned as it is.

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
        raise ArgumentTypeError(
            f"mask: expected masks on both sides of {operator}, got {type(value).__name__}{hint}"
        )
    return value


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class And(Mask):
    """What both masks show."""

    left: Mask
    right: Mask

    def _parts(self) -> tuple[Mask, ...]:
        return self.left, self.right

    def _write(self, prefix: str, held: list[Any] | None) -> str:
        left, right = self.left._write(prefix, held), self.right._write(prefix, held)
        left = f"({left})" if isinstance(self.left, Or) else left
        right = f"({right})" if isinstance(self.right, (And, Or)) else right
        return f"{left} & {right}"

    def visible(self, p: Points) -> Tensor:
        return self.left.visible(p) & self.right.visible(p)

    def band(self, Lq: int, Lk: int) -> Band | None:
        left, right = self.left.band(Lq, Lk), self.right.band(Lq, Lk)
        for band in (left, right):
            if band is not None and band.is_empty:
                return band
        return None if left is None or right is None else left.intersection(right)

    def row_spans(self, lines: Lines) -> Spans | None:
        return intervals.intersection(self.left.row_spans(lines), self.right.row_spans(lines), lines.k_length)

    def col_spans(self, lines: Lines) -> Spans | None:
        return intervals.intersection(self.left.col_spans(lines), self.right.col_spans(lines), lines.q_length)

    def tiles(self, boxes: Boxes) -> Tensor:
        return torch.minimum(self.left.tiles(boxes), self.right.tiles(boxes))

    def states(self, B: int, H: int, Lq: int, Lk: int, size: int, device: torch.device) -> Tensor:
        call = (B, H, Lq, Lk, size, device)
        return torch.minimum(self.left.states(*call), self.right.states(*call))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Or(Mask):
    """What either mask shows."""

    left: Mask
    right: Mask

    def _parts(self) -> tuple[Mask, ...]:
        return self.left, self.right

    def _write(self, prefix: str, held: list[Any] | None) -> str:
        left, right = self.left._write(prefix, held), self.right._write(prefix, held)
        right = f"({right})" if isinstance(self.right, Or) else right
        return f"{left} | {right}"

    def visible(self, p: Points) -> Tensor:
        return self.left.visible(p) | self.right.visible(p)

    def band(self, Lq: int, Lk: int) -> Band | None:
        left, right = self.left.band(Lq, Lk), self.right.band(Lq, Lk)
        for band in (left, right):
            if band is not None and band.is_full:
                return band
        return None if left is None or right is None else left.union(right)

    def row_spans(self, lines: Lines) -> Spans | None:
        return intervals.union(self.left.row_spans(lines), self.right.row_spans(lines), lines.k_length)

    def col_spans(self, lines: Lines) -> Spans | None:
        return intervals.union(self.left.col_spans(lines), self.right.col_spans(lines), lines.q_length)

    def tiles(self, boxes: Boxes) -> Tensor:
        return torch.maximum(self.left.tiles(boxes), self.right.tiles(boxes))

    def states(self, B: int, H: int, Lq: int, Lk: int, size: int, device: torch.device) -> Tensor:
        call = (B, H, Lq, Lk, size, device)
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

    def visible(self, p: Points) -> Tensor:
        return ~self.mask.visible(p)

    def band(self, Lq: int, Lk: int) -> Band | None:
        inner = self.mask.band(Lq, Lk)
        return None if inner is None else inner.complement()

    def row_spans(self, lines: Lines) -> Spans | None:
        return intervals.complement(self.mask.row_spans(lines), lines.k_length)

    def col_spans(self, lines: Lines) -> Spans | None:
        return intervals.complement(self.mask.col_spans(lines), lines.q_length)

    def tiles(self, boxes: Boxes) -> Tensor:
        return 2 - self.mask.tiles(boxes)

    def states(self, B: int, H: int, Lq: int, Lk: int, size: int, device: torch.device) -> Tensor:
        return 2 - self.mask.states(B, H, Lq, Lk, size, device)
