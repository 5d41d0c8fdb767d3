"""A packed row is exact: log-probs and gradients are those of separate rows."""

import random

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from open_r1 import scoring
from open_r1.attention import BLOCK, block_kinds, build_mask, flex_mask
from open_r1.packing import pack, padded_length
from open_r1.scoring import add_scoring_forward, entropy_of, self_certainty_of
from tests.prompts import make_prompts, separate_logps
from tests.tiny import tiny_model

LENGTHS = [[1, 7, 12], [3, 12, 5], [2, 1, 9], [4, 6, 8]]  # of the completions of each prompt


@pytest.fixture(scope="module")
def groups():
    generator = torch.Generator().manual_seed(0)
    draw = [[torch.randint(0, 256, (n,), generator=generator) for n in lengths] for lengths in LENGTHS]
    return list(zip(make_prompts(), draw, strict=True))


def relative(a: dict, b: dict) -> float:
    """Norm of the difference of all gradients over the norm of all gradients."""
    difference = sum((a[name] - b[name]).square().sum() for name in b)
    return float((difference / sum(value.square().sum() for value in b.values())).sqrt())


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    # a parameter without gradient (vision, for rows without images) counts as zeros
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def yardstick(groups):
    """Log-probs [N] and gradients of a weighted sum of them, from separate rows."""
    model = tiny_model()
    logps = torch.cat([separate_logps(model, prompt, c) for prompt, cs in groups for c in cs])
    weights = torch.randn(logps.numel(), generator=torch.Generator().manual_seed(1))
    return logps.detach(), weights, gradients(model, (logps * weights).sum())


@pytest.mark.parametrize("rows", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 0], [1, 2]]])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_rows_equal_separate_rows(groups, yardstick, rows, checkpointing, monkeypatch):
    monkeypatch.setattr(scoring, "LOGITS_CHUNK", 7)  # several chunks, the last one not full
    expected, weights, expected_gradients = yardstick
    per_group = [
        w.split(lengths) for w, lengths in zip(weights.split([sum(x) for x in LENGTHS]), LENGTHS, strict=True)
    ]
    logps_of = [
        e.split(lengths)
        for e, lengths in zip(expected.split([sum(x) for x in LENGTHS]), LENGTHS, strict=True)
    ]
    model = add_scoring_forward(tiny_model()).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = 0
    for row in rows:
        packed = pack([groups[i] for i in row])
        logps = model(**packed.model_inputs())
        assert torch.allclose(logps, torch.cat([torch.cat(logps_of[i]) for i in row]), atol=1e-5)
        loss = loss + (logps * torch.cat([torch.cat(per_group[i]) for i in row])).sum()
    assert relative(gradients(model, loss), expected_gradients) < 1e-5


def test_padding_changes_nothing(groups):
    model = add_scoring_forward(tiny_model())
    packed = pack(groups)
    padded = pack(groups, length=padded_length(packed.input_ids.numel()) + BLOCK)
    assert padded.input_ids.numel() >= packed.input_ids.numel() + BLOCK
    assert torch.allclose(model(**packed.model_inputs()), model(**padded.model_inputs()), atol=1e-6)
    with pytest.raises(ValueError, match="does not fit into 10"):
        pack(groups, length=10)


def test_temperature_divides_the_logits(groups):
    model, prompt, completion = tiny_model(), *[groups[0][0], groups[0][1][2]]
    ids = torch.cat([prompt.input_ids, completion])[None]
    logits = model(
        input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=prompt.pixel_values,
        image_grid_thw=prompt.image_grid_thw, mm_token_type_ids=(ids == model.config.image_token_id).int(),
    ).logits[0, prompt.input_ids.numel() - 1 : -1]  # fmt: skip
    expected = (logits / 0.7).log_softmax(-1).gather(1, completion[:, None])[:, 0]
    scoring = add_scoring_forward(tiny_model())
    got = scoring(**pack([(prompt, [completion])]).model_inputs(), temperature=0.7)
    assert torch.allclose(got, expected, atol=1e-5)


def test_chunked_logps_have_the_gradient_of_log_softmax(monkeypatch):
    monkeypatch.setattr(scoring, "LOGITS_CHUNK", 3)
    hidden = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    targets, scale = torch.randint(0, 11, (8,)), torch.randn(8)
    logps = scoring.ChunkedLogps.apply(hidden, weight, targets, 1.3)
    got = torch.autograd.grad((logps * scale).sum(), (hidden, weight))
    reference = ((hidden @ weight.T) / 1.3).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    expected = torch.autograd.grad((reference * scale).sum(), (hidden, weight))
    assert torch.allclose(logps.double(), reference, atol=1e-5)
    assert all(torch.allclose(g, e, atol=1e-5) for g, e in zip(got, expected, strict=True))


def test_logits_of_all_tokens_never_exist_at_once(groups, monkeypatch):
    monkeypatch.setattr(scoring, "LOGITS_CHUNK", 16)
    seen = []
    original = scoring.chunk_logits
    monkeypatch.setattr(scoring, "chunk_logits", lambda *a: seen.append(original(*a)) or seen[-1])
    model = add_scoring_forward(tiny_model())
    model(**pack(groups).model_inputs()).sum().backward()
    assert len(seen) > 4 and max(logits.shape[0] for logits in seen) == 16


def test_a_row_without_images_runs_the_vision_tower(groups):
    """Under ZeRO-3 a rank that skips a module leaves the others waiting in its collective."""
    model = add_scoring_forward(tiny_model())
    calls = []
    model.model.visual.register_forward_hook(lambda *_: calls.append(1))
    model(**pack([groups[3]]).model_inputs()).sum().backward()
    assert calls == [1]
    assert all(p.grad is not None and not p.grad.any() for p in model.model.visual.parameters())


def test_statistics(groups):
    """Entropy and self-certainty from the chunked head equal those of the whole logits; uniform logits are
    the anchor."""
    uniform = torch.zeros(2, 50)
    assert torch.allclose(entropy_of(uniform), torch.log(torch.tensor(50.0)).expand(2))
    assert torch.allclose(self_certainty_of(uniform), torch.zeros(2), atol=1e-6)
    logits = torch.tensor([[2.0, 0.0, 0.0]])
    p = logits.softmax(-1)
    assert torch.allclose(self_certainty_of(logits), (1 / 3 * (1 / 3 / p).log()).sum(-1), atol=1e-6)
    model = add_scoring_forward(tiny_model())
    inputs = pack(groups).model_inputs()
    entropy = model(**inputs, statistic="entropy")
    assert entropy.shape == inputs["targets"].shape and (entropy > 0).all()


@pytest.mark.parametrize("tokens, expected", [(1, 128), (128, 128), (129, 256), (2049, 2176)])
def test_padded_length(tokens, expected):
    assert padded_length(tokens) == expected


@pytest.mark.parametrize("seed", range(8))
def test_block_mask_is_the_librarys(seed):
    """Counted from segments, it equals what create_block_mask finds by asking the rule for all pairs."""
    draw = random.Random(seed)
    segments = [(g, c, draw.randrange(1, 300)) for g in range(3) for c in range(draw.randrange(1, 5))]
    padding = -sum(n for _, _, n in segments) % BLOCK + BLOCK * draw.randrange(2)
    segments.append((-1, 0, padding))
    group_ids = torch.cat([torch.full((n,), g) for g, _, n in segments])
    completion_ids = torch.cat([torch.full((n,), c) for _, c, n in segments])
    ours = flex_mask(group_ids, completion_ids, block_kinds(group_ids, completion_ids))
    length = group_ids.numel()
    theirs = create_block_mask(ours.mask_mod, None, None, length, length, device="cpu")
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(theirs, f"{name}_num_blocks")[0, 0]
        assert torch.equal(counts, getattr(ours, f"{name}_num_blocks")[0, 0])
        indices = [getattr(mask, f"{name}_indices")[0, 0] for mask in (ours, theirs)]
        for mine, its, n in zip(*indices, counts.tolist(), strict=True):
            assert torch.equal(mine[:n], its[:n])


def test_the_mask_rule():
    """[prompt of 2 | completion 1 of 2 | completion 2 of 1] and a second group of one token."""
    group_ids, completion_ids = torch.tensor([0, 0, 0, 0, 0, 1]), torch.tensor([0, 0, 1, 1, 2, 0])
    (a, b, first), (c, d, second) = build_mask(group_ids, completion_ids, None)
    assert (a, b, c, d) == (0, 5, 5, 6) and second.tolist() == [[True]]
    assert first.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
