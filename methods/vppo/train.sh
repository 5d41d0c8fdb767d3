#!/usr/bin/env bash
# VPPO (arXiv 2510.09285): only the tokens that depend most on the image are learned from, and completions that depend on
# it more weigh more.
#
#   bash methods/vppo/train.sh                                           the train.sh at the root, with the flag below before yours
#   bash methods/vppo/train.sh --token_weight_options renormalise=false  the paper's loss: filtered tokens still count in its mean
#
# Flags and environment variables as for train.sh (OUT is outputs/vppo); without a model it is the demo here too.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export OUT=${OUT:-$ROOT/outputs/vppo}

recipe=(
    --token_weights vppo            # 40 % of a completion's tokens; the rewards are main's
)
exec bash "$ROOT/train.sh" "${recipe[@]}" "$@"
