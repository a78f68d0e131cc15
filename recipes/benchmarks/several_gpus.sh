#!/usr/bin/env bash
# Measurements on 4 or 8 GPUs of one host, each of at most ten minutes: bash recipes/benchmarks/several_gpus.sh PART
# Environment: GPUS (4), OUT (outputs), COMMIT (that of this checkout), LAUNCH (torchrun with GPUS processes).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
gpus=${GPUS:-4} out=${OUT:-outputs} here=recipes/benchmarks
commit=${COMMIT:-$(git rev-parse HEAD)}
launch=${LAUNCH:-torchrun --standalone --nproc-per-node $gpus}
mkdir -p "$out"

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
once=(--rounds 1 --warmup 0 --check-length 8192)
ours=(limit 'hf_burst auto' 'ulysses plain')

case ${1:?one of the parts of this file} in
    attention) attention whole --kv-heads 8 32 --lengths 16384 32768 65536 131072 262144 --seconds 240 ;;
    attention_short) attention short --kv-heads 8 32 --lengths 16384 32768 --rounds 30 60 --contenders "${ours[@]}" ;;
    packed) attention packed --kv-heads 8 32 --documents 512 65536 --lengths 131072 262144 ;;
    windows) attention windows --kv-heads 8 32 --window 4095 --lengths 131072 262144 ;;
    steps) steps whole --lengths 32768 131072 --profile ;;
    steps_again) steps again --lengths 32768 --contenders "hf_burst, attention recomputed" "hf_burst, attention saved" \
        "accelerate context parallelism, cuDNN" ;;
    reach_1m) steps 1m "${once[@]}" --lengths 1048576 --contenders "hf_burst, chosen" --timeout 560 ;;
    reach_2m) steps 2m "${once[@]}" --lengths 2097152 --layers 6 --contenders "hf_burst, chosen" --timeout 560 ;;
    reach_3m) steps 3m "${once[@]}" --lengths 3145728 --layers 2 --contenders "hf_burst, chosen" --timeout 560 ;;
    lora_1m) steps lora_1m "${once[@]}" --lora --lengths 1048576 --contenders "hf_burst, chosen" --timeout 560 ;;
    recurrent) $launch $here/recurrent.py --commit "$commit" --out "$out/recurrent_${gpus}x.json" ;;
    hybrid) steps hybrid --shape qwen3.5-hybrid --gated-norms --layers 16 --lengths 65536 131072 --rounds 2 ;;
    hybrid_lora) steps hybrid_lora --shape qwen3.5-hybrid --gated-norms --lora --lengths 65536 131072 --rounds 2 ;;
    nodes) hosts as_nodes $((gpus / 2)) --kv-heads 8 32 --lengths 32768 131072 --seconds 240 --timeout 200 \
        --schedules auto kv_ring burst ulysses ulysses_2+kv_ring ulysses_2+burst ;;
    nodes_flat) hosts as_nodes_flat $((gpus / 2)) --kv-heads 8 32 --lengths 32768 131072 --seconds 240 --timeout 200 \
        --burst ranks_per_host="$gpus" --contenders 'hf_burst*' ;;
    long) attention long --kv-heads 8 32 --lengths 131072 262144 524288 1048576 --seconds 260 \
        --schedules auto ulysses ulysses_4+kv_ring ulysses_4+burst --contenders "${ours[@]}" 'hf_burst ulysses*' ;;
    qwen3_1m) steps qwen3_1m "${once[@]}" --shape qwen3-8b --lengths 1048576 --contenders "hf_burst, chosen" --timeout 560 ;;
    *) echo "unknown part $1; the parts are in $here/several_gpus.sh" >&2; exit 2 ;;
esac
