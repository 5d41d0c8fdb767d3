"""The fast engine: greedy token for token what `generate` gives, sampling as asked and independent of
processes."""

import math

import pytest
import torch

from open_r1.packing import pack
from open_r1.rollout import FastEngine, TransformersEngine
from open_r1.sampling import Sampling, filter_probs, keyed_uniform, sampling_keys
from open_r1.scoring import add_scoring_forward
from tests.prompts import make_prompts
from tests.tiny import TOKEN_ID, tiny_model, tiny_processor

GREEDY = Sampling(greedy=True, max_new_tokens=40)


@pytest.fixture(scope="module")
def prompts():
    return make_prompts()


def trap(model):
    """The generation settings of the public checkpoint: a rollout that sets only a temperature is greedy
    with them."""
    config = model.generation_config
    config.do_sample, config.top_k, config.top_p, config.temperature = True, 1, 0.001, 0.01
    return model


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_equals_generate(prompts, penalty):
    """Different prompt lengths, image sizes, two images, no image, in one batch; with a repetition penalty
    too."""
    models = [trap(tiny_model()), trap(tiny_model())]
    for model in models:
        model.generation_config.repetition_penalty = penalty
    slow = TransformersEngine(models[0], tiny_processor()).generate(prompts, 1, GREEDY)
    fast = FastEngine(models[1], tiny_processor()).generate(prompts, 1, GREEDY)
    assert len({tuple(g[0].token_ids.tolist()) for g in slow}) == len(prompts)
    for a, b in zip(slow, fast, strict=True):
        assert a[0].token_ids.tolist() == b[0].token_ids.tolist()
        assert (a[0].text, a[0].truncated) == (b[0].text, b[0].truncated)
        assert torch.allclose(a[0].logps, b[0].logps, atol=1e-4)


def test_greedy_ends_at_each_eos_of_the_generation_config(prompts):
    """Ends are per row: with an end token that greedy decoding meets, rows stop at different lengths, as in
    generate."""
    free = FastEngine(tiny_model(), tiny_processor()).generate(prompts, 1, GREEDY)
    ends = [free[0][0].token_ids[5].item(), free[1][0].token_ids[11].item()]
    models = [tiny_model(), tiny_model()]
    for model in models:
        model.generation_config.eos_token_id = ends
    slow = TransformersEngine(models[0], tiny_processor()).generate(prompts, 1, GREEDY)
    fast = FastEngine(models[1], tiny_processor()).generate(prompts, 1, GREEDY)
    assert [g[0].token_ids.tolist() for g in slow] == [g[0].token_ids.tolist() for g in fast]
    assert not fast[0][0].truncated and len({g[0].token_ids.numel() for g in fast}) > 1
    assert fast[0][0].token_ids[-1].item() in ends


@pytest.mark.parametrize("engine", [FastEngine, TransformersEngine])
def test_sampling_owns_its_settings(prompts, engine):
    """top_k 1 and top_p 0.001 in the checkpoint must not reach a rollout: all completions of a group would
    be equal."""
    keys = sampling_keys(0, 0, range(2), 8)
    groups = engine(trap(tiny_model()), tiny_processor()).generate(prompts[:2], 8, Sampling(False, 10), keys)
    for group in groups:
        assert len({tuple(c.token_ids.tolist()) for c in group}) == 8


@pytest.mark.parametrize("engine", [FastEngine, TransformersEngine])
def test_placeholders_are_never_sampled(prompts, engine):
    """A sampled <|image_pad|> breaks the scoring forward. The model here wants nothing else."""
    model = tiny_model()
    wanted = [TOKEN_ID[t] for t in ("<|image_pad|>", "<|video_pad|>", "<|vision_pad|>")]
    weight = model.lm_head.weight
    model.lm_head.weight = torch.nn.Parameter(weight.detach().clone())
    bias = torch.zeros(weight.shape[0])
    bias[wanted] = 50.0
    model.lm_head.bias = torch.nn.Parameter(bias)
    groups = engine(model, tiny_processor()).generate(
        prompts[:1], 4, Sampling(False, 6), sampling_keys(0, 0, [0], 4)
    )
    assert not {t for c in groups[0] for t in c.token_ids.tolist()} & set(wanted)


def test_logps_are_those_of_the_trainer(prompts):
    engine = FastEngine(tiny_model(), tiny_processor())
    groups = engine.generate(
        prompts, 3, Sampling(False, 12, temperature=0.8), sampling_keys(3, 1, range(4), 3)
    )
    policy = add_scoring_forward(tiny_model())
    row = pack([(p, [c.token_ids for c in g]) for p, g in zip(prompts, groups, strict=True)])
    logps = policy(**row.model_inputs(), temperature=0.8)
    assert torch.allclose(torch.cat([c.logps for g in groups for c in g]), logps, atol=1e-4)


def test_noise_belongs_to_the_prompt_not_to_the_batch(prompts):
    """One process that rolls out four prompts = two that roll out two each."""
    engine = FastEngine(tiny_model(), tiny_processor())
    sampling, keys = Sampling(False, 12), sampling_keys(7, 5, range(4), 3)
    together = engine.generate(prompts, 3, sampling, keys)
    apart = engine.generate(prompts[:2], 3, sampling, keys[:2]) + engine.generate(
        prompts[2:], 3, sampling, keys[2:]
    )
    assert [[c.token_ids.tolist() for c in g] for g in together] == [
        [c.token_ids.tolist() for c in g] for g in apart
    ]
    other_step = engine.generate(prompts, 3, sampling, sampling_keys(7, 6, range(4), 3))
    assert [c.token_ids.tolist() for c in together[0]] != [c.token_ids.tolist() for c in other_step[0]]


def test_sampling_without_keys_is_refused(prompts):
    with pytest.raises(ValueError, match="sampling needs keys"):
        FastEngine(tiny_model(), tiny_processor()).generate(prompts[:1], 2, Sampling(False, 4))


def test_keyed_uniform_is_uniform():
    keys = torch.tensor([k for row in sampling_keys(0, 0, range(200), 100) for k in row])
    u = keyed_uniform(keys, torch.tensor(3))
    assert u.min() > 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.003
    assert torch.histc(u.float(), 10, 0, 1).div(len(u)).sub(0.1).abs().max() < 0.01
    v = keyed_uniform(keys, torch.tensor(4))
    assert abs(torch.corrcoef(torch.stack([u, v]))[0, 1]) < 0.02


def test_samples_follow_the_distribution(prompts):
    """First tokens of many completions against the softmax (chi-square over the likely tokens)."""
    engine, count = FastEngine(tiny_model(), tiny_processor()), 4000
    group = engine.generate(prompts[:1], count, Sampling(False, 1), sampling_keys(0, 0, [0], count))[0]
    policy = add_scoring_forward(tiny_model())
    candidates = torch.arange(256)
    logps = policy(**pack([(prompts[0], [candidates[i : i + 1] for i in range(256)])]).model_inputs())
    expected = logps.exp() * count
    seen = torch.bincount(torch.cat([c.token_ids for c in group]), minlength=320)[:256]
    likely = expected > 5
    chi2 = ((seen - expected).square() / expected)[likely].sum()
    freedom = int(likely.sum())
    assert freedom > 10 and abs(chi2 - freedom) < 5 * math.sqrt(2 * freedom)


def test_filters_by_hand():
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    assert (filter_probs(probs, Sampling(False, 1, top_k=2)) > 0).tolist() == [[True, True, False, False]]
    assert (filter_probs(probs, Sampling(False, 1, top_p=0.6)) > 0).tolist() == [[True, True, False, False]]
    assert (filter_probs(probs, Sampling(False, 1, top_p=0.5)) > 0).tolist() == [[True, False, False, False]]
    assert (filter_probs(probs, Sampling(False, 1, min_p=0.2)) > 0).tolist() == [[True, True, True, False]]
    assert torch.equal(filter_probs(probs, Sampling(False, 1)), probs)


def test_a_generation_config_that_fast_does_not_implement_is_refused():
    model = tiny_model()
    model.generation_config.no_repeat_ngram_size = 3
    with pytest.raises(ValueError, match="no_repeat_ngram_size.*--rollout_engine transformers"):
        FastEngine(model, tiny_processor())


def test_a_generation_config_without_eos_is_refused():
    model = tiny_model()
    model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="eos_token_id"):
        FastEngine(model, tiny_processor())
