# What the scripts share: set-up (setup_python leaves PYTHON as the Python to use) and the passing on of signals.
#
# The rule: a python3 (or $PYTHON) that has the packages is used as it is, and nothing is installed. Otherwise .venv
# in the project's folder is used, and made first when it is not complete.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The project is run from its folder, not installed; PYTHONPATH makes it importable from any directory.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

die() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# has_packages PYTHON FILE...: 0 when it has all packages of the requirements files, 3 when some are missing (they
# are printed), 1 when a version was never tested (stderr says which).
has_packages() {
    "$1" "$ROOT/open_r1/versions.py" "${@:2}"
}

# setup_python FILE...: chooses or makes the Python that has the packages of the requirements files.
setup_python() {
    local base=${PYTHON:-python3} venv=$ROOT/.venv missing
    command -v "$base" >/dev/null || die "$base is not found; set PYTHON to a Python 3.11 or 3.12"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$base is older than Python 3.11; set PYTHON to a Python 3.11 or 3.12"

    PYTHON=$base
    missing=$(has_packages "$base" "$@") && return
    [[ $? == 3 ]] || exit 1

    PYTHON=$venv/bin/python
    mkdir -p "$venv"
    exec 9>"$venv/lock"
    flock 9 # a second start waits here, then finds .venv complete; the kernel frees the lock of a killed one
    if [[ ! -e $venv/COMPLETE ]] || ! has_packages "$PYTHON" "$@" &>/dev/null; then
        make_venv "$base" "$venv" "$missing" "$@"
    fi
    exec 9>&-
}

# COMPLETE is written last: a .venv whose installation was cut short has none, and pip goes on where it stopped.
make_venv() {
    local base=$1 venv=$2 missing=$3 pip_options=() file
    shift 3
    rm -f "$venv/COMPLETE"
    echo "$base lacks $missing."
    echo "Installing into $venv: about 3 GB to download, 6 GB on disk, a few minutes. This happens once."
    for file in "$@"; do pip_options+=(-r "$file"); done
    [[ -t 1 ]] || pip_options+=(-q) # progress bars are for a terminal
    if [[ -d $ROOT/wheels ]]; then
        echo "Installing from $ROOT/wheels, without a network."
        pip_options+=(--no-index --find-links "$ROOT/wheels")
    fi
    "$base" -m venv "$venv" || die "$base cannot make $venv; install its venv module, or set PYTHON to another Python"
    # DeepSpeed comes as source; without its compiled operators, which nothing here uses, it needs no compiler.
    DS_BUILD_OPS=0 "$venv/bin/python" -m pip install --disable-pip-version-check "${pip_options[@]}" ||
        die "pip could not install into $venv; for a machine without a network run \`DS_BUILD_OPS=0 python -m pip \
wheel -r requirements.txt -r requirements-dev.txt -w wheels\` on one that has it (and the same Python version), copy \
the folder to $ROOT/wheels and run this again"
    "$venv/bin/python" -c 'import torchvision, trl, deepspeed, peft, qwen_vl_utils' ||
        die "the packages in $venv do not import; move $venv away and run this again"
    touch "$venv/COMPLETE"
}

# run_stoppable COMMAND...: runs it and leaves its exit code in `code`. SIGTERM, SIGINT, SIGUSR1 and SIGHUP to this
# script are passed on, and it waits until what it ran has saved and left. `passed` is the last one, or empty.
run_stoppable() {
    local signal
    child='' passed=''
    for signal in TERM INT USR1; do
        # shellcheck disable=SC2064 # of this loop's signal
        trap "pass_on $signal" "$signal"
    done
    trap 'pass_on TERM' HUP # the terminal is closed
    (trap - TERM INT USR1 HUP; exec "$@") & # bash would start it with SIGINT ignored
    child=$!
    [[ -z $passed ]] || pass_on "$passed" # it came just before
    while wait "$child"; kill -0 "$child" 2>/dev/null; do :; done # a signal ends the wait, not the run
    code=0
    wait "$child" || code=$?
    trap - TERM INT USR1 HUP
    [[ -z $passed || $code != 1 ]] || code=$(signal_code) # a launcher's 1 says nothing
}

# pass_on SIGNAL: to what run_stoppable runs. A launcher is left out: it would kill its processes after a while.
pass_on() {
    passed=$1
    [[ -n $child ]] || return 0
    local processes=$child
    if [[ $(tr '\0' ' ' <"/proc/$child/cmdline") == *"/scripts/launch.py "* ]]; then
        processes=$(grep -l "^PPid:[[:space:]]*$child\$" /proc/[0-9]*/status 2>/dev/null | cut -d/ -f3) || true
    fi
    # shellcheck disable=SC2086 # a list
    kill -s "$1" ${processes:-$child} 2>/dev/null || true
}

# signal_code: the exit code that stands for the signal that was passed on.
signal_code() {
    echo $((128 + $(kill -l "$passed")))
}

# show_help: the comment at the beginning of the script that runs.
show_help() {
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
}

# asks_for_help ARGUMENTS...
asks_for_help() {
    [[ " $* " == *" --help "* || " $* " == *" -h "* ]]
}
