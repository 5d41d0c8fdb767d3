#!/usr/bin/env bash
# TTRL (arXiv 2504.16084): the answer that most completions of a prompt give is taken for the true one.
#
#   bash methods/ttrl/train.sh                     the train.sh at the root, with the flags below before yours
#   bash methods/ttrl/train.sh --beta 0.01         with a KL term
#
# Flags and environment variables as for train.sh (OUT is outputs/ttrl); without a model it is the demo here too.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export OUT=${OUT:-$ROOT/outputs/ttrl}

recipe=(
    --reward_funcs majority_vote    # 1 for the majority's answer; without an answer nobody votes or earns
    --reward_weights 1.0            # nothing for the format: an answer that cannot be read earns nothing already
    --vote_generations 16           # completions that vote, of which the first 8 are trained on
    --oversample 1                  # all groups are trained on, as in the paper
    --eval_steps 20                 # such runs rise and fall within a hundred updates: look more often
    --collapse_watch true           # end a run that falls apart, by the signs in open_r1/collapse_watch.py
)
exec bash "$ROOT/train.sh" "${recipe[@]}" "$@"
