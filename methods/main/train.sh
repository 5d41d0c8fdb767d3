#!/usr/bin/env bash
# The counting recipe. It is the train.sh at the root, and takes the same flags and environment variables.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../train.sh" "$@"
