#!/usr/bin/env bash
# RENT (arXiv 2505.22660): the policy is rewarded for a low entropy of its next-token distribution.
#
#   bash methods/rent/train.sh                     the train.sh at the root, with the flags below before yours
#   bash methods/rent/train.sh --beta 0.01         with a KL term
#
# Flags and environment variables as for train.sh (OUT is outputs/rent); without a model it is the demo here too.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export OUT=${OUT:-$ROOT/outputs/rent}

recipe=(
    --reward_funcs negative_entropy # minus the entropy, a mean over the completion's tokens
    --reward_weights 1.0
    --oversample 1                  # all groups are trained on, as in the paper
    --eval_steps 20                 # such runs rise and fall within a hundred updates: look more often
    --collapse_watch true           # end a run that falls apart, by the signs in open_r1/collapse_watch.py
)
exec bash "$ROOT/train.sh" "${recipe[@]}" "$@"
