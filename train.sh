#!/usr/bin/env bash
# The counting recipe: GRPO on Qwen2-VL-2B-Instruct, all GPUs, DeepSpeed ZeRO-3, averaging, the grader's self-check.
#
#   bash train.sh                                  on the data in /app, or the demo where there is none
#   MODEL=... DATA=... VAL=... bash train.sh       on your own
#   bash train.sh --max_steps 200 --beta 0.04      flags come last, so they override those below
#   bash train.sh --dry_run                        every check on one screen, no training
#
# Environment: MODEL, DATA, VAL, OOD_VAL (what to read), OUT (logs and checkpoints), SUBMISSION (the best model),
# NUM_GPUS (0: the CPU), PYTHON (the Python to use), ZERO (zero3.json, zero2.json, zero3_offload.json or a DeepSpeed
# configuration of your own). On several machines the same command on each, with NUM_MACHINES, MACHINE_RANK (0, 1, ...),
# MAIN_PROCESS_IP (of machine 0) and MAIN_PROCESS_PORT (29500); OUT is one folder on a disk that all of them share.
#
# The recipe's flags, with reasons, and the exit codes: methods/main/README.md. All flags: python open_r1/grpo.py --help
set -euo pipefail
{ # bash reads a script while it runs: in braces it is read whole, and editing it does not disturb a run
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
! asks_for_help "$@" || show_help

PROMPTS_PER_UPDATE=16 # as in R1-V: 8 GPUs x 2 accumulation steps
arguments=("$@")

# given NAME: the value that the arguments give to --NAME (or --NAME=, or with dashes); the last one counts.
given() {
    local i key value=
    for ((i = 0; i < ${#arguments[@]}; i++)); do
        key=${arguments[i]%%=*}
        [[ ${key//-/_} == "__$1" ]] || continue
        if [[ ${arguments[i]} == *=* ]]; then value=${arguments[i]#*=}; else value=${arguments[i + 1]:-}; fi
        [[ $value == --* || -z $value ]] && value=true # a switch
    done
    echo "$value"
}

# choose VARIABLE FLAG DEFAULT: sets VARIABLE from the flag (grpo.py checks it: a hub name will do), else from the
# environment (a path, which must exist), else to the default, or to nothing where the default does not exist.
choose() {
    local flag
    flag=$(given "$2")
    if [[ -n $flag ]]; then
        printf -v "$1" %s "$flag"
    elif [[ -n ${!1:-} ]]; then
        [[ -e ${!1} ]] || missing+=("$1=${!1} does not exist; set $1 to what is on disk, or give --$2 a hub name")
    elif [[ -e $3 ]]; then
        printf -v "$1" %s "$3"
    else
        printf -v "$1" %s ""
    fi
}

[[ -z $(given config) ]] || die "--config: the flags below would override the file's; give flags instead"

missing=() # told all together
choose MODEL model_name_or_path /app/models/Qwen2-VL-2B-Instruct
choose DATA dataset_name /app/data/train
choose VAL val_dataset /app/data/val
choose OOD_VAL ood_val_dataset /app/data/ood_val

if [[ ! -e /app/models && ! -e /app/data && -z $MODEL && -z $DATA && ${#missing[@]} == 0 ]]; then
    cat <<BANNER
--------------------------------------------------------------------------------------------
There is neither /app/models nor /app/data, and neither MODEL nor DATA is set.
Running the demo instead: drawn images and a tiny Qwen2-VL, everything below this folder.
For the real recipe: MODEL=folder DATA=folder VAL=folder OOD_VAL=folder bash train.sh
--------------------------------------------------------------------------------------------
BANNER
    exec bash "$ROOT/methods/demo/train.sh" "$@"
fi
[[ -n $MODEL ]] || missing+=("MODEL is not set and its default does not exist; set MODEL to a Qwen2-VL folder")
[[ -n $DATA ]] || missing+=("DATA is not set and its default does not exist; set DATA to the training rows")

[[ -n $VAL || -n $OOD_VAL ]] || missing+=("neither VAL nor OOD_VAL is set and their defaults do not exist; set one: \
the best model is chosen on its rows")
[[ ${#missing[@]} == 0 ]] || die "$(printf '%s\n' "${missing[@]}")"

out=$(given output_dir)
submission=$(given submission_dir)
OUT=${out:-${OUT:-$ROOT/outputs/main}}
SUBMISSION=${submission:-${SUBMISSION:-/app/submission}}

setup_python "$ROOT/requirements.txt"

# --- the machine

visible=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
NUM_GPUS=${NUM_GPUS:-$visible}
[[ $NUM_GPUS =~ ^(0|[1-9][0-9]*)$ ]] || die "NUM_GPUS=$NUM_GPUS is no number; set it to 0 (the CPU) up to $visible"
((NUM_GPUS <= visible)) || die "NUM_GPUS=$NUM_GPUS, but this machine shows $visible; set it to 0 (the CPU) up to $visible"

NUM_MACHINES=${NUM_MACHINES:-1} MACHINE_RANK=${MACHINE_RANK:-0}
[[ $NUM_MACHINES =~ ^[1-9][0-9]*$ ]] || die "NUM_MACHINES=$NUM_MACHINES: set it to 1 or more"
[[ $MACHINE_RANK =~ ^(0|[1-9][0-9]*)$ && $MACHINE_RANK -lt $NUM_MACHINES ]] ||
    die "MACHINE_RANK=$MACHINE_RANK of NUM_MACHINES=$NUM_MACHINES: count the machines from 0"
((NUM_MACHINES == 1)) || [[ -n ${MAIN_PROCESS_IP:-} ]] ||
    die "NUM_MACHINES=$NUM_MACHINES: set MAIN_PROCESS_IP to the address of the machine with MACHINE_RANK=0"
[[ ${MAIN_PROCESS_PORT:=29500} =~ ^[1-9][0-9]{0,4}$ ]] ||
    die "MAIN_PROCESS_PORT=$MAIN_PROCESS_PORT is no port; set a free one of the machine with MACHINE_RANK=0"
processes=$(((NUM_GPUS > 0 ? NUM_GPUS : 1) * NUM_MACHINES))

# One choice for the launcher and for the script: --deepspeed, else ZERO. Names without a folder are the project's.
zero=$(given deepspeed)
[[ -z $zero ]] || ((NUM_GPUS > 0)) || die "--deepspeed $zero needs GPUs, and NUM_GPUS=0 trains on the CPU: leave it out"
ZERO=${zero:-${ZERO:-$ROOT/zero3.json}}
[[ -e $ZERO || $ZERO == */* ]] || ZERO=$ROOT/$ZERO
[[ -f $ZERO ]] || die "ZERO=$ZERO is no file; set zero3.json, zero2.json, zero3_offload.json or your own"
ZERO=$(realpath -s "$ZERO")
set --
for ((i = 0; i < ${#arguments[@]}; i++)); do
    case ${arguments[i]} in
        --deepspeed) ((++i)) ;;
        --deepspeed=*) ;;
        *) set -- "$@" "${arguments[i]}" ;;
    esac
done
export ZERO NUM_MACHINES # a dry run reads them

# --- an update

prompts_per_row=$(given prompts_per_row)
prompts_per_row=${prompts_per_row:-1}
accumulation=$(given gradient_accumulation_steps)
if [[ -z $accumulation ]]; then
    [[ $prompts_per_row =~ ^[1-9][0-9]*$ ]] || die "--prompts_per_row $prompts_per_row: set it to 1 or more"
    ((PROMPTS_PER_UPDATE % (processes * prompts_per_row) == 0)) ||
        die "an update of $PROMPTS_PER_UPDATE prompts does not divide over $processes processes x --prompts_per_row \
$prompts_per_row; change NUM_GPUS or --prompts_per_row, or set --gradient_accumulation_steps yourself"
    accumulation=$((PROMPTS_PER_UPDATE / (processes * prompts_per_row)))
fi

# --- the recipe

max_steps=600
[[ -z $(given num_train_epochs) ]] || max_steps=-1 # epochs that are asked for decide

recipe=(
    --model_name_or_path "$MODEL"
    --dataset_name "$DATA"
    ${VAL:+--val_dataset "$VAL"}
    ${OOD_VAL:+--ood_val_dataset "$OOD_VAL"}
    --output_dir "$OUT"
    --submission_dir "$SUBMISSION"

    # What is rewarded.
    --reward_funcs accuracy format  # the grader's own rule, and an answer block it can read; nothing for <think>
    --reward_weights 1.0 0.1        # the count decides; the format orders the wrong answers
    --prompt_mix 0.2                # a fifth in R1-V's phrasing, the rest in the grader's: no hanging on a wording

    # The group.
    --num_generations 8             # completions of a prompt, compared with each other
    --oversample 2                  # twice the prompts are rolled out; kept are groups that vary (docs/evidence.md: +1 to +3)
    --max_completion_length 256     # where the grader cuts
    --temperature 1.0               # sample from the very policy that is trained
    --top_p 1.0                     # likewise: with a cut tail the two would differ
    --scale_rewards group           # advantages in units of the group's own spread, as in R1-V
    --loss_type dapo                # every token weighs the same; a mean per completion would spare long wrong ones
    --beta 0.0                      # no KL term: an exact reward needs no leash, and no reference model takes memory

    # The update.
    --per_device_train_batch_size 1 # one packed row: its prompts, each with all its completions
    --prompts_per_row "$prompts_per_row"            # more fill a fast card; 1 is R1-V's
    --gradient_accumulation_steps "$accumulation"   # 16 prompts an update, whatever the number of GPUs
    --learning_rate 1e-6            # full fine-tuning of float32 masters; the value of R1-V and most after it
    --lr_scheduler_type constant_with_warmup        # the best model is kept, so the run needs no planned end
    --warmup_steps 10               # until Adam's second moments mean something
    --max_grad_norm 0.5             # public runs that collapsed did so with a burst of the gradient norm
    --max_steps "$max_steps"        # 9,600 prompts, of 19,200 rolled out; a starting value
    --max_hours 7.5                 # of 8 hours: the rest is for averaging and the self-check
    --patience 6                    # validations that are no better: 300 updates without progress are enough
    --select_level 0.7              # submitted is what beats the base in 7 of 10 paired bootstrap samples (docs/evidence.md: the gate)
    --keep_top 2                    # float32 weights of the two best, to be averaged and mixed with the base
    --finalize true                 # after training: these are scored too, and the best of all is submitted
    --finalize_minutes 15           # of the 30 that --max_hours leaves; the self-check needs the rest

    # Memory.
    --gradient_checkpointing false  # rows are short, as completions share their prompt; true: less memory, slower

    # Measuring and keeping.
    --eval_strategy steps           # greedy, under the grader's protocol; the best goes into the submission
    --eval_steps 50                 # twelve looks in 600 updates
    --eval_limit 500                # rows of each set: at 90 % a standard error of 1.3 points
    --save_steps 100                # the same command goes on after the newest complete checkpoint
    --logging_steps 1               # every update
    --report_to tensorboard         # needs no network
    --seed 42                       # data order and sampling noise follow from it
)

if ((NUM_GPUS > 0)); then
    machine=(
        --bf16 true                 # bf16 compute over float32 master weights
        --dataloader_num_workers 2  # the next rollouts' images are decoded meanwhile
    )
else
    machine=(--use_cpu true --bf16 false)
    export CUDA_VISIBLE_DEVICES=    # the self-check stays on the CPU too
fi

where="$NUM_GPUS GPUs"
((NUM_MACHINES == 1)) || where+=" on each of $NUM_MACHINES machines"
echo "An update: $processes processes ($where) x $accumulation accumulation steps x $prompts_per_row prompts a" \
    "row = $((processes * accumulation * prompts_per_row)) prompts"

# --- checks only, training on the CPU, or training on the GPUs

# is_off WORD: as the flags take it.
is_off() { [[ ${1,,} =~ ^(false|f|no|n|0)$ ]]; }

script=$ROOT/open_r1/grpo.py
dry_run=$(given dry_run)
if [[ -n $dry_run ]] && ! is_off "$dry_run"; then
    # It is one process, and counts on as many as it sees GPUs.
    if ((NUM_GPUS > 0)); then
        seen=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 "$((visible - 1))")}
        CUDA_VISIBLE_DEVICES=$(cut -d, -f "1-$NUM_GPUS" <<<"$seen")
        export CUDA_VISIBLE_DEVICES
    fi
    exec "$PYTHON" "$script" "${recipe[@]}" "${machine[@]}" "$@"
fi

started=$(date +%s.%N)
# train FLAGS...: the run, from its newest checkpoint; leaves its exit code in `code`.
train() {
    local launch=(
        --num_processes "$processes"
        --num_machines "$NUM_MACHINES"
        --machine_rank "$MACHINE_RANK"
        --mixed_precision no        # --bf16 decides
        --dynamo_backend no
    ) place=(--main_process_port 0) # a free one: two runs on a machine do not collide
    local kind=(--multi_gpu) sharded=() # accelerate's name for plain data parallelism
    if ((NUM_MACHINES > 1)); then
        place=(--main_process_ip "$MAIN_PROCESS_IP" --main_process_port "$MAIN_PROCESS_PORT")
        place+=(--deepspeed_multinode_launcher standard) # started by hand on each: no ssh
    fi
    if ((NUM_GPUS > 0)); then
        kind=(--use_deepspeed --deepspeed_config_file "$ZERO") sharded=(--deepspeed "$ZERO")
    elif ((NUM_MACHINES == 1)); then
        run_stoppable "$PYTHON" "$script" "${recipe[@]}" "${machine[@]}" "$@"
        return
    fi
    # A signal to the launcher itself: SIGUSR1 counts too, and saving may take longer than 30 s (torch 2.12 and later).
    export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=900
    # `accelerate launch` of this very Python, wherever its scripts lie.
    run_stoppable "$PYTHON" "$ROOT/scripts/launch.py" "${launch[@]}" "${place[@]}" "${kind[@]}" \
        "$script" "${recipe[@]}" "${machine[@]}" "${sharded[@]}" "$@"
}

more=() # flags for smaller rows
train "$@"
for attempt in 1 2; do
    [[ $code != 0 && -z $passed ]] || break
    mapfile -t smaller < <("$PYTHON" "$ROOT/open_r1/status.py" "$OUT" "$started" smaller "$attempt")
    [[ -n ${smaller[*]} ]] || break
    more+=("${smaller[@]}")
    echo "train.sh: no memory was left: the run goes on from its newest complete checkpoint with smaller rows, attempt" \
        "$attempt of at most 2: ${more[*]}" >&2
    started=$(date +%s.%N)
    train "$@" "${more[@]}"
done
"$PYTHON" "$ROOT/open_r1/status.py" "$OUT" "$started" "$code" # ends this script with the run's exit code, unless 0

((MACHINE_RANK == 0)) || exit 0 # what follows is done on machine 0 alone

# --- the best model, averages and mixtures with the base: the best of all

finalized=0
if [[ -z $passed ]] && ! is_off "$(given finalize)"; then
    run_stoppable "$PYTHON" "$ROOT/open_r1/finalize.py" "$OUT"
    finalized=$code
    [[ -z $passed ]] || finalized=$(signal_code)
    ((finalized == 0)) || echo "train.sh: exit code $finalized: all is trained, and $SUBMISSION holds the best validated \
model, but averages and mixtures were not looked at to the end. The same command looks at them again" >&2
    [[ -z $passed ]] || exit "$finalized"
fi

# --- what the grader would see

sets=(${VAL:+"$VAL"} ${OOD_VAL:+"$OOD_VAL"})
self_check=("$PYTHON" "$ROOT/selfcheck.py" --model "$SUBMISSION" --data "${sets[@]}" --out "$OUT/selfcheck")
split=$(given dataset_test_split)
[[ -z $split ]] || self_check+=(--split "$split")
if [[ -n $passed ]]; then # too late for the training
    code=$(signal_code)
else
    run_stoppable "${self_check[@]}"
fi
((code == 0)) || echo "train.sh: exit code $code: all is trained, and $SUBMISSION holds the best validated model, but \
the self-check did not end. It alone: ${self_check[*]@Q}" >&2
((code > 0)) || code=$finalized
exit "$code"
}
