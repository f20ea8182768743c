"""The page allocator, against a model that keeps every sequence's tokens by itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tilefold.decode import Copy, PageAllocator
from tilefold.errors import ArgumentError, ArgumentTypeError, CapacityError

PAGES, SIZE = 12, 4
#: Few different ones, so that sequences begin alike.
TOKENS = st.lists(st.integers(0, 1), max_size=18)
SALTS = st.sampled_from([b"", b"adapter"])


def snapshot(pages: PageAllocator) -> Any:
    return (
        {n: pages.pages_of(n) for n in pages._owners},
        {n: (list(o.tokens), list(o.digests)) for n, o in pages._owners.items()},
        list(pages._uses), list(pages._free), list(pages._cached), dict(pages._page_of),
    )  # fmt: skip


class Machine(RuleBasedStateMachine):
    """Pages hold what a cache would write there; every sequence must read its own tokens."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(PAGES, SIZE)
        self.memory: list[list[Any]] = [[None] * SIZE for _ in range(PAGES)]
        self.model: dict[int, tuple[bytes, list[int]]] = {}

    def write(self, sequence: int, tokens: list[int], begin: int, copies: list[Copy]) -> None:
        salt = self.model[sequence][0]
        for source, target, count in copies:
            self.memory[target][:count] = self.memory[source][:count]
        table = self.pages.pages_of(sequence)
        for n, token in enumerate(tokens, begin):
            self.memory[table[n // SIZE]][n % SIZE] = (salt, token)

    @rule(target=sequences, tokens=TOKENS, salt=SALTS, uncached=st.integers(0, 3))
    def start(self, tokens: list[int], salt: bytes, uncached: int) -> Any:
        before = snapshot(self.pages)
        try:
            sequence, cached = self.pages.start(tokens, salt=salt, uncached=uncached)
        except CapacityError:
            assert snapshot(self.pages) == before
            return multiple()
        assert sequence not in self.model
        assert cached % SIZE == 0 and cached <= max(len(tokens) - uncached, 0)
        self.model[sequence] = salt, list(tokens)
        self.write(sequence, tokens[cached:], cached, [])
        return sequence

    @rule(sequence=sequences, tokens=TOKENS)
    def append(self, sequence: int, tokens: list[int]) -> None:
        before, needed = snapshot(self.pages), self.pages.needs(sequence, len(tokens))
        room = self.pages.available
        try:
            copies = self.pages.append(sequence, tokens)
        except CapacityError:
            assert snapshot(self.pages) == before and needed > room
            return
        assert room - self.pages.available == needed
        own = self.model[sequence][1]
        self.write(sequence, tokens, len(own), copies)
        own += tokens

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: int) -> int:
        room = self.pages.available
        fork = self.pages.fork(sequence)
        assert self.pages.available == room and self.pages.pages_of(fork) == self.pages.pages_of(sequence)
        salt, tokens = self.model[sequence]
        self.model[fork] = salt, list(tokens)
        return fork

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence: int, share: float) -> None:
        tokens = self.model[sequence][1]
        length = int(share * len(tokens))
        self.pages.truncate(sequence, length)
        del tokens[length:]

    @rule(sequence=consumes(sequences))
    def finish(self, sequence: int) -> None:
        self.pages.finish(sequence)
        del self.model[sequence]

    @invariant()
    def everybody_reads_his_own_tokens(self) -> None:
        for sequence, (salt, tokens) in self.model.items():
            table = self.pages.pages_of(sequence)
            assert len(table) == -(-len(tokens) // SIZE) and self.pages.length(sequence) == len(tokens)
            assert [self.memory[table[n // SIZE]][n % SIZE] for n in range(len(tokens))] == [
                (salt, token) for token in tokens
            ]

    @invariant()
    def no_page_is_lost(self) -> None:
        uses = Counter(page for n in self.model for page in self.pages.pages_of(n))
        assert self.pages._uses == [uses[page] for page in range(PAGES)]
        every = [*uses, *self.pages._free, *self.pages._cached]
        assert sorted(every) == list(range(PAGES))
        assert self.pages.available == PAGES - len(uses)

    @invariant()
    def names_lead_to_what_they_say(self) -> None:
        names = self.pages._page_of
        assert {page: name for name, page in names.items()} == self.pages._digest_of
        assert set(self.pages._cached) <= set(names.values())
        assert not set(self.pages._free) & set(names.values())


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_same_beginning_is_found_and_shared() -> None:
    pages = PageAllocator(8, 4)
    first, none = pages.start(range(10))
    again, cached = pages.start(range(10))
    assert (none, cached) == (0, 8)
    assert pages.pages_of(again)[:2] == pages.pages_of(first)[:2]
    assert pages.pages_of(again)[2] != pages.pages_of(first)[2]
    assert pages.available == 4
    # The last token is wanted: of two full pages one is computed again.
    assert pages.start(range(8)).cached == 4
    assert pages.start(range(8), uncached=0).cached == 8
    assert pages.start([0, 1, 2, 3, 9, 9], salt=b"other").cached == 0


def test_a_page_is_known_by_all_tokens_before_it() -> None:
    pages = PageAllocator(8, 2)
    pages.start([1, 1, 5, 5])
    assert pages.start([2, 2, 5, 5, 0]).cached == 0


def test_what_is_done_stays_until_it_is_needed_its_end_goes_first() -> None:
    pages = PageAllocator(5, 2)
    first, _ = pages.start(range(6))
    table = pages.pages_of(first)
    pages.finish(first)
    assert pages.available == 5 and repr(pages).endswith("0 used, 3 cached)")
    other, _ = pages.start([9] * 6)
    # Two pages were free; the third one is the last of the three.
    assert set(pages.pages_of(other)) == {3, 4, table[2]}
    pages.finish(other)
    again, cached = pages.start(range(6), uncached=0)
    assert cached == 4 and pages.pages_of(again)[:2] == table[:2]
    assert pages.append(again, []) == []


def test_a_fork_is_copied_where_it_is_written_to_and_once() -> None:
    pages = PageAllocator(4, 4)
    first, _ = pages.start([1, 2, 3, 4, 5, 6])
    fork = pages.fork(first)
    old = pages.pages_of(first)
    assert pages.needs(fork, 1) == 1
    (copy,) = pages.append(fork, [7])
    assert copy == Copy(old[1], pages.pages_of(fork)[1], 2)
    assert pages.append(first, [8]) == [] and pages.pages_of(first) == old
    assert pages.pages_of(fork)[0] == old[0]


def test_what_was_guessed_wrong_is_taken_back() -> None:
    pages = PageAllocator(4, 2)
    first, _ = pages.start([1, 2, 3, 4, 5])
    pages.truncate(first, 3)
    assert pages.length(first) == 3 and len(pages.pages_of(first)) == 2
    # The second page was known by [3, 4]; now it is written to.
    pages.append(first, [9])
    assert pages.start([1, 2, 3, 4], uncached=0).cached == 2
    assert pages.start([1, 2, 3, 9], uncached=0).cached == 4


def test_without_sharing_nothing_is_found() -> None:
    pages = PageAllocator(8, 2, share=False)
    first, _ = pages.start(range(6))
    pages.finish(first)
    assert pages.start(range(6)).cached == 0
    assert repr(pages) == "PageAllocator(8 pages of 2 tokens: 3 used, 0 cached)"


def test_when_pages_run_out_the_error_says_how_many() -> None:
    pages = PageAllocator(4, 2)
    first, _ = pages.start(range(6))
    with pytest.raises(CapacityError, match="pages: expected 2 free ones, got 1 of 4"):
        pages.append(first, [1, 2, 3])
    with pytest.raises(CapacityError, match="pages: expected 3 free ones, got 1 of 4"):
        pages.start([7] * 5)
    assert pages.append(first, [1, 2]) == []


def test_found_pages_do_not_count_as_room() -> None:
    pages = PageAllocator(3, 2)
    first, _ = pages.start(range(4))
    pages.finish(first)
    with pytest.raises(CapacityError, match="expected 2 free ones, got 1 of 3"):
        pages.start([0, 1, 2, 3, 4, 5, 6])
    assert pages.available == 3


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda p: PageAllocator(0, 4), ArgumentError, "pages: expected 1 or more, got 0"),
        (lambda p: PageAllocator(4, 0), ArgumentError, "page_size: expected 1 or more, got 0"),
        (lambda p: PageAllocator(4.0, 4), ArgumentTypeError, "pages: expected a whole number, got 4.0"),
        (lambda p: p.start(["a"]), ArgumentTypeError, "tokens: expected whole numbers"),
        (lambda p: p.start([1 << 63]), ArgumentError, "tokens: expected numbers of 64 bits, got"),
        (lambda p: p.start([1], uncached=-1), ArgumentError, "uncached: expected 0 or more, got -1"),
        (lambda p: p.start([1], salt="me"), ArgumentTypeError, "salt: expected bytes, got 'me'"),
        (lambda p: p.append(7, [1]), ArgumentError, "sequence: expected one that was started .*, got 7"),
        (lambda p: p.truncate(0, 3), ArgumentError, "length: expected at most the sequence's 2, got 3"),
        (lambda p: p.truncate(0, -1), ArgumentError, "length: expected 0 or more, got -1"),
    ],
)  # fmt: skip
def test_bad_arguments_change_nothing(call: Any, error: type[Exception], message: str) -> None:
    pages = PageAllocator(4, 4)
    pages.start([1, 2])
    before = snapshot(pages)
    with pytest.raises(error, match=message):
        call(pages)
    assert snapshot(pages) == before
