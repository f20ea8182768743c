"""Which pages of a cache belong to which sequences (PagedAttention: Kwon et al. 2023, sections 4.1 to 4.4).

Plain Python: a page is a number, and the keys and values in it are somebody else's. Sequences that begin with
the same tokens share full pages, which are found by the chained hash of their tokens; forks share all pages
until one of them is written to.
"""

from __future__ import annotations

import hashlib
import operator
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tilefold.errors import ArgumentError, ArgumentTypeError, CapacityError

#: Bytes of a hash, and of a token in what is hashed.
_DIGEST, _TOKEN = 16, 8


class Started(NamedTuple):
    """A new sequence, and how many of its first tokens have their keys and values in the cache already."""

    sequence: int
    cached: int


class Copy(NamedTuple):
    """What is to be copied before the tokens that were appended are written: the first `tokens` places of
    page `source` to page `target`.
    """

    source: int
    target: int
    tokens: int


@dataclass
class _Owner:
    """A sequence: its tokens, its pages in order, and the hashes of the full ones and of what is before."""

    root: bytes
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)


class PageAllocator:
    """Hands out the pages of a cache.

    A page is free, used by as many sequences as its table names it in, or cached: nobody's, but full, and
    found again by a sequence that begins with the same tokens. Cached pages are given to whoever needs one
    when no page is free, those that were let go first before others. Every method either does all of what it
    says or raises and changes nothing.

    Args:
        pages: how many there are, numbered from 0.
        page_size: tokens of a page.
        share: whether full pages are found by their tokens. A page can be found from the call on that fills
            it: whoever finds it must read it behind the writes of that step.

    Raises:
        ArgumentError: a number below 1.
    """

    def __init__(self, pages: int, page_size: int, *, share: bool = True) -> None:
        count = _whole("pages", pages, 1)
        self.page_size = _whole("page_size", page_size, 1)
        self._share = share
        self._owners: dict[int, _Owner] = {}
        self._next = 0
        self._uses = [0] * count
        self._free = list(reversed(range(count)))
        #: Nobody's, but full of known tokens; those that were let go first come first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __repr__(self) -> str:
        pages, cached = len(self._uses), len(self._cached)
        used = pages - cached - len(self._free)
        return f"PageAllocator({pages} pages of {self.page_size} tokens: {used} used, {cached} cached)"

    # What there is.

    @property
    def available(self) -> int:
        """Pages that can be handed out: the free ones and those that are merely cached."""
        return len(self._free) + len(self._cached)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return len(self._owner(sequence).tokens)

    def pages_of(self, sequence: int) -> tuple[int, ...]:
        """Its pages: token `n` is at place `n % page_size` of page `n // page_size` of these."""
        return tuple(self._owner(sequence).pages)

    def needs(self, sequence: int, tokens: int) -> int:
        """Pages that appending so many tokens takes."""
        return self._needs(self._owner(sequence), _whole("tokens", tokens, 0))

    # What changes.

    def start(self, tokens: Iterable[int] = (), *, salt: bytes = b"", uncached: int = 1) -> Started:
        """A new sequence of these tokens, with the longest run of full pages that is known to hold them.

        Args:
            tokens: numbers of 64 bits.
            salt: sequences share pages only with those of the same salt (a model's adapter, an image, a
                user).
            uncached: so many tokens at least are left to be computed: the last one's logits are wanted.

        Raises:
            CapacityError: there are not enough pages.
        """
        if not isinstance(salt, bytes):
            raise ArgumentTypeError(f"salt: expected bytes, got {salt!r}")
        owner, given = _Owner(_root(salt)), _tokens(tokens)
        size, parent = self.page_size, owner.root
        for at in range(0, len(given) - _whole("uncached", uncached, 0) - size + 1, size):
            parent = _digest(parent, given[at : at + size])
            page = self._page_of.get(parent)
            if page is None:
                break
            owner.pages.append(page)
            owner.digests.append(parent)
        cached = len(owner.pages) * size
        owner.tokens = given[:cached]
        found = sum(page in self._cached for page in owner.pages)
        self._check(self._needs(owner, len(given) - cached), found)
        sequence = self._enter(owner)
        self._write(owner, given[cached:])
        return Started(sequence, cached)

    def append(self, sequence: int, tokens: Iterable[int]) -> list[Copy]:
        """Room for more tokens: what must be copied first, since others go on reading it.

        Raises:
            CapacityError: there are not enough pages.
        """
        owner, given = self._owner(sequence), _tokens(tokens)
        self._check(self._needs(owner, len(given)), 0)
        return self._write(owner, given)

    def fork(self, sequence: int) -> int:
        """Another sequence with the same tokens in the same pages."""
        owner = self._owner(sequence)
        return self._enter(_Owner(owner.root, owner.tokens[:], owner.pages[:], owner.digests[:]))

    def truncate(self, sequence: int, length: int) -> None:
        """Take back all tokens but the first `length`, such as those that were guessed wrong."""
        owner = self._owner(sequence)
        if _whole("length", length, 0) > len(owner.tokens):
            raise ArgumentError(f"length: expected at most the sequence's {len(owner.tokens)}, got {length}")
        kept = -(-length // self.page_size)
        self._let_go(owner.pages[kept:])
        del owner.tokens[length:], owner.pages[kept:], owner.digests[length // self.page_size :]

    def finish(self, sequence: int) -> None:
        """The sequence is done: its full pages stay cached until somebody needs them."""
        self._let_go(self._owner(sequence).pages)
        del self._owners[sequence]

    # How.

    def _owner(self, sequence: int) -> _Owner:
        if sequence not in self._owners:
            raise ArgumentError(
                f"sequence: expected one that was started and is not finished, got {sequence!r}"
            )
        return self._owners[sequence]

    def _enter(self, owner: _Owner) -> int:
        """The number of a new sequence, which uses its pages from now on."""
        for page in owner.pages:
            self._uses[page] += 1
            self._cached.pop(page, None)
        sequence, self._next = self._next, self._next + 1
        self._owners[sequence] = owner
        return sequence

    def _needs(self, owner: _Owner, tokens: int) -> int:
        end = len(owner.tokens) + tokens
        return -(-end // self.page_size) - len(owner.pages) + (tokens > 0 and self._is_shared_tail(owner))

    def _is_shared_tail(self, owner: _Owner) -> bool:
        """Whether the next token goes into a page that others use."""
        return len(owner.tokens) % self.page_size > 0 and self._uses[owner.pages[-1]] > 1

    def _check(self, needed: int, found: int) -> None:
        """`found`: cached pages that will not be there any more."""
        if needed > self.available - found:
            raise CapacityError(
                f"pages: expected {needed} free ones, got {self.available - found} of {len(self._uses)}"
            )

    def _write(self, owner: _Owner, tokens: list[int]) -> list[Copy]:
        """Append, when it is known that there is room."""
        copies = []
        places = len(owner.tokens) % self.page_size
        if tokens and self._is_shared_tail(owner):
            source, owner.pages[-1] = owner.pages[-1], self._take()
            self._uses[source] -= 1
            copies.append(Copy(source, owner.pages[-1], places))
        elif tokens and places:
            # It was full and known, and has been truncated.
            self._forget(owner.pages[-1])
        owner.tokens += tokens
        while len(owner.pages) * self.page_size < len(owner.tokens):
            owner.pages.append(self._take())
        if self._share:
            self._name(owner)
        return copies

    def _name(self, owner: _Owner) -> None:
        """Full pages that have no name yet get theirs, unless another page has it."""
        size = self.page_size
        for n in range(len(owner.digests), len(owner.tokens) // size):
            parent = owner.digests[-1] if n else owner.root
            digest = _digest(parent, owner.tokens[n * size : (n + 1) * size])
            owner.digests.append(digest)
            if digest not in self._page_of:
                self._page_of[digest] = owner.pages[n]
                self._digest_of[owner.pages[n]] = digest

    def _take(self) -> int:
        """A page for one sequence: a free one, or the cached one that was let go first."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
        self._uses[page] = 1
        return page

    def _let_go(self, pages: Sequence[int]) -> None:
        """From the last one on: a page is of no use to others without those before it."""
        for page in reversed(pages):
            self._uses[page] -= 1
            if self._uses[page] == 0:
                if page in self._digest_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def _forget(self, page: int) -> None:
        """It is not found any more."""
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]


def _digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a page: of that of the page before it and its own tokens."""
    text = b"".join(token.to_bytes(_TOKEN, "little", signed=True) for token in tokens)
    return hashlib.blake2b(parent + text, digest_size=_DIGEST).digest()


def _root(salt: bytes) -> bytes:
    """What stands before the first page."""
    return hashlib.blake2b(salt, digest_size=_DIGEST, person=b"salt").digest()


def _tokens(given: Iterable[int]) -> list[int]:
    try:
        tokens = [operator.index(token) for token in given]
    except TypeError as error:
        raise ArgumentTypeError(f"tokens: expected whole numbers, {error}") from None
    for token in tokens:
        if not -(1 << 63) <= token < 1 << 63:
            raise ArgumentError(f"tokens: expected numbers of 64 bits, got {token}")
    return tokens


def _whole(name: str, value: int, least: int) -> int:
    """`value`, a whole number of at least `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(f"{name}: expected a whole number, got {value!r}")
    if operator.index(value) < least:
        raise ArgumentError(f"{name}: expected {least} or more, got {value}")
    return operator.index(value)
