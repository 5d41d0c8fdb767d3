"""What only a CUDA device shows: FlexAttention's rows and the captured decode step. Run by hand: bash
test.sh -m gpu"""

import pytest
import torch

from open_r1.packing import pack, padded_length
from open_r1.rollout import FastEngine, TransformersEngine
from open_r1.sampling import Sampling, sampling_keys
from open_r1.scoring import add_scoring_forward
from tests.prompts import make_prompts, separate_logps
from tests.tiny import tiny_model, tiny_processor

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def prompts():
    return make_prompts()


@pytest.fixture(autouse=True)
def exact_matrix_products():
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def test_flex_rows_equal_separate_rows(prompts):
    """Forward and gradients, against the library's own forward on the CPU."""
    generator = torch.Generator().manual_seed(0)
    completions = [[torch.randint(0, 256, (n,), generator=generator) for n in (1, 7, 12)] for _ in prompts]
    reference = tiny_model()
    expected = torch.cat(
        [separate_logps(reference, p, c) for p, cs in zip(prompts, completions, strict=True) for c in cs]
    )
    expected.sum().backward()
    model = add_scoring_forward(tiny_model().cuda())
    groups = list(zip(prompts, completions, strict=True))
    length = padded_length(pack(groups).input_ids.numel())
    logps = model(**pack(groups, length).to("cuda").model_inputs())
    logps.sum().backward()
    assert torch.allclose(logps.cpu(), expected, atol=2e-4)
    difference = norm = 0.0
    for (_, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        difference += (a.grad.cpu() - b.grad).square().sum()
        norm += b.grad.square().sum()
    assert (difference / norm).sqrt() < 1e-3


def test_captured_greedy_decoding_equals_generate(prompts):
    greedy = Sampling(greedy=True, max_new_tokens=40)
    slow = TransformersEngine(tiny_model().cuda(), tiny_processor()).generate(prompts, 1, greedy)
    engine = FastEngine(tiny_model().cuda(), tiny_processor())
    for _ in range(2):  # the second time from the captured graph
        fast = engine.generate(prompts, 1, greedy)
        assert [g[0].token_ids.tolist() for g in fast] == [g[0].token_ids.tolist() for g in slow]


def test_the_graph_reads_refreshed_weights(prompts):
    """Weights are changed in place between rollouts; a graph over old addresses would go on with the old
    policy."""
    engine = FastEngine(tiny_model(0).cuda(), tiny_processor())
    sampling, keys = Sampling(False, 12), sampling_keys(0, 0, range(4), 3)
    engine.generate(prompts, 3, sampling, keys)
    with torch.no_grad():
        for a, b in zip(engine.model.parameters(), tiny_model(1).parameters(), strict=True):
            a.copy_(b)
    groups = engine.generate(prompts, 3, sampling, keys)
    policy = add_scoring_forward(tiny_model(1))
    logps = policy(
        **pack([(p, [c.token_ids for c in g]) for p, g in zip(prompts, groups, strict=True)]).model_inputs()
    )
    assert torch.allclose(torch.cat([c.logps for g in groups for c in g]), logps, atol=1e-3)


def test_sampling_on_the_gpu_is_that_of_the_cpu(prompts):
    sampling, keys = Sampling(False, 12, temperature=0.9, top_p=0.95), sampling_keys(1, 2, range(4), 3)
    gpu = FastEngine(tiny_model().cuda(), tiny_processor()).generate(prompts, 3, sampling, keys)
    cpu = FastEngine(tiny_model(), tiny_processor()).generate(prompts, 3, sampling, keys)
    assert [[c.token_ids.tolist() for c in g] for g in gpu] == [
        [c.token_ids.tolist() for c in g] for g in cpu
    ]


def test_a_card_without_room_decodes_in_parts(prompts):
    """Capped at 0.6 of what the whole batch took: the same completions, from smaller batches."""
    engine = FastEngine(tiny_model().cuda(), tiny_processor())
    sampling, keys = Sampling(False, 12), sampling_keys(1, 2, range(4), 128)
    engine.drop_batches()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    whole = engine.generate(prompts, 128, sampling, keys)
    needed = torch.cuda.max_memory_reserved() - before
    engine.drop_batches()
    cap = torch.cuda.memory_reserved() + 0.6 * needed
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(0).total_memory)
    try:
        parts = engine.generate(prompts, 128, sampling, keys)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert engine.splits
    for group, others in zip(whole, parts, strict=True):
        assert [c.token_ids.tolist() for c in group] == [c.token_ids.tolist() for c in others]
