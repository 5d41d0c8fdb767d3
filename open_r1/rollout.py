"""Prompts -> groups of completions.

FastEngine prefills each prompt once (its image goes through the vision tower once), hands its keys and
values to the G completions, and decodes all completions of all prompts together; on CUDA a decode step is
one captured graph over buffers whose addresses never move. Where the GPU has no room for a batch, it is
decoded in parts. TransformersEngine does the same through `model.generate`, one prompt at a time: slow, and
exactly what the grader runs.

Legend
  R  prompts        G  completions a prompt        B = R * G  rows of the decode batch
  P  prompt tokens  L  tokens of a prefill row     H  hidden size     V  vocabulary
Row b of the batch is completion b % G of prompt b // G.
"""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, Qwen2VLForConditionalGeneration

from .attention import ATTENTION, CACHE
from .data import Prompt
from .decoding import DecodeBatch, DecodeLayers, PrefillWriter, choose, decode_step
from .layers import use_fused_layers
from .packing import pack, padded_length
from .sampling import Sampling
from .scoring import row_hidden_states

PREFILL_TOKENS = {"cuda": 16384, "cpu": 2048}  # prompt tokens of one prefill row
# Asking a GPU whether all rows are done makes the host wait for it.
STEPS_BETWEEN_CHECKS = {"cuda": 8, "cpu": 1}
GRAPHS_KEPT = 2  # training and validation each decode in a shape of their own

# Settings of a generation_config that act under greedy decoding and that FastEngine does not implement.
UNSUPPORTED = (
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens",
    "begin_suppress_tokens", "min_length", "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "exponential_decay_length_penalty", "sequence_bias", "guidance_scale", "encoder_repetition_penalty",
    "watermarking_config", "stop_strings", "remove_invalid_values", "penalty_alpha", "dola_layers",
)  # fmt: skip


@dataclass
class Completion:
    token_ids: Tensor  # [T], with the end-of-sequence token when it was reached
    logps: Tensor  # [T], under the full softmax at the sampling temperature, as the trainer computes them
    truncated: bool  # no end-of-sequence token within max_new_tokens
    text: str  # special tokens left out


def end_tokens(settings: GenerationConfig) -> list[int]:
    """The ids that end a completion."""
    eos = settings.eos_token_id
    return [eos] if isinstance(eos, int) else list(eos or [])


def unsupported(settings: GenerationConfig) -> str | None:
    """A sentence about what FastEngine does not implement."""
    defaults = GenerationConfig()
    refused = {
        name: getattr(settings, name)
        for name in UNSUPPORTED
        if getattr(settings, name, None) not in (None, 0, [], False, getattr(defaults, name, None))
    }
    if (settings.num_beams or 1) > 1:
        refused["num_beams"] = settings.num_beams
    if not refused:
        return None
    return (
        f"generation_config.json sets {refused}, which the fast engine does not implement: use the "
        "transformers engine (--rollout_engine transformers, selfcheck.py --engine transformers)"
    )


class Engine:
    """What both engines know of the model: where a completion ends, and which tokens must not be sampled."""

    splits = 0  # how often a batch was too large for the GPU and was cut in two

    def __init__(self, model: Qwen2VLForConditionalGeneration, processor):
        self.model, self.processor = model.eval(), processor
        self.eos = end_tokens(model.generation_config)
        if not self.eos:
            raise ValueError(
                "generation_config.json names no eos_token_id: completions would never end; set it there"
            )
        # A sampled placeholder would be looked up among the image features by the next forward.
        config = model.config
        self.placeholders = [config.image_token_id, config.video_token_id]
        vision_pad = processor.tokenizer.convert_tokens_to_ids("<|vision_pad|>")
        if vision_pad is not None and vision_pad != processor.tokenizer.unk_token_id:
            self.placeholders.append(vision_pad)

    def drop_batches(self) -> None:
        """Gives back what is kept between two calls of generate."""

    def completion(self, token_ids: Tensor, logps: Tensor) -> Completion:
        """Cut after the first end-of-sequence token. token_ids and logps [T] on the CPU."""
        ends = torch.isin(token_ids, torch.tensor(self.eos)).nonzero()
        length = int(ends[0]) + 1 if len(ends) else token_ids.numel()
        text = self.processor.tokenizer.decode(token_ids[:length], skip_special_tokens=True)
        return Completion(token_ids[:length].clone(), logps[:length].clone(), not len(ends), text)


class FastEngine(Engine):
    """Owns `model`: its text tower is switched to the packed attention. Weights may be changed in place
    between calls."""

    def __init__(self, model: Qwen2VLForConditionalGeneration, processor):
        super().__init__(model, processor)
        settings = model.generation_config
        if fault := unsupported(settings):
            raise ValueError(fault)
        self.penalty = settings.repetition_penalty or 1.0
        use_fused_layers(model)
        model.model.language_model.set_attn_implementation(ATTENTION)
        self.layers = DecodeLayers(model.model.language_model)
        self.device = model.device
        self.eos_tensor = torch.tensor(self.eos, device=self.device)
        self.suppressed = torch.tensor(self.placeholders, device=self.device)
        self.batches: dict[tuple[int, int, int], DecodeBatch] = {}
        self.most_slots = math.inf  # of a batch, since a larger one found no room

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: Sampling,
        keys: list[list[int]] | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> list[list[Completion]]:
        """A group of `num_generations` completions for each prompt. `keys` (sampling_keys) are needed
        unless greedy. Once `interrupted()` it stops: what it returns then is to be thrown away."""
        if keys is None and not sampling.greedy:
            raise ValueError("sampling needs keys: pass sampling_keys(seed, step, prompts, num_generations)")
        longest = max(p.input_ids.numel() for p in prompts)
        return self._in_parts(prompts, num_generations, keys, longest, sampling, interrupted)

    def _in_parts(self, prompts, num_generations: int, keys, longest: int, sampling: Sampling, interrupted):
        """In one batch, or in two where it finds no room: the noise belongs to the row, not to the batch."""
        rows, slots = len(prompts) * num_generations, longest + sampling.max_new_tokens
        half = (len(prompts if len(prompts) > 1 else range(num_generations)) + 1) // 2
        if rows * slots <= self.most_slots or rows == 1:
            try:
                return self._together(prompts, num_generations, keys, longest, sampling, interrupted)
            except torch.OutOfMemoryError:
                if rows == 1:
                    raise
            # Here, where the error no longer holds the frames with their tensors.
            self.drop_batches()
            self.splits += 1
            self.most_slots = (half * num_generations if len(prompts) > 1 else half) * slots
            print(f"A rollout of {rows} completions found no room on {self.device}: it is cut in two, and so "
                  "are those of its size from now on.", flush=True)  # fmt: skip
        rest = longest, sampling, interrupted
        if len(prompts) > 1:
            first, second = (keys[:half], keys[half:]) if keys else (None, None)
            return [
                *self._in_parts(prompts[:half], num_generations, first, *rest),
                *self._in_parts(prompts[half:], num_generations, second, *rest),
            ]
        first, second = ([keys[0][:half]], [keys[0][half:]]) if keys else (None, None)
        (group,) = self._in_parts(prompts, half, first, *rest)
        (others,) = self._in_parts(prompts, num_generations - half, second, *rest)
        return [[*group, *others]]

    def drop_batches(self) -> None:
        """All decode batches and their graphs."""
        self.batches.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _together(self, prompts, num_generations: int, keys, longest: int, sampling: Sampling, interrupted):
        rows = len(prompts) * num_generations
        batch = self._batch(rows, longest, sampling)
        batch.keys.copy_(torch.tensor(keys).flatten() if keys else torch.zeros(rows, dtype=torch.long))
        logits = self._prefill(batch, prompts, num_generations, longest)
        self._choose(batch, logits, sampling)
        self._decode(batch, longest, sampling, interrupted)
        token_ids, logps = batch.token_ids.cpu(), batch.logps.cpu()
        completions = [self.completion(*row) for row in zip(token_ids, logps, strict=True)]
        return [completions[i : i + num_generations] for i in range(0, rows, num_generations)]

    def _batch(self, rows: int, longest: int, sampling: Sampling) -> DecodeBatch:
        cuda = self.device.type == "cuda"
        slots = longest + sampling.max_new_tokens
        slots = -(-slots // 64) * 64 if cuda else slots
        shape = (rows, slots, sampling.max_new_tokens)
        batch = self.batches.pop(shape, None)
        if batch is None:
            while len(self.batches) >= (GRAPHS_KEPT if cuda else 1):
                del self.batches[next(iter(self.batches))]  # the one used longest ago
            batch = DecodeBatch(self.model, *shape)
        self.batches[shape] = batch
        for tensor in batch.state():
            tensor.zero_()
        if sampling.greedy and self.penalty != 1:
            vocabulary = self.model.lm_head.weight.shape[0]
            if batch.seen is None:
                batch.seen = torch.zeros(rows, vocabulary, dtype=torch.bool, device=self.device)
        return batch

    def _prefill(
        self, batch: DecodeBatch, prompts: Sequence[Prompt], num_generations: int, longest: int
    ) -> Tensor:
        """Fills the prompts' slots; returns the logits of each row's first token, [B, V]."""
        last_hidden, start = [], 0
        while start < len(prompts):
            stop, tokens = start, 0
            while stop < len(prompts) and (stop == start or tokens < PREFILL_TOKENS[self.device.type]):
                tokens += prompts[stop].input_ids.numel()
                stop += 1
            part = prompts[start:stop]
            lengths = [p.input_ids.numel() for p in part]
            row = pack([(p, []) for p in part], padded_length(tokens) if self.device.type == "cuda" else None)
            inputs = row.to(self.device).model_inputs()
            del inputs["sources"], inputs["targets"]
            writer = PrefillWriter(batch.cache, lengths, start, num_generations)
            hidden = row_hidden_states(self.model, **inputs, **{CACHE: writer, "use_cache": True})  # [L, H]
            last_hidden.append(hidden[torch.tensor(lengths).cumsum(0) - 1])
            start = stop
        for number, prompt in enumerate(prompts):
            rows = slice(number * num_generations, (number + 1) * num_generations)
            batch.cache.lengths[rows] = prompt.input_ids.numel()
            batch.positions[rows] = prompt.next_position
            if batch.seen is not None:
                batch.seen[rows, prompt.input_ids.to(self.device)] = True
        batch.cache.first.fill_(longest)
        batch.cache.slot.fill_(longest)
        logits = self.model.lm_head(torch.cat(last_hidden))
        return logits.repeat_interleave(num_generations, dim=0)

    def _decode(self, batch: DecodeBatch, longest: int, sampling: Sampling, interrupted) -> None:
        every = STEPS_BETWEEN_CHECKS[self.device.type]
        for t in range(1, sampling.max_new_tokens):
            if (t - 1) % every == 0 and (bool(batch.done.all()) or (interrupted and interrupted())):
                break
            if self.device.type == "cuda":
                self._graph(batch, sampling).replay()
            else:
                self._step(batch, sampling, visible=longest + t)

    def _graph(self, batch: DecodeBatch, sampling: Sampling) -> torch.cuda.CUDAGraph:
        if sampling not in batch.graphs:
            before = [tensor.clone() for tensor in batch.state()]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # Warm-up: what is compiled or made on first use must not be made inside the graph.
                self._step(batch, sampling, visible=0)
            torch.cuda.current_stream().wait_stream(stream)
            batch.graphs[sampling] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(batch.graphs[sampling]):
                self._step(batch, sampling, visible=0)
            for tensor, value in zip(batch.state(), before, strict=True):
                tensor.copy_(value)
        return batch.graphs[sampling]

    def _step(self, batch: DecodeBatch, sampling: Sampling, visible: int) -> None:
        """One token for every row."""
        self._choose(batch, decode_step(self.model, self.layers, batch, visible), sampling)

    def _choose(self, batch: DecodeBatch, logits: Tensor, sampling: Sampling) -> None:
        choose(batch, logits, sampling, self.penalty, self.eos_tensor, self.suppressed)


class TransformersEngine(Engine):
    """`model.generate`, prompt by prompt: what the grader runs, and the yardstick for FastEngine."""

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: Sampling,
        keys: list[list[int]] | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> list[list[Completion]]:
        """As FastEngine.generate; the noise depends on the group's first key only, and differs from
        FastEngine's."""
        groups = []
        for number, prompt in enumerate(prompts):
            if interrupted and interrupted():
                break
            if not sampling.greedy:
                torch.manual_seed(keys[number][0] % 2**32)
            groups.append(self._group(prompt, num_generations, sampling))
        return groups

    def _group(self, prompt: Prompt, num_generations: int, sampling: Sampling) -> list[Completion]:
        device = self.model.device
        ids = prompt.input_ids[None].to(device)  # [1, P]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if prompt.pixel_values is not None:
            placeholders = (ids == self.model.config.image_token_id).to(torch.int)
            inputs |= {"pixel_values": prompt.pixel_values.to(device), "mm_token_type_ids": placeholders}
            inputs |= {"image_grid_thw": prompt.image_grid_thw.to(device)}
        # Every setting by name: what is left out, transformers takes from the checkpoint's generation_config.
        settings = {"do_sample": False} if sampling.greedy else {
            "do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "top_k": sampling.top_k, "min_p": sampling.min_p, "repetition_penalty": 1.0,
            "suppress_tokens": self.placeholders,
        }  # fmt: skip
        output = self.model.generate(
            **inputs, **settings, max_new_tokens=sampling.max_new_tokens,
            num_return_sequences=num_generations, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        token_ids = output.sequences[:, ids.shape[1] :]  # [G, T]
        temperature = 1.0 if sampling.greedy else sampling.temperature
        logits = torch.stack(output.logits, dim=1).float() / temperature  # [G, T, V]
        logps = logits.log_softmax(-1).gather(2, token_ids[..., None])[..., 0]  # [G, T]
        return [self.completion(*row) for row in zip(token_ids.cpu(), logps.cpu(), strict=True)]
