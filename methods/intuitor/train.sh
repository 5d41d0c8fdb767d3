#!/usr/bin/env bash
# Intuitor (arXiv 2505.19590): the policy is rewarded for being certain of what it says.
#
#   bash methods/intuitor/train.sh                 the train.sh at the root, with the flags below before yours
#   bash methods/intuitor/train.sh --beta 0.01     with a KL term
#
# Flags and environment variables as for train.sh (OUT is outputs/intuitor); without a model it is the demo here too.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export OUT=${OUT:-$ROOT/outputs/intuitor}

recipe=(
    --reward_funcs self_certainty   # KL(uniform || policy), a mean over the completion's tokens
    --reward_weights 1.0
    --oversample 1                  # all groups are trained on, as in the paper
    --eval_steps 20                 # such runs rise and fall within a hundred updates: look more often
    --collapse_watch true           # end a run that falls apart, by the signs in open_r1/collapse_watch.py
)
exec bash "$ROOT/train.sh" "${recipe[@]}" "$@"
