"""The dropout generator against the published known answers of Philox4x32-10, and the laws of its use."""

from __future__ import annotations

import pytest
import torch

from tilefold import philox

# Known answers of Random123 (kat_vectors, philox 4x32 with 10 rounds): counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_words_are_the_published_ones(counter, key, words):
    c0, c1, c2, c3 = (torch.tensor([c]) for c in counter)
    got = philox.philox((c0, c1, c2, c3), (torch.tensor(key[0]), torch.tensor(key[1])))
    assert tuple(int(w) for w in got) == words


def _kept(
    seed: int, p: float, keys: torch.Tensor, batch: int = 2, heads: int = 3, rows: int = 4
) -> torch.Tensor:
    b, h = torch.arange(batch)[:, None, None], torch.arange(heads)[:, None]
    return philox.keep(torch.tensor(seed), p, b, h, torch.arange(rows), keys)


def test_a_place_draws_the_same_word_in_any_tile():
    whole = _kept(7, 0.4, torch.arange(50))
    assert torch.equal(whole[..., 13:29], _kept(7, 0.4, torch.arange(13, 29)))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(whole[..., order], _kept(7, 0.4, order))


def test_each_element_is_the_lane_of_its_counter():
    seed, p = -(2**40) + 12345, 0.3
    kept = _kept(seed, p, torch.arange(9))
    key = (torch.tensor(seed & 0xFFFFFFFF), torch.tensor((seed >> 32) & 0xFFFFFFFF))
    for b, h, q, k in [(0, 0, 0, 0), (1, 2, 3, 8), (0, 1, 2, 5)]:
        counter = tuple(torch.tensor(c) for c in (k // 4, q, h, b))
        word = int(philox.philox(counter, key)[k % 4])
        assert bool(kept[b, h, q, k]) == (word >= int(p * 2**32))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_rate_is_the_one_asked_for(p):
    kept = _kept(3, p, torch.arange(4096), rows=16)
    n = kept.numel()
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5


def test_seeds_differ_and_no_keys_draw_nothing():
    keys = torch.arange(256)
    assert not torch.equal(_kept(1, 0.5, keys), _kept(2, 0.5, keys))
    assert not torch.equal(_kept(1, 0.5, keys), _kept(1 + 2**32, 0.5, keys))
    assert _kept(1, 0.5, keys[:0]).shape == (2, 3, 4, 0)
