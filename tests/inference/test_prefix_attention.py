"""Attention part by part equals attention over the whole masked square, forward and backward."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from harness.inference.prefix_attention import Part, parted_attention, tree_parts  # noqa: E402

SHAPES = [([5, 9, 1], 11), ([64, 64, 3, 0], 40), ([], 7)]
"""Per branch the lengths of its completions and of its suffix."""


def layout(root):
    """Return the branches of a flat tree, its length and who sees whom, told token by token."""
    branches = []
    owner: list[tuple[str | int, ...]] = [("root",)] * root
    for index, (completions, suffix) in enumerate(SHAPES):
        branches.append((len(owner), suffix, completions))
        owner += [("suffix", index)] * suffix
        for row, length in enumerate(completions):
            owner += [("completion", index, row)] * length
    seen = torch.zeros(len(owner), len(owner), dtype=torch.bool)
    for i, mine in enumerate(owner):
        for j, theirs in enumerate(owner[: i + 1]):
            seen[i, j] = theirs == ("root",) or theirs == mine or theirs == ("suffix", *mine[1:2])
    return branches, len(owner), seen


def spans(root, branches):
    """Return where every run of tokens starts and stops, and where what sees it ends."""
    found = [(0, root, branches[-1][0] + branches[-1][1] + sum(branches[-1][2]))]
    for start, suffix, completions in branches:
        place = start + suffix
        found.append((start, place, place + sum(completions)))
        for length in completions:
            found.append((place, place + length, place + length))
            place += length
    return found


@pytest.mark.parametrize("root", [0, 37])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_parts_equal_the_masked_square(root, dtype, bound):
    torch.manual_seed(0)
    branches, total, seen = layout(root)
    tensors = [torch.randn(1, 3, total, 16).to(dtype).requires_grad_() for _ in range(3)]
    upstream = torch.randn(1, 3, total, 16).to(dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    query, key, value = exact
    whole = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.3)
    whole.backward(upstream.double())
    query, key, value = tensors
    parted = parted_attention(query, key, value, tree_parts(spans(root, branches)), 0.3)
    parted.backward(upstream)
    assert parted.dtype == dtype
    assert (parted.double() - whole).abs().max() < bound
    for ours, theirs in zip(tensors, exact, strict=True):
        assert (ours.grad.double() - theirs.grad).abs().max() < bound


def test_parts_cover_each_visible_pair_once():
    branches, total, seen = layout(5)
    count = torch.zeros(total, total, dtype=torch.int)
    for query, key, causal in tree_parts(spans(5, branches)):
        block = torch.ones(query.stop - query.start, key.stop - key.start, dtype=torch.int)
        count[query, key] += block.tril() if causal else block
    assert torch.equal(count, seen.int())


def test_a_missing_part_is_noticed():
    """Guards the comparison itself."""
    torch.manual_seed(0)
    branches, total, _ = layout(0)
    parts = tree_parts(spans(0, branches))
    query, key, value = (torch.randn(1, 1, total, 8) for _ in range(3))
    without = [part for part in parts if part != next(p for p in parts if not p.causal)]
    assert any(isinstance(part, Part) for part in without)
    whole = parted_attention(query, key, value, parts, 1.0)
    assert not torch.allclose(whole, parted_attention(query, key, value, without, 1.0))
