#!/usr/bin/env bash
# PRPO, an interpretation of the abstract of arXiv 2606.08708: tokens that depend on the image, and do so under a mild
# perturbation too, get more of their completion's advantage.
#
#   bash methods/prpo/train.sh                                       the train.sh at the root, with the flag below before yours
#   bash methods/prpo/train.sh --token_weight_options strength=0.5   a weight of 1.5 at most
#
# Flags and environment variables as for train.sh (OUT is outputs/prpo); without a model it is the demo here too.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export OUT=${OUT:-$ROOT/outputs/prpo}

recipe=(
    --token_weights prpo            # 1 to 2 by robust visual dependency; the rewards are main's
)
exec bash "$ROOT/train.sh" "${recipe[@]}" "$@"
