"""How a trainer makes a rollout: completions, rewards, advantages, and the rows that it trains on.

Dynamic sampling (DAPO, arXiv 2503.14476): a group of equal rewards teaches nothing, so new prompts take its
place, for --dynamic_sampling tries at most. Which prompts these are, and their noise, follow from seed,
rollout, try and place, so that neither a resumed run nor another number of processes draws others.

Legend
  R  prompts of this rank's rollout     G  completions a prompt     F  reward functions
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .advantages import combine_rewards, equal_rewards, group_advantages
from .data import Prompt
from .data_loader import alone, prompt_places
from .frozen_vision import with_image_features
from .informative import kept_groups, share_out
from .kl_readout import kl_to_base
from .label_free import vote_numbers
from .lora import adapters_off
from .metrics import best_and_worst, completion_numbers, rollout_metrics, shares_right
from .probe import image_probe
from .rewards import reward_arguments
from .sampling import sampling_keys
from .scoring import TOKEN_STATISTICS
from .training_rows import Group, TrainingRow, build_rows, pack_groups


@dataclass
class Drawn:
    """This rank's prompts, and what was drawn for them."""

    prompts: list[Prompt]
    voters: list[Group]  # all completions of each
    groups: list[Group]  # those that are trained on
    values: Tensor  # [R, G, F] what each reward function says

    def take(self, other: "Drawn", places: dict[int, int]) -> None:
        """Replaces prompt i by the other's prompt places[i]."""
        for name in ("prompts", "voters", "groups", "values"):
            for i, j in places.items():
                getattr(self, name)[i] = getattr(other, name)[j]


class RollsOut:
    """A part of the Trainer. `base` is the folder of the model to be beaten, in a further round too;
    `failures_before` are the rewards' failures before the newest rollout, by its number: one that is given up
    is made again by the run that goes on, and counts again."""

    base: Path | None = None
    failures_before: dict[int, dict[str, int]] = {}

    def roll_out(self, number: int, prompts: list[Prompt]) -> list[TrainingRow]:
        """One rollout: completions, rewards and advantages over all ranks, and this rank's rows of it."""
        started = time.perf_counter()
        args, names = self.args, [reward.name for reward in self.rewards.rewards]
        self.failures_before = {number: dict(self.rewards.failures)}
        self.refresh()
        places = prompt_places(args, args.prompts_drawn)[self.own_slice(len(prompts))]
        drawn = self.draw(number, prompts, places)
        per_function, rewards, logs = self.judge_and_refill(drawn, number)
        per_completion = self.gather(completion_numbers(drawn.prompts, drawn.groups))
        logs |= rollout_metrics(per_completion, rewards, per_function, names)
        logs |= self.rewards.numbers() | self.vote_metrics(drawn)
        logs |= self.noisy.metrics(number, rewards) if self.noisy else {}
        if splits := self.run_control.highest([self.engine.splits])[0]:  # of this session
            logs["rollout_splits"] = float(splits)
        logs |= self.collapse_watch.add_rollout(number, logs) | self.readouts(number, drawn)
        logs["collapse"] = self.look_for_collapse()
        if args.oversample > 1:
            drawn, per_function, rewards = self.keep_informative(drawn, per_function, rewards)
            logs["oversample/informative"] = 1 - float(equal_rewards(rewards).float().mean())
        prompts, groups, own = drawn.prompts, drawn.groups, self.own_slice(len(drawn.prompts))
        advantages = group_advantages(rewards, args.scale_rewards)
        advantages[rewards.isinf().any(1)] = torch.nan  # such an update is found by its loss
        weights = None
        if self.weigher:
            weights, numbers = self.weigher.weigh(number, prompts, groups, advantages[own])
            logs |= self.weigher.metrics(self.gather(numbers[None]))
        rows = build_rows(
            args, prompts, groups, rewards[own], advantages[own], self.sum_over_ranks, weights
        )
        rows = self.add_logps(rows)

        self.rollout_logs.append(logs | {"time/rollout_s": time.perf_counter() - started})
        samples = best_and_worst(prompts, groups, per_function[own], rewards[own], advantages[own], names)
        self.samples += [{"rollout": number, **sample} for sample in samples]
        return rows

    def readouts(self, number: int, drawn: Drawn) -> dict[str, float]:
        """What is measured now and then about the policy that made rollout `number`. Every rank calls it."""
        args, logs = self.args, {}
        update = number * args.updates_per_rollout
        if args.probe_steps and update % args.probe_steps == 0:
            logs |= image_probe(self)
        if args.kl_readout_steps and update % args.kl_readout_steps == 0:
            groups = [group[: len(group) // 2] if self.noisy else group for group in drawn.groups]
            logs |= kl_to_base(self, self.base, drawn.prompts, groups)  # of what the image itself drew
        return logs

    def look_for_collapse(self) -> float:
        """1.0 where there is a sign of one, which ends the run with --collapse_watch."""
        sign = self.collapse_watch.sign()
        if self.args.collapse_watch:
            self.run_control.collapse = sign
        return float(sign is not None)

    def draw(self, number: int, prompts: list[Prompt], places: list[int], attempt: int = 0) -> Drawn:
        """Completions and rewards of rollout `number`'s prompts at these places of it, which a try to replace
        them, attempt 1 or later, shares; its noise is another."""
        args = self.args
        numbers = [place + attempt * args.prompts_per_rollout for place in places]
        if self.vision_is_frozen:
            prompts = with_image_features(prompts, self.engine.model.model.visual)
        keys = sampling_keys(args.seed, number, numbers, args.completions_drawn)
        generate = partial(self.noisy.generate, number) if self.noisy else self.engine.generate
        voters = generate(
            prompts, args.completions_drawn, self.sampling, keys, self.run_control.interrupted
        )
        groups = [group[: args.num_generations] for group in voters]
        self.run_control.agree()  # on all ranks, before a rollout that was given up on one is used
        return Drawn(prompts, voters, groups, self.reward(prompts, groups, numbers, voters))

    def judge_and_refill(self, drawn: Drawn, number: int) -> tuple[Tensor, Tensor, dict[str, float]]:
        """As `judge`, after the tries of dynamic sampling; with what is to be logged of them."""
        values, rewards = self.judge(drawn, number)
        if not self.args.dynamic_sampling:
            return values, rewards, {}
        first = {"reward": rewards.nanmean(), "zero_variance": equal_rewards(rewards).float().mean()}
        tries = 0
        while tries < self.args.dynamic_sampling and (same := equal_rewards(rewards)).any():
            tries += 1
            self.refill(drawn, number, tries, same)
            values, rewards = self.judge(drawn, number)
        logs = {f"dynamic_sampling/first_{name}": float(value) for name, value in first.items()}
        return values, rewards, logs | {"dynamic_sampling/tries": float(tries)}

    def judge(self, drawn: Drawn, number: int) -> tuple[Tensor, Tensor]:
        """What the reward functions say, and the rewards, of all ranks: [R * world, G, F], [R * world, G]."""
        args = self.args
        values = self.rewards.settle(self.gather(drawn.values), args.world_size)
        drawn.values = values[self.own_slice(len(drawn.prompts))].clone()  # a failure is counted once
        if args.difficulty_sampling:
            rows = self.gather(torch.tensor([prompt.row for prompt in drawn.prompts]))
            shares = self.gather(shares_right(drawn.prompts, drawn.groups))
            self.row_sampler.observe(number, rows.tolist(), shares.tolist())
        return values, combine_rewards(values, torch.tensor([r.weight for r in self.rewards.rewards]))

    def refill(self, drawn: Drawn, number: int, attempt: int, same: Tensor) -> None:
        """Puts new prompts with their completions in the place of groups of equal rewards, [R * world].

        Every rank draws as many, because they score completions together: one with fewer such groups draws
        for others too, and drops them. On a GPU it is the whole rollout: a captured graph has one shape.
        """
        args, count = self.args, len(drawn.prompts)
        shares = same.view(args.world_size, count)
        own = shares[args.process_index].tolist()
        needed = int(shares.sum(1).max()) if args.device.type == "cpu" else count
        chosen = sorted(range(count), key=lambda i: not own[i])[:needed]  # those to be replaced first
        rows = self.row_sampler.refill(number, attempt)
        places = prompt_places(args, args.prompts_drawn)[self.own_slice(count)]
        prompts = [
            self.encoder.encode(self.train_dataset, self.train_rows[rows[places[i]]], step=number)
            for i in chosen
        ]
        new = self.draw(number, prompts, [places[i] for i in chosen], attempt)
        drawn.take(new, {i: j for j, i in enumerate(chosen) if own[i]})

    def keep_informative(
        self, drawn: Drawn, per_function: Tensor, rewards: Tensor
    ) -> tuple[Drawn, Tensor, Tensor]:
        """What is trained on of what was drawn, this rank's and all ranks'."""
        args, kept = self.args, kept_groups(self.args, rewards)
        items = list(zip(drawn.prompts, drawn.voters, drawn.groups, drawn.values, strict=True))

        def collect(sent: list) -> list:
            return self.run_control.collect([(i, (alone(prompt), *rest)) for i, (prompt, *rest) in sent])

        own = share_out(items, kept, args.process_index, args.world_size, collect)
        prompts, voters, groups, values = map(list, zip(*own, strict=True))
        return Drawn(prompts, voters, groups, torch.stack(values)), per_function[kept], rewards[kept]

    def own_slice(self, count: int) -> slice:
        """This rank's among all ranks' groups, `count` of each, one rank's behind the other's."""
        return slice(self.args.process_index * count, (self.args.process_index + 1) * count)

    def gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, one behind the other, on the CPU."""
        return self.accelerator.gather(tensor.to(self.args.device)).cpu()

    def sum_over_ranks(self, value: float) -> float:
        return float(self.accelerator.reduce(torch.tensor(value, device=self.args.device)))

    def reward(
        self, prompts: list[Prompt], groups: list[Group], numbers: list[int], voters: list[Group]
    ) -> Tensor:
        """Rewards [R, G, F] of this rank's completions."""
        available = reward_arguments(prompts, groups, numbers, voters, self.args.max_completion_length)
        for statistic in TOKEN_STATISTICS:
            if any(reward.wants(statistic) for reward in self.rewards.rewards):
                available[statistic] = self.token_statistic(prompts, groups, statistic)
        return self.rewards(available).view(len(groups), self.args.num_generations, -1)

    def vote_metrics(self, drawn: Drawn) -> dict[str, float]:
        """Means over all ranks' prompts, where the majority vote is a reward."""
        options = [reward.options for reward in self.rewards.rewards if reward.name == "majority_vote"]
        if not options:
            return {}
        trained = self.args.num_generations
        numbers = [
            vote_numbers([c.text for c in group], prompt.columns["answer"], trained, **options[0])
            for prompt, group in zip(drawn.prompts, drawn.voters, strict=True)
        ]
        means = self.gather(torch.tensor([list(one.values()) for one in numbers])).mean(0)
        return dict(zip(numbers[0], means.tolist(), strict=True))

    def token_statistic(self, prompts: list[Prompt], groups: list[Group], statistic: str) -> list[Tensor]:
        """The policy's entropy or self-certainty at each completion token: a [T] tensor per completion."""
        values = []
        for i in range(0, len(prompts), self.args.prompts_per_row):
            part = slice(i, i + self.args.prompts_per_row)
            row = pack_groups(prompts[part], groups[part], self.args.device)
            lengths = [c.token_ids.numel() for group in groups[part] for c in group]
            scored = self.score(self.model_wrapped, row, statistic, self.args.vocab_limit)
            values += scored.cpu().split(lengths)
        return values

    def add_logps(self, rows: list[TrainingRow]) -> list[TrainingRow]:
        """The log-probs that later updates of a rollout and a KL term are measured against."""
        if self.args.updates_per_rollout > 1:
            # From the second update on the policy is not the one that sampled.
            rows = [replace(row, old_logps=self.score(self.model_wrapped, row.packed).cpu()) for row in rows]
        if self.args.beta:
            rows = [replace(row, ref_logps=self.reference_logps(row).cpu()) for row in rows]
        return rows

    def reference_logps(self, row: TrainingRow) -> Tensor:
        """Log-probs [N] under the reference: with LoRA that is the policy without its adapters."""
        if self.ref_model is not None:
            return self.score(self.ref_model, row.packed)
        with adapters_off(self.model):
            return self.score(self.model_wrapped, row.packed)
