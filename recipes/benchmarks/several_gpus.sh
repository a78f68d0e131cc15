#!/usr/bin/env bash
# Measurements on 4 or 8 GPUs of one host, each of about ten minutes: bash recipes/benchmarks/several_gpus.sh PART
# Environment: GPUS (4), OUT (outputs), COMMIT (that of this checkout), LAUNCH (torchrun with GPUS processes).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
gpus=${GPUS:-4} out=${OUT:-outputs} here=recipes/benchmarks
commit=${COMMIT:-$(git rev-parse HEAD)}
launch=${LAUNCH:-torchrun --standalone --nproc-per-node $gpus}
mkdir -p "$out"
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$(realpath "$out")/triton} TRITON_CACHE_AUTOTUNING=1  # a second run tunes nothing

attention() { # NAME ARGUMENTS...
    $launch $here/attention.py --commit "$commit" --out "$out/attention_${gpus}x_$1.json" "${@:2}"
}
steps() { # NAME ARGUMENTS...
    $launch $here/training.py --liger --commit "$commit" --out "$out/training_${gpus}x_$1.json" "${@:2}"
}
hosts() { # NAME GPUS_A_HOST ARGUMENTS...: GPUs of one host as several, whose messages go by sockets of the loopback
    export NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 A_HOST=$2
    $launch --no-python bash -c 'NCCL_HOSTID=host$((LOCAL_RANK / A_HOST)) exec python "$@"' attention \
        $here/attention.py --commit "$commit" --out "$out/attention_${gpus}x_$1.json" "${@:3}"
}
few=(--rounds 3 --check-length 8192)
hybrid=(--shape qwen3.5-hybrid --gated-norms --lengths 65536 131072 --rounds 2 --check-length 8192)
once=(--rounds 1 --warmup 0 --check-length 8192 --timeout 480)
ours=(limit 'hf_burst auto' 'ulysses plain')
others=("accelerate context parallelism, cuDNN" "DeepSpeed Ulysses, flash-attn 4" "ringmaster, flash-attn 4")
levels=(auto kv_ring burst ulysses ulysses_2+kv_ring ulysses_2+burst)
nodes=(--kv-heads 8 32 --lengths 32768 131072 --seconds 200 --timeout 200 --schedules "${levels[@]}")
long=(--lengths 131072 262144 524288 1048576 --rounds 1 10 --schedules auto ulysses ulysses_4+kv_ring ulysses_4+burst)

case ${1:?one of the parts of this file} in
    attention) attention whole --kv-heads 8 32 --lengths 16384 32768 65536 131072 262144 --seconds 200 ;;
    attention_short) attention short --kv-heads 8 32 --lengths 16384 32768 --rounds 30 60 --contenders "${ours[@]}" ;;
    packed) attention packed --kv-heads 8 32 --documents 512 65536 --lengths 131072 262144 ;;
    windows) attention windows --kv-heads 8 32 --window 4095 --lengths 131072 262144 ;;
    steps_32k) steps 32k --lengths 32768 "${few[@]}" --contenders "hf_burst, attention saved" "${others[@]}" ;;
    steps_128k) steps 128k --lengths 131072 "${few[@]}" --contenders "hf_burst, attention saved" "${others[@]}" ;;
    steps_again) steps again --lengths 32768 "${few[@]}" --hf-burst attention_keep=0.0 --contenders "hf_burst, attention saved" \
        "accelerate context parallelism, cuDNN" ;;
    reach_1m) steps 1m "${once[@]}" --lengths 1048576 --contenders "hf_burst, chosen" ;;
    reach_2m) steps 2m "${once[@]}" --lengths 2097152 --layers 6 --contenders "hf_burst, chosen" ;;
    reach_3m) steps 3m "${once[@]}" --lengths 3145728 --layers 2 --contenders "hf_burst, chosen" ;;
    lora_1m) steps lora_1m "${once[@]}" --lora --lengths 1048576 --contenders "hf_burst, chosen" ;;
    recurrent) $launch $here/recurrent.py --commit "$commit" --out "$out/recurrent_${gpus}x.json" ;;
    hybrid) steps hybrid "${hybrid[@]}" --layers 16 ;;
    hybrid_lora) steps hybrid_lora "${hybrid[@]}" --lora ;;
    nodes) hosts as_nodes $((gpus / 2)) "${nodes[@]}" ;;
    long) attention long --kv-heads 8 "${long[@]}" --contenders "${ours[@]}" 'hf_burst ulysses*' ;;
    long_32) attention long_32 --kv-heads 32 "${long[@]}" --contenders "${ours[@]}" 'hf_burst ulysses*' ;;
    qwen3_1m) steps qwen3_1m "${once[@]}" --shape qwen3-8b --lengths 1048576 --contenders "hf_burst, chosen" ;;
    *) echo "unknown part $1; the parts are in $here/several_gpus.sh" >&2; exit 2 ;;
esac
