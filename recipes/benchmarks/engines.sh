#!/usr/bin/env bash
# Trains by each engine of engines.py in turn: bash recipes/benchmarks/engines.sh OPTIONS OF engines.py, with --out
# Environment: GPUS (2), ENGINES (all below), LIMIT_S (900: seconds of an engine), PORT (29500), and UNSLOTH and SWIFT: folders
# that come first on PYTHONPATH for these two, which need other versions of TRL, peft and datasets.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
gpus=${GPUS:-2} port=${PORT:-29500} script=recipes/benchmarks/engines.py
configured() { accelerate launch --config_file "recipes/configs/accelerate_$1.yaml" --num_processes "$gpus" --main_process_port "$port" "${@:2}"; }
plain() { if [ "$gpus" = 1 ]; then "$@"; else torchrun --no-python --nproc-per-node "$gpus" --master-port "$port" "$@"; fi; }
unsloth_first="import unsloth, runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
export -f configured plain
export gpus port script unsloth_first HF_HUB_OFFLINE=1
export WITH_UNSLOTH=${UNSLOTH:+$UNSLOTH:}${PYTHONPATH:-} WITH_SWIFT=${SWIFT:+$SWIFT:}${PYTHONPATH:-}

train() { # ENGINE OPTIONS...
    case $1 in
        one-gpu) python "$script" --engine one-gpu "${@:2}" ;;
        hf_burst | torch | torch-cudnn) configured fsdp2 "$script" --engine "$@" ;;
        hf_burst-ddp) plain python "$script" --engine hf_burst "${@:2}" ;;
        deepspeed) configured zero3 "$script" --engine "$@" ;;
        unsloth*) PYTHONPATH=$WITH_UNSLOTH UNSLOTH_FLASH_ATTENTION_IMPL=fa4 \
            plain python -c "$unsloth_first" "$script" --engine "$@" --no-liger ;;
        ms-swift) PYTHONPATH=$WITH_SWIFT USE_HF=1 CELOSS_PARALLEL_SIZE=4096 plain python "$script" --engine "$@" ;;
        *) echo "unknown engine $1" >&2; return 2 ;;
    esac
}
export -f train
for engine in ${ENGINES:-one-gpu hf_burst hf_burst-ddp torch-cudnn deepspeed unsloth unsloth-ulysses ms-swift}; do
    begin=$SECONDS
    timeout -k 10 "${LIMIT_S:-900}" bash -c 'train "$@"' train "$engine" "$@"
    echo "$engine ended with $? after $((SECONDS - begin)) s"
done
